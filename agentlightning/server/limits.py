"""How many requests a caller may make, counted by the `limits` library, and how many bytes of large ones are read at
once. A caller is who a valid key stands for, else an address."""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import math
import secrets
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
_SLOTS: Final = 256  # that addresses share: the time of counting grows with how many are counted
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


class Limits:
    """What callers may ask and send: requests at the `rate`, per second, and large bodies. Those of a caller that are
    read and not yet answered have at most `budget` bytes together; further ones wait unread. A body of unknown length
    counts as the `longest`; without that, bodies are not limited.

    Addresses are those of the connection: what a header says of them is not believed."""

    def __init__(
        self, access: Access | None, rate: float | None, longest: int | None = None, budget: int = 128 << 20
    ) -> None:
        self._access, self._longest, self._budget = access, longest, budget
        self._rate = None if rate is None else limit_of(rate)
        self._limiter = SlidingWindowCounterRateLimiter(MemoryStorage())
        self._salt = secrets.token_bytes(16)
        self._sizes = Counter[str]()  # of large bodies, by caller
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def within(self, method: str, path: str, headers: Mapping[str, str], address: str) -> AsyncGenerator[None]:
        """Answer a request in this block. RateExceededError if it is one too many; a large body waits for room."""
        if self._rate is not None and path not in _UNLIMITED:
            await self._count(self._rate, headers, address)
        size = self._size(method, headers)
        if not size:
            yield
            return
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

    async def _count(self, limit: RateLimitItemPerSecond, headers: Mapping[str, str], address: str) -> None:
        caller = None if self._access is None else await self._access.name_of(headers)
        if caller is None:
            digest = hashlib.blake2b(_network(address).encode(), key=self._salt, digest_size=8).digest()
            caller = f"address {int.from_bytes(digest) % _SLOTS}"
        if not await self._limiter.hit(limit, caller):
            stats = await self._limiter.get_window_stats(limit, caller)
            raise RateExceededError(min(max(1, math.ceil(stats.reset_time - time.time())), limit.get_expiry()))

    def _size(self, method: str, headers: Mapping[str, str]) -> int:
        """What the body of a request counts for: 0 if it is not large."""
        if self._longest is None or method in ("GET", "HEAD"):
            return 0
        length = headers.get("content-length", "")
        size = min(int(length), self._longest) if length.isdigit() and len(length) < 20 else self._longest
        return size if size > _SMALL else 0


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
