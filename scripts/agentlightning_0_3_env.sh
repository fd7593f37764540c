#!/usr/bin/env bash
# Creates .venv-agentlightning-0.3 unless it is there: Agent Lightning 0.3, whose adapters benchmarks/data.py compares
# with, and docs/reference/compatibility.md speaks of. It brings no torch. $1 is the environment of `make setup`, whose Python it
# takes, and where uv goes if there is none.
set -euo pipefail

setup=${1:-.venv}
environment=.venv-agentlightning-0.3

if ! compgen -G "$environment/lib/python*/site-packages/agentlightning/adapter" >/dev/null; then
    . scripts/find_uv.sh "$setup"
    "$uv" venv --quiet --clear --python "$setup/bin/python" "$environment"
    "$uv" pip install --quiet --python "$environment/bin/python" \
        agentlightning==0.3.0 litellm==1.80.11 opentelemetry-api==1.39.1 opentelemetry-sdk==1.39.1
fi
