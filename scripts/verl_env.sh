#!/usr/bin/env bash
# Creates .venv-verl: verl without what it needs GPUs for, and this package, whose gradients tests/learner/test_verl.py
# compares. $1 is the environment of `make setup`, whose Python and torch it takes.
set -euo pipefail

setup=$1
environment=.venv-verl

"$setup/bin/python" -m venv --clear "$environment"
pip="$environment/bin/python -m pip --disable-pip-version-check"
cpu_index=https://download.pytorch.org/whl/cpu
# The same build of torch, where pip's own configuration would bring the one for CUDA.
if "$setup/bin/python" -c 'import torch; raise SystemExit("+cpu" not in torch.__version__)' &&
    "$setup/bin/python" -c 'import sys, urllib.request as u; u.urlopen(sys.argv[1], timeout=5)' "$cpu_index/torch/" \
        2>/dev/null; then
    $pip install --quiet --no-deps --index-url "$cpu_index" "$(grep '^torch==' constraints.txt)"
fi
$pip install --quiet --no-deps --requirement constraints-verl.txt
$pip install --quiet --no-deps --editable .
site=$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
rm -r "$site/tests" # of verl, in the place of this package's
"$environment/bin/python" -W ignore -c 'import verl.workers.engine.fsdp.transformer_impl'
