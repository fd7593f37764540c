"""How many requests a caller may make: a token bucket for each, as ASGI middleware.

This module knows callers by their key or their address, and how SDKs say that they repeat a request. It does not know
whether a key is valid; it learns that from the answers, so that inventing keys gains nobody anything.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import OrderedDict
from typing import Any, Final

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentlightning.errors import ConfigError
from agentlightning.gateway.calls import RETRY_HEADER
from agentlightning.store.calls import ErrorBody, ErrorReply

_BURST: Final = 2.0  # seconds' worth of requests that may come at once
_REMEMBERED: Final = 10_000
_UNLIMITED: Final = frozenset({"/health", "/ready"})
_OPEN: Final = frozenset({"/docs", "/openapi.json"})  # answered whatever the key
_RETRY: Final = RETRY_HEADER.encode()


class Buckets:
    """One bucket per caller: `rate` tokens a second flow in, up to two seconds' worth. The callers that were quiet for
    longest are forgotten, which gives them no more than a full bucket."""

    def __init__(self, rate: float, remembered: int = _REMEMBERED) -> None:
        if not (rate > 0 and math.isfinite(rate)):
            raise ConfigError(f"the rate limit is {rate}; it must be a positive number of requests per second")
        self._rate = rate
        self._size = max(1.0, _BURST * rate)
        self._remembered = remembered
        self._buckets: OrderedDict[bytes, tuple[float, float]] = OrderedDict()

    def __contains__(self, caller: bytes) -> bool:
        return caller in self._buckets

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, caller: bytes, now: float) -> float:
        """Take a token; 0, or the seconds until there is one."""
        tokens, since = self._buckets.get(caller, (self._size, now))
        tokens = min(self._size, tokens + (now - since) * self._rate)
        wait = 0.0 if tokens >= 1.0 else (1.0 - tokens) / self._rate
        self._buckets[caller] = (tokens if wait else tokens - 1.0, now)
        self._buckets.move_to_end(caller)
        if len(self._buckets) > self._remembered:
            self._buckets.popitem(last=False)
        return wait


class Refusals:
    """First tries that were refused unread, each told by its path, who asked and its length: what repeats one of them
    must not pass for the repetition of a call whose answer was lost."""

    def __init__(self, remembered: int = _REMEMBERED) -> None:
        self._remembered = remembered
        self._counts: OrderedDict[tuple[str, bytes, bytes | None], int] = OrderedDict()

    def note(self, scope: Scope, caller: bytes) -> None:
        """This request is refused."""
        if _header(scope, _RETRY) == b"0":
            name = _request(scope, caller)
            self._counts[name] = self._counts.pop(name, 0) + 1
            if len(self._counts) > self._remembered:
                self._counts.popitem(last=False)

    def settle(self, scope: Scope, caller: bytes) -> None:
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
    """Answers 429 with `Retry-After` to callers whose bucket is empty. A key counts for itself once a request with it
    was answered; until then, and without one, the client's address does."""

    def __init__(self, app: ASGIApp, buckets: Buckets) -> None:
        self._app = app
        self._buckets = buckets
        self._refusals = Refusals()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _UNLIMITED:
            await self._app(scope, receive, send)
            return
        key = _key(scope)
        known = key is not None and key in self._buckets
        now = time.monotonic()
        address = _address(scope)
        wait = self._buckets.take(key if key is not None and known else address, now)
        if wait:
            self._refusals.note(scope, key or address)
            await _refuse(send, wait)
            return
        self._refusals.settle(scope, key or address)
        if key is None or known or scope["path"] in _OPEN:
            await self._app(scope, receive, send)
            return

        async def learn(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] < 400:
                self._buckets.take(key, now)
            await send(message)

        await self._app(scope, receive, learn)


def _key(scope: Scope) -> bytes | None:
    """A digest of the key that a request shows."""
    for name, value in scope["headers"]:
        if name in (b"authorization", b"x-api-key") and value:
            return hashlib.sha256(value).digest()
    return None


def _header(scope: Scope, wanted: bytes) -> bytes | None:
    return next((value for name, value in scope["headers"] if name == wanted), None)


def _request(scope: Scope, caller: bytes) -> tuple[str, bytes, bytes | None]:
    return scope["path"], caller, _header(scope, b"content-length")


def _address(scope: Scope) -> bytes:
    client: Any = scope.get("client")
    return str(client[0]).encode() if client else b""


async def _refuse(send: Send, wait: float) -> None:
    seconds = math.ceil(wait)
    message = f"this caller asks more often than the server allows; ask again in {seconds} s"
    body = msgspec.json.encode(ErrorReply(error=ErrorBody(message=message, type="rate_limited")))
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"retry-after", str(seconds).encode()),
    ]
    await send({"type": "http.response.start", "status": 429, "headers": headers})
    await send({"type": "http.response.body", "body": body})
