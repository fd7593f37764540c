#!/usr/bin/env bash
# Creates .venv-trl: TRL, with the torch and the transformers of `make setup`. Its gradients are what
# tests/learner/test_trl.py compares with, its speed what benchmarks/rl.py does (on an agent that imports openai). $1 is
# the environment of `make setup`, whose Python it takes.
set -euo pipefail

. scripts/own_environment.sh .venv-trl "$1"
install_torch
$pip install --quiet trl openai --constraint constraints-trl.txt
