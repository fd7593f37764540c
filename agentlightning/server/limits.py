"""Limits the requests that a caller may make, counted by the `limits` library, and the bytes of
large ones that are read at once. A caller is who a valid key stands for, else an address."""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import math
import secrets
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final
from weakref import WeakValueDictionary

from limits import RateLimitItemPerSecond
from limits.aio.storage import MemoryStorage
from limits.aio.strategies import SlidingWindowCounterRateLimiter
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from agentlightning.errors import AgentLightningError, ConfigError
from agentlightning.gateway.attribution import api_key_of
from agentlightning.server.access import Access
from agentlightning.server.requests import refusal

CALLER_BUDGET: Final = 128 << 20  # bytes
_WINDOW: Final = 2  # seconds, at least: so much may come at once
_SMALL: Final = 1 << 20  # bytes, of a body that counts for nothing
# bytes that a body of unknown length counts for among all: most are short
_UNANNOUNCED: Final = 8 << 20
_PAUSE: Final = 10  # seconds
_SLOTS: Final = 256  # that addresses share: the time of counting grows with how many are counted
_UNLIMITED: Final = frozenset({"/health", "/ready"})


def limit_of(rate: float) -> RateLimitItemPerSecond:
    """`rate` requests a second, as a whole number of requests in a few seconds. ConfigError unless
    it is positive and finite."""
    if not (rate > 0 and math.isfinite(rate)):
        raise ConfigError(
            f"the rate limit is {rate}; it must be a positive number of requests per second"
        )
    share = Fraction(rate).limit_denominator(max(20, math.ceil(1 / rate)))
    several = math.ceil(_WINDOW / share.denominator)
    return RateLimitItemPerSecond(several * share.numerator, several * share.denominator)


class LimitExceededError(AgentLightningError):
    """The server refuses a request for now: the caller may ask again in so many `seconds`."""

    def __init__(self, message: str, seconds: int, *, status: int, code: str) -> None:
        super().__init__(f"{message}; ask again in {seconds} s")
        self.seconds = seconds
        self.status = status
        self.code = code


class _ByteBudget:
    """Room for `size` bytes. Bodies wait for it in turn; one that is longer gets in when no other
    is there."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._taken = 0
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def taken(self, size: int) -> AsyncGenerator[None]:
        async with self._turn:
            while self._taken and self._taken + size > self._size:
                await self._freed.wait()
            self._taken += size
        try:
            yield
        finally:
            self._taken -= size
            self._freed.set()
            self._freed.clear()


class Limits:
    """The limits of callers: requests at the `rate`, per second, and large bodies. Those that are
    read and not yet answered have at most `budget` bytes together for each caller (None: as many as
    there is room for), and `total` bytes for all; further ones wait unread, for so many `seconds`.
    A body of unknown length counts as the `longest` of its caller's; without that, bodies are not
    limited.

    Addresses are those of the connection: what a header says of them is not believed."""

    def __init__(
        self,
        access: Access | None,
        rate: float | None,
        longest: int | None = None,
        budget: int | None = CALLER_BUDGET,
        total: int = 512 << 20,
        seconds: float = 60.0,
    ) -> None:
        self._access = access
        self._longest = longest
        self._budget = budget
        self._seconds = seconds
        self._rate = None if rate is None else limit_of(rate)
        self._limiter = SlidingWindowCounterRateLimiter(MemoryStorage())
        self._salt = secrets.token_bytes(16)
        # of callers that have large bodies under way
        self._budgets = WeakValueDictionary[str, _ByteBudget]()
        self._shared_budget = _ByteBudget(total)

    @asynccontextmanager
    async def within(
        self, method: str, path: str, headers: Mapping[str, str], address: str
    ) -> AsyncGenerator[None]:
        """Answer a request in this block, in which a large body has room. LimitExceededError (429)
        if the request is one too many, or (503) if there was no room for long."""
        if self._rate is not None and path not in _UNLIMITED:
            await self._count(self._rate, headers, address)
        content_length = _content_length(headers)
        longest = self._longest
        if longest is None or method in ("GET", "HEAD"):
            yield
            return
        size = longest if content_length is None else min(content_length, longest)
        if size <= _SMALL:
            yield
            return
        async with AsyncExitStack() as held:
            try:
                async with asyncio.timeout(self._seconds):
                    if self._budget is not None:
                        caller = api_key_of(headers) or _network(address)
                        caller_budget = self._budgets.setdefault(caller, _ByteBudget(self._budget))
                        await held.enter_async_context(caller_budget.taken(size))
                    if content_length is None:
                        size = min(size, _UNANNOUNCED)
                    await held.enter_async_context(self._shared_budget.taken(size))
            except TimeoutError:
                message = (
                    "the requests that this server is answering leave no room for one so large"
                )
                raise LimitExceededError(message, _PAUSE, status=503, code="no_room") from None
            yield

    async def _count(
        self, limit: RateLimitItemPerSecond, headers: Mapping[str, str], address: str
    ) -> None:
        caller = None if self._access is None else await self._access.name_of(headers)
        if caller is None:
            digest = hashlib.blake2b(
                _network(address).encode(), key=self._salt, digest_size=8
            ).digest()
            caller = f"address {int.from_bytes(digest) % _SLOTS}"
        if not await self._limiter.hit(limit, caller):
            stats = await self._limiter.get_window_stats(limit, caller)
            seconds = min(max(1, math.ceil(stats.reset_time - time.time())), limit.get_expiry())
            message = "this caller asks more often than the server allows"
            raise LimitExceededError(message, seconds, status=429, code="rate_limited")


def _content_length(headers: Mapping[str, str]) -> int | None:
    """The length of a body by its header."""
    length = headers.get("content-length", "")
    return int(length) if length.isdigit() and len(length) < 20 else None


@dataclass(eq=False)
class Limited:
    """ASGI: `app` within these limits. Who exceeds them is answered with `Retry-After`."""

    app: ASGIApp
    limits: Limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        client: Any = scope.get("client")
        address = str(client[0]) if client else ""
        try:
            async with self.limits.within(
                scope["method"], scope["path"], Headers(scope=scope), address
            ):
                await self.app(scope, receive, send)
        except LimitExceededError as error:
            after = {"retry-after": str(error.seconds)}
            await refusal(error.status, error.code, str(error), after)(scope, receive, send)


def _network(address: str) -> str:
    """The network of an IPv6 address: whoever has one address has all of it. Others unchanged."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    return (
        address
        if parsed.version == 4
        else str(ipaddress.ip_network((int(parsed), 64), strict=False))
    )
