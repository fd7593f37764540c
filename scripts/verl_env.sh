#!/usr/bin/env bash
# Creates .venv-verl: verl without what it needs GPUs for, and this package, whose gradients tests/learner/test_verl.py
# compares. $1 is the environment of `make setup`, whose Python and torch it takes.
set -euo pipefail

. scripts/own_environment.sh .venv-verl "$1"
install_torch --no-deps
$pip install --quiet --no-deps --requirement constraints-verl.txt
$pip install --quiet --no-deps --editable .
rm -r "$site/tests" # of verl, in the place of this package's
"$environment/bin/python" -W ignore -c 'import verl.workers.engine.fsdp.transformer_impl'
