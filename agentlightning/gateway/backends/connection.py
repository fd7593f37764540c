"""Requests to one server, over connections that are kept and through the proxy that the environment
names.

There are no redirects, cookies or compression.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from functools import lru_cache, partial
from typing import Any, Final, Literal, TypeAlias
from urllib.parse import quote, urlsplit

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.streams import EMPTY_PAYLOAD
from yarl import URL

from agentlightning.errors import BackendError, ConfigError
from agentlightning.gateway.backends.words import failed_in_answer, words_of
from agentlightning.gateway.request import CallRefused
from agentlightning.proxies import proxy_for
from agentlightning.shortages import lacking

UNREACHABLE: Final = "backend_unreachable"
BROKE_OFF: Final = "backend_broke_off"
NO_WEIGHTS: Final = "weights_unknown"

_log = logging.getLogger(__name__)
_RETRY_DELAYS = (0.1, 0.5, 2.0)
_CONNECT_SECONDS: Final = 10.0
_END_SECONDS: Final = 0.05
_UNREAD: Final = 1 << 20  # bytes; a server that sends more than is read has to wait
_LONGEST_ANSWER: Final = 1 << 29  # bytes of one that is read as a whole
_LONGEST_REFUSAL: Final = 1 << 20  # bytes
_LONGEST_LINE: Final = 1 << 25  # bytes of an event stream; a million token ids fit
_FORBIDDEN: Final = frozenset("\r\n\0")
# a task's latest request
_reuses: ContextVar[bool] = ContextVar("agentlightning_reuses_connection", default=False)
_UNESCAPED: Final = "/:?&=%[]@!$'()*+,;~-._"

KeyHeader: TypeAlias = Literal["authorization", "api-key", "x-api-key"]


class UnreachableError(BackendError):
    """No connection, or it was lost before anything of an answer came."""


class BackendConnection:
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
        self._socket = socket
        self._proxy = proxy_for(base_url) if socket is None else None
        self._key = api_key
        self._headers = {
            "content-type": "application/json",
            "accept-encoding": "identity",
            "user-agent": "agentlightning",
        }
        if api_key:
            self._headers[key_header] = (
                f"Bearer {api_key}" if key_header == "authorization" else api_key
            )
        self._session: aiohttp.ClientSession | None = None
        # the latest that came on each connection
        self._bodies: dict[ResponseHandler, aiohttp.StreamReader] = {}
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
        await self._end_session()

    def without_key(self, said: bytes) -> bytes:
        """The server's words, without the key that it was asked with."""
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
                if self._closed:
                    await self._end_session()

    async def healthy(self, timeout_seconds: float, *, control: bool = False) -> bool:
        """Whether the server answers at `health_url` in time without an error of its own, and is
        usable, unless it is asked under `control`."""
        return await self.health(timeout_seconds, control=control) is None

    async def health(self, timeout_seconds: float, *, control: bool = False) -> str | None:
        """The fault of the server, such as `UNREACHABLE`; None if it is healthy."""
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
        for name, value in sent.items():
            if not _FORBIDDEN.isdisjoint(value):
                raise BackendError(
                    f"the header {name} holds a line break", status=400, code="invalid_request"
                )
        for delay in (*_RETRY_DELAYS, None) if retry else (None,):
            try:
                return await self._send(url, body, sent)
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

    async def _send(self, url: str, body: bytes | None, headers: Mapping[str, str]) -> Response:
        session = self._session or self._open_session()
        method = "GET" if body is None else "POST"
        while True:
            _reuses.set(False)  # of this try: a refused connection never gets to say so
            try:
                response = await session.request(
                    method, _address(url), data=body, headers=headers, allow_redirects=False
                )
                break
            except aiohttp.SocketTimeoutError:
                raise _silent(self.origin) from None
            except (aiohttp.ClientConnectionError, aiohttp.ClientHttpProxyError) as error:
                if resource := lacking(error):  # which is no fault of the backend
                    why = f"the gateway has no more {resource} at present; try again later"
                    raise BackendError(why, status=503, code="out_of_resources") from None
                if not _reuses.get():  # otherwise it was closed meanwhile
                    raise UnreachableError(_why(error), status=503) from None
            except aiohttp.ClientError as error:
                raise BackendError(
                    f"the backend at {self.origin} does not speak HTTP, or sends a head that does "
                    f"not end: {_why(error)}"
                ) from None
        if response.headers.get("content-encoding", "identity") != "identity":
            response.close()
            raise BackendError(f"the backend at {self.origin} compressed its answer unasked")
        if not 200 <= response.status < 600:
            response.close()
            why = f"answered {response.status}, which no answer of HTTP has as its status"
            raise BackendError(f"the backend at {self.origin} {why}")
        if response.connection is not None and response.connection.protocol is not None:
            self._bodies[response.connection.protocol] = response.content
        return Response(response, self.origin)

    def _open_session(self) -> aiohttp.ClientSession:
        settings: dict[str, Any] = {
            "limit": 0,
            "bodies": self._bodies,
            "silence_seconds": self.timeout_seconds,
        }
        self._session = aiohttp.ClientSession(
            connector=_TcpConnector(**settings)
            if self._socket is None
            else _UnixConnector(self._socket, **settings),
            proxy=self._proxy,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            read_bufsize=_UNREAD,
            timeout=aiohttp.ClientTimeout(
                total=None, connect=_CONNECT_SECONDS, sock_read=self.timeout_seconds
            ),
        )
        return self._session

    async def _end_session(self) -> None:
        session = self._session
        self._session = None
        if session is not None:
            await session.close()


@lru_cache(maxsize=1024)
def _address(url: str) -> URL:
    # with its dots, which may be in the name of a model
    return URL(quote(url, safe=_UNESCAPED), encoded=True)


class _Connector(aiohttp.BaseConnector):
    """Connections whose answers end where aiohttp alone would take something else for them, or wait
    on."""

    def __init__(
        self,
        *arguments: Any,
        bodies: dict[ResponseHandler, aiohttp.StreamReader],
        silence_seconds: float,
        **settings: Any,
    ) -> None:
        super().__init__(*arguments, **settings)
        self._bodies = bodies
        self._silence_seconds = silence_seconds

    async def connect(self, *arguments: Any, **settings: Any) -> aiohttp.connector.Connection:
        connection = await super().connect(*arguments, **settings)
        protocol = connection.protocol
        assert protocol is not None
        _reuses.set(protocol in self._bodies)
        if protocol.should_close:
            connection.close()
            raise aiohttp.ServerDisconnectedError(
                "something came unasked, which would be taken for the next answer"
            )
        if protocol not in self._bodies and protocol.closed is not None:
            self._bodies[protocol] = EMPTY_PAYLOAD
            protocol.closed.add_done_callback(partial(self._lost, protocol))
        protocol.read_timeout = self._silence_seconds
        # aiohttp starts it when the request is written, which a server may prevent
        protocol.start_timeout()
        return connection

    def _lost(self, protocol: ResponseHandler, closed: asyncio.Future[None]) -> None:
        """aiohttp closes a connection on which something comes that is no HTTP, and lets the reader
        wait."""
        body = self._bodies.pop(protocol)
        if not body.is_eof() and body.exception() is None:
            body.set_exception(aiohttp.ClientPayloadError("it does not speak HTTP"))
        if not closed.cancelled():
            closed.exception()  # which is then not logged


class _TcpConnector(_Connector, aiohttp.TCPConnector): ...


class _UnixConnector(_Connector, aiohttp.UnixConnector): ...


class Response:
    """The answer of a server so far."""

    def __init__(self, response: aiohttp.ClientResponse, origin: str) -> None:
        self.status = response.status
        self.headers: Mapping[str, str] = response.headers
        self._response = response
        self._origin = origin

    async def read(self, limit: int = _LONGEST_ANSWER) -> bytes:
        """The whole body. BackendError for one of more than `limit` bytes."""
        parts = list[bytes]()
        size = 0
        async for part in self.parts():
            parts.append(part)
            size += len(part)
            if size > limit:
                raise BackendError(f"the backend at {self._origin} sends more than {limit:,} bytes")
        return b"".join(parts)

    async def parts(self) -> AsyncGenerator[bytes, None]:
        content = self._response.content
        while True:
            try:
                part = await content.readany()
            except TimeoutError:
                raise _silent(self._origin) from None
            except aiohttp.ClientError as error:
                why = f"the backend at {self._origin} broke off its answer: {_why(error)}"
                raise BackendError(why, code=BROKE_OFF) from None
            if not part:
                return
            yield part

    def close(self) -> None:
        """Close the connection, which cancels the request, unless the answer has come to its
        end."""
        self._response.close()


def _silent(origin: str) -> BackendError:
    return BackendError(f"the backend at {origin} fell silent", status=504, code="timeout")


def _why(error: Exception) -> str:
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "it closed the connection"
    if isinstance(error, aiohttp.ClientResponseError):
        return error.message
    return str(error).replace(" ssl:default", "") or type(error).__name__


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
            if not line.startswith(b"data:"):
                if line.startswith(b"event:"):
                    failed = line[6:].strip() == b"error"
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
