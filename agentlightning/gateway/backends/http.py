"""Any server of OpenAI's protocols as a backend: vLLM, this project's own, a hosted API.

Asks for exact token ids the way vLLM gives them (`return_token_ids`, logprobs, usage). A streamed call is streamed
upstream, so that a disconnect cancels there and partial answers are known; a call that nobody sees before its end is
not.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import msgspec

from agentlightning.errors import BackendError, ConfigError, nearest
from agentlightning.gateway.backend import SESSION_HEADER, BackendEvent, ModelCall, RelayedAnswer, RelayedCall
from agentlightning.gateway.backends.answers import AnswerReader
from agentlightning.gateway.backends.connection import Connection, KeyHeader, Response, event_data, refusal
from agentlightning.gateway.request import NEUTRAL_PENALTIES, given

Kind: TypeAlias = Literal["vllm", "openai", "azure", "anthropic"]


@dataclass(frozen=True)
class _Kind:
    """What a kind of server can do: whether it returns token ids, which endpoints it answers in their own protocol, and
    the header that brings its key to these."""

    captures_tokens: bool
    relays: frozenset[str]
    key_header: KeyHeader = "authorization"


_OPENAI_RELAYS: Final = frozenset({"responses", "embeddings", "models"})
KINDS: Final[dict[str, _Kind]] = {
    "vllm": _Kind(captures_tokens=True, relays=frozenset({"embeddings", "models"})),
    "openai": _Kind(captures_tokens=False, relays=_OPENAI_RELAYS),
    "azure": _Kind(captures_tokens=False, relays=_OPENAI_RELAYS, key_header="api-key"),
    "anthropic": _Kind(
        captures_tokens=False,
        relays=frozenset({"messages", "messages/count_tokens", "models"}),
        key_header="x-api-key",
    ),
}
# What comes back with an answer that was passed through.
_RELAYED_HEADERS: Final = ("content-type", "request-id", "x-request-id", "retry-after", "openai-processing-ms")


class HttpBackend:
    """A server at `base_url`, such as `http://host:8000/v1`.

    `kind` is one of `KINDS`: `vllm` (also another gateway of this project) is asked for token ids, hosted APIs
    (`openai` and whatever imitates it, `azure`, `anthropic`) are not, and their answers cannot be trained on. `model`
    is the server's name for the model, if it is not the one it is called here."""

    def __init__(
        self,
        base_url: str,
        *,
        kind: Kind = "vllm",
        api_key: str | None = None,
        model: str | None = None,
        timeout_seconds: float = 600.0,
        socket: str | None = None,
    ) -> None:
        if kind not in KINDS:
            raise ConfigError(f"there is no kind of backend {kind!r}; {nearest(kind, KINDS)}")
        self.kind: str = kind
        self.captures_tokens = KINDS[kind].captures_tokens
        self.seeded = False
        self.keeps_weights = False  # a call ends with the weights that it began with
        self.relays = KINDS[kind].relays
        self.model = model
        self.connection = Connection(
            base_url,
            api_key=api_key,
            key_header=KINDS[kind].key_header,
            timeout_seconds=timeout_seconds,
            socket=socket,
        )
        self.name = self.connection.base_url
        # Where Anthropic's API imitates OpenAI's, it takes the key as that one does.
        self._chat_headers = {"authorization": f"Bearer {api_key}"} if kind == "anthropic" and api_key else {}
        if kind == "vllm":
            self.connection.health_url = f"{self.connection.root}/health"

    async def close(self) -> None:
        await self.connection.close()

    async def answer(self, call: ModelCall) -> AsyncGenerator[BackendEvent, None]:
        """See `Backend.answer`. BackendError carries the server's own status and message for what it refuses, 502 for
        what it fails at, 503 where it cannot be reached, and 504 where it falls silent."""
        failed_loads = self.connection.failed_loads
        reader = AnswerReader(call, self.captures_tokens, self.connection.version)
        url = self.connection.url("chat/completions" if call.prompt is None else "completions")
        posted = self.connection.posted(url, msgspec.json.encode(self._body(call)), self._headers(call), accepted=True)
        async with posted as response:
            if _streamed(response, asked=call.stream):
                async for data in event_data(response, reader.ended):
                    for event in reader.read(data):
                        yield event
            else:
                for event in reader.read(await response.read()):
                    yield event
                reader.ended()
        version = None if self.keeps_weights else self.connection.version
        for event in reader.end(version, unknown=self.connection.failed_loads != failed_loads):
            yield event

    async def count_tokens(self, call: ModelCall) -> int:
        """Asks vLLM's tokenizer. Hosted APIs have none to ask: there it is an estimate, a token for four bytes."""
        if self.kind != "vllm":
            return len(msgspec.json.encode((call.messages, call.tools))) // 4
        body = {"model": self.model or call.model, "messages": call.messages, "tools": call.tools or None}
        url = f"{self.connection.root}/tokenize"
        async with self.connection.posted(url, msgspec.json.encode(body), accepted=True) as response:
            try:
                return msgspec.json.decode(await response.read(), type=_Counted).count
            except msgspec.DecodeError as error:
                raise BackendError(f"{url} did not answer with a count: {error}") from None

    @asynccontextmanager
    async def relay(self, call: RelayedCall) -> AsyncGenerator[RelayedAnswer]:
        headers = call.headers | ({SESSION_HEADER: call.session} if call.session else {})
        body = msgspec.json.encode({**call.body, "model": self.model or call.model}) if call.body else None
        async with self.connection.posted(self.connection.url(call.path), body, headers) as response:
            if response.status in (401, 403):
                raise await refusal(response, self.name)
            kept = {name: response.headers[name] for name in _RELAYED_HEADERS if name in response.headers}
            yield RelayedAnswer(response.status, kept, response.parts())

    def _headers(self, call: ModelCall) -> dict[str, str]:
        return self._chat_headers if call.session is None else self._chat_headers | {SESSION_HEADER: call.session}

    def _body(self, call: ModelCall) -> dict[str, Any]:
        sampling = call.sampling
        chat = call.prompt is None
        whole = self.captures_tokens and None not in (sampling.temperature, sampling.top_p, sampling.top_k)
        optional: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or (-1 if whole else None),
            "max_tokens": sampling.max_tokens,
            "stop": list(sampling.stop) or None,
            "seed": sampling.seed,
            "n": sampling.n if sampling.n > 1 else None,
            "tools": call.tools or None,
            "tool_choice": call.tool_choice,
            "stream_options": {"include_usage": True} if call.stream else None,
            "return_token_ids": self.captures_tokens or None,
            "return_weight_versions": self.captures_tokens or None,
        }
        if self.kind in ("openai", "azure") and chat:
            optional[call.max_tokens_name] = optional.pop("max_tokens")
        if self.captures_tokens or call.logprobs:
            optional["logprobs"] = True if chat else call.top_logprobs
            optional["top_logprobs"] = (call.top_logprobs or None) if chat else None
        prompt = {"messages": call.messages} if chat else {"prompt": call.prompt}
        always = {"model": self.model or call.model, **prompt, "stream": call.stream}
        # A given distribution is sent in full: vLLM takes the rest from the model's generation config, which may hold a
        # penalty.
        return (dict(NEUTRAL_PENALTIES) if whole else {}) | call.extra | always | given(**optional)


def _streamed(response: Response, *, asked: bool) -> bool:
    """Whether the answer is an event stream: some servers always send one, others never."""
    kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    return kind == "text/event-stream" or (asked and kind != "application/json")


class _Counted(msgspec.Struct):
    count: int
