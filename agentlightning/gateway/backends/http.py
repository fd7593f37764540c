"""Any server of OpenAI's protocols as a backend: vLLM, this project's own, a hosted API.

Asks for exact token ids the way vLLM gives them (`return_token_ids`, logprobs, usage). A streamed call is streamed
upstream, so that a disconnect cancels there and partial answers are known; a call that nobody sees before its end is
not.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Final, Generic, Literal, TypeAlias, TypeVar

import msgspec

from agentlightning.errors import BackendError, ConfigError, nearest
from agentlightning.gateway.admission import forces_a_call, leaves_sampling_free
from agentlightning.gateway.backend import (
    CONSTRAINED,
    SESSION_HEADER,
    STOPPED_BY_STRING,
    WEIGHTS_UNKNOWN,
    BackendEvent,
    Delta,
    Finished,
    ModelCall,
    NotRelayedError,
    RelayedAnswer,
    RelayedCall,
    Started,
    Usage,
)
from agentlightning.gateway.backends.connection import Connection, KeyHeader, Response, event_data, refusal
from agentlightning.gateway.chat.repairs import Repair, as_system, may_be_repaired, tries, with_json_arguments
from agentlightning.gateway.request import NEUTRAL_PENALTIES, NOT_JSON, CallRefused, given
from agentlightning.types import FinishReason

T = TypeVar("T")
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
# What can be asked by chat completions where a server does not answer it itself.
_TRANSLATED: Final = frozenset({"responses", "messages", "messages/count_tokens"})
_NO_ROUTE: Final = (404, 405, 501)
# What comes back with an answer that was passed through.
_RELAYED_HEADERS: Final = ("content-type", "request-id", "x-request-id", "retry-after", "openai-processing-ms")
_FINISH_REASONS: dict[str, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
    "content_filter": "content_filter",
}


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
        # Of chats that the server renders. Templates that do not know developers leave out what they say.
        self._repairs: tuple[Repair, ...] = (as_system, with_json_arguments) if kind == "vllm" else ()
        self._chat_only = False
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
        reader = _AnswerReader(call, self.captures_tokens, self.connection.version)
        url = self.connection.url("chat/completions" if call.prompt is None else "completions")
        async with self._accepted(url, call, self._body) as response:
            if call.stream:
                async for data in event_data(response):
                    for event in reader.read(data):
                        yield event
            else:
                for event in reader.read(await response.read()):
                    yield event
        version = None if self.keeps_weights else self.connection.version
        for event in reader.end(version, unknown=self.connection.failed_loads != failed_loads):
            yield event

    async def count_tokens(self, call: ModelCall) -> int:
        """Asks vLLM's tokenizer. Hosted APIs have none to ask: there it is an estimate, a token for four bytes."""
        if self.kind != "vllm":
            return len(msgspec.json.encode((call.messages, call.tools))) // 4
        url = f"{self.connection.root}/tokenize"
        async with self._accepted(url, call, self._counted_body) as response:
            try:
                return msgspec.json.decode(await response.read(), type=_Counted).count
            except msgspec.DecodeError as error:
                raise BackendError(f"{url} did not answer with a count: {error}") from None

    def _counted_body(self, call: ModelCall) -> dict[str, Any]:
        return {"model": self.model or call.model, "messages": call.messages, "tools": call.tools or None}

    @asynccontextmanager
    async def _accepted(
        self, url: str, call: ModelCall, body: Callable[[ModelCall], dict[str, Any]]
    ) -> AsyncGenerator[Response]:
        """The server's answer, with the repairs that its chats turn out to need; those are made at once from then on.
        BackendError is the first refusal where none helps."""
        headers, refused = self._headers(call), None
        for messages, repair in tries(call.messages, self._repairs):
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
                if begun or not may_be_repaired(str(refused)):
                    raise
        if refused is not None:
            raise refused

    @asynccontextmanager
    async def relay(self, call: RelayedCall) -> AsyncGenerator[RelayedAnswer]:
        headers = call.headers | ({SESSION_HEADER: call.session} if call.session else {})
        body = msgspec.json.encode({**call.body, "model": self.model or call.model}) if call.body else None
        async with self.connection.posted(self.connection.url(call.path), body, headers) as response:
            if response.status in (401, 403):
                raise await refusal(response, self.name)
            kept = {name: response.headers[name] for name in _RELAYED_HEADERS if name in response.headers}
            parts = response.parts()
            if response.status in _NO_ROUTE and call.path in _TRANSLATED:
                said = await response.read()
                if not _names_something(said):
                    self._lacks(call.path)
                    raise NotRelayedError(f"{self.name} has no {call.path}", status=response.status, code="not_found")
                parts = _once(said)
            yield RelayedAnswer(response.status, kept, parts)

    def _lacks(self, path: str) -> None:
        """The server does not know this endpoint. One that does not know responses is not OpenAI's own, and knows
        neither its newer roles nor its newer names."""
        self.relays -= {path}
        if self.kind == "openai" and path == "responses":
            self._chat_only = True
            self._repairs = (as_system, with_json_arguments, *self._repairs)

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
            "tool_choice": call.tool_choice if call.tools or forces_a_call(call.tool_choice) else None,
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
        # A given distribution is sent in full: vLLM takes the rest from the model's generation config, which may hold a
        # penalty.
        return (dict(NEUTRAL_PENALTIES) if whole else {}) | call.extra | always | given(**optional)


def _names_something(refusal: bytes) -> bool:
    """Whether a 404 is about what was asked for, such as a model, rather than about the endpoint."""
    try:
        error = msgspec.json.decode(refusal, type=_NotFound).error
    except NOT_JSON:
        return False
    coded = isinstance(error.code, str) and error.code not in ("404", "405", "not_found", "not_found_error")
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


class _TokenLogprob(msgspec.Struct, gc=False):
    logprob: float


class _Logprobs(msgspec.Struct, Generic[T]):
    """Of a chat (`content`), or of a continued prompt."""

    content: list[T] | None = None
    token_logprobs: list[float | None] | None = None
    tokens: list[str] = []
    top_logprobs: list[dict[str, float] | None] | None = None


class _FunctionPart(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _ToolCallPart(msgspec.Struct):
    index: Annotated[int, msgspec.Meta(ge=0, lt=1024)] = 0
    id: str | None = None
    function: _FunctionPart | None = None


class _MessageFields(msgspec.Struct):
    """What others rely on in a `delta` or `message`; it is passed on as it is written."""

    content: str | list[Any] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[_ToolCallPart] | None = None


class WeightsSpan(msgspec.Struct):
    """The tokens from `start` to `end` of a choice were sampled by the weights of this name."""

    version: str
    start: int
    end: int


class _ChoicePart(msgspec.Struct, Generic[T]):
    """Of a chunk (`delta`), of a whole answer (`message`), or of a continued prompt (`text`)."""

    index: int = 0
    delta: dict[str, Any] | None = None
    message: dict[str, Any] | None = None
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: _Logprobs[T] | None = None
    token_ids: tuple[int, ...] | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    policy_versions: list[tuple[int, int]] | None = None
    weight_versions: list[WeightsSpan] | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: dict[str, Any] | None = None
    completion_tokens_details: dict[str, Any] | None = None


class _Error(msgspec.Struct):
    message: str = "no message"


class _Chunk(msgspec.Struct, Generic[T]):
    choices: list[_ChoicePart[T]] = []
    usage: _Usage | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    policy_version: int | None = None
    system_fingerprint: str | None = None
    service_tier: str | None = None
    error: _Error | None = None


_CHUNK = msgspec.json.Decoder(_Chunk[_TokenLogprob])
# With the entries of logprobs as they were written, where the agent asked for them.
_WRITTEN_CHUNK = msgspec.json.Decoder(_Chunk[msgspec.Raw])
_ENTRY = msgspec.json.Decoder(_TokenLogprob)


class _AnswerReader:
    """Chunks of one answer, or the whole of it → backend events. The usage it reports comes last."""

    def __init__(self, call: ModelCall, captures_tokens: bool, version: int) -> None:
        self._call = call
        self._captures_tokens = captures_tokens
        self._version = version
        self._started = False
        self._version_given = False
        self._unfinished = set(range(call.sampling.n))
        self._ends: list[tuple[_ChoicePart[Any], FinishReason]] = []
        self._usage: _Usage | None = None
        self._decoder: msgspec.json.Decoder[_Chunk[Any]] = _WRITTEN_CHUNK if call.logprobs else _CHUNK

    def read(self, data: bytes) -> list[BackendEvent]:
        try:
            chunk = self._decoder.decode(data)
        except NOT_JSON as error:
            raise BackendError(f"the backend sent something that is no chat completion: {error}") from None
        if chunk.error is not None:
            raise BackendError(f"the backend failed in mid-answer: {chunk.error.message}")
        events: list[BackendEvent] = []
        if not self._started:
            self._started = True
            prompt = chunk.prompt_token_ids
            if prompt is None:
                of_choices = (choice.prompt_token_ids for choice in chunk.choices if choice.prompt_token_ids)
                prompt = next(of_choices, ())
            extra = given(system_fingerprint=chunk.system_fingerprint, service_tier=chunk.service_tier)
            events.append(Started(prompt, extra=extra))
        self._usage = chunk.usage or self._usage
        if chunk.policy_version is not None:
            self._version_given, self._version = True, chunk.policy_version
        for choice in chunk.choices:
            events.extend(self._read_choice(choice))
        return events

    def _read_choice(self, choice: _ChoicePart[Any]) -> list[BackendEvent]:
        if choice.index not in range(self._call.sampling.n):
            raise BackendError(f"the backend sent choice {choice.index}, which was not requested")
        if choice.finish_reason is not None and choice.index in self._unfinished:
            self._unfinished.discard(choice.index)
            self._ends.append((choice, _FINISH_REASONS.get(choice.finish_reason, "abort")))
        try:
            delta = _delta(choice)
            logprobs, entries = self._logprobs(choice.logprobs)
        except msgspec.ValidationError as error:
            raise BackendError(f"the backend sent something that is no chat completion: {error}") from None
        ids = choice.token_ids or ()
        if not (delta or ids or logprobs):
            return []
        runs = choice.policy_versions
        if not runs or sum(count for _, count in runs) != len(ids):
            return [Delta(choice.index, delta, ids, logprobs, self._version, entries)]
        self._version_given = True
        deltas: list[BackendEvent] = []
        start = 0
        for version, count in runs:
            part = slice(start, start + count)
            deltas.append(Delta(choice.index, delta, ids[part], logprobs[part], version, entries[part]))
            delta, start = {}, start + count
        return deltas

    def end(self, version: int | None, *, unknown: bool) -> list[BackendEvent]:
        """The ends of the choices and the usage; `version` is what the server's weights are called now, if they are not
        `unknown`, None if the call had the same from its beginning."""
        if self._unfinished:
            raise BackendError("the backend ended its answer before every choice was finished")
        last = None if self._version_given or version == self._version else version
        events: list[BackendEvent] = []
        for choice, reason in self._ends:
            runs = version_runs(choice.weight_versions, self._version)
            untrainable = WEIGHTS_UNKNOWN if unknown else self._untrainable(choice)
            stopped = choice.stop_reason if isinstance(choice.stop_reason, str) else None
            events.append(Finished(choice.index, reason, untrainable, stopped, None if runs else last, runs))
        if self._usage is not None:
            usage = self._usage
            details = given(
                prompt_tokens_details=usage.prompt_tokens_details,
                completion_tokens_details=usage.completion_tokens_details,
            )
            events.append(Usage(usage.prompt_tokens, usage.completion_tokens, details))
        return events

    def _logprobs(self, logprobs: _Logprobs[Any] | None) -> tuple[tuple[float, ...], tuple[Any, ...]]:
        """(the logprob of each token, its entry of `logprobs.content` where the agent asked for it)."""
        if logprobs is None:
            return (), ()
        if logprobs.content is None:
            values = tuple(float("nan") if value is None else value for value in logprobs.token_logprobs or ())
            return values, _entries(logprobs) if self._call.logprobs else ()
        if not self._call.logprobs:
            return tuple([token.logprob for token in logprobs.content]), ()
        return tuple([_ENTRY.decode(entry).logprob for entry in logprobs.content]), tuple(logprobs.content)

    def _untrainable(self, choice: _ChoicePart[Any]) -> str | None:
        call = self._call
        if self._captures_tokens and not leaves_sampling_free(call.extra, call.tools, call.tool_choice):
            return CONSTRAINED
        if choice.finish_reason not in _FINISH_REASONS:
            return "the backend aborted the answer"
        return STOPPED_BY_STRING if isinstance(choice.stop_reason, str) else None


def version_runs(spans: Sequence[WeightsSpan] | None, version: int) -> list[list[int]]:
    """The policy version of each token, run-length, where the server names its weights by them; empty where it does
    not, or where they have been another `version` since before the call."""
    weights = spans or []
    runs = [
        [int(span.version), span.end - span.start]
        for span in weights
        if span.version.isdecimal() and len(span.version) < 10 and span.end > span.start  # which 32 bits hold
    ]
    return runs if len(runs) == len(weights) and runs and runs[-1][0] >= version else []


def _delta(choice: _ChoicePart[Any]) -> dict[str, Any]:
    if choice.text is not None:
        return {"content": choice.text} if choice.text else {}
    message = choice.delta if choice.delta is not None else choice.message or {}
    if len(message) == 1 and isinstance(content := message.get("content"), str):  # nearly every chunk
        return message if content else {}
    msgspec.convert(message, _MessageFields)
    return {name: value for name, value in message.items() if name != "role" and value not in (None, "", [])}


def _entries(logprobs: _Logprobs[Any]) -> tuple[Any, ...]:
    """Those of a continued prompt, in the form of a chat's."""
    tops = logprobs.top_logprobs or [None] * len(logprobs.tokens)
    return tuple(
        _entry(token, logprob) | {"top_logprobs": [_entry(other, value) for other, value in (top or {}).items()]}
        for token, logprob, top in zip(logprobs.tokens, logprobs.token_logprobs or (), tops, strict=False)
    )


def _entry(token: str, logprob: float | None) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode())}
