#!/usr/bin/env bash
# Creates .venv-trl: TRL, with the torch and the transformers of `make setup`. Its gradients are what
# tests/learner/test_trl.py compares with, its speed what benchmarks/rl.py does (on an agent that imports openai). $1 is
# the environment of `make setup`, whose Python it takes.
set -euo pipefail

setup=$1
environment=.venv-trl

"$setup/bin/python" -m venv --clear "$environment"
pip="$environment/bin/python -m pip --disable-pip-version-check"
cpu_index=https://download.pytorch.org/whl/cpu
# The same build of torch, where pip's own configuration would bring the one for CUDA.
if "$setup/bin/python" -c 'import torch; raise SystemExit("+cpu" not in torch.__version__)' &&
    "$setup/bin/python" -c 'import sys, urllib.request as u; u.urlopen(sys.argv[1], timeout=5)' "$cpu_index/torch/" \
        2>/dev/null; then
    $pip install --quiet --index-url "$cpu_index" "$(grep '^torch==' constraints.txt)"
fi
$pip install --quiet trl openai --constraint constraints-trl.txt
