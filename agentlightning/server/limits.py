"""How many requests a caller may make, counted by the `limits` library, as ASGI middleware.

A caller is who a valid key stands for, else an address. This module knows how SDKs say that they repeat a request.
"""

from __future__ import annotations

import hashlib
import ipaddress
import math
import secrets
import time
from collections import OrderedDict
from typing import Any, Final

import msgspec
from limits import RateLimitItemPerSecond
from limits.aio.storage import MemoryStorage
from limits.aio.strategies import SlidingWindowCounterRateLimiter
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from agentlightning.errors import ConfigError
from agentlightning.gateway.calls import RETRY_HEADER
from agentlightning.server.access import Access
from agentlightning.store.calls import ErrorBody, ErrorReply

_WINDOW: Final = 2  # seconds, at least: so much may come at once
_SLOTS: Final = 256  # that addresses share, so that inventing them takes no memory
_REMEMBERED: Final = 10_000
_UNLIMITED: Final = frozenset({"/health", "/ready"})
_RETRY: Final = RETRY_HEADER.encode()


class Refusals:
    """First tries that were refused unread, each told by its path, who asked and its length: what repeats one of them
    must not pass for the repetition of a call whose answer was lost."""

    def __init__(self, remembered: int = _REMEMBERED) -> None:
        self._remembered = remembered
        self._counts: OrderedDict[tuple[str, str, bytes | None], int] = OrderedDict()

    def note(self, scope: Scope, caller: str) -> None:
        """This request is refused."""
        if _header(scope, _RETRY) == b"0":
            name = _request(scope, caller)
            self._counts[name] = self._counts.pop(name, 0) + 1
            if len(self._counts) > self._remembered:
                self._counts.popitem(last=False)

    def settle(self, scope: Scope, caller: str) -> None:
        """This request goes on: as a first try, if it repeats one that was refused."""
        if not self._counts or _header(scope, _RETRY) in (None, b"0"):
            return
        name = _request(scope, caller)
        count = self._counts.pop(name, 0)
        if count:
            scope["headers"] = [header for header in scope["headers"] if header[0] != _RETRY]
        if count > 1:
            self._counts[name] = count - 1


class RateLimit:
    """Answers 429 with `Retry-After` to callers who make more than `rate` requests a second, counted over at least two
    seconds. Addresses are those of the connection: what a header says of them is not believed."""

    def __init__(self, app: ASGIApp, rate: float, access: Access | None) -> None:
        if not (rate > 0 and math.isfinite(rate)):
            raise ConfigError(f"the rate limit is {rate}; it must be a positive number of requests per second")
        self._app = app
        self._access = access
        self._window = max(_WINDOW, math.ceil(1 / rate))
        self._limit = RateLimitItemPerSecond(max(1, round(rate * self._window)), self._window)
        self._limiter = SlidingWindowCounterRateLimiter(MemoryStorage())
        self._salt = secrets.token_bytes(16)
        self._refusals = Refusals()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _UNLIMITED:
            await self._app(scope, receive, send)
            return
        caller = None if self._access is None else await self._access.name_of(Headers(scope=scope))
        caller = caller or self._slot(_address(scope))
        if await self._limiter.hit(self._limit, caller):
            self._refusals.settle(scope, caller)
            await self._app(scope, receive, send)
            return
        self._refusals.note(scope, caller)
        stats = await self._limiter.get_window_stats(self._limit, caller)
        await _refuse(send, min(max(1, math.ceil(stats.reset_time - time.time())), self._window))

    def _slot(self, address: str) -> str:
        digest = hashlib.blake2b(address.encode(), key=self._salt, digest_size=8).digest()
        return f"address {int.from_bytes(digest, 'big') % _SLOTS}"


def _header(scope: Scope, wanted: bytes) -> bytes | None:
    return next((value for name, value in scope["headers"] if name == wanted), None)


def _request(scope: Scope, caller: str) -> tuple[str, str, bytes | None]:
    return scope["path"], caller, _header(scope, b"content-length")


def _address(scope: Scope) -> str:
    """The client's, of IPv6 its network: whoever has one has all of it."""
    client: Any = scope.get("client")
    text = str(client[0]) if client else ""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return text
    return text if address.version == 4 else str(ipaddress.ip_network((int(address), 64), strict=False))


async def _refuse(send: Send, seconds: int) -> None:
    message = f"this caller asks more often than the server allows; ask again in {seconds} s"
    body = msgspec.json.encode(ErrorReply(error=ErrorBody(message=message, type="rate_limited")))
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"retry-after", str(seconds).encode()),
    ]
    await send({"type": "http.response.start", "status": 429, "headers": headers})
    await send({"type": "http.response.body", "body": body})
