"""How many requests a caller may make, counted by the `limits` library, as ASGI middleware.

A caller is who a valid key stands for, else an address.
"""

from __future__ import annotations

import hashlib
import ipaddress
import math
import secrets
import time
from typing import Any, Final

from limits import RateLimitItemPerSecond
from limits.aio.storage import MemoryStorage
from limits.aio.strategies import SlidingWindowCounterRateLimiter
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from agentlightning.errors import ConfigError
from agentlightning.server.access import Access
from agentlightning.server.requests import refusal

_WINDOW: Final = 2  # seconds, at least: so much may come at once
_SLOTS: Final = 256  # that addresses share, so that inventing them takes no memory
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


def _address(scope: Scope) -> str:
    """The client's, of IPv6 its network: whoever has one has all of it."""
    client: Any = scope.get("client")
    text = str(client[0]) if client else ""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return text
    return text if address.version == 4 else str(ipaddress.ip_network((int(address), 64), strict=False))
