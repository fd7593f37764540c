"""Connections passed between processes."""

from __future__ import annotations

import asyncio
import errno
import socket
from pathlib import Path

import pytest

from agentlightning.server.handover import Inbox, Place

pytestmark = pytest.mark.anyio


async def test_an_inbox_outlasts_a_time_of_too_many_open_files(tmp_path: Path, monkeypatch) -> None:
    loop, place = asyncio.get_running_loop(), Place(1, 1, tmp_path)
    accept, taken = loop.sock_accept, asyncio.Queue[bytes]()
    failures = iter([OSError(errno.EMFILE, "Too many open files")])

    async def scarce(listening: socket.socket) -> tuple[socket.socket, object]:
        if error := next(failures, None):
            raise error
        return await accept(listening)

    monkeypatch.setattr(loop, "sock_accept", scarce)
    inbox = Inbox(
        place.inbox(1), lambda connection, data: (connection.close(), taken.put_nowait(data))
    )
    inbox.open()
    ours, its = socket.socketpair()
    with its:
        await place.pass_on(ours, b"what was read", 1)
        async with asyncio.timeout(60):
            assert await taken.get() == b"what was read"
    await inbox.close()
