#!/usr/bin/env bash
# Creates .venv-tinker: the Tinker SDK, SkyRL's server for it with the JAX backend on CPUs, and this package, which trains
# with the two in tests/learner/test_tinker.py. $1 is the environment of `make setup`, whose Python it takes.
set -euo pipefail

setup=$1
environment=.venv-tinker

"$setup/bin/python" -m venv --clear "$environment"
pip="$environment/bin/python -m pip --disable-pip-version-check"
# SkyRL asks for Python 3.12, for the sake of one import on this path.
$pip install --quiet --no-deps --ignore-requires-python --requirement constraints-tinker.txt
$pip install --quiet --no-deps --editable .
site=$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
sed -i -E '/^from typing import/s/, TypedDict$/\nfrom typing_extensions import TypedDict/' "$site/skyrl/tinker/types.py"
"$environment/bin/python" -c 'import skyrl.tinker.api, tinker'
