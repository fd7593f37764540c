"""Answers of servers of chat completions, whole and streamed, as backend events: one reader for all
kinds of servers.

What a server sends as the protocol says is decoded at once. Anything else is read for what it means
(`_readable`): what only informs, such as usage or ids, is left out where it has no meaning, and
never costs an answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any, Final, Generic, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from agentlightning.arrays import int32
from agentlightning.errors import BackendError
from agentlightning.gateway.admission import leaves_sampling_free
from agentlightning.gateway.backend import (
    CONSTRAINED,
    ENDED_OTHERWISE,
    STOPPED_BY_STRING,
    WEIGHTS_UNKNOWN,
    BackendEvent,
    Delta,
    Finished,
    ModelCall,
    Started,
    Usage,
    token_count,
)
from agentlightning.gateway.backends.tool_calls import ToolCallParts
from agentlightning.gateway.backends.words import failed_in_answer, words_of
from agentlightning.gateway.request import NOT_JSON, given
from agentlightning.tracing.dialects import items, json_of, mapping
from agentlightning.types import FinishReason

T = TypeVar("T")

ABORTED: Final = "the backend aborted the answer"
_ENDS: Final[dict[FinishReason, tuple[str, ...]]] = {
    "stop": (
        "stop",
        "eos",
        "eos_token",
        "end_turn",
        "stop_sequence",
        "complete",
        "completed",
        "done",
        "finished",
    ),
    "length": (
        "length",
        "max_tokens",
        "max_output_tokens",
        "model_length",
        "token_limit",
        "incomplete",
    ),
    "tool_calls": ("tool_calls", "tool_call", "function_call", "tool_use"),
    "content_filter": (
        "content_filter",
        "safety",
        "sensitive",
        "refusal",
        "prohibited_content",
        "recitation",
    ),
    "abort": (
        "abort",
        "aborted",
        "error",
        "cancelled",
        "insufficient_system_resource",
        "network_error",
    ),
}
_FINISH_REASONS: Final[dict[str, FinishReason]] = {
    word: reason for reason, words in _ENDS.items() for word in words
}

_SAMPLED: Final = ("completion_tokens", "output_tokens")


# What the store and the policy can take. Others are left out, and an answer without them is not
# trained.
TokenId: TypeAlias = Annotated[int, Meta(ge=0, lt=2**31)]  # of a token, or a version
_Count: TypeAlias = Annotated[int, Meta(ge=1, lt=2**31)]


class _TokenLogprob(msgspec.Struct, gc=False):
    logprob: float | None = None


class _Logprobs(msgspec.Struct, Generic[T]):
    """Log-probabilities of a chat (`content`), or of a continued prompt."""

    content: list[T] | None = None
    token_logprobs: list[float | None] | None = None
    tokens: list[str] = []
    top_logprobs: list[dict[str, float] | None] | None = None


class WeightsSpan(msgspec.Struct):
    """The tokens from `start` to `end` of a choice were sampled by the weights of this name."""

    version: str
    start: int
    end: int


class _ChoicePart(msgspec.Struct, Generic[T]):
    """Part of a chunk (`delta`), of a whole answer (`message`), or of a continued prompt
    (`text`)."""

    index: int = 0
    delta: dict[str, Any] | None = None
    message: dict[str, Any] | None = None
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: _Logprobs[T] | None = None
    token_ids: tuple[TokenId, ...] | None = None
    prompt_token_ids: tuple[TokenId, ...] | None = None
    policy_versions: list[tuple[TokenId, _Count]] | None = None
    weight_versions: list[WeightsSpan] | None = None


class _Chunk(msgspec.Struct, Generic[T]):
    choices: list[_ChoicePart[T]] = []
    usage: Any = None
    prompt_token_ids: tuple[TokenId, ...] | None = None
    policy_version: TokenId | None = None
    system_fingerprint: str | None = None
    service_tier: str | None = None
    error: Any = None
    detail: Any = None  # where FastAPI's servers have an error
    message: Any = None  # where older servers of vLLM have one


_CHUNK = msgspec.json.Decoder(_Chunk[_TokenLogprob])
# With the entries of logprobs as they were written, where the agent asked for them.
_WRITTEN_CHUNK = msgspec.json.Decoder(_Chunk[msgspec.Raw])
_ENTRY = msgspec.json.Decoder(_TokenLogprob)


class AnswerReader:
    """Chunks of one answer, or the whole of it → backend events. The usage it reports comes
    last."""

    def __init__(self, call: ModelCall, captures_tokens: bool, version: int) -> None:
        self._call = call
        self._captures_tokens = captures_tokens
        self._version = version
        self._started: Started | None = None
        self._version_given = False
        self._numbers: dict[int, int] = {}  # the server's number of a choice → ours
        self._calls: dict[int, ToolCallParts] = {}
        self._all = False
        self._sampled = 0  # tokens
        self._ends: dict[int, tuple[_ChoicePart[Any], FinishReason]] = {}
        self._usage: Any = None
        self._decoder: msgspec.json.Decoder[_Chunk[Any]] = (
            _WRITTEN_CHUNK if call.logprobs else _CHUNK
        )

    def read(self, data: bytes) -> list[BackendEvent]:
        """The events of a chunk, or of a whole answer. BackendError for an error, and for what is
        no answer."""
        if not data:
            return []
        chunk = self._chunk(data)
        wrong = chunk.error if chunk.choices else chunk.error or chunk.detail or chunk.message
        if wrong:
            raise failed_in_answer(json_of(data.decode(errors="replace")))
        events: list[BackendEvent] = []
        if self._started is None:
            prompt = chunk.prompt_token_ids
            if prompt is None:
                of_choices = (
                    choice.prompt_token_ids for choice in chunk.choices if choice.prompt_token_ids
                )
                prompt = next(of_choices, ())
            extra = given(
                system_fingerprint=chunk.system_fingerprint, service_tier=chunk.service_tier
            )
            self._started = Started(int32(prompt), extra=extra)
            events.append(self._started)
        self._usage = chunk.usage or self._usage
        if chunk.policy_version is not None:
            self._version_given = True
            self._version = chunk.policy_version
        for choice in chunk.choices:
            number = self._numbers.get(choice.index)
            if number is None:
                number = self._number(choice.index)
            if number is not None:
                events.extend(self._read_choice(number, choice))
        return events

    def _chunk(self, data: bytes) -> _Chunk[Any]:
        try:
            return self._decoder.decode(data)
        except NOT_JSON:
            pass
        answer = json_of(data.decode(errors="replace"))
        if isinstance(answer, dict):
            with suppress(*NOT_JSON):
                return self._decoder.decode(_encoded(_readable(mapping(answer))))
        elif answer is not None:
            raise failed_in_answer(answer)
        said = words_of(data[:1000]).message
        raise BackendError(
            f"the backend sent something that is no chat completion: {said[:200] or 'not JSON'}"
        )

    def _number(self, index: int) -> int | None:
        """Our number of a choice. None for one that was not asked for; the only one may have any
        number."""
        most = self._call.sampling.n
        if len(self._numbers) < most and (most == 1 or index in range(most)):
            self._numbers[index] = index if most > 1 else 0
        return self._numbers.get(index)

    def _read_choice(self, number: int, choice: _ChoicePart[Any]) -> list[BackendEvent]:
        if choice.finish_reason is not None and number not in self._ends:
            reason = _FINISH_REASONS.get(choice.finish_reason.lower(), "stop")
            self._ends[number] = (choice, reason)
        try:
            delta = self._delta(number, choice)
        except RecursionError:
            raise BackendError(
                "the backend sent something that is no chat completion: it is nested too deeply"
            ) from None
        logprobs, entries = self._logprobs(choice.logprobs)
        ids = choice.token_ids or ()
        self._sampled += len(ids)
        if not (delta or ids or logprobs):
            return []
        return [Delta(number, delta, ids, logprobs, self._version, entries)]

    def _delta(self, number: int, choice: _ChoicePart[Any]) -> dict[str, Any]:
        """The part of the message, with texts as texts and tool calls as `ToolCallParts` gives
        them."""
        message = choice.delta or choice.message or {}
        if not message and choice.text is not None:
            return {"content": choice.text} if choice.text else {}
        # nearly every chunk
        if len(message) == 1 and isinstance(content := message.get("content"), str):
            return message if content else {}
        said = {
            name: value
            for name, value in message.items()
            if name != "role" and value not in (None, "", [])
        }
        said |= _texts(said)
        if "tool_calls" in said:
            parts = self._calls.setdefault(
                number, ToolCallParts(f"{self._call.request_id}_{number}")
            )
            said["tool_calls"] = parts.read(said["tool_calls"], whole=not choice.delta)
        return {name: value for name, value in said.items() if value not in ("", [])}

    def ended(self) -> None:
        """The server says that this is all. What has come has ended, and what has not will not:
        some give one choice, however many they are asked for."""
        self._all = bool(self._numbers)
        for number in self._numbers.values():
            self._ends.setdefault(number, (_ChoicePart[Any](), "stop"))

    def end(self, version: int | None, *, unknown: bool) -> list[BackendEvent]:
        """The ends of the choices and the usage; `version` is what the server's weights are called
        now, if they are not `unknown`, None if the call had the same from its beginning."""
        if len(self._ends) < self._call.sampling.n and not self._all:
            raise BackendError("the backend ended its answer before every choice was finished")
        last = None if self._version_given or version == self._version else version
        usage = self._read_usage()
        events: list[BackendEvent] = []
        counted = _first_count(mapping(self._usage), *_SAMPLED) is not None
        for number, (choice, reason) in self._ends.items():
            runs = [list(run) for run in choice.policy_versions or ()]
            runs = runs or version_runs(choice.weight_versions, self._version)
            stopped = choice.stop_reason if isinstance(choice.stop_reason, str) else None
            untrainable = WEIGHTS_UNKNOWN if unknown else self._untrainable(choice)
            if untrainable is None and stopped is not None and not counted:
                untrainable = STOPPED_BY_STRING
            events.append(
                Finished(number, reason, untrainable, stopped, None if runs else last, runs)
            )
        return events if usage is None else [*events, usage]

    def _read_usage(self) -> Usage | None:
        """The counts that are counts; where one is missing, that of the ids. None where there is
        none at all."""
        usage = mapping(self._usage)
        prompt = _first_count(usage, "prompt_tokens", "input_tokens")
        sampled = _first_count(usage, *_SAMPLED)
        if prompt is None and sampled is None:
            return None
        read = self._started.prompt_token_ids if self._started is not None else ()
        details: dict[str, Any] = {}
        for name in ("prompt_tokens_details", "completion_tokens_details"):
            of_name = mapping(usage.get(name))
            counts = {
                part: count
                for part, value in of_name.items()
                if (count := token_count(value)) is not None
            }
            if counts:
                details[name] = counts
        return Usage(
            len(read) if prompt is None else prompt,
            self._sampled if sampled is None else sampled,
            details,
        )

    def _logprobs(
        self, logprobs: _Logprobs[Any] | None
    ) -> tuple[tuple[float, ...], tuple[Any, ...]]:
        """(the logprob of each token, its entry of `logprobs.content` where the agent asked for
        it)."""
        if logprobs is None:
            return (), ()
        if logprobs.content is None:
            return _numbers(logprobs.token_logprobs or ()), _entries(
                logprobs
            ) if self._call.logprobs else ()
        if not self._call.logprobs:
            return _numbers([token.logprob for token in logprobs.content]), ()
        return _numbers([_ENTRY.decode(entry).logprob for entry in logprobs.content]), tuple(
            logprobs.content
        )

    def _untrainable(self, choice: _ChoicePart[Any]) -> str | None:
        call = self._call
        if self._captures_tokens and not leaves_sampling_free(
            call.extra, call.tools, call.tool_choice
        ):
            return CONSTRAINED
        reason = _FINISH_REASONS.get((choice.finish_reason or "").lower())
        if reason is None:
            return ENDED_OTHERWISE
        return ABORTED if reason == "abort" else None


def version_runs(spans: Sequence[WeightsSpan] | None, version: int) -> list[list[int]]:
    """The policy version of each token, run-length, where the server names its weights by them;
    empty where it does not, or where they have been another `version` since before the call."""
    weights = spans or []
    runs = [
        [int(span.version), span.end - span.start]
        for span in weights
        # which 32 bits hold
        if span.version.isdecimal() and len(span.version) < 10 and span.end > span.start
    ]
    return runs if len(runs) == len(weights) and runs and runs[-1][0] >= version else []


def _encoded(answer: dict[str, Any]) -> bytes:
    try:
        return msgspec.json.encode(answer)
    except UnicodeEncodeError:  # half of a character, in a chunk that ends in its middle
        return json.dumps(answer, ensure_ascii=False).encode(errors="replace")


def _readable(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer without the fields that are not of their type, whose meaning nobody can know."""
    choices = answer.get("choices")
    listed = [choices] if isinstance(choices, dict) else items(choices)
    read = [_of_type(_ChoicePart[_TokenLogprob], _with_texts(mapping(choice))) for choice in listed]
    return _of_type(_Chunk[_TokenLogprob], answer | {"choices": []}) | {"choices": read}


def _with_texts(choice: dict[str, Any]) -> dict[str, Any]:
    """A choice whose message is a text alone."""
    texts = {
        name: {"content": choice[name]}
        for name in ("message", "delta")
        if isinstance(choice.get(name), str)
    }
    return choice | texts


def _of_type(kind: Any, fields: dict[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for field in msgspec.structs.fields(kind):
        if field.name in fields:
            with suppress(msgspec.ValidationError):
                msgspec.convert(fields[field.name], field.type, strict=False)
                kept[field.name] = _strict(fields[field.name], field.type)
    return kept


def _strict(value: Any, type: Any) -> Any:
    """`value` in a form that is of the type without conversion, such as 3 for "3"."""
    try:
        msgspec.convert(value, type)
    except msgspec.ValidationError:
        return msgspec.to_builtins(msgspec.convert(value, type, strict=False))
    return value


def _texts(message: dict[str, Any]) -> dict[str, Any]:
    """The texts of a message that are not simply texts: `content` may be parts, thoughts among them
    (Mistral)."""
    read: dict[str, Any] = {}
    thoughts = ""
    for name in ("content", "reasoning_content", "reasoning", "refusal", "thinking"):
        value = message.get(name)
        if value is not None and not isinstance(value, str):
            said, thought = _said(value)
            read[name] = said + thought if name != "content" else said
            thoughts += thought if name == "content" else ""
    if thinking := read.get("thinking") or message.get("thinking"):
        thoughts += thinking
        read["thinking"] = ""
    known = any(read.get(name) or message.get(name) for name in ("reasoning_content", "reasoning"))
    return read | ({"reasoning_content": thoughts} if thoughts and not known else {})


def _said(content: Any) -> tuple[str, str]:
    """(text, thoughts) of a content that is no text: parts of either kind, or JSON."""
    if isinstance(content, dict):
        part = mapping(content)
        for name in ("thinking", "text", "content", "summary"):
            if name in part:
                inner = part[name]
                text = inner if isinstance(inner, str) else "".join(_said(inner))
                thinks = name == "thinking" or part.get("type") in ("thinking", "reasoning")
                return ("", text) if thinks else (text, "")
        return ("", "") if "type" in part else (json.dumps(content, ensure_ascii=False), "")
    if isinstance(content, list):
        pairs = [(part, "") if isinstance(part, str) else _said(part) for part in items(content)]
        return "".join(text for text, _ in pairs), "".join(thought for _, thought in pairs)
    return "" if content is None else json.dumps(content), ""


def _first_count(usage: dict[str, Any], *names: str) -> int | None:
    return next(
        (count for name in names if (count := token_count(usage.get(name))) is not None), None
    )


def _numbers(logprobs: Sequence[float | None]) -> tuple[float, ...]:
    if None not in logprobs:
        return tuple(logprobs)  # type: ignore[arg-type]
    return tuple(float("nan") if logprob is None else logprob for logprob in logprobs)


def _entries(logprobs: _Logprobs[Any]) -> tuple[Any, ...]:
    """Those of a continued prompt, in the form of a chat's."""
    tops = logprobs.top_logprobs or [None] * len(logprobs.tokens)
    return tuple(
        _entry(token, logprob)
        | {"top_logprobs": [_entry(other, value) for other, value in (top or {}).items()]}
        for token, logprob, top in zip(
            logprobs.tokens, logprobs.token_logprobs or (), tops, strict=False
        )
    )


def _entry(token: str, logprob: float | None) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode())}
