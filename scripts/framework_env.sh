#!/usr/bin/env bash
# Creates .venv-$1, where agents of examples/frameworks or trackers are tested: the dependency group $1 and the agent side
# of this package, which means no torch. $2 is the environment of `make setup`, whose Python it takes, and where uv goes if there is none.
set -euo pipefail

name=$1
setup=$2

. scripts/find_uv.sh "$setup"
"$uv" venv --quiet --clear --python "$setup/bin/python" ".venv-$name"
"$uv" pip install --quiet --python ".venv-$name/bin/python" --editable . --group "$name" \
    --constraint "constraints-$name.txt"
