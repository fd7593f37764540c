#!/usr/bin/env bash
# Creates .venv-$1, where environments of the hub $1 are trained on: its package, on top of the environment of `make
# setup`, $2, whose torch it sees, as it sees this checkout.
set -euo pipefail

environment=.venv-$1
setup=$2
. scripts/find_uv.sh "$setup"
[ ! -L "$environment" ] || rm "$environment" # not what it leads to, which is another checkout's
"$uv" venv --quiet --clear --python "$setup/bin/python" "$environment"
site=$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$setup/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$site/setup.pth"
pwd >>"$site/setup.pth"
# Without their dependencies: the constraints name all of them.
"$uv" pip install --quiet --python "$environment/bin/python" --no-deps --requirement "constraints-$1.txt"
