"""How many requests a caller may make, counted by the `limits` library, and how many bytes of large ones are read at
once. A caller is who a valid key stands for, else an address."""

from __future__ import annotations

import asyncio
import ipaddress
import math
import time
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from fractions import Fraction
from typing import Any, Final

from limits import RateLimitItemPerSecond
from limits.aio.storage import MemoryStorage
from limits.aio.strategies import SlidingWindowCounterRateLimiter
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from agentlightning.errors import AgentLightningError, ConfigError
from agentlightning.gateway.attribution import api_key_of
from agentlightning.server.access import Access
from agentlightning.server.requests import refusal

_WINDOW: Final = 2  # seconds, at least: so much may come at once
_SMALL: Final = 1 << 20  # bytes, of a body that counts for nothing
_UNLIMITED: Final = frozenset({"/health", "/ready"})


def limit_of(rate: float) -> RateLimitItemPerSecond:
    """`rate` requests a second, as a whole number of requests in a few seconds. ConfigError unless it is positive and
    finite."""
    if not (rate > 0 and math.isfinite(rate)):
        raise ConfigError(f"the rate limit is {rate}; it must be a positive number of requests per second")
    share = Fraction(rate).limit_denominator(max(20, math.ceil(1 / rate)))
    several = math.ceil(_WINDOW / share.denominator)
    return RateLimitItemPerSecond(several * share.numerator, several * share.denominator)


class RateExceededError(AgentLightningError):
    """The caller may ask again in so many `seconds`."""

    def __init__(self, seconds: int) -> None:
        super().__init__(f"this caller asks more often than the server allows; ask again in {seconds} s")
        self.seconds = seconds


class RateLimit:
    """Refuses callers who make more requests than the `limit`. Addresses are those of the connection: what a header
    says of them is not believed."""

    def __init__(self, limit: RateLimitItemPerSecond, access: Access | None) -> None:
        self._access = access
        self._limit = limit
        self._limiter = SlidingWindowCounterRateLimiter(MemoryStorage())

    async def check(self, path: str, headers: Mapping[str, str], address: str) -> None:
        """Count a request, from this address. RateExceededError if it is one too many."""
        if path in _UNLIMITED:
            return
        caller = None if self._access is None else await self._access.name_of(headers)
        caller = caller or f"address {_network(address)}"
        if not await self._limiter.hit(self._limit, caller):
            stats = await self._limiter.get_window_stats(self._limit, caller)
            raise RateExceededError(min(max(1, math.ceil(stats.reset_time - time.time())), self._limit.get_expiry()))


class LargeBodies:
    """The large bodies of one caller that are read and not yet answered have at most `budget` bytes together; further
    ones wait unread. A caller is a key, or an address without one. A body of unknown length counts as `limit` bytes."""

    def __init__(self, limit: int, budget: int = 128 << 20) -> None:
        self._limit, self._budget = limit, budget
        self._sizes = Counter[str]()  # by caller
        self._freed = asyncio.Event()

    def size(self, method: str, headers: Mapping[str, str]) -> int:
        """What the body of a request counts for: 0 if it is not large."""
        if method in ("GET", "HEAD"):
            return 0
        length = headers.get("content-length", "")
        size = min(int(length), self._limit) if length.isdigit() and len(length) < 20 else self._limit
        return size if size > _SMALL else 0

    @asynccontextmanager
    async def reading(self, size: int, headers: Mapping[str, str], address: str) -> AsyncGenerator[None]:
        """Wait until a body of this size may be read; it counts until the block ends."""
        caller = api_key_of(headers) or _network(address)
        while self._sizes[caller] and self._sizes[caller] + size > self._budget:
            await self._freed.wait()
        self._sizes[caller] += size
        try:
            yield
        finally:
            self._sizes[caller] -= size
            if not self._sizes[caller]:
                del self._sizes[caller]
            self._freed.set()
            self._freed.clear()


class Limits:
    """What callers may ask and send."""

    def __init__(self, rate: RateLimit | None, bodies: LargeBodies | None) -> None:
        self._rate, self._bodies = rate, bodies

    @asynccontextmanager
    async def within(self, method: str, path: str, headers: Mapping[str, str], address: str) -> AsyncGenerator[None]:
        """Answer a request in this block. RateExceededError if it is one too many; a large body waits for room."""
        if self._rate is not None:
            await self._rate.check(path, headers, address)
        if self._bodies is not None and (size := self._bodies.size(method, headers)):
            async with self._bodies.reading(size, headers, address):
                yield
        else:
            yield


class Limited:
    """ASGI: `app` within these limits. Who asks too often is answered 429 with `Retry-After`."""

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self._app, self._limits = app, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        client: Any = scope.get("client")
        address = str(client[0]) if client else ""
        try:
            async with self._limits.within(scope["method"], scope["path"], Headers(scope=scope), address):
                await self._app(scope, receive, send)
        except RateExceededError as error:
            after = {"retry-after": str(error.seconds)}
            await refusal(429, "rate_limited", str(error), after)(scope, receive, send)


def _network(address: str) -> str:
    """Of an address of IPv6 the network: whoever has one has all of it."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    return address if parsed.version == 4 else str(ipaddress.ip_network((int(parsed), 64), strict=False))
