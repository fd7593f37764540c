"""HTTP/1.1 to one server over connections that are kept, one request at a time on each, and nothing more: no redirects,
cookies, proxies or compression. A general client costs more than the rest of a call.

Knows bytes on sockets, and how a server fails; no calls, keys or protocols above HTTP.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import ssl
from collections.abc import AsyncGenerator, Mapping
from typing import Final, cast
from urllib.parse import SplitResult, quote

import httptools

from agentlightning.errors import BackendError

UNREACHABLE: Final = "backend_unreachable"
BROKE_OFF: Final = "backend_broke_off"

_CONNECT_SECONDS: Final = 10.0
_UNREAD: Final = 1 << 20  # bytes; a server that sends more than is read has to wait
_LONGEST_HEAD: Final = 1 << 19  # bytes; as much is read at once, body and all
_FORBIDDEN: Final = frozenset("\r\n\0")


class UnreachableError(BackendError):
    """No connection, or it was lost before anything of an answer came."""


class Wire:
    """Connections to the server of a URL, or to the one that listens on the Unix `socket`. A server that says nothing
    for `silence_seconds` has fallen silent."""

    def __init__(self, parts: SplitResult, silence_seconds: float, socket: str | None = None) -> None:
        assert parts.hostname is not None
        self.origin = f"{parts.scheme}://{parts.netloc}"
        self.silence_seconds = silence_seconds
        self._socket = socket
        self._host = parts.hostname
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._idle: list[Response] = []
        self._fixed = f"host: {parts.netloc}\r\naccept: */*\r\naccept-encoding: identity\r\n"

    async def request(self, method: str, url: str, headers: Mapping[str, str], body: bytes | None) -> Response:
        """The answer to a request, as soon as its head is there. Leave it by `close`.

        UnreachableError (503) as it says; BackendError 504 where the server falls silent, 502 where it breaks off or
        does not speak HTTP."""
        lines = [f"{method} {_target(url.removeprefix(self.origin))} HTTP/1.1\r\n{self._fixed}"]
        for name, value in headers.items():
            if not _FORBIDDEN.isdisjoint(value):
                raise BackendError(f"the header {name} holds a line break", status=400, code="invalid_request")
            lines.append(f"{name}: {value}\r\n")
        lines.append("\r\n" if body is None else f"content-length: {len(body)}\r\n\r\n")
        head = "".join(lines).encode("latin-1", "replace")
        message = head if body is None else head + body
        while self._idle:
            try:
                return await self._idle.pop().send(message)
            except UnreachableError:
                pass  # closed by the server meanwhile
        return await (await self._connect()).send(message)

    async def _connect(self) -> Response:
        loop = asyncio.get_running_loop()
        made = functools.partial(Response, self, loop)
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                if self._socket is not None:
                    return (await loop.create_unix_connection(made, self._socket))[1]
                return (await loop.create_connection(made, self._host, self._port, ssl=self._tls))[1]
        except TimeoutError:
            raise UnreachableError(f"no connection within {_CONNECT_SECONDS:g} s", status=503) from None
        except (OSError, ssl.SSLError) as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):  # which says nothing of the server
                raise BackendError(
                    f"too many files are open here for another call: {error}; see `ulimit -n`",
                    status=503,
                    code="too_many_open_files",
                ) from None
            raise UnreachableError(str(error), status=503) from None

    @property
    def kept(self) -> int:
        """How many connections wait for further requests."""
        return len(self._idle)

    def keep(self, response: Response) -> None:
        """Use its connection for further requests."""
        self._idle.append(response)

    def close(self) -> None:
        """End the connections that nobody uses."""
        idle, self._idle = self._idle, []
        for response in idle:
            response.abort()


class Response(asyncio.Protocol):
    """A connection, and what the server has answered to its present request. `headers` have lower-case names."""

    def __init__(self, wire: Wire, loop: asyncio.AbstractEventLoop) -> None:
        self.lost = False
        self._wire = wire
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._begin()

    def _begin(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self._head_bytes = 0
        self._parser = httptools.HttpResponseParser(self)
        self._parts: list[bytes] = []
        self._unread = 0
        self._paused = False
        self._complete = False
        self._stays = False  # whether the connection can be used again
        self._failure: BackendError | None = None
        self._waiting: asyncio.Future[None] | None = None

    async def send(self, request: bytes) -> Response:
        """Send a request and wait for the head of its answer."""
        if self.lost or self._transport is None:
            raise UnreachableError("it closed the connection", status=503)
        self._begin()
        self._transport.write(request)
        try:
            while not self.status:
                await self._more()
        except BaseException:
            self.abort()
            raise
        return self

    async def read(self) -> bytes:
        """What is left of the body."""
        if self._complete:
            return self._take()
        return b"".join([part async for part in self.parts()])

    async def parts(self) -> AsyncGenerator[bytes, None]:
        """The body as it comes."""
        while True:
            if self._parts:
                yield self._take()
            elif self._complete:
                return
            else:
                await self._more()

    def close(self) -> None:
        """The answer is done with. One that was not read to its end takes its connection with it: this cancels it."""
        if self._complete and self._stays and not self.lost:
            self._parts = []
            self._wire.keep(self)
        else:
            self.abort()

    def abort(self) -> None:
        self.lost = True
        if self._transport is not None:
            self._transport.abort()

    def _take(self) -> bytes:
        body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts, self._unread = [], 0
        if self._paused and self._transport is not None and not self.lost:
            self._paused = False
            self._transport.resume_reading()
        return body

    async def _more(self) -> None:
        """Wait until something has come."""
        if self._failure is not None:
            raise self._failure
        self._waiting = self._loop.create_future()
        alarm = self._loop.call_later(self._wire.silence_seconds, self._fall_silent)
        try:
            await self._waiting
        finally:
            alarm.cancel()
            self._waiting = None
        if self._failure is not None and not self._parts:
            raise self._failure

    def _fall_silent(self) -> None:
        self._fail(BackendError(f"the backend at {self._wire.origin} fell silent", status=504, code="timeout"))

    def _fail(self, failure: BackendError) -> None:
        self._failure = self._failure or failure
        self._wake()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but its base class

    def data_received(self, data: bytes) -> None:
        if self._complete:
            self.abort()  # nobody asked for more: whatever follows on this connection cannot be told apart from it
            return
        if not self.status:
            self._head_bytes += len(data)
            if self._head_bytes > _LONGEST_HEAD:
                self._fail(BackendError(f"the head of an answer of {self._wire.origin} does not end"))
                self.abort()
                return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(BackendError(f"the backend at {self._wire.origin} does not speak HTTP: {error}"))
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        if self._complete:
            return
        ends_here = self.status and not {"content-length", "transfer-encoding"}.intersection(self.headers)
        if exc is None and ends_here:
            self._complete = True
            self._wake()
        elif not self.status:
            self._fail(UnreachableError(f"it closed the connection{_because(exc)}", status=503))
        else:
            said = f"the backend at {self._wire.origin} broke off its answer{_because(exc)}"
            self._fail(BackendError(said, code=BROKE_OFF))

    def on_header(self, name: bytes, value: bytes) -> None:
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        self.headers[key] = f"{self.headers[key]}, {text}" if key in self.headers else text

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            self.headers = {}  # of an answer before the answer, such as 100 Continue
        elif "content-encoding" in self.headers and self.headers["content-encoding"] != "identity":
            self._fail(BackendError(f"the backend at {self._wire.origin} compressed its answer unasked"))
        else:
            self.status = status
            self._stays = self._parser.should_keep_alive()
            self._wake()

    def on_body(self, part: bytes) -> None:
        self._parts.append(part)
        self._unread += len(part)
        if self._unread > _UNREAD and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def on_message_complete(self) -> None:
        self._complete = self.status != 0
        self._wake()


def _because(error: Exception | None) -> str:
    return f": {error}" if error is not None else ""


@functools.lru_cache(maxsize=1024)
def _target(text: str) -> str:
    return quote(text, safe="/:?&=%[]@!$'()*+,;~-._") or "/"
