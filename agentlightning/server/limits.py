"""How many requests a caller may make: a token bucket for each, as ASGI middleware.

This module knows callers by their key or their address. It does not know whether a key is valid; it learns that from
the answers, so that inventing keys gains nobody anything.
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
from agentlightning.store.calls import ErrorBody, ErrorReply

_BURST: Final = 2.0  # seconds' worth of requests that may come at once
_REMEMBERED: Final = 10_000
_UNLIMITED: Final = frozenset({"/health", "/ready"})
_OPEN: Final = frozenset({"/docs", "/openapi.json"})  # answered whatever the key


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


class RateLimit:
    """Answers 429 with `Retry-After` to callers whose bucket is empty. A key counts for itself once a request with it
    was answered; until then, and without one, the client's address does."""

    def __init__(self, app: ASGIApp, buckets: Buckets) -> None:
        self._app = app
        self._buckets = buckets

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
            await _refuse(send, wait)
            return
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
