#!/usr/bin/env bash
# Creates .venv-$1, where environments of the hub $1 are trained on: its package, on top of the environment of `make
# setup`, $2, whose torch it sees, as it sees this checkout.
set -euo pipefail

. scripts/own_environment.sh ".venv-$1" "$2"
"$setup/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$site/setup.pth"
pwd >>"$site/setup.pth"
# Without their dependencies: the constraints name all of them, and pip would take those of $2 for installed.
$pip install --quiet --no-deps --ignore-installed --requirement "constraints-$1.txt"
