#!/usr/bin/env bash
# Creates .venv-sglang: SGLang on a CPU without its kernels, to test this package's sampler against the real server. Where
# there is a GPU, install SGLang itself instead. $1 is the environment of `make setup`, whose Python it takes.
set -euo pipefail

. scripts/own_environment.sh .venv-sglang "$1"
# Without what SGLang depends on for GPUs, which are several gigabytes.
$pip install --quiet --no-deps --requirement constraints-sglang.txt
cp scripts/sglang_kernels.py "$site"
echo 'import sglang_kernels' >"$site/sglang_kernels.pth" # in every process, those that SGLang starts too
# Transformers looks whether there is such a distribution before it lets SGLang import what needs images.
info="$site/torchvision-0.28.0.dist-info"
mkdir -p "$info"
printf 'Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\n' >"$info/METADATA"
echo pip >"$info/INSTALLER"
: >"$info/RECORD"
