#!/usr/bin/env bash
# Creates .venv-harbor, in which `agl runner` plays tasks of Harbor: its package and the agent side of ours, on Python 3.12,
# which uv must find. $1 is the environment of `make setup`, where uv goes if there is none.
set -euo pipefail

. scripts/find_uv.sh "$1"
[ ! -L .venv-harbor ] || rm .venv-harbor # not what it leads to, which is another checkout's
python=$(ls "$HOME"/.pyenv/versions/3.12.*/bin/python 2>/dev/null | head -1 || true)
"$uv" venv --quiet --clear --python "${python:-3.12}" .venv-harbor
"$uv" pip install --quiet --python .venv-harbor/bin/python --editable . openai harbor --constraint constraints-harbor.txt
