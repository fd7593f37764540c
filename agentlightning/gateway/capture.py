"""One LLM call → one span: exact ids, logprobs and versions, gen_ai attributes, and whether the call may be trained.

A pure transformation. It does not know HTTP or the store, and never sees a header other than `traceparent`.
"""

from __future__ import annotations

import math
import re
import secrets
import time
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from agentlightning import semconv
from agentlightning.errors import BackendError
from agentlightning.gateway.answer import Answer
from agentlightning.gateway.attribution import Caller
from agentlightning.gateway.backend import Sampling
from agentlightning.gateway.endpoints.base import Endpoint, Head
from agentlightning.gateway.models import ModelEntry
from agentlightning.gateway.request import CallRequest
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


@dataclass
class CallRecord:
    """What was decided about a call before it was made, and when it began (seconds since the epoch).

    `call_index` is None for calls that no attempt made; `discards` are earlier calls whose answers were not sent.
    `dropped` are the names of what the backend was not sent. Before it began it was held for `held_seconds`. `made_by`
    says who made it and what for, in attributes of the span."""

    caller: Caller
    call_index: int | None
    endpoint: Endpoint
    request: CallRequest
    head: Head
    entry: ModelEntry
    sampling: Sampling
    overridden: dict[str, Any]
    traceparent: str | None
    discards: list[int]
    dropped: list[str]
    one_tool_call: bool
    held_seconds: float
    made_by: Attributes
    start_time: float = field(default_factory=time.time)
    span_id: str = field(default_factory=lambda: secrets.token_hex(8))  # nobody can guess it and take its place


def call_span(
    record: CallRecord,
    answer: Answer,
    *,
    end_time: float,
    time_to_first_chunk: float | None,
    error: BaseException | None,
) -> Span:
    """The span of a finished, failed or aborted call."""
    attributes = _attributes(record, answer)
    if time_to_first_chunk is not None:
        attributes[semconv.GEN_AI_TIME_TO_FIRST_CHUNK] = time_to_first_chunk
    flag = untrainable_reason(answer, record.entry.backend.captures_tokens)
    if flag:
        attributes[semconv.CALL_FLAG] = flag
    status = SpanStatus(status_code="ERROR", description=str(error) or flag) if error else SpanStatus()
    if isinstance(error, BackendError):
        attributes |= {semconv.ERROR_TYPE: error.code, semconv.HTTP_STATUS: error.status}
    name = f"{record.endpoint.operation} {record.head.model}"
    return _span(record, name, attributes, end_time, status, _tokens(answer))


def undelivered_span(record: CallRecord, *, time: float) -> Span:
    """Says that nobody received the answer of a call whose span is stored already."""
    assert record.call_index is not None
    attributes: Attributes = {semconv.CALL_DISCARDS: [record.call_index]}
    span = _span(record, semconv.UNDELIVERED, attributes, time, SpanStatus(), None)
    return msgspec.structs.replace(span, span_id=secrets.token_hex(8))


def untrainable_reason(answer: Answer, captures_tokens: bool) -> str | None:
    """The first reason why the answer must not be trained, or None: what is trained is exactly what was sampled."""
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
        if (answer.usage.prompt_tokens, answer.usage.completion_tokens) != (len(answer.prompt_token_ids), sampled):
            return COUNTS_DIFFER
    return None


def _span(
    record: CallRecord,
    name: str,
    attributes: Attributes,
    end_time: float,
    status: SpanStatus,
    tokens: TokenCapture | None,
) -> Span:
    trace_id, parent_id = _trace(record)
    return Span(
        rollout_id=record.caller.rollout_id,
        attempt_id=record.caller.attempt_id,
        sequence_id=0,  # the store numbers it
        trace_id=trace_id,
        span_id=record.span_id,
        parent_id=parent_id,
        name=name,
        start_time=record.start_time,
        end_time=end_time,
        status=status,
        attributes=attributes,
        tokens=tokens,
    )


def _attributes(record: CallRecord, answer: Answer) -> Attributes:
    request, sampling, counts = record.request, record.sampling, answer.token_counts()
    attributes: Attributes = {
        semconv.GEN_AI_OPERATION: record.endpoint.operation,
        semconv.GEN_AI_REQUEST_MODEL: request.model,
        semconv.GEN_AI_RESPONSE_MODEL: record.head.model,
        semconv.GEN_AI_RESPONSE_ID: record.head.response_id,
        semconv.GEN_AI_FINISH_REASONS: [choice.finish_reason or "abort" for choice in answer.choices],
        semconv.GEN_AI_INPUT_TOKENS: counts.prompt_tokens,
        semconv.GEN_AI_OUTPUT_TOKENS: counts.completion_tokens,
        semconv.GEN_AI_OUTPUT_MESSAGES: _json([choice.message() for choice in answer.choices]),
        semconv.CALL_ENDPOINT: record.endpoint.path,
        semconv.CALL_STREAM: request.stream,
        semconv.CALL_REQUEST: request.request_json,
        semconv.CALL_SAMPLING: _json(sampling),
        semconv.CALL_BACKEND: answer.replica or record.entry.backend.name,
        semconv.CALL_TRAINABLE: record.entry.trainable,
    }
    if request.prompt is None:
        attributes[semconv.GEN_AI_INPUT_MESSAGES] = request.messages_json or _json(request.messages)
    elif isinstance(request.prompt, str):
        attributes[semconv.CALL_PROMPT] = request.prompt
    sampled = [choice for choice in answer.choices if choice.versions]
    if sampled:
        attributes[semconv.CALL_FIRST_VERSION] = min([choice.versions[0][0] for choice in sampled])
        last = [max(choice.versions[-1][0], choice.last_version or 0) for choice in sampled]
        attributes[semconv.CALL_LAST_VERSION] = max(last)
    optional = (
        (semconv.GEN_AI_TEMPERATURE, sampling.temperature),
        (semconv.GEN_AI_TOP_P, sampling.top_p),
        (semconv.GEN_AI_MAX_TOKENS, sampling.max_tokens),
        (semconv.CALL_RESPONSE, answer.response_json),
        (semconv.CALL_INDEX, record.call_index),
        (semconv.CALL_DISCARDS, record.discards or None),
        (semconv.CALL_HELD_SECONDS, record.held_seconds or None),
        (semconv.CALL_DROPPED, [*record.dropped, *answer.dropped] or None),
        (semconv.CALL_OVERRIDDEN, _json(record.overridden) if record.overridden else None),
        (semconv.GEN_AI_TOOL_DEFINITIONS, request.tools_json or (_json(request.tools) if request.tools else None)),
        (semconv.RECORDED_SPLICE, answer.spliced_tokens or None),
    )
    for name, value in optional:
        if value is not None:
            attributes[name] = value
    return attributes | record.made_by


def _tokens(answer: Answer) -> TokenCapture | None:
    if not answer.prompt_token_ids:
        return None
    choices = [
        SampledChoice(
            token_ids=tuple(choice.token_ids),
            logprobs=tuple(choice.logprobs),
            finish_reason=choice.finish_reason or "abort",
            versions=tuple([(version, count) for version, count in choice.versions]),
        )
        for choice in answer.choices
    ]
    return TokenCapture(prompt_token_ids=answer.prompt_token_ids, choices=tuple(choices))


def _trace(record: CallRecord) -> tuple[str, str | None]:
    """(trace id, parent span id): the agent's own where it sent a traceparent, else the attempt's trace."""
    match = _TRACEPARENT.match(record.traceparent or "")
    if match and match[1] != "0" * 32 and match[2] != "0" * 16:
        # Outside any span of the agent's, the parent is the one that `tracing.opentelemetry` makes up for its trace.
        return match[1], None if match[1].startswith(match[2]) else match[2]
    return record.caller.trace_id, None


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
