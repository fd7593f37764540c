#!/usr/bin/env bash
# Installs what the whole test suite needs beyond Python: the PostgreSQL server's programs, Chromium, and WordNet. Does
# nothing where they are. No cluster is made or started: the tests make their own in a temporary directory.
set -euo pipefail

has_postgres() {
    command -v initdb >/dev/null || compgen -G '/usr/lib/postgresql/*/bin/initdb' >/dev/null
}

has_chromium() {
    command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null
}

has_wordnet() {
    [ -e "${WORDNET:-/usr/share/wordnet}/data.noun" ]
}

as_root() {
    if [ "$(id -u)" = 0 ]; then
        "$@"
    elif command -v sudo >/dev/null; then
        sudo "$@"
    else
        echo "installing $packages needs root or sudo; run as root: $0" >&2
        return 1
    fi
}

install() {
    # Debian's package makes a cluster and starts it unless told otherwise; told for this installation only.
    settings=/etc/postgresql-common/createcluster.d/agentlightning.conf
    trap 'as_root rm -f "$settings"' EXIT
    as_root mkdir -p "$(dirname "$settings")"
    echo 'create_main_cluster = false' | as_root tee "$settings" >/dev/null
    as_root apt-get update -qq -o DPkg::Lock::Timeout=300
    as_root env DEBIAN_FRONTEND=noninteractive \
        apt-get install -qq -y --no-install-recommends -o DPkg::Lock::Timeout=300 $packages
}

packages=
has_postgres || packages=postgresql
has_chromium || packages="$packages chromium fonts-dejavu-core"
has_wordnet || packages="$packages wordnet-base"
if [ -z "$packages" ]; then
    exit 0
elif command -v apt-get >/dev/null; then
    install
else
    echo "the tests need PostgreSQL's initdb and postgres, and Chromium, on the PATH (macOS: brew install postgresql," \
        "and Chrome), and WordNet 3.0 in the folder that WORDNET names" >&2
    exit 1
fi
