"""`agl runs --watch`, `agl rollouts --watch` and `agl rollouts tail`: what happens now, also while
a server is away."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from agentlightning.store.sql import SqlStore
from tests.cli.world import add_rollout, add_run

pytestmark = pytest.mark.anyio


async def watched(
    folder: Path,
    arguments: list[str],
    first: str,
    happens: Callable[[], Awaitable[object]],
    then: str,
):
    """Start the command; once it has shown `first`, something happens, which it must show."""
    command = [sys.executable, "-m", "agentlightning.cli.main", *arguments]
    process = await asyncio.create_subprocess_exec(*command, cwd=folder, stdout=PIPE, stderr=STDOUT)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(60):
            while first.encode() not in await process.stdout.readline():
                pass
            await happens()
            while then.encode() not in await process.stdout.readline():
                pass
    finally:
        process.kill()
        await process.wait()


@pytest.mark.parametrize(
    "words",
    [["runs", "--watch", "0.1"], ["rollouts", "ls", "--watch", "0.1"], ["rollouts", "tail"]],
)
async def test_what_is_new_is_shown(tmp_path: Path, words: list[str]) -> None:
    store = await SqlStore.open(tmp_path / "agentlightning.sqlite")

    async def add(name: str) -> None:
        await add_run(store, name, steps=3)
        await add_rollout(store, name, 0.25)

    await add("mine")
    await watched(tmp_path, words, "mine", lambda: add("yours"), "yours")
    await store.close()
