"""Connections passed between the processes of one server: each process answers the calls of its own attempts.

A connection goes with what was read from it, through a Unix socket of the process that is to answer. Knows descriptors.
Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final

_LARGEST_PART: Final = 1 << 18  # bytes


async def pass_on(connection: socket.socket, data: bytes, inbox: Path) -> bool:
    """Give `connection` away, with `data` that was read from it; False where nobody is at the `inbox`."""
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sending:
        sending.setblocking(False)
        try:
            await loop.sock_connect(sending, str(inbox))
            socket.send_fds(sending, [b"\0"], [connection.fileno()])
            await loop.sock_sendall(sending, data)
        except OSError:
            return False
    return True


class Inbox:
    """Where other processes pass connections to this one, which are given to `take` with what was read from them."""

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
                sender, _ = await loop.sock_accept(listening)
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
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sender, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(sender)
