# Sourced by the scripts that install with uv: $uv is the one on the PATH, else that of $1, the environment of `make
# setup`, where it is installed.
uv=$(command -v uv || true)
if [ -z "$uv" ]; then
    [ -x "$1/bin/uv" ] || "$1/bin/python" -m pip --disable-pip-version-check install --quiet uv
    uv=$1/bin/uv
fi
