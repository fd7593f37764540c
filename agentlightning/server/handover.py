"""Connections passed between the processes of one server, with what was read from them: each worker
answers the calls of its own attempts, and the owner of the store whatever is no LLM call. Knows
descriptors; no HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from agentlightning.gateway.attribution import api_key_of
from agentlightning.store.keys import WORKER_PREFIX, claimed_attempt

_LARGEST_PART: Final = 1 << 18  # bytes
_TRIES: Final = 50
_PAUSE: Final = 0.2  # seconds between them


OWNER: Final = 0
"""The number of the process that owns the store; workers count from 1."""


class Place:
    """A process among those of its server: the owner, or number `index` of `count` workers. The
    sockets through which they pass connections on are in `folder`."""

    def __init__(self, index: int, count: int, folder: Path) -> None:
        self.index = index
        self._count = count
        self._folder = folder

    def of_call(self, ids: tuple[str, str] | None, headers: Mapping[str, str]) -> int:
        """Which process answers an LLM call: that of its attempt, by the ids that its path names or
        by its key."""
        key = api_key_of(headers) or ""
        if ids is None and (key.startswith(WORKER_PREFIX) or (not key and "cookie" in headers)):
            # which knows the attempt that a worker holds, and who is signed in to the page
            return OWNER
        if ids is None and (claimed := claimed_attempt(key)) is not None:
            ids = claimed[:2]
        if ids is None:  # nobody's attempt: whoever is here
            return self.index
        return 1 + zlib.crc32(ids[1].encode(errors="replace")) % self._count

    def inbox(self, index: int) -> Path:
        return self._folder / str(index)

    async def pass_on(self, connection: socket.socket, data: bytes, index: int) -> None:
        """Give a connection to process `index`, with `data` that was read from it. It is closed if
        that process is not there for a few seconds: a worker that died has been started again by
        then."""
        with connection:
            for _ in range(_TRIES):
                if await self._passed_on(connection, data, index):
                    return
                await asyncio.sleep(_PAUSE)

    async def _passed_on(self, connection: socket.socket, data: bytes, index: int) -> bool:
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sending:
            sending.setblocking(False)
            try:
                await loop.sock_connect(sending, str(self.inbox(index)))
                socket.send_fds(sending, [b"\0"], [connection.fileno()])
                await loop.sock_sendall(sending, data)
            except OSError:
                return False
        return True


class Inbox:
    """Where other processes pass connections to this one, which are given to `take` with what was
    read from them."""

    def __init__(self, path: Path, take: Callable[[socket.socket, bytes], object]) -> None:
        self._path = path
        self._take = take
        self._receiving: set[asyncio.Task[None]] = set()
        self._accepting: asyncio.Task[None] | None = None

    def open(self) -> None:
        self._path.unlink(missing_ok=True)  # of a process that was killed
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listening.setblocking(False)
        listening.bind(str(self._path))
        listening.listen(1024)
        self._accepting = asyncio.create_task(self._accept(listening), name="connections passed on")

    async def close(self) -> None:
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.wait([self._accepting, *self._receiving])
        self._path.unlink(missing_ok=True)

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with listening:
            while True:
                try:
                    sender, _ = await loop.sock_accept(listening)
                except OSError:
                    # too many files are open: the next is accepted once some are closed
                    await asyncio.sleep(_PAUSE)
                    continue
                task = asyncio.create_task(self._receive(sender))
                self._receiving.add(task)
                task.add_done_callback(self._receiving.discard)

    async def _receive(self, sender: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        parts = list[bytes]()
        with sender:
            sender.setblocking(False)
            await _readable(sender)
            try:
                _, descriptors, _, _ = socket.recv_fds(sender, 1, 1)
            except OSError:
                return
            for descriptor in descriptors:
                connection = socket.socket(fileno=descriptor)
                with contextlib.ExitStack() as stack:
                    stack.callback(connection.close)
                    while part := await loop.sock_recv(sender, _LARGEST_PART):
                        parts.append(part)
                    stack.pop_all()
                connection.setblocking(False)
                self._take(connection, b"".join(parts))


async def _readable(sender: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(sender, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(sender)
