"""The description of a server → its backend; and the entry of a model that is never trained."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast
from urllib.parse import urlsplit

import msgspec

from agentlightning.errors import ConfigError, imported
from agentlightning.gateway.backend import (
    Backend,
    BackendEvent,
    ModelCall,
    RelayedAnswer,
    RelayedCall,
)
from agentlightning.gateway.backends.connection import BackendConnection
from agentlightning.gateway.backends.http import KINDS, HttpBackend, Kind
from agentlightning.gateway.models import ModelEntry
from agentlightning.types import FrozenModel

if TYPE_CHECKING:  # tokenizers are not among what a server without models needs to have installed
    from agentlightning.gateway.backends.tokens import SglangBackend
    from agentlightning.gateway.chat.template import ChatTemplate

BackendKind: TypeAlias = Kind | Literal["sglang"]


def make_backend(
    base_url: str,
    *,
    kind: BackendKind = "vllm",
    api_key: str | None = None,
    model: str | None = None,
    tokenizer: str | None = None,
    timeout_seconds: float = 600.0,
) -> HttpBackend | SglangBackend:
    """The server at `base_url`; see `HttpBackend`. With a `tokenizer` (a directory, or a name on
    Hugging Face) chats are rendered here; see `VllmBackend`, and `SglangBackend`, which needs one.
    Reading it takes time: not for the event loop's thread.

    ConfigError for an unknown kind, and for a setting that a kind lacks or cannot use."""
    if kind == "sglang" and tokenizer is None:
        raise ConfigError(
            "a server of the kind 'sglang' is sent token ids: name the tokenizer of its model (a "
            "directory, or a name on Hugging Face), or register the server as 'openai' with "
            "trainable=False"
        )
    if kind == "sglang" and model is not None:
        raise ConfigError("a server of the kind 'sglang' has one model; leave model out")
    if tokenizer is None:
        return HttpBackend(
            base_url,
            kind=cast("Kind", kind),
            api_key=api_key,
            model=model,
            timeout_seconds=timeout_seconds,
        )
    if kind not in ("vllm", "sglang"):
        raise ConfigError(
            f"a server of the kind {kind!r} renders chats itself; leave tokenizer out"
        )
    chat = chat_template(tokenizer)
    from agentlightning.gateway.backends.tokens import SglangBackend, VllmBackend

    if kind == "vllm":
        return VllmBackend(
            base_url, chat, api_key=api_key, model=model, timeout_seconds=timeout_seconds
        )
    return SglangBackend(
        BackendConnection(base_url, api_key=api_key, timeout_seconds=timeout_seconds), chat
    )


def captures_tokens(kind: BackendKind) -> bool:
    return kind == "sglang" or KINDS[kind].captures_tokens


def with_version(url: str, kind: str) -> str:
    """`url` with the `/v1` at its end that a server of this kind has, where nothing says
    otherwise."""
    parts = urlsplit(url)
    path = parts.path.rstrip("/")
    if path.endswith("/v1") or kind == "azure" or (path and kind not in ("vllm", "sglang")):
        return url
    return parts._replace(path=f"{path}/v1").geturl()


class ByProtocol:
    """Two hosted APIs as one backend: calls of Anthropic's protocol go to `anthropic`, all others
    to `openai`."""

    def __init__(self, openai: Backend, anthropic: Backend) -> None:
        self._openai = openai
        self._anthropic = anthropic
        self.name = f"{openai.name}, {anthropic.name}"
        self.captures_tokens = openai.captures_tokens
        self.seeded = openai.seeded

    @property
    def relays(self) -> frozenset[str]:
        return self._openai.relays | self._anthropic.relays

    def answer(self, call: ModelCall) -> AsyncGenerator[BackendEvent, None]:
        return self._openai.answer(call)

    def relay(self, call: RelayedCall) -> AbstractAsyncContextManager[RelayedAnswer]:
        theirs = call.path.startswith("messages") or "anthropic-version" in call.headers
        return (self._anthropic if theirs else self._openai).relay(call)

    async def count_tokens(self, call: ModelCall) -> int:
        return await self._openai.count_tokens(call)

    async def close(self) -> None:
        await asyncio.gather(self._openai.close(), self._anthropic.close())


@lru_cache(maxsize=8)
def chat_template(tokenizer: str) -> ChatTemplate:
    """The tokenizer in this directory, or of this name on Hugging Face, with its chat template;
    read once and shared.

    ConfigError where it cannot be read, or `transformers` is not installed."""
    needed = "a chat that is rendered here", "agent-lightning-next[train]"
    transformers = imported("transformers", *needed)
    template = imported("agentlightning.gateway.chat.template", *needed)
    # or it would be looked for on Hugging Face
    if tokenizer.startswith((".", "/")) and not Path(tokenizer).exists():
        raise ConfigError(
            f"there is no tokenizer {tokenizer} on this machine: name (--tokenizer) where it is "
            "here"
        )
    try:
        return template.ChatTemplate.from_pretrained(
            transformers.AutoTokenizer.from_pretrained(tokenizer)
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"the tokenizer {tokenizer!r} cannot be read: {error}") from None


def read_frozen(
    models: Mapping[str, FrozenModel | Mapping[str, Any]], trained: Mapping[str, object]
) -> dict[str, FrozenModel]:
    """The models beside those `trained`. ConfigError for what is none, and for a name that is
    taken."""
    read: dict[str, FrozenModel] = {}
    for name, given in models.items():
        if name in trained or name == "llm":
            raise ConfigError(
                f"models: the name {name!r} is that of a model being trained; choose another"
            )
        try:
            read[name] = (
                given if isinstance(given, FrozenModel) else msgspec.convert(given, FrozenModel)
            )
        except msgspec.ValidationError as error:
            raise ConfigError(
                f"models.{name}: {error}; give it as {{endpoint: https://…/v1, frozen: true}}, "
                "with `model` and `api_key` where the endpoint needs them. What is trained is "
                "given as `model`"
            ) from None
    return read


def frozen_entry(name: str, model: FrozenModel, *aliases: str) -> ModelEntry:
    """The model under its names. Without a key of its own it is asked with OPENAI_API_KEY if that
    is for its host."""
    host = urlsplit(os.environ.get("OPENAI_BASE_URL") or "https://api.openai.com/v1").hostname
    key = model.api_key or (
        os.environ.get("OPENAI_API_KEY") if urlsplit(model.endpoint).hostname == host else None
    )
    # Hosted APIs refuse to be asked for token ids, and nothing here trains on their answers.
    backend = HttpBackend(model.endpoint, kind="openai", api_key=key, model=model.model)
    return ModelEntry(name, backend, trainable=False, aliases=aliases)
