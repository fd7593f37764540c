"""Two hosted APIs as one backend: an agent may call OpenAI's and Anthropic's, each by any name of a model.

Knows which protocol a call came in. Knows no names of models.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager

from agentlightning.gateway.backend import BackendEvent, ModelCall, RelayedAnswer, RelayedCall
from agentlightning.gateway.backends.http import HttpBackend


class ByProtocol:
    """Calls of Anthropic's protocol go to `anthropic`, all others to `openai`."""

    def __init__(self, openai: HttpBackend, anthropic: HttpBackend) -> None:
        self._openai = openai
        self._anthropic = anthropic
        self.name = f"{openai.name}, {anthropic.name}"
        self.captures_tokens = openai.captures_tokens
        self.relays = openai.relays | anthropic.relays

    def answer(self, call: ModelCall) -> AsyncGenerator[BackendEvent, None]:
        return self._openai.answer(call)

    def relay(self, call: RelayedCall) -> AbstractAsyncContextManager[RelayedAnswer]:
        theirs = call.path.startswith("messages") or "anthropic-version" in call.headers
        return (self._anthropic if theirs else self._openai).relay(call)

    async def count_tokens(self, call: ModelCall) -> int:
        return await self._openai.count_tokens(call)

    async def close(self) -> None:
        await asyncio.gather(self._openai.close(), self._anthropic.close())
