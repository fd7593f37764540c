"""LLM calls, answered in front of the web framework's layers, whose cost they would feel."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from agentlightning.gateway.exchange import Exchange
from agentlightning.gateway.request import CallRefused
from agentlightning.gateway.serving import Found, Serving
from agentlightning.server.limits import LimitExceededError, Limits
from agentlightning.server.request_log import CLIENT_GONE, Finished


@dataclass(eq=False)
class LlmCalls:
    """ASGI: answers the requests of a gateway, within the server's limits, and passes the rest on
    to `app`; `listeners` get each when it is over."""

    app: ASGIApp
    serving: Serving
    listeners: Sequence[Callable[[Finished], None]]
    limits: Limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = None
        if scope["type"] == "http":
            found = self.serving.find(scope["method"], scope["path"])
        if found is None:
            return await self.app(scope, receive, send)
        client: Any = scope.get("client")
        exchange = Exchange(scope, receive, send, ids=found.ids, rest=found.rest)
        return await exchange.run(self._answer(found, str(client[0]) if client else "", exchange))

    async def _answer(self, found: Found, client: str, exchange: Exchange) -> None:
        began = time.perf_counter()
        try:
            async with self.limits.within(exchange.method, exchange.path, exchange.headers, client):
                await self.serving.answer(found, exchange)
        except LimitExceededError as error:
            refused = CallRefused(str(error), status=error.status, code=error.code)
            refused.retry_after = str(error.seconds)
            await exchange.fail(refused, found.route.endpoint.error)
        finally:
            status = CLIENT_GONE if exchange.disconnected else exchange.status
            ms = (time.perf_counter() - began) * 1000
            attempt = None if exchange.ids is None else exchange.ids[1]
            caller = attempt if attempt is not None and attempt.isprintable() else None
            finished = Finished(exchange.method, found.route.template, status, ms, caller)
            for listener in self.listeners:
                listener(finished)
