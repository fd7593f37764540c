"""HTTP/1.1 to one server over connections that are kept, one request at a time on each: a general
client costs more than the rest of a call. There are no redirects, cookies, proxies or compression.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Final, Literal, TypeAlias, cast
from urllib.parse import quote, urlsplit

import httptools

from agentlightning.errors import BackendError, ConfigError
from agentlightning.gateway.backends.words import failed_in_answer, words_of
from agentlightning.gateway.request import CallRefused
from agentlightning.shortages import lacking

UNREACHABLE: Final = "backend_unreachable"
BROKE_OFF: Final = "backend_broke_off"
NO_WEIGHTS: Final = "weights_unknown"

_log = logging.getLogger(__name__)
_RETRY_DELAYS = (0.1, 0.5, 2.0)
_CONNECT_SECONDS: Final = 10.0
_END_SECONDS: Final = 0.05
_UNREAD: Final = 1 << 20  # bytes; a server that sends more than is read has to wait
_LONGEST_HEAD: Final = 1 << 19  # bytes; as much is read at once, body and all
_LONGEST_ANSWER: Final = 1 << 29  # bytes of one that is read as a whole
_LONGEST_REFUSAL: Final = 1 << 20  # bytes
_LONGEST_LINE: Final = 1 << 25  # bytes of an event stream; a million token ids fit
_FORBIDDEN: Final = frozenset("\r\n\0")

KeyHeader: TypeAlias = Literal["authorization", "api-key", "x-api-key"]


class UnreachableError(BackendError):
    """No connection, or it was lost before anything of an answer came."""


class Connection:
    """Requests to `base_url`, such as `http://host:8000/v1`; a query in it (`?api-version=…`) goes
    with each of them. With `socket` they go to whoever listens on that Unix socket.

    `timeout_seconds` bounds the wait for each further part of an answer. `health_url` tells whether
    the server lives. `retries=False` leaves a server that cannot be reached to whoever has another
    one. `version` is the policy version of its weights, if the server does not name it. While
    `unusable` gives a reason, only `control` requests are made. `failed_loads` counts failures to
    load weights: tokens of calls during one may be of any."""

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        key_header: KeyHeader = "authorization",
        timeout_seconds: float = 600.0,
        socket: str | None = None,
    ) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                f"the backend's base_url is {base_url!r}; it must begin with http:// or https://"
            )
        if parts.username is not None or parts.password is not None:
            raise ConfigError(
                "the backend's base_url holds a user or a password, which spans would show: use "
                "api_key"
            )
        self.base_url = base_url.partition("?")[0].rstrip("/")
        self._query = f"?{parts.query}" if parts.query else ""
        self.health_url = self.url("models")
        self.retries = True
        self.version = self.running = self.failed_loads = 0
        self.unusable: str | None = None
        self.origin = f"{parts.scheme}://{parts.netloc}"
        self.timeout_seconds = timeout_seconds
        self._host = parts.hostname
        self._socket = socket
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._fixed = f"host: {parts.netloc}\r\naccept: */*\r\naccept-encoding: identity\r\n"
        self._key = api_key
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers[key_header] = (
                f"Bearer {api_key}" if key_header == "authorization" else api_key
            )
        self._kept: list[Response] = []
        self._closed = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def root(self) -> str:
        """The URL without `/v1`, where servers have routes of their own."""
        return self.base_url.removesuffix("/v1")

    def url(self, path: str) -> str:
        return f"{self.base_url}/{path}{self._query}"

    async def close(self) -> None:
        """End the connections, as soon as the requests under way have been answered, and those of
        any that follow."""
        self._closed = True
        await self._idle.wait()
        kept = self._kept
        self._kept = []
        for response in kept:
            response.abort()

    def without_key(self, said: bytes) -> bytes:
        """What the server said, without the key that it was asked with."""
        return said.replace(self._key.encode(), b"[key]") if self._key else said

    @asynccontextmanager
    async def posted(
        self,
        url: str,
        body: bytes | None,
        headers: Mapping[str, str] | None = None,
        *,
        accepted: bool = False,
        control: bool = False,
        retries: bool = True,
    ) -> AsyncGenerator[Response]:
        """The answer to a POST (a GET without a body), whatever its status unless it is to be
        `accepted`. Leaving the block early cancels it.

        BackendError 503 where the server is unusable or cannot be reached (after a few tries), 504
        where it falls silent, 502 where it breaks off; its own status and message where it refuses
        what was to be accepted."""
        if self.unusable and not control:
            raise BackendError(self.unusable, status=503, code=NO_WEIGHTS)
        self.running += 1
        self._idle.clear()
        response = None
        try:
            response = await self._request(url, body, headers, retry=retries and self.retries)
            del body  # it may be large, and the answer may take long
            if accepted and response.status != 200:
                raise await refusal(response, self.base_url)
            yield response
        except BackendError as error:
            # servers repeat what they do not like, and agents read it
            if self._key and self._key in str(error):
                error.args = (str(error).replace(self._key, "[key]"),)
            raise
        finally:
            if response is not None:
                response.close()
            self.running -= 1
            if self.running == 0:
                self._idle.set()

    async def healthy(self, timeout_seconds: float, *, control: bool = False) -> bool:
        """Whether the server answers at `health_url` in time without an error of its own, and is
        usable, unless it is asked under `control`."""
        return await self.health(timeout_seconds, control=control) is None

    async def health(self, timeout_seconds: float, *, control: bool = False) -> str | None:
        """What is wrong with the server, such as `UNREACHABLE`; None if it is healthy."""
        request = self.posted(self.health_url, None, retries=False, control=control)
        try:
            async with asyncio.timeout(timeout_seconds), request as response:
                await response.read()
                return None if response.status < 500 else "failing"
        except TimeoutError:
            return "slow"
        except BackendError as error:
            return str(error.code)

    async def _request(
        self, url: str, body: bytes | None, headers: Mapping[str, str] | None, *, retry: bool
    ) -> Response:
        """The answer, as soon as its head is there, of the first try that reaches the server."""
        sent = self._headers | dict(headers) if headers else self._headers
        if headers and "authorization" in headers:
            sent.pop("x-api-key", None)  # it brings the key itself
        message = [self._head(url, sent, body), body or b""]
        for delay in (*_RETRY_DELAYS, None) if retry else (None,):
            try:
                return await self._send(message)
            except UnreachableError as error:
                if delay is None:
                    why = (
                        f"the backend at {self.base_url} cannot be reached: {error}; see that it "
                        "runs"
                    )
                    raise BackendError(why, status=503, code=UNREACHABLE) from None
                _log.warning(
                    "the backend at %s cannot be reached, trying again: %s", self.base_url, error
                )
                await asyncio.sleep(delay)
        raise AssertionError("the last try returns or raises")

    def _head(self, url: str, headers: Mapping[str, str], body: bytes | None) -> bytes:
        method = "GET" if body is None else "POST"
        lines = [f"{method} {_target(url.removeprefix(self.origin))} HTTP/1.1\r\n{self._fixed}"]
        for name, value in headers.items():
            if not _FORBIDDEN.isdisjoint(value):
                raise BackendError(
                    f"the header {name} holds a line break", status=400, code="invalid_request"
                )
            lines.append(f"{name}: {value}\r\n")
        lines.append("\r\n" if body is None else f"content-length: {len(body)}\r\n\r\n")
        return "".join(lines).encode("latin-1", "replace")

    async def _send(self, message: list[bytes]) -> Response:
        while self._kept:
            try:
                return await self._kept.pop().send(message)
            except UnreachableError:
                pass  # closed by the server meanwhile
        loop = asyncio.get_running_loop()
        made = functools.partial(Response, self, loop)
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                if self._socket is not None:
                    _, response = await loop.create_unix_connection(made, self._socket)
                else:
                    _, response = await loop.create_connection(
                        made, self._host, self._port, ssl=self._tls
                    )
        except TimeoutError:
            raise UnreachableError(
                f"no connection within {_CONNECT_SECONDS:g} s", status=503
            ) from None
        except OSError as error:
            resource = lacking(error)
            if resource is not None:  # which is no fault of the backend
                why = f"the gateway has no more {resource} at present; try again later"
                raise BackendError(why, status=503, code="out_of_resources") from None
            raise UnreachableError(str(error), status=503) from None
        return await response.send(message)

    def keep(self, response: Response) -> None:
        if self._closed:
            response.abort()
        else:
            self._kept.append(response)


class Response(asyncio.Protocol):
    """A connection, and what the server has answered to its present request. `headers` have
    lower-case names."""

    def __init__(self, connection: Connection, loop: asyncio.AbstractEventLoop) -> None:
        self.lost = False
        self._connection = connection
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

    async def send(self, request: list[bytes]) -> Response:
        if self.lost or self._transport is None:
            raise UnreachableError("it closed the connection", status=503)
        self._begin()
        self._transport.writelines(request)
        try:
            while not self.status:
                await self._more()
        except BaseException:
            self.abort()
            raise
        return self

    async def read(self, limit: int = _LONGEST_ANSWER) -> bytes:
        """The whole body. BackendError for one of more than `limit` bytes."""
        parts = list[bytes]()
        size = 0
        async for part in self.parts():
            parts.append(part)
            size += len(part)
            if size > limit:
                raise BackendError(
                    f"the backend at {self._connection.origin} sends more than {limit:,} bytes"
                )
        return b"".join(parts)

    async def parts(self) -> AsyncGenerator[bytes, None]:
        while True:
            if self._parts:
                yield self._take()
            elif self._complete:
                return
            else:
                await self._more()

    def close(self) -> None:
        """Keep the connection if the answer was read to its end; else close it, which cancels the
        request."""
        if self._complete and self._stays and not self.lost:
            self._parts = []
            self._connection.keep(self)
        else:
            self.abort()

    def abort(self) -> None:
        self.lost = True
        if self._transport is not None:
            self._transport.abort()

    def _take(self) -> bytes:
        body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts = []
        self._unread = 0
        if self._paused and self._transport is not None and not self.lost:
            self._paused = False
            self._transport.resume_reading()
        return body

    async def _more(self) -> None:
        if self._failure is not None:
            raise self._failure
        self._waiting = self._loop.create_future()
        alarm = self._loop.call_later(self._connection.timeout_seconds, self._fall_silent)
        try:
            await self._waiting
        finally:
            alarm.cancel()
            self._waiting = None
        if self._failure is not None and not self._parts:
            raise self._failure

    def _fall_silent(self) -> None:
        self._fail(
            BackendError(
                f"the backend at {self._connection.origin} fell silent", status=504, code="timeout"
            )
        )

    def _fail(self, failure: BackendError) -> None:
        self._failure = self._failure or failure
        self._wake()

    def _give_up(self, what: str) -> None:
        self._fail(BackendError(f"the backend at {self._connection.origin} {what}"))
        self.abort()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's is one in all but its base class
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._complete:
            self.abort()  # unrequested data, which would be taken for the next answer
            return
        if not self.status:
            self._head_bytes += len(data)
            if self._head_bytes > _LONGEST_HEAD:
                self._give_up("sends a head that does not end")
                return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._give_up(f"does not speak HTTP: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        if self._complete:
            return
        why = "" if exc is None else f": {exc}"
        if not self.status:
            self._fail(UnreachableError(f"it closed the connection{why}", status=503))
        elif exc is None and not {"content-length", "transfer-encoding"}.intersection(self.headers):
            self._complete = True  # its end is that of the body
            self._wake()
        else:
            self._fail(
                BackendError(
                    f"the backend at {self._connection.origin} broke off its answer{why}",
                    code=BROKE_OFF,
                )
            )

    def on_header(self, name: bytes, value: bytes) -> None:
        key = name.decode("latin-1").lower()
        text = value.decode("latin-1")
        self.headers[key] = f"{self.headers[key]}, {text}" if key in self.headers else text

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            self.headers = {}  # of an answer before the answer, such as 100 Continue
        elif self.headers.get("content-encoding", "identity") != "identity":
            self._give_up("compressed its answer unasked")
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


@functools.lru_cache(maxsize=1024)
def _target(text: str) -> str:
    return quote(text, safe="/:?&=%[]@!$'()*+,;~-._") or "/"


async def refusal(response: Response, base_url: str) -> BackendError:
    """The server's refusal as this gateway's. A key that the server refuses is not the agent's to
    change."""
    if response.status in (401, 403):
        _log.warning("the backend at %s refused the gateway's key (%d)", base_url, response.status)
        # its own words may repeat the key
        message = f"the backend at {base_url} refused the gateway's key"
        return BackendError(message, status=502, code="backend_key_refused")
    words = words_of(await response.read(_LONGEST_REFUSAL))
    refused = CallRefused(
        words.message or f"the backend answered {response.status} and said nothing",
        status=response.status if 400 <= response.status < 500 else 502,
        code=words.code or "backend_error",
        param=words.param,
    )
    refused.answered = response.status
    refused.retry_after = response.headers.get("retry-after")
    return refused


async def event_data(
    response: Response, ended: Callable[[], None] = lambda: None
) -> AsyncIterator[bytes]:
    """The data of each server-sent event up to `[DONE]`, at which `ended` is called. BackendError
    for a line that does not end, and for an event that is an error."""
    begun: list[bytes] = []  # of a line that has not ended
    size = 0
    failed = False
    async for part in response.parts():
        *lines, rest = part.split(b"\n")
        if lines:
            lines[0] = b"".join((*begun, lines[0]))
            begun = []
            size = 0
        begun.append(rest)
        size += len(rest)
        if size > _LONGEST_LINE:
            raise BackendError(f"the backend sent a line of more than {_LONGEST_LINE} bytes")
        for line in lines:
            if line.startswith(b"event:"):
                failed = line[6:].strip() == b"error"
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if failed:
                raise failed_in_answer(data)
            if data == b"[DONE]":
                ended()
                # What ends the response is read so that its connection is used again, and not
                # waited for.
                with suppress(TimeoutError, BackendError):
                    async with asyncio.timeout(_END_SECONDS):
                        await response.read()
                return
            yield data
