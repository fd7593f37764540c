# Sourced by the scripts that create an environment of their own: makes $1, such as .venv-trl, with the Python of $2, the
# environment of `make setup`, and says how to install into it ($pip), where that goes ($site), and with which torch.
environment=$1
setup=$2
"$setup/bin/python" -m venv --clear "$environment"
pip="$environment/bin/python -m pip --disable-pip-version-check"
site=$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

# The same build of torch as $setup has, where pip's own configuration would bring the one for CUDA.
install_torch() {
    local cpu_index=https://download.pytorch.org/whl/cpu
    if "$setup/bin/python" -c 'import torch; raise SystemExit("+cpu" not in torch.__version__)' &&
        "$setup/bin/python" -c 'import sys, urllib.request as u; u.urlopen(sys.argv[1], timeout=5)' \
            "$cpu_index/torch/" 2>/dev/null; then
        $pip install --quiet --index-url "$cpu_index" "$@" "$(grep '^torch==' constraints.txt)"
    fi
}
