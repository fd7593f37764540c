"""How many requests a caller may make, counted by the `limits` library, and how many bytes of large ones are read at
once, as ASGI middleware.

A caller is who a valid key stands for, else an address.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import math
import secrets
import time
from collections.abc import Awaitable
from typing import Any, Final

from limits import RateLimitItemPerSecond
from limits.aio.storage import MemoryStorage
from limits.aio.strategies import SlidingWindowCounterRateLimiter
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from agentlightning.errors import ConfigError
from agentlightning.gateway.attribution import api_key_of
from agentlightning.server.access import Access
from agentlightning.server.requests import refusal

_WINDOW: Final = 2  # seconds, at least: so much may come at once
_SLOTS: Final = 256  # that addresses share, so that inventing them takes no memory
_SMALL: Final = 1 << 20  # bytes, of a body that counts for nothing
_UNLIMITED: Final = frozenset({"/health", "/ready"})


def limit_of(rate: float) -> RateLimitItemPerSecond:
    """`rate` requests a second, counted over at least two seconds; ConfigError unless it is positive and finite."""
    if not (rate > 0 and math.isfinite(rate)):
        raise ConfigError(f"the rate limit is {rate}; it must be a positive number of requests per second")
    window = max(_WINDOW, math.ceil(1 / rate))
    return RateLimitItemPerSecond(max(1, round(rate * window)), window)


class RateLimit:
    """Answers 429 with `Retry-After` to callers who make more requests than the `limit`. Addresses are those of the
    connection: what a header says of them is not believed."""

    def __init__(self, app: ASGIApp, limit: RateLimitItemPerSecond, access: Access | None) -> None:
        self._app = app
        self._access = access
        self._limit = limit
        self._limiter = SlidingWindowCounterRateLimiter(MemoryStorage())
        self._salt = secrets.token_bytes(16)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _UNLIMITED:
            await self._app(scope, receive, send)
            return
        caller = None if self._access is None else await self._access.name_of(Headers(scope=scope))
        caller = caller or self._slot(_address(scope))
        if await self._limiter.hit(self._limit, caller):
            await self._app(scope, receive, send)
            return
        stats = await self._limiter.get_window_stats(self._limit, caller)
        seconds = min(max(1, math.ceil(stats.reset_time - time.time())), self._limit.get_expiry())
        message = f"this caller asks more often than the server allows; ask again in {seconds} s"
        await refusal(429, "rate_limited", message, {"retry-after": str(seconds)})(scope, receive, send)

    def _slot(self, address: str) -> str:
        digest = hashlib.blake2b(address.encode(), key=self._salt, digest_size=8).digest()
        return f"address {int.from_bytes(digest, 'big') % _SLOTS}"


class LargeBodies:
    """ASGI: the large bodies of one caller that are read and not yet answered have at most `budget` bytes together;
    further ones wait unread. A caller is a key, or an address without one. A body of unknown length counts as `limit`
    bytes."""

    def __init__(self, app: ASGIApp, limit: int, budget: int = 256 << 20) -> None:
        self._app = app
        self._limit, self._budget = limit, budget
        self._callers: dict[str, _Held] = {}

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD"):
            return self._app(scope, receive, send)
        length = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
        size = min(int(length), self._limit) if length.isdigit() else self._limit
        if size <= _SMALL:
            return self._app(scope, receive, send)
        return self._within_budget(size, scope, receive, send)

    async def _within_budget(self, size: int, scope: Scope, receive: Receive, send: Send) -> None:
        caller = api_key_of(Headers(scope=scope)) or _address(scope)
        held = self._callers.setdefault(caller, _Held())
        held.requests += 1
        try:
            while held.size and held.size + size > self._budget:
                await held.freed.wait()
            held.size += size
            try:
                await self._app(scope, receive, send)
            finally:
                held.size -= size
                held.freed.set()
                held.freed.clear()
        finally:
            held.requests -= 1
            if not held.requests:
                del self._callers[caller]


class _Held:
    """What a caller's requests hold, and how many there are."""

    def __init__(self) -> None:
        self.size = self.requests = 0
        self.freed = asyncio.Event()


def _address(scope: Scope) -> str:
    """The client's, of IPv6 its network: whoever has one has all of it."""
    client: Any = scope.get("client")
    text = str(client[0]) if client else ""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return text
    return text if address.version == 4 else str(ipaddress.ip_network((int(address), 64), strict=False))
