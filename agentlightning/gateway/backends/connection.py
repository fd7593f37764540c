"""HTTP to one server: connections kept, requests made, refusals and failures told as typed errors.

Calls no address but the one it was given: redirects are not followed. Knows no calls and no protocol.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias
from urllib.parse import urlsplit

import msgspec

from agentlightning.errors import BackendError, ConfigError
from agentlightning.gateway.backends.wire import BROKE_OFF, UNREACHABLE, Response, UnreachableError, Wire
from agentlightning.gateway.request import CallRefused

_log = logging.getLogger(__name__)
_RETRY_DELAYS = (0.1, 0.5, 2.0)
_END_SECONDS: Final = 0.05
_LONGEST_LINE: Final = 32 * 1024 * 1024  # of an event stream; a million token ids fit

KeyHeader: TypeAlias = Literal["authorization", "api-key", "x-api-key"]


class Connection:
    """Requests to `base_url`, such as `http://host:8000/v1`; a query in it (`?api-version=…`) goes with each of them.
    With `socket` they go to whoever listens on that Unix socket.

    `timeout_seconds` bounds the wait for each further part of an answer. `health_url` is asked for whether the server
    lives. `retries=False` leaves a server that cannot be reached to whoever has another one. `close` ends the
    connections. `version` is the policy version of the weights there, where the server does not tell itself; where
    nobody can tell, `unusable` says why, and only `control` requests are made. While it is `paused` nothing is
    sampled."""

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
            raise ConfigError(f"the backend's base_url is {base_url!r}; it must begin with http:// or https://")
        if parts.username is not None or parts.password is not None:
            raise ConfigError("the backend's base_url holds a user or a password, which spans would show: use api_key")
        self.base_url = base_url.partition("?")[0].rstrip("/")
        self._query = f"?{parts.query}" if parts.query else ""
        self.health_url = self.url("models")
        self.retries = True
        self.version = 0
        self.unusable: str | None = None
        self.paused = False
        self.lost = False  # unusable for no other reason than that it may be gone: a call that it ends is as it was
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers[key_header] = f"Bearer {api_key}" if key_header == "authorization" else api_key
        self.wire = Wire(parts, timeout_seconds, socket)
        self._closed = False
        self._idle = asyncio.Event()
        self._idle.set()
        self.running = 0

    @property
    def root(self) -> str:
        """The URL without `/v1`, where servers have routes of their own."""
        return self.base_url.removesuffix("/v1")

    @property
    def changes_weights(self) -> bool:
        """Whether nobody can tell which weights sample now. While answers are paused none is sampled."""
        return self.unusable is not None and not self.paused and not self.lost

    def url(self, path: str) -> str:
        return f"{self.base_url}/{path}{self._query}"

    async def close(self) -> None:
        """End the connections, as soon as the requests under way have been answered, and those of any that follow."""
        self._closed = True
        await self._idle.wait()
        self.wire.close()

    def posted(
        self,
        url: str,
        body: bytes | None,
        headers: Mapping[str, str] | None = None,
        *,
        accepted: bool = False,
        control: bool = False,
        retries: bool = True,
    ) -> _Exchange:
        """For `async with`: the answer to a POST (a GET without a body), whatever its status unless it is to be
        `accepted`. Leaving the block early cancels it.

        BackendError 503 where the server is unusable or cannot be reached (after a few tries), 504 where it falls
        silent, 502 where it breaks off; its own status and message where it refuses what was to be accepted."""
        return _Exchange(self, url, body, headers, accepted, control, retries and self.retries)

    async def healthy(self, timeout_seconds: float, *, control: bool = False) -> bool:
        """Whether the server is usable (unless asked under `control`) and answers at `health_url` in time, without an
        error of its own."""
        asked = self.posted(self.health_url, None, retries=False, control=control)
        try:
            async with asyncio.timeout(timeout_seconds), asked as response:
                await response.read()
                return response.status < 500
        except (BackendError, TimeoutError):
            return False

    async def deserted(self, timeout_seconds: float) -> bool:
        """Whether nobody listens there any more. One that takes its time does."""
        try:
            async with asyncio.timeout(timeout_seconds), self.posted(self.health_url, None, retries=False) as response:
                await response.read()
        except BackendError as error:
            return error.code in (UNREACHABLE, BROKE_OFF)
        except TimeoutError:
            pass
        return False

    def enter(self) -> None:
        """A request is under way."""
        self.running += 1
        self._idle.clear()

    def leave(self) -> None:
        self.running -= 1
        if self.running == 0:
            self._idle.set()
            if self._closed:
                self.wire.close()

    async def request(self, url: str, body: bytes | None, headers: Mapping[str, str] | None, retry: bool) -> Response:
        """The answer, of the first try that reaches the server."""
        sent = self._headers | dict(headers) if headers else self._headers
        if headers and "authorization" in headers:
            sent.pop("x-api-key", None)  # it brings the key itself
        for delay in (*_RETRY_DELAYS, None) if retry else (None,):
            try:
                return await self.wire.request("GET" if body is None else "POST", url, sent, body)
            except UnreachableError as error:
                if delay is None:
                    raise BackendError(
                        f"the backend at {self.base_url} cannot be reached: {error}; is it running?",
                        status=503,
                        code=UNREACHABLE,
                    ) from None
                _log.warning("the backend at %s cannot be reached, trying again: %s", self.base_url, error)
                await asyncio.sleep(delay)
        raise AssertionError("the last try returns or raises")


@dataclass(eq=False)
class _Exchange:
    """A request, and its answer for as long as the block lasts."""

    connection: Connection
    url: str
    body: bytes | None
    headers: Mapping[str, str] | None
    accepted: bool
    control: bool
    retry: bool
    response: Response | None = None

    async def __aenter__(self) -> Response:
        connection = self.connection
        if connection.unusable and not self.control:
            raise BackendError(connection.unusable, status=503, code="weights_unknown")
        connection.enter()
        try:
            self.response = response = await connection.request(self.url, self.body, self.headers, self.retry)
            if self.accepted and response.status != 200:
                raise await refusal(response, connection.base_url)
        except BaseException:
            await self.__aexit__()
            raise
        return response

    async def __aexit__(self, *_: object) -> None:
        if self.response is not None:
            self.response.close()
        self.connection.leave()


async def refusal(response: Response, base_url: str) -> BackendError:
    """The server's refusal as this gateway's. A key that the server refuses is not the agent's to mend."""
    text = (await response.read()).decode(errors="replace")
    message, code, param = " ".join(text[:500].split())[:200], None, None  # a page of HTML, perhaps
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


async def event_data(response: Response) -> AsyncIterator[bytes]:
    """The data of each server-sent event up to `[DONE]`. BackendError for a line that does not end."""
    begun: list[bytes] = []  # of a line that has not ended
    async for part in response.parts():
        *lines, rest = part.split(b"\n")
        if lines:
            lines[0] = b"".join((*begun, lines[0]))
            begun = []
        begun.append(rest)
        if sum(map(len, begun)) > _LONGEST_LINE:
            raise BackendError(f"the backend sent a line of more than {_LONGEST_LINE} bytes")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                await _read_end(response)
                return
            yield data


async def _read_end(response: Response) -> None:
    """Read what ends the response behind its last event, so that its connection is used again; do not wait for it."""
    with suppress(TimeoutError, BackendError):
        async with asyncio.timeout(_END_SECONDS):
            await response.read()
