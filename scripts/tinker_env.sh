#!/usr/bin/env bash
# Creates .venv-tinker: the Tinker SDK, SkyRL's server for it with the JAX backend on CPUs, and this package, which trains
# with the two in tests/learner/test_tinker.py. $1 is the environment of `make setup`, whose Python it takes.
set -euo pipefail

. scripts/own_environment.sh .venv-tinker "$1"
# SkyRL asks for Python 3.12, for the sake of one import on this path.
$pip install --quiet --no-deps --ignore-requires-python --requirement constraints-tinker.txt
$pip install --quiet --no-deps --editable .
sed -i -E '/^from typing import/s/, TypedDict$/\nfrom typing_extensions import TypedDict/' "$site/skyrl/tinker/types.py"
"$environment/bin/python" -c 'import skyrl.tinker.api, tinker'
