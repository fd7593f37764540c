#!/usr/bin/env bash
# Creates .venv-harbor, in which `agl runner` plays tasks of Harbor: its package and the agent side of ours, on Python 3.12
# or newer, which uv must find. $1 is the environment of `make setup`, where uv goes if there is none.
set -euo pipefail

uv=$(command -v uv || true)
if [ -z "$uv" ]; then
    [ -x "$1/bin/uv" ] || "$1/bin/python" -m pip --disable-pip-version-check install --quiet uv
    uv=$1/bin/uv
fi
python=$(ls "$HOME"/.pyenv/versions/3.12.*/bin/python 2>/dev/null | head -1 || true)
"$uv" venv --quiet --clear --python "${python:-3.12}" .venv-harbor
"$uv" pip install --quiet --python .venv-harbor/bin/python --editable . openai harbor --constraint constraints-harbor.txt
