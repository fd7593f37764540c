"""Connections passed between processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
from pathlib import Path

import pytest

from agentlightning.server.handover import Inbox, Place

pytestmark = pytest.mark.anyio


async def test_an_inbox_outlasts_a_time_of_too_many_open_files(tmp_path: Path) -> None:
    place = Place(1, 1, tmp_path)
    taken: asyncio.Queue[bytes] = asyncio.Queue()

    def take(connection: socket.socket, data: bytes) -> None:
        connection.close()
        taken.put_nowait(data)

    inbox = Inbox(place.inbox(1), take)
    inbox.open()
    ours, its = socket.socketpair()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack:
        stack.callback(its.close)
        waiting = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(300, limits[0]), limits[1]))
        spare: list[int] = []
        with contextlib.suppress(OSError):
            while True:
                spare.append(os.dup(its.fileno()))
        waiting.connect(str(place.inbox(1)))  # which cannot be accepted
        await asyncio.sleep(0.5)
        for one in spare:
            os.close(one)
    await place.pass_on(ours, b"what was read", 1)
    async with asyncio.timeout(60):
        assert await taken.get() == b"what was read"
    await inbox.close()
