"""Asks a model at an OpenAI-compatible URL: for judges, and for the models that improve prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import aiohttp
import msgspec

from agentlightning.errors import BackendError
from agentlightning.proxies import proxy_for
from agentlightning.store.redaction import text_without_secrets
from agentlightning.types import LLM

Messages: TypeAlias = Sequence[Mapping[str, str]]

# seconds before each further try of a call that was refused for the moment
WAITS: Final = (0.5, 2.0, 8.0)
_PASSING: Final = (408, 409, 429)


@dataclass(frozen=True)
class Completion:
    """`read` and `written` count tokens; None where the server does not say."""

    text: str
    model: str
    call_id: str
    read: int | None
    written: int | None


async def complete(
    llm: LLM, messages: Messages, *, timeout: float, headers: Mapping[str, str] | None = None
) -> Completion:
    """The model's answer within `timeout` seconds a try. BackendError where it cannot be had."""
    body = {"model": llm.model, "messages": list(messages), **llm.sampling_parameters}
    for wait in (*WAITS, None):
        try:
            return read_completion(await _post(llm, body, timeout, headers or {}))
        except BackendError as error:
            if wait is None or not (error.status in _PASSING or error.status >= 500):
                raise
            await asyncio.sleep(wait)
    raise AssertionError("the last try returns or raises")


def read_completion(answer: Any) -> Completion:
    """BackendError for an answer that is no chat completion."""
    try:
        text = str(answer["choices"][0]["message"]["content"] or "")
        text = text.encode(errors="replace").decode()  # half a surrogate pair can be stored nowhere
    except (LookupError, TypeError):
        raise BackendError(
            f"the answer is not a chat completion: {answer!s:.200}", status=422
        ) from None
    usage = answer.get("usage") or {}
    tokens = usage.get("prompt_tokens"), usage.get("completion_tokens")
    return Completion(text, str(answer.get("model")), str(answer.get("id")), *tokens)


async def _post(
    llm: LLM, body: Mapping[str, Any], timeout: float, headers: Mapping[str, str]
) -> Any:
    url = f"{llm.endpoint.rstrip('/')}/chat/completions"
    key = {} if llm.api_key is None else {"Authorization": f"Bearer {llm.api_key}"}
    try:
        async with (
            aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(timeout), proxy=proxy_for(url)
            ) as session,
            session.post(url, json=body, headers={**headers, **key}) as response,
        ):
            content = await response.text(errors="replace")
    except TimeoutError:
        raise BackendError(
            f"{llm.model} at {url} gave no answer within {timeout:g} s", status=503
        ) from None
    except aiohttp.ClientError as error:
        raise BackendError(
            f"{url} cannot be reached: {error or type(error).__name__}", status=503
        ) from None
    if response.status != 200:
        raise BackendError(
            f"{url} answered {response.status}: {text_without_secrets(content[:500])}",
            status=response.status,
        )
    try:
        return msgspec.json.decode(content)
    except msgspec.DecodeError:
        raise BackendError(f"{url} answered no JSON: {content:.200}", status=422) from None
