"""Recorded answers, given again: as the events of a backend, and as what is stored of the call.

A whole answer is its recorded message; a stream, logprobs and stop strings come from the recorded
tokens, where they become text here. Either way they are remembered for the prompts that go on from
them, so that these are spliced as they were."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Final

from agentlightning import semconv
from agentlightning.arrays import int32
from agentlightning.gateway.answer import Answer
from agentlightning.gateway.backend import (
    Backend,
    BackendEvent,
    Delta,
    Finished,
    ModelCall,
    Recital,
    Reciter,
    Started,
    Usage,
)
from agentlightning.gateway.recordings import RecordedCall
from agentlightning.gateway.replicas import servers_of
from agentlightning.tracing.dialects import (
    finish_reasons,
    items,
    json_of,
    mapping,
    output_messages,
    token_counts,
)
from agentlightning.types import Attributes

# What of a call of a fork is stored beside the name of the call that has its content.
_REFERENCE: Final = (
    semconv.GEN_AI_OPERATION,
    semconv.GEN_AI_REQUEST_MODEL,
    semconv.GEN_AI_RESPONSE_MODEL,
    semconv.GEN_AI_RESPONSE_ID,
    semconv.GEN_AI_FINISH_REASONS,
    semconv.CALL_ENDPOINT,
    semconv.CALL_STREAM,
    semconv.CALL_BACKEND,
    semconv.CALL_TRAINABLE,
    semconv.CALL_FIRST_VERSION,
    semconv.CALL_LAST_VERSION,
    semconv.CALL_PARENT_AGENT,
    semconv.CALL_HOUSEKEEPING,
    semconv.CALL_OPENING,
)
# What belongs to the call that was sampled alone.
_OF_ITS_OWN: Final = (
    semconv.CALL_INDEX,
    semconv.CALL_CONTINUES,
    semconv.CALL_SHARED_MESSAGES,
    semconv.CALL_TOKENS_AGREE,
    semconv.CALL_DISCARDS,
    semconv.CALL_HELD_SECONDS,
    semconv.CALL_DIVERGED,
    semconv.GEN_AI_TIME_TO_FIRST_CHUNK,
)


def reciters(backend: Backend) -> list[Reciter]:
    """The parts of a backend whose tokens become text here."""
    return [part for part in servers_of(backend) or [backend] if isinstance(part, Reciter)]


def extras_of(answer: Answer, request: ModelCall, *, captures_tokens: bool) -> dict[str, Any]:
    """The parts of an answer that neither its messages nor its tokens hold: what ended it, fields
    and counts of the backend's own, entries of logprobs that tokens do not tell."""
    choices = answer.choices
    details = answer.usage.details if answer.usage is not None else {}
    extras: dict[str, Any] = {"extra": answer.started.extra, "details": details}
    if any(choice.stop_string for choice in choices):
        extras["stops"] = [choice.stop_string for choice in choices]
    if request.logprobs and (request.top_logprobs or not captures_tokens):
        extras["logprobs"] = [choice.logprob_entries for choice in choices]
    return {name: value for name, value in extras.items() if value}


def created(call: RecordedCall) -> int:
    """When the answer was made, in seconds since the epoch."""
    made = call.span.attributes.get(semconv.CALL_CREATED)
    return made if isinstance(made, int) else int(call.span.start_time)


def whole_attributes(call: RecordedCall) -> Attributes:
    """The attributes of a call that is written again, whole."""
    attributes = {
        name: value for name, value in call.span.attributes.items() if name not in _OF_ITS_OWN
    }
    if attributes.get(semconv.CALL_FLAG) == semconv.GIVEN:
        return attributes
    rollout_id, attempt_id, index = call.name
    return attributes | {
        semconv.CALL_REPLAYED_ROLLOUT: rollout_id,
        semconv.CALL_REPLAYED_ATTEMPT: attempt_id,
        semconv.CALL_REPLAYED_INDEX: index,
        semconv.CALL_CREATED: created(call),
    }


def reference_attributes(whole: Attributes) -> Attributes:
    """The attributes of a call that names the one with its content."""
    named = (*_REFERENCE, semconv.CALL_REPLAYED_ROLLOUT, semconv.CALL_REPLAYED_ATTEMPT)
    kept = (*named, semconv.CALL_REPLAYED_INDEX, semconv.CALL_CREATED)
    reference = {name: whole[name] for name in kept if name in whole}
    return reference | {semconv.CALL_FLAG: semconv.REPLAYED}


async def repeated_events(
    call: RecordedCall, sent: ModelCall, backend: Backend
) -> AsyncGenerator[BackendEvent, None]:
    """The recorded answer as events of the backend."""
    attributes = call.span.attributes
    tokens = call.span.tokens
    extras = mapping(json_of(attributes.get(semconv.CALL_ANSWER)))
    messages = output_messages(attributes)
    speakers = [] if tokens is None else reciters(backend)
    entries = items(extras.get("logprobs"))
    extra = mapping(extras.get("extra"))
    exact = sent.stream or (sent.logprobs and not entries) or not messages
    if tokens is not None and speakers:
        spliced = attributes.get(semconv.RECORDED_SPLICE)
        recital = Recital(tokens, spliced if isinstance(spliced, int) else 0, extra)
        if exact:
            async for event in speakers[0].recite(sent, recital):
                yield event
            return
        for speaker in speakers:
            speaker.prime(sent.session, recital)
    reasons = finish_reasons(attributes)
    stops = items(extras.get("stops"))
    prompt = int32() if tokens is None else tokens.prompt_token_ids
    yield Started(prompt, extra=extra)
    for index, message in enumerate(messages):
        choice = None if tokens is None else tokens.choices[index]
        yield Delta(
            index,
            _delta(message),
            () if choice is None else tuple(choice.token_ids),
            () if choice is None else tuple(choice.logprobs),
            logprob_entries=tuple(items(entries[index])) if entries else (),
        )
        runs = [] if choice is None else [list(run) for run in choice.versions]
        reason: Any = reasons[index] if index < len(reasons) else "stop"
        stop = stops[index] if stops else None
        yield Finished(index, reason, stop_string=stop, versions=runs)
    counts = token_counts(attributes)
    if counts is not None:
        yield Usage(*counts, mapping(extras.get("details")))


def _delta(message: dict[str, Any]) -> dict[str, Any]:
    delta = {name: value for name, value in message.items() if name != "role" and value}
    if "tool_calls" in delta:
        delta["tool_calls"] = [
            {"index": place, **tool} for place, tool in enumerate(delta["tool_calls"])
        ]
    return delta
