"""Requests and answers between two processes of one server, as msgpack over a pair of sockets, in
the order they were sent."""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeAlias, cast

import msgspec

from agentlightning import errors
from agentlightning.errors import AgentLightningError, UnavailableError
from agentlightning.store.codec import plain

_log = logging.getLogger(__name__)
_LENGTH: Final = struct.Struct("!I")
_encode: Final = msgspec.msgpack.Encoder(enc_hook=plain).encode


class _Frame(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """`name` is the request's. An answer has none, and an `error` (its class) where its content is
    a message."""

    number: int
    content: msgspec.Raw
    name: str | None = None
    error: str | None = None


_decode: Final = msgspec.msgpack.Decoder(_Frame).decode

Answering: TypeAlias = Callable[[str, msgspec.Raw], Awaitable[Any]]
"""Given the name of a request and its content, gives what is answered."""


class Pipe(asyncio.Protocol):
    """One end. `closed` is set when the other process has ended; whoever waits then gets an
    UnavailableError."""

    def __init__(self, answer: Answering) -> None:
        self.closed = asyncio.Event()
        self._answer = answer
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._sending: list[bytes] = []
        self._asked: dict[int, asyncio.Future[msgspec.Raw]] = {}
        self._number = 0
        self._answering: set[asyncio.Task[None]] = set()

    async def ask(self, name: str, content: Any = None) -> msgspec.Raw:
        """What the other process answers. Raises the typed error that it met."""
        if self.closed.is_set():
            raise UnavailableError("the other process of this server has ended")
        self._number = number = self._number + 1
        self._asked[number] = answer = asyncio.get_running_loop().create_future()
        try:
            self._send(_Frame(number, msgspec.Raw(_encode(content)), name))
            return await answer
        finally:
            del self._asked[number]

    def tell(self, name: str, content: Any = None) -> None:
        """Send a request whose answer nobody waits for."""
        if not self.closed.is_set():
            self._send(_Frame(0, msgspec.Raw(_encode(content)), name))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(UnavailableError("the other process of this server has ended"))

    def data_received(self, data: bytes) -> None:
        received = self._received
        received += data
        place = 0
        while len(received) >= place + _LENGTH.size:
            (length,) = _LENGTH.unpack_from(received, place)
            end = place + _LENGTH.size + length
            if len(received) < end:
                break
            self._take(_decode(bytes(received[place + _LENGTH.size : end])))
            place = end
        del received[:place]

    def _take(self, frame: _Frame) -> None:
        if frame.name is not None:
            task = asyncio.get_running_loop().create_task(self._carry_out(frame, frame.name))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)
            return
        answer = self._asked.get(frame.number)
        if answer is None or answer.done():
            return
        if frame.error is None:
            answer.set_result(frame.content)
        else:
            kind = getattr(errors, frame.error, AgentLightningError)
            answer.set_exception(kind(msgspec.msgpack.decode(frame.content, type=str)))

    async def _carry_out(self, frame: _Frame, name: str) -> None:
        error = None
        try:
            content = _encode(await self._answer(name, frame.content))
        except AgentLightningError as raised:
            content = _encode(str(raised))
            error = type(raised).__name__
            if not frame.number:  # nobody waits for the answer
                _log.error("%s failed: %s", name, raised)
        except Exception:  # noqa: BLE001 - a defect ends nobody else's requests
            _log.exception("%s failed unexpectedly", name)
            content = _encode("a defect of the server; its log has the details")
            error = "AgentLightningError"
        if frame.number and not self.closed.is_set():
            self._send(_Frame(frame.number, msgspec.Raw(content), None, error))

    def _send(self, frame: _Frame) -> None:
        """At the end of this turn of the event loop, with all that is sent until then."""
        if not self._sending:
            asyncio.get_running_loop().call_soon(self._flush)
        data = _encode(frame)
        self._sending += (_LENGTH.pack(len(data)), data)

    def _flush(self) -> None:
        sending = self._sending
        self._sending = []
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(sending))
