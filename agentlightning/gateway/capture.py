"""One LLM call → one span: exact ids, logprobs and versions, gen_ai attributes, and whether the call may be trained.

A pure transformation. It does not know HTTP or the store, and never sees a header other than `traceparent`.
"""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass
from typing import Any

import msgspec

from agentlightning import semconv
from agentlightning.gateway.answer import Answer, Choice
from agentlightning.gateway.attribution import Caller
from agentlightning.gateway.backend import Sampling
from agentlightning.gateway.models import ModelEntry
from agentlightning.gateway.openai import ChatRequest
from agentlightning.types import Attributes, SampledChoice, Span, SpanStatus, TokenCapture

_TRACEPARENT = re.compile(r"^[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}$")

# Why a call must not be trained: the values of `agentlightning.call.untrainable`.
FAILED = "call failed"
ABORTED = "client disconnected"
NO_TOKEN_IDS = "backend returns no token ids"
LENGTHS_DIFFER = "ids and logprobs differ in length"
COUNTS_DIFFER = "ids and reported usage differ"
NOT_FINITE = "logprob is not finite"


@dataclass
class CallRecord:
    """What was decided about a call before it was made, and when it began. Times are seconds since the epoch."""

    caller: Caller
    call_index: int
    request: ChatRequest
    entry: ModelEntry
    sampling: Sampling
    overridden: dict[str, Any]
    response_id: str
    traceparent: str | None
    start_time: float


def call_span(
    record: CallRecord,
    answer: Answer,
    *,
    end_time: float,
    time_to_first_token: float | None,
    error: BaseException | None,
) -> Span:
    """The span of a finished, failed or aborted call. The same call always gets the same span id."""
    caller = record.caller
    trace_id, parent_id = _trace(record)
    attributes = _attributes(record, answer)
    if time_to_first_token is not None:
        attributes[semconv.CALL_TIME_TO_FIRST_TOKEN] = time_to_first_token
    flag = untrainable_reason(answer, record.entry.backend.captures_tokens)
    if flag:
        attributes[semconv.CALL_FLAG] = flag
    return Span(
        rollout_id=caller.rollout_id,
        attempt_id=caller.attempt_id,
        sequence_id=0,  # the store numbers it
        trace_id=trace_id,
        span_id=_hex("span", caller.attempt_id, record.call_index)[:16],
        parent_id=parent_id,
        name=f"chat {record.entry.name}",
        start_time=record.start_time,
        end_time=end_time,
        status=SpanStatus(status_code="ERROR", description=str(error) or flag) if error else SpanStatus(),
        attributes=attributes,
        tokens=_tokens(answer),
    )


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
    if answer.usage is not None:
        sampled = sum(len(choice.token_ids) for choice in answer.choices)
        if (answer.usage.prompt_tokens, answer.usage.completion_tokens) != (len(answer.prompt_token_ids), sampled):
            return COUNTS_DIFFER
    return None


def _attributes(record: CallRecord, answer: Answer) -> Attributes:
    request, sampling, counts = record.request, record.sampling, answer.token_counts()
    attributes: Attributes = {
        semconv.GEN_AI_OPERATION: "chat",
        semconv.GEN_AI_REQUEST_MODEL: request.model,
        semconv.GEN_AI_RESPONSE_MODEL: record.entry.name,
        semconv.GEN_AI_RESPONSE_ID: record.response_id,
        semconv.GEN_AI_FINISH_REASONS: [choice.finish_reason or "abort" for choice in answer.choices],
        semconv.GEN_AI_INPUT_TOKENS: counts.prompt_tokens,
        semconv.GEN_AI_OUTPUT_TOKENS: counts.completion_tokens,
        semconv.GEN_AI_TEMPERATURE: sampling.temperature,
        semconv.GEN_AI_TOP_P: sampling.top_p,
        semconv.GEN_AI_INPUT_MESSAGES: request.messages_json,
        semconv.GEN_AI_OUTPUT_MESSAGES: msgspec.json.encode([c.message() for c in answer.choices]).decode(),
        semconv.CALL_INDEX: record.call_index,
        semconv.CALL_STREAM: request.stream,
        semconv.CALL_SAMPLING: msgspec.json.encode(sampling).decode(),
        semconv.CALL_BACKEND: type(record.entry.backend).__name__,
        semconv.CALL_TRAINABLE: record.entry.trainable,
    }
    if sampling.max_tokens is not None:
        attributes[semconv.GEN_AI_MAX_TOKENS] = sampling.max_tokens
    if record.overridden:
        attributes[semconv.CALL_OVERRIDDEN] = msgspec.json.encode(record.overridden).decode()
    if request.tools_json:
        attributes[semconv.GEN_AI_TOOL_DEFINITIONS] = request.tools_json
    if answer.spliced_tokens:
        attributes[semconv.RECORDED_SPLICE] = answer.spliced_tokens
    return attributes


def _tokens(answer: Answer) -> TokenCapture | None:
    if not answer.prompt_token_ids:
        return None
    return TokenCapture(
        prompt_token_ids=answer.prompt_token_ids,
        choices=tuple(_sampled(choice) for choice in answer.choices),
    )


def _sampled(choice: Choice) -> SampledChoice:
    return SampledChoice(
        token_ids=tuple(choice.token_ids),
        logprobs=tuple(choice.logprobs),
        finish_reason=choice.finish_reason or "abort",
        versions=tuple((version, count) for version, count in choice.versions),
    )


def _trace(record: CallRecord) -> tuple[str, str | None]:
    """(trace id, parent span id): the agent's own where it sent a traceparent, else the attempt's trace."""
    match = _TRACEPARENT.match(record.traceparent or "")
    if match and match[1] != "0" * 32 and match[2] != "0" * 16:
        return match[1], match[2]
    return record.caller.trace_id, None


def _hex(*parts: str | int) -> str:
    return hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=16).hexdigest()
