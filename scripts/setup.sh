#!/usr/bin/env bash
# Creates the virtual environment named by $1 and installs the package with everything quickstart, tests and docs need.
# With $2, a wheel and its extras, that and what it requires is installed instead. PYTHON picks the interpreter; TORCH=cpu|default picks the torch build (default: cpu on Linux without an NVIDIA GPU).
set -euo pipefail

venv=$1 wheel=${2:-}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
        if command -v "$candidate" >/dev/null && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
            echo "$candidate"
            return
        fi
    done
    echo "agentlightning needs Python 3.11 or newer; install one, or name it: make setup PYTHON=/path/to/python3" >&2
    return 1
}

# Plain PyPI serves Linux the CUDA build of torch, several gigabytes larger than the CPU build.
wants_cpu_torch() {
    case ${TORCH:-auto} in
    cpu) return 0 ;;
    default) return 1 ;;
    auto) [ "$(uname -s)" = Linux ] && ! command -v nvidia-smi >/dev/null ;;
    *) echo "TORCH is '${TORCH}'; it must be cpu or default" >&2 && exit 1 ;;
    esac
}

reachable() {
    "$venv/bin/python" -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=5)' "$1" 2>/dev/null
}

say() { echo "setup: $*" >&2; }

say "making a virtual environment in $venv; this takes one to three minutes"
if [ ! -x "$venv/bin/python" ]; then
    "$(find_python)" -m venv "$venv"
fi
pip="$venv/bin/python -m pip --disable-pip-version-check"
$pip install --quiet --upgrade 'pip>=25.1' # the first with --group

cpu_index=https://download.pytorch.org/whl/cpu
if wants_cpu_torch; then
    if reachable "$cpu_index/torch/"; then
        say "1/2 installing torch for the CPU (about 200 MB)"
        $pip install --quiet --index-url "$cpu_index" "$(grep '^torch==' requirements/constraints.txt)"
    else
        echo "cannot reach $cpu_index; taking torch from pip's own configuration" >&2
    fi
fi
if [ -n "$wheel" ]; then
    say "2/2 installing $wheel"
    $pip install --quiet "$wheel" --constraint requirements/constraints.txt
    exit
fi
say "2/2 installing agentlightning with what training, tests and docs need (about 100 packages)"
$pip install --quiet --editable '.[all]' --group test --group docs --constraint requirements/constraints.txt
say "done; start with: $venv/bin/agl --help   (or: source $venv/bin/activate)"
