#!/usr/bin/env bash
# Creates .venv-experiments, where the three experiments run: the frameworks of their agents, on top of the environment
# of `make setup`, $1, whose torch and whose checkout of this package it sees.
set -euo pipefail

setup=$1
environment=.venv-experiments

"$setup/bin/python" -m venv --clear "$environment"
site=$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$setup/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$site/setup.pth"
"$setup/bin/python" -c 'import agentlightning, pathlib; print(pathlib.Path(agentlightning.__file__).parents[1])' >>"$site/setup.pth"
"$environment/bin/python" -m pip --disable-pip-version-check install --quiet \
    langchain-openai langgraph openai-agents 'autogen-agentchat' 'autogen-ext[openai]' 'mcp' bm25s faiss-cpu \
    --constraint constraints-experiments.txt
