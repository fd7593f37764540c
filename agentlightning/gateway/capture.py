"""One LLM call: while it runs, and as the span that is stored of it, with exact ids, logprobs and
versions, and whether it may be trained. Knows no HTTP, and not how a call came about."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import math
import re
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final

import msgspec

from agentlightning import semconv
from agentlightning.errors import BackendError
from agentlightning.gateway.answer import Answer
from agentlightning.gateway.attribution import Caller
from agentlightning.gateway.backend import BackendEvent, Delta, RelayedCall
from agentlightning.gateway.backends.connection import UNREACHABLE
from agentlightning.gateway.endpoints.base import Endpoint
from agentlightning.gateway.gates import Gate
from agentlightning.gateway.models import ModelEntry
from agentlightning.gateway.recorder import CallStatistics, Recorder
from agentlightning.gateway.recordings import RecordedCall
from agentlightning.gateway.repeating import (
    extras_of,
    reference_attributes,
    repeated_events,
    whole_attributes,
)
from agentlightning.gateway.replay import LIVE, Met
from agentlightning.gateway.request import CallRequest
from agentlightning.prompts.replacing import Replaced
from agentlightning.tracing.links import link_attributes
from agentlightning.types import Attributes, SampledChoice, Span, SpanStatus, TokenCapture

_TRACEPARENT = re.compile(r"^[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}$")

# Why a call must not be trained: the values of `agentlightning.call.untrainable`.
FAILED = "call failed"
ABORTED = "client disconnected"
NO_TOKEN_IDS = "backend returns no token ids"
LENGTHS_DIFFER = "ids and logprobs differ in length"
COUNTS_DIFFER = "ids and reported usage differ"
NOT_FINITE = "logprob is not finite"
UNKNOWN_LOGPROB = "logprob is clamped or unknown"
_CLAMPED: Final = -9999.0  # what vLLM writes for minus infinity, and for what it does not know


@dataclass(eq=False, kw_only=True)
class Call:
    """One call under way, as `async with`: left without `commit` it is recorded as failed or
    aborted.

    `request` is what the agent asks, `sent` what the backend is asked, `relayed` the same where the
    backend answers in the agent's own protocol, and `refused` its refusal. `index` numbers the
    calls of an attempt. `overridden` is the sampling that the agent asked for and did not get,
    `dropped` names fields that are not sent, `discards` are earlier calls whose answers were not
    sent, `made_by` says who calls and what for, `replaced` what the agent's prompts were. Without a
    `recorder` nothing is captured. `met` says which recorded call answers this one, if one does.
    `remember` is given the answer of a call that was committed,
    `lost` the model of a call that did not reach it."""

    caller: Caller
    endpoint: Endpoint
    request: CallRequest
    sent: CallRequest
    entry: ModelEntry
    answer: Answer
    gate: Gate
    recorder: Recorder | None
    statistics: CallStatistics
    remember: Callable[[Caller, CallRequest, Answer], None]
    index: int | None
    overridden: dict[str, Any]
    dropped: list[str]
    discards: list[int]
    held_seconds: float
    made_by: Attributes
    traceparent: str | None
    lost: Callable[[ModelEntry], None]
    relayed: RelayedCall | None = None
    replaced: Replaced | None = None
    refused: BackendError | None = None
    met: Met = LIVE
    # since the epoch; `_started` is on the monotonic clock
    start_time: float = field(default_factory=time.time)
    _started: float = field(default_factory=time.monotonic)
    _span_id: str = field(default_factory=lambda: _new_span_id())
    _recorded: bool = False

    def events(self) -> AsyncGenerator[BackendEvent, None]:
        backend = self.entry.backend
        if self.met.call is not None:
            events = repeated_events(self.met.call, self.sent, backend)
        else:
            events = backend.answer(self.sent)
        if self.request.extra.get("parallel_tool_calls") is False and backend.captures_tokens:
            return _with_one_tool_call(events)
        return events

    async def commit(self) -> None:
        """Store the finished call. When this returns the call is durable; only then may its end be
        sent."""
        self._recorded = True
        await self._store(self.refused)
        self.statistics.calls[self.entry.name, "failed" if self.refused else "answered"] += 1
        self.remember(self.caller, self.request, self.answer)

    async def undelivered(self) -> None:
        """Record that the client left between the commit and the end of its answer."""
        self._put_back()
        if self.recorder is not None and self.index is not None:
            self.statistics.undelivered += 1
            attributes: Attributes = {semconv.CALL_DISCARDS: [self.index]}
            span = self._span(semconv.UNDELIVERED, attributes, time.time(), SpanStatus(), None)
            await self._record(msgspec.structs.replace(span, span_id=_new_span_id()))

    async def __aenter__(self) -> Call:
        self.caller.running += 1
        self.gate.enter(self.caller.attempt)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is not None and not self._recorded:
                aborted = isinstance(error, asyncio.CancelledError)
                self.statistics.calls[self.entry.name, "aborted" if aborted else "failed"] += 1
                self.answer.abort(ABORTED if aborted else FAILED)
                self._put_back()
                if isinstance(error, BackendError) and error.code == UNREACHABLE:
                    self.lost(self.entry)
                await self._store(error)
        finally:
            self.gate.leave(self.caller.attempt)
            self.caller.running -= 1

    def _put_back(self) -> None:
        """Let a recorded call answer again, as nobody received its answer."""
        if self.caller.replay is not None:
            self.caller.replay.put_back(self.met)

    async def _store(self, error: BaseException | None) -> None:
        if self.recorder is None:
            return
        if self.met.call is not None and error is None:
            await self._store_again(self.met.call)
            return
        attributes = _attributes(self)
        # the span holds them now; they may be large, and the store slow
        if not self.request.continuable:
            self.request = msgspec.structs.replace(self.request, messages=[], messages_json=None)
            self.sent = msgspec.structs.replace(self.sent, messages=[], messages_json=None)
        flag = untrainable_reason(self.answer, self.entry.backend.captures_tokens)
        replay = self.caller.replay
        if replay is not None and replay.is_fork and replay.diverged:
            flag = flag or semconv.DIVERGED
        if flag:
            attributes[semconv.CALL_FLAG] = flag
        if self.answer.first_token_time is not None:
            attributes[semconv.GEN_AI_TIME_TO_FIRST_CHUNK] = (
                self.answer.first_token_time - self._started
            )
        if isinstance(error, BackendError):
            attributes |= {semconv.ERROR_TYPE: error.code, semconv.HTTP_STATUS: error.status}
        status = (
            SpanStatus(status_code="ERROR", description=str(error) or flag)
            if error
            else SpanStatus()
        )
        end_time = self.start_time + (time.monotonic() - self._started)
        name = f"{self.endpoint.operation} {self.answer.model}"
        span = self._span(name, attributes, end_time, status, _tokens(self.answer))
        if (
            self.caller.links is not None
            and self.index is not None
            and self.endpoint.operation != "embeddings"
        ):
            attributes |= link_attributes(self.caller.links.add(span, self.index))
        self.statistics.captured(span, self.entry.name, self.held_seconds)
        await self._record(span)
        if replay is not None and error is None:
            replay.went_on(self.index, _answered(self.answer))

    async def _store_again(self, recorded: RecordedCall) -> None:
        """Store the call of a retry with the recorded tokens, and that of a fork as a
        reference."""
        assert self.index is not None and self.caller.replay is not None
        own: Attributes = {semconv.CALL_INDEX: self.index, semconv.CALL_STREAM: self.request.stream}
        if self.discards:
            own[semconv.CALL_DISCARDS] = self.discards
        whole = whole_attributes(recorded) | own
        tokens = recorded.span.tokens
        name = recorded.span.name
        span = self._span(name, whole, time.time(), SpanStatus(), tokens)
        if self.caller.links is not None:
            own |= link_attributes(self.caller.links.add(span, self.index))
        if semconv.CALL_REPLAYED_ROLLOUT not in whole:  # what a user answered
            self.caller.replay.went_on(self.index, whole)
        else:
            self.caller.replay.serve(self.index)
        if recorded.name[0] != self.caller.rollout_id and semconv.CALL_REPLAYED_ROLLOUT in whole:
            whole = reference_attributes(whole)
            tokens = None
        span = msgspec.structs.replace(span, attributes=whole | own, tokens=tokens)
        await self._record(span, reference=whole.get(semconv.CALL_FLAG) == semconv.REPLAYED)

    async def _record(self, span: Span, *, reference: bool = False) -> None:
        """After a failure the span may or may not be stored, and the answer is not sent."""
        assert self.recorder is not None
        try:
            await self.recorder.record(span, reference=reference)
        except BaseException:
            self._put_back()
            if self.index is not None:
                self.caller.lost += [*self.discards, self.index]
            raise

    def _span(
        self,
        name: str,
        attributes: Attributes,
        end_time: float,
        status: SpanStatus,
        tokens: TokenCapture | None,
    ) -> Span:
        trace_id, parent_id = _trace(self.traceparent) or (self.caller.trace_id, None)
        return Span(
            rollout_id=self.caller.rollout_id,
            attempt_id=self.caller.attempt_id,
            sequence_id=0,  # the store numbers it
            trace_id=trace_id,
            span_id=self._span_id,
            parent_id=parent_id,
            name=name,
            start_time=self.start_time,
            end_time=end_time,
            status=status,
            attributes=attributes,
            tokens=tokens,
        )


async def _with_one_tool_call(
    events: AsyncGenerator[BackendEvent, None],
) -> AsyncGenerator[BackendEvent, None]:
    """Keep the first tool call of each choice; the tokens of the others stay, as they were
    sampled."""
    async with aclosing(events):
        async for event in events:
            if isinstance(event, Delta) and "tool_calls" in event.delta:
                parts: list[dict[str, Any]] = event.delta["tool_calls"]
                first = [part for place, part in enumerate(parts) if part.get("index", place) == 0]
                event = msgspec.structs.replace(event, delta=event.delta | {"tool_calls": first})
            yield event


def untrainable_reason(answer: Answer, captures_tokens: bool) -> str | None:
    """The first reason why the answer must not be trained, or None: what is trained is exactly what
    was sampled."""
    for choice in answer.choices:
        if choice.untrainable:
            return choice.untrainable
    if not captures_tokens:
        return NO_TOKEN_IDS
    for choice in answer.choices:
        if not choice.token_ids or not answer.prompt_token_ids:
            return NO_TOKEN_IDS
        if len(choice.token_ids) != len(choice.logprobs):
            return LENGTHS_DIFFER
        if not all(map(math.isfinite, choice.logprobs)):
            return NOT_FINITE
        if min(choice.logprobs) <= _CLAMPED:
            return UNKNOWN_LOGPROB
    if answer.usage is not None:
        sampled = sum([len(choice.token_ids) for choice in answer.choices])
        if (answer.usage.prompt_tokens, answer.usage.completion_tokens) != (
            len(answer.prompt_token_ids),
            sampled,
        ):
            return COUNTS_DIFFER
    return None


def _attributes(call: Call) -> Attributes:
    request = call.request
    sampling = call.sent.sampling
    answer = call.answer
    counts = answer.token_counts()
    started = answer.started
    sampled = [choice for choice in answer.choices if choice.versions]
    last_versions = [max(choice.versions[-1][0], choice.last_version or 0) for choice in sampled]
    captures_tokens = call.entry.backend.captures_tokens
    extras = extras_of(answer, request, captures_tokens=captures_tokens)
    attributes: dict[str, Any] = {
        semconv.GEN_AI_RESPONSE_MODEL: answer.model,
        semconv.GEN_AI_RESPONSE_ID: answer.response_id,
        semconv.GEN_AI_FINISH_REASONS: [
            choice.finish_reason or "abort" for choice in answer.choices
        ],
        semconv.GEN_AI_INPUT_TOKENS: counts.prompt_tokens,
        semconv.GEN_AI_OUTPUT_TOKENS: counts.completion_tokens,
        **_answered(answer),
        semconv.GEN_AI_TEMPERATURE: sampling.temperature,
        semconv.GEN_AI_TOP_P: sampling.top_p,
        semconv.GEN_AI_MAX_TOKENS: sampling.max_tokens,
        semconv.CALL_ENDPOINT: call.endpoint.path,
        semconv.CALL_STREAM: request.stream,
        semconv.CALL_RESPONSE: answer.response_json,
        semconv.CALL_SAMPLING: _json(sampling),
        semconv.CALL_OVERRIDDEN: _json(call.overridden) if call.overridden else None,
        semconv.CALL_BACKEND: started.replica or call.entry.backend.name,
        semconv.CALL_TRAINABLE: call.entry.trainable,
        semconv.CALL_INDEX: call.index,
        semconv.CALL_DISCARDS: call.discards or None,
        semconv.CALL_HELD_SECONDS: call.held_seconds or None,
        semconv.CALL_DROPPED: [*call.dropped, *started.dropped] or None,
        semconv.CALL_FIRST_VERSION: min(
            [versioned.versions[0][0] for versioned in sampled], default=None
        ),
        semconv.CALL_LAST_VERSION: max(last_versions, default=None),
        semconv.RECORDED_SPLICE: started.spliced_tokens or None,
        semconv.CALL_DIVERGED: call.met.diverged,
        semconv.CALL_ANSWER: _json(extras) if extras else None,
    }
    written = {name: value for name, value in attributes.items() if value is not None}
    return asked(call.endpoint.operation, request) | written | call.made_by


def asked(operation: str, request: CallRequest) -> Attributes:
    """The attributes that say what a call asks."""
    attributes: dict[str, Any] = {
        semconv.GEN_AI_OPERATION: operation,
        semconv.GEN_AI_REQUEST_MODEL: request.model,
        semconv.GEN_AI_INPUT_MESSAGES: None
        if request.prompt
        else request.messages_json or _json(request.messages),
        semconv.GEN_AI_TOOL_DEFINITIONS: request.tools_json
        or (_json(request.tools) if request.tools else None),
        semconv.CALL_REQUEST: request.request_json,
        semconv.CALL_PROMPT: request.prompt if isinstance(request.prompt, str) else None,
    }
    return {name: value for name, value in attributes.items() if value is not None}


def _answered(answer: Answer) -> Attributes:
    messages = [choice.message() for choice in answer.choices]
    return {semconv.GEN_AI_OUTPUT_MESSAGES: _json(messages)}


def _tokens(answer: Answer) -> TokenCapture | None:
    if not answer.prompt_token_ids:
        return None
    choices = [
        SampledChoice(
            token_ids=choice.token_ids,
            logprobs=choice.logprobs,
            finish_reason=choice.finish_reason or "abort",
            versions=tuple([(version, count) for version, count in choice.versions]),
        )
        for choice in answer.choices
    ]
    return TokenCapture(prompt_token_ids=answer.prompt_token_ids, choices=tuple(choices))


def _trace(traceparent: str | None) -> tuple[str, str | None] | None:
    """(trace id, parent span id) of the agent's own, where it sent them."""
    match = _TRACEPARENT.match(traceparent or "")
    if not match or match[1] == "0" * 32 or match[2] == "0" * 16:
        return None
    # Outside any span of the agent's, the parent is the one that `tracing.opentelemetry` makes up
    # for its trace.
    return match[1], None if match[1].startswith(match[2]) else match[2]


_SECRET: Final = secrets.token_bytes(32)
_numbers = itertools.count()


def _new_span_id() -> str:
    """An id that nobody can guess, so that no other span takes its place. To ask the system for
    randomness would let go of the interpreter's lock in the middle of each call."""
    return hashlib.blake2b(b"%d" % next(_numbers), key=_SECRET, digest_size=8).hexdigest()


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
