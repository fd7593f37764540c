"""The optimiser's model, asked directly: at an OpenAI-compatible or Anthropic endpoint, or through an SDK's client.

Knows how a question is put and an answer read, and tries again what failed for the moment. Knows nothing of prompts.
"""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias, cast

import aiohttp
import msgspec

from agentlightning.algorithm.apo.budget import Budget
from agentlightning.errors import BackendError, ConfigError
from agentlightning.types import LLM

API: TypeAlias = Literal["openai", "anthropic"]
Messages: TypeAlias = Sequence[Mapping[str, str]]

AT_ONCE: Final = 16  # calls
WAITS: Final = (0.5, 2.0, 8.0)  # seconds before each further try
_ANSWER_TOKENS: Final = 8192  # Anthropic's API wants a limit
_ENDPOINTS: Final = {"openai": "https://api.openai.com/v1", "anthropic": "https://api.anthropic.com"}
_KEYS: Final = {"openai": "OPENAI_API_KEY", "anthropic": "ANTHROPIC_API_KEY"}
_PASSING: Final = (408, 409, 429)
_UNREACHABLE: Final = 503


class OptimizerModel:
    """Asks `client`, an `AsyncOpenAI`, `AsyncAnthropic` or `LLM`; or, without one, the `endpoint` that speaks `api`,
    with the key in OPENAI_API_KEY or ANTHROPIC_API_KEY. What it takes is added to `budget`.

    ConfigError for another client, and for a temperature where none is taken."""

    def __init__(
        self, client: object, endpoint: str | None, api: API, temperature: float, timeout: float, budget: Budget
    ) -> None:
        self.api: API = api
        self.budget = budget
        self._temperature = temperature
        self._timeout = timeout
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._client: Any = None
        self._key = os.environ.get(_KEYS[api])
        self._endpoint = endpoint or (os.environ.get("OPENAI_BASE_URL") if api == "openai" else None) or _ENDPOINTS[api]
        if isinstance(client, LLM):
            self._endpoint, self._key = client.endpoint, client.api_key
        elif client is not None:
            self._client, self.api = _checked(client)
        if self.api == "anthropic" and temperature != 1:
            raise ConfigError(
                f"diversity_temperature is {temperature:g}, but Anthropic's API takes no temperature; leave it out"
            )

    async def ask(self, model: str, messages: Messages) -> str:
        """The answer of `model`, stripped; empty where it gave none. BackendError after the last try; OutOfBudget."""
        body: dict[str, Any] = {"model": model, "messages": list(messages)}
        body |= {"max_tokens": _ANSWER_TOKENS} if self.api == "anthropic" else {"temperature": self._temperature}
        for wait in (*WAITS, None):
            self.budget.require()
            try:
                async with self._turns, asyncio.timeout(self._timeout):
                    answer = await (self._post(body) if self._client is None else self._call(body))
                return self._read(model, messages, answer)
            except TimeoutError:
                error = BackendError(f"{model} gave no answer within {self._timeout:g} s", status=_UNREACHABLE)
            except BackendError as refused:
                error = refused
            if wait is None or not (error.status in _PASSING or error.status >= 500):
                raise error
            await asyncio.sleep(wait)
        raise AssertionError("the last try returns or raises")

    async def _post(self, body: Mapping[str, Any]) -> Any:
        root = self._endpoint.rstrip("/")
        headers: dict[str, str] = {}
        if self.api == "anthropic":
            url = f"{root.removesuffix('/v1')}/v1/messages"
            headers = {"anthropic-version": "2026-10-21", "x-api-key": self._key or "none"}
        else:
            url = f"{root}/chat/completions"
            headers = {"Authorization": f"Bearer {self._key or 'none'}"}
        try:
            async with aiohttp.ClientSession() as session, session.post(url, json=body, headers=headers) as response:
                content = await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise BackendError(
                f"{url} cannot be reached: {error or type(error).__name__}", status=_UNREACHABLE
            ) from None
        if response.status != 200:
            raise BackendError(f"{url} answered {response.status}: {content[:300]!r}", status=response.status)
        try:
            return msgspec.json.decode(content)
        except msgspec.DecodeError:
            raise BackendError(f"{url} answered no JSON: {content[:200]!r}", status=422) from None

    async def _call(self, body: Mapping[str, Any]) -> Any:
        make = self._client.messages if self.api == "anthropic" else self._client.chat.completions
        sdk = importlib.import_module(type(self._client).__module__.partition(".")[0])
        try:
            return (await make.create(**body)).model_dump()
        except sdk.APIError as error:
            status = getattr(error, "status_code", _UNREACHABLE)
            raise BackendError(f"the client of the optimiser failed: {error}", status=status) from None

    def _read(self, model: str, messages: Messages, answer: Any) -> str:
        try:
            if self.api == "anthropic":
                text = "".join(part["text"] for part in answer["content"] if part["type"] == "text")
                names = ("input_tokens", "output_tokens")
            else:
                text = answer["choices"][0]["message"]["content"] or ""
                names = ("prompt_tokens", "completion_tokens")
        except (LookupError, TypeError):
            raise BackendError(
                f"the answer of {model} is none of {self.api}'s API: {answer!s:.200}", status=422
            ) from None
        said = answer.get("usage") or {}
        # Without a count, four characters are taken for a token.
        guesses = (sum(len(message["content"]) for message in messages) // 4, len(text) // 4)
        read, written = (
            count if isinstance(count := said.get(name), int) else guess
            for name, guess in zip(names, guesses, strict=True)
        )
        self.budget.spend_calls({model: (read, written)})
        return text.strip()


def _checked(client: object) -> tuple[Any, API]:
    """A client without retries of its own, and what it speaks."""
    if not type(client).__name__.startswith("Async"):
        raise ConfigError(
            f"the optimiser's client is a {type(client).__name__}; give an AsyncOpenAI, AsyncAnthropic or LLM"
        )
    if hasattr(client, "chat"):
        return cast(Any, client).with_options(max_retries=0), "openai"
    return cast(Any, client).with_options(max_retries=0), "anthropic"
