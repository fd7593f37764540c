"""Any server of OpenAI's protocols as a backend: vLLM, this project's own, a hosted API.

Asks for exact token ids the way vLLM gives them (`return_token_ids`, logprobs, usage). A streamed
call is streamed upstream, so that a disconnect cancels there and partial answers are known; a call
that nobody sees before its end is not."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import msgspec

from agentlightning.errors import BackendError, ConfigError, nearest
from agentlightning.gateway.admission import forces_a_call
from agentlightning.gateway.backend import (
    SESSION_HEADER,
    BackendEvent,
    ModelCall,
    NotRelayedError,
    RelayedAnswer,
    RelayedCall,
)
from agentlightning.gateway.backends.answers import AnswerReader
from agentlightning.gateway.backends.connection import (
    BackendConnection,
    KeyHeader,
    Response,
    event_data,
    refusal,
)
from agentlightning.gateway.chat.repairs import (
    Repair,
    as_system,
    may_be_repaired,
    tries,
    with_json_arguments,
)
from agentlightning.gateway.request import NEUTRAL_PENALTIES, NOT_JSON, CallRefused, given

Kind: TypeAlias = Literal["vllm", "openai", "azure", "anthropic"]


@dataclass(frozen=True)
class _Kind:
    """Capabilities of a kind of server: whether it returns token ids, which endpoints it answers in
    their own protocol, and the header that brings its key to these."""

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
# What can be asked by chat completions where a server does not answer it itself.
_TRANSLATED: Final = frozenset({"responses", "messages", "messages/count_tokens"})
_NO_ROUTE: Final = (404, 405, 501)
_OF_CHATS: Final = (400, 422, 500)  # with which servers refuse what a chat holds
# What comes back with an answer that was passed through.
_RELAYED_HEADERS: Final = (
    "content-type",
    "request-id",
    "x-request-id",
    "retry-after",
    "openai-processing-ms",
)


class HttpBackend:
    """A server at `base_url`, such as `http://host:8000/v1`.

    `kind` is one of `KINDS`: `vllm` (also another gateway of this project) is asked for token ids,
    hosted APIs (`openai` and whatever imitates it, `azure`, `anthropic`) are not, and their answers
    cannot be trained on. `model` is the server's name for the model, if it is not the one it is
    called here."""

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
        # Of chats that the server renders. Templates that do not know developers leave out what
        # they say.
        self._always: tuple[Repair, ...] = (
            (as_system, with_json_arguments) if kind == "vllm" else ()
        )
        self._repairs: tuple[Repair, ...] = ()  # that have helped
        self._knows = set[str]()  # endpoints
        self._chat_only = False
        self.model = model
        self.connection = BackendConnection(
            base_url,
            api_key=api_key,
            key_header=KINDS[kind].key_header,
            timeout_seconds=timeout_seconds,
            socket=socket,
        )
        self.name = self.connection.base_url
        # Where Anthropic's API imitates OpenAI's, it takes the key as that one does.
        self._chat_headers = (
            {"authorization": f"Bearer {api_key}"} if kind == "anthropic" and api_key else {}
        )
        if kind == "vllm":
            self.connection.health_url = f"{self.connection.root}/health"

    async def close(self) -> None:
        await self.connection.close()

    async def answer(self, call: ModelCall) -> AsyncGenerator[BackendEvent, None]:
        """See `Backend.answer`. BackendError carries the server's own status and message for what
        it refuses, 502 for what it fails at, 503 where it cannot be reached, and 504 where it falls
        silent."""
        failed_loads = self.connection.failed_loads
        reader = AnswerReader(call, self.captures_tokens, self.connection.version)
        url = self.connection.url("chat/completions" if call.prompt is None else "completions")
        async with self._accepted(url, call, self._body) as response:
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
        """Asks vLLM's tokenizer. Hosted APIs have none to ask: there it is an estimate, a token for
        four bytes."""
        if self.kind != "vllm":
            return len(msgspec.json.encode((call.messages, call.tools))) // 4
        url = f"{self.connection.root}/tokenize"
        async with self._accepted(url, call, self._counted_body) as response:
            try:
                return msgspec.json.decode(await response.read(), type=_Counted).count
            except msgspec.DecodeError as error:
                raise BackendError(f"{url} did not answer with a count: {error}") from None

    def _counted_body(self, call: ModelCall) -> dict[str, Any]:
        return {
            "model": self.model or call.model,
            "messages": call.messages,
            "tools": call.tools or None,
        }

    @asynccontextmanager
    async def _accepted(
        self, url: str, call: ModelCall, body: Callable[[ModelCall], dict[str, Any]]
    ) -> AsyncGenerator[Response]:
        """The server's answer, with the repairs that a refused chat turns out to need; those that
        have helped are tried first. BackendError is the first refusal where none helps."""
        headers = self._headers(call)
        refused = None
        written = call.messages
        for repair in self._always:
            written = repair(written)
        for messages, repair in tries(written, self._repairs):
            tried = msgspec.structs.replace(call, messages=messages)
            begun = False
            try:
                async with self.connection.posted(
                    url, msgspec.json.encode(body(tried)), headers, accepted=True
                ) as response:
                    begun = True
                    if repair is not None and repair not in self._repairs:
                        self._repairs = (*self._repairs, repair)
                    yield response
                    return
            except CallRefused as error:
                refused = refused or error
                if begun or error.answered not in _OF_CHATS or not may_be_repaired(str(refused)):
                    raise
        if refused is not None:
            raise refused

    @asynccontextmanager
    async def relay(self, call: RelayedCall) -> AsyncGenerator[RelayedAnswer]:
        headers = call.headers | ({SESSION_HEADER: call.session} if call.session else {})
        body = (
            msgspec.json.encode({**call.body, "model": self.model or call.model})
            if call.body
            else None
        )
        async with self.connection.posted(
            self.connection.url(call.path), body, headers
        ) as response:
            if response.status in (401, 403):
                raise await refusal(response, self.name)
            kept = {
                name: response.headers[name]
                for name in _RELAYED_HEADERS
                if name in response.headers
            }
            parts = response.parts()
            in_json = kept.get("content-type", "").startswith("application/json")
            may_lack = call.path in _TRANSLATED and (
                response.status in _NO_ROUTE or (response.status == 200 and in_json)
            )
            if may_lack or response.status >= 400:
                said = self.connection.without_key(await response.read())
                if (
                    may_lack
                    and _has_no_route(response.status, said)
                    and not await self._has(call.path)
                ):
                    self._lacks(call.path)
                    raise NotRelayedError(
                        f"{self.name} has no {call.path}", status=404, code="not_found"
                    )
                parts = _once(said)
            if response.status not in _NO_ROUTE:
                self._knows.add(call.path)
            yield RelayedAnswer(response.status, kept, parts)

    async def _has(self, path: str) -> bool:
        """Whether the server knows this endpoint. What an agent is refused may be about something
        that it named, and is no proof: an empty request is refused otherwise than one that leads
        nowhere."""
        if path not in self._knows:
            async with self.connection.posted(self.connection.url(path), b"{}") as response:
                said = await response.read()
                if response.status in _NO_ROUTE or (
                    response.status == 200 and _has_no_route(200, said)
                ):
                    return False
            self._knows.add(path)
        return True

    def _lacks(self, path: str) -> None:
        """The server does not know this endpoint. One that does not know responses is not OpenAI's
        own, and knows neither its newer roles nor its newer names."""
        self.relays -= {path}
        if self.kind == "openai" and path == "responses":
            self._chat_only = True
            self._always = (as_system, with_json_arguments)

    def _headers(self, call: ModelCall) -> dict[str, str]:
        return (
            self._chat_headers
            if call.session is None
            else self._chat_headers | {SESSION_HEADER: call.session}
        )

    def _body(self, call: ModelCall) -> dict[str, Any]:
        sampling = call.sampling
        chat = call.prompt is None
        whole = self.captures_tokens and None not in (
            sampling.temperature,
            sampling.top_p,
            sampling.top_k,
        )
        optional: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or (-1 if whole else None),
            "max_tokens": sampling.max_tokens,
            "stop": list(sampling.stop) or None,
            "seed": sampling.seed,
            "n": sampling.n if sampling.n > 1 else None,
            "tools": call.tools or None,
            "tool_choice": call.tool_choice
            if call.tools or forces_a_call(call.tool_choice)
            else None,
            "stream_options": {"include_usage": True} if call.stream else None,
            "return_token_ids": self.captures_tokens or None,
            "return_weight_versions": self.captures_tokens or None,
        }
        if self.kind in ("openai", "azure") and chat and not self._chat_only:
            optional[call.max_tokens_name] = optional.pop("max_tokens")
        if self.captures_tokens or call.logprobs:
            optional["logprobs"] = True if chat else call.top_logprobs
            optional["top_logprobs"] = (call.top_logprobs or None) if chat else None
        prompt = {"messages": call.messages} if chat else {"prompt": call.prompt}
        always = {"model": self.model or call.model, **prompt, "stream": call.stream}
        # A given distribution is sent in full: vLLM takes the rest from the model's generation
        # config, which may hold a penalty.
        return (dict(NEUTRAL_PENALTIES) if whole else {}) | call.extra | always | given(**optional)


def _streamed(response: Response, *, asked: bool) -> bool:
    """Whether the answer is an event stream: some servers always send one, others never."""
    kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    return kind == "text/event-stream" or (asked and kind != "application/json")


def _has_no_route(status: int, said: bytes) -> bool:
    """Whether an answer means that there is no such endpoint. LM Studio says so with 200."""
    if status == 200:
        return b'"Unexpected endpoint or method' in said[:100]
    return not _names_something(said)


def _names_something(refusal: bytes) -> bool:
    """Whether a 404 is about what was asked for, such as a model, rather than about the
    endpoint."""
    try:
        error = msgspec.json.decode(refusal, type=_NotFound).error
    except NOT_JSON:
        return False
    coded = isinstance(error.code, str) and error.code not in (
        "404",
        "405",
        "not_found",
        "not_found_error",
    )
    return coded or error.param is not None or "model" in error.message.lower()


async def _once(body: bytes) -> AsyncGenerator[bytes, None]:
    yield body


class _Reason(msgspec.Struct):
    message: str = ""
    code: str | int | None = None
    param: str | None = None


class _NotFound(msgspec.Struct):
    error: _Reason


class _Counted(msgspec.Struct):
    count: int
