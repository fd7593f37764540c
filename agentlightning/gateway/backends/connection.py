"""HTTP to one server: connections kept, requests made, refusals and failures told as typed errors.

Calls no address but the one it was given: redirects are not followed. Knows no calls and no protocol.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, Literal, TypeAlias
from urllib.parse import urlsplit

import aiohttp
import msgspec

from agentlightning.errors import BackendError, ConfigError
from agentlightning.gateway.request import CallRefused

_log = logging.getLogger(__name__)
_RETRY_DELAYS = (0.1, 0.5, 2.0)
_END_SECONDS: Final = 0.05
_LONGEST_LINE: Final = 32 * 1024 * 1024  # of an event stream; a million token ids fit

KeyHeader: TypeAlias = Literal["authorization", "api-key", "x-api-key"]


class Connection:
    """Requests to `base_url`, such as `http://host:8000/v1`; a query in it (`?api-version=…`) goes with each of them.

    `timeout_seconds` bounds the wait for each further part of an answer. `health_url` is asked for whether the server
    lives. `retries=False` leaves a server that cannot be reached to whoever has another one. `close` ends the
    connections. `version` is the policy version of the weights there, where the server does not tell itself; where
    nobody can tell, `unusable` says why, and only `control` requests are made."""

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        key_header: KeyHeader = "authorization",
        timeout_seconds: float = 600.0,
        connections: int = 4096,
    ) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"the backend's base_url is {base_url!r}; it must begin with http:// or https://")
        if parts.username is not None or parts.password is not None:
            raise ConfigError("the backend's base_url holds a user or a password, which spans would show: use api_key")
        self.base_url = base_url.partition("?")[0].rstrip("/")
        self._query = f"?{parts.query}" if parts.query else ""
        self.health_url = self.url("models")
        self.retries = True
        self.version = 0
        self.unusable: str | None = None
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers[key_header] = f"Bearer {api_key}" if key_header == "authorization" else api_key
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=timeout_seconds)
        self._connections = connections
        self._session: aiohttp.ClientSession | None = None
        self._closed = False
        self._idle = asyncio.Event()
        self._idle.set()
        self.running = 0

    @property
    def root(self) -> str:
        """The URL without `/v1`, where servers have routes of their own."""
        return self.base_url.removesuffix("/v1")

    def url(self, path: str) -> str:
        return f"{self.base_url}/{path}{self._query}"

    async def close(self) -> None:
        """End the connections, as soon as the requests under way have been answered, and those of any that follow."""
        self._closed = True
        await self._idle.wait()
        await self._end()

    async def _end(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    @asynccontextmanager
    async def _counted(self) -> AsyncGenerator[None]:
        self.running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.running -= 1
            if self.running == 0:
                self._idle.set()
                if self._closed:
                    await self._end()

    @asynccontextmanager
    async def posted(
        self, url: str, body: bytes | None, headers: Mapping[str, str] | None = None, *, control: bool = False
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        """The answer to a POST (a GET without a body), whatever its status. Leaving the block early cancels it.

        BackendError 503 where the server is unusable or cannot be reached (after a few tries), 504 where it falls
        silent, 502 where it breaks off."""
        if self.unusable and not control:
            raise BackendError(self.unusable, status=503, code="weights_unknown")
        try:
            async with self._counted():
                response = await self._connect("GET" if body is None else "POST", url, body, headers)
                try:
                    yield response
                finally:
                    response.close()  # an answer not read to its end must not go back into the pool: this cancels it
        except TimeoutError:
            raise BackendError(f"the backend at {self.base_url} fell silent", status=504, code="timeout") from None
        except (aiohttp.ClientError, ConnectionResetError) as error:
            raise BackendError(f"the backend at {self.base_url} broke off its answer: {error}") from None

    @asynccontextmanager
    async def accepted(
        self, url: str, body: bytes, headers: Mapping[str, str] | None = None, *, control: bool = False
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        """Like `posted`, but a refusal is raised: BackendError with the server's own status and message."""
        async with self.posted(url, body, headers, control=control) as response:
            if response.status != 200:
                raise await refusal(response, self.base_url)
            yield response

    async def healthy(self, timeout_seconds: float) -> bool:
        """Whether the server is usable and answers at `health_url` in time, without an error of its own."""
        if self.unusable:
            return False
        timeout = aiohttp.ClientTimeout(total=timeout_seconds)
        try:
            async with (
                self._counted(),
                self._opened().get(
                    self.health_url, headers=self._headers, timeout=timeout, allow_redirects=False
                ) as response,
            ):
                return response.status < 500
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=self._connections)
            self._session = aiohttp.ClientSession(
                connector=connector,
                timeout=self._timeout,
                read_bufsize=2**20,
                cookie_jar=aiohttp.DummyCookieJar(),  # a backend keeps no sessions, and looking for cookies takes time
            )
        return self._session

    async def _connect(
        self, method: str, url: str, body: bytes | None, headers: Mapping[str, str] | None
    ) -> aiohttp.ClientResponse:
        sent = self._headers | dict(headers) if headers else self._headers
        if headers and "authorization" in headers:
            sent.pop("x-api-key", None)  # it brings the key itself
        for delay in (*_RETRY_DELAYS, None) if self.retries else (None,):
            try:
                return await self._opened().request(method, url, data=body, headers=sent, allow_redirects=False)
            except aiohttp.SocketTimeoutError:
                raise  # it was reached and fell silent; asking again would only wait again
            except (aiohttp.ClientConnectionError, ConnectionResetError) as error:
                if delay is None:
                    raise BackendError(
                        f"the backend at {self.base_url} cannot be reached: {error}; is it running?",
                        status=503,
                        code="backend_unreachable",
                    ) from None
                _log.warning("the backend at %s cannot be reached, trying again: %s", self.base_url, error)
                await asyncio.sleep(delay)
        raise AssertionError("the last try returns or raises")


async def refusal(response: aiohttp.ClientResponse, base_url: str) -> BackendError:
    """The server's refusal as this gateway's. A key that the server refuses is not the agent's to mend."""
    text = await response.text(errors="replace")
    message, code, param = text[:500], None, None
    try:
        error: Any = msgspec.json.decode(text)
        error = error.get("error", error)
        message, code, param = str(error.get("message", message)), error.get("code"), error.get("param")
    except (msgspec.DecodeError, AttributeError, RecursionError):
        pass  # not JSON, or not an object: the text itself is the message
    if response.status in (401, 403):
        _log.warning("the backend at %s refused the gateway's key (%d)", base_url, response.status)
        message = f"the backend at {base_url} refused the gateway's key"  # its own words may repeat the key
        return BackendError(message, status=502, code="backend_key_refused")
    refused = CallRefused(
        message,
        status=response.status if 400 <= response.status < 500 else 502,
        code=code if isinstance(code, str) else "backend_error",
        param=param if isinstance(param, str) else None,
    )
    refused.retry_after = response.headers.get("retry-after")
    return refused


async def event_data(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The data of each server-sent event up to `[DONE]`. BackendError for a line that does not end."""
    rest = b""
    async for part in content.iter_any():
        *lines, rest = (rest + part).split(b"\n")
        if len(rest) > _LONGEST_LINE:
            raise BackendError(f"the backend sent a line of more than {_LONGEST_LINE} bytes")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                await _read_end(content)
                return
            yield data


async def _read_end(content: aiohttp.StreamReader) -> None:
    """Read what ends the response behind its last event, so that its connection is used again; do not wait for it."""
    with suppress(TimeoutError, aiohttp.ClientError):
        async with asyncio.timeout(_END_SECONDS):
            await content.read()
