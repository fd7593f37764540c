"""Calls that should go on from an earlier one, token for token, and do not.

    (1, 2) + (7, 8), then (1, 2, 9, 3, 4), with the same answer in its messages  →  a break at 2

The link of a call (`tracing.links`) says which call it was meant to go on from; here is where their
tokens differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from agentlightning import semconv
from agentlightning.data.call_filter import call_order
from agentlightning.data.forest import shared_length
from agentlightning.data.transitions import Transition
from agentlightning.tracing.dialects import input_messages, is_gateway_call
from agentlightning.tracing.links import read_links
from agentlightning.types import Attributes, Link, Span

BreakKind: TypeAlias = Literal["retokenised", "edited history", "tools changed", "unknown"]

SUGGESTIONS: Final[Mapping[BreakKind, str]] = {
    "retokenised": (
        "The text is the same, its tokens are not: serve the policy where token ids go in (the "
        "embedded engine, SGLang), use a chat template that keeps earlier answers whole, or train "
        "at level 'tree'."
    ),
    "edited history": (
        "Send earlier messages back as they were, with what is new at the end; cut the history "
        "rarely, or train at level 'tree'."
    ),
    "tools changed": "Offer the same tools, in the same order, at each call of a conversation.",
    "unknown": "Record messages (--capture full): without them only tokens tell.",
}
"""What you can do about each kind of break."""

_BEFORE: Final = 6  # tokens shown of a break
_AFTER: Final = 12


@dataclass(frozen=True)
class Break:
    """A call whose prompt should start with the prompt and answer of call `earlier`, but differs
    from token `position` on, `inside` that prompt or answer. Calls are identified by their index in
    the attempt. `before` are the ids just before that position; `recorded` and `found` are the
    earlier and the new ids from there on."""

    agent: str | None
    call_index: int
    earlier: int
    position: int
    inside: Literal["prompt", "answer"]
    kind: BreakKind
    before: tuple[int, ...]
    recorded: tuple[int, ...]
    found: tuple[int, ...]

    @property
    def suggestion(self) -> str:
        return SUGGESTIONS[self.kind]


def find_breaks(transitions: Sequence[Transition], spans: Sequence[Span]) -> tuple[Break, ...]:
    """The breaks of one attempt's transitions, in their order. `spans` are the rollout's, in any
    order."""
    attempts = {transition.attempt_id for transition in transitions}
    calls = sorted(
        (span for span in spans if span.attempt_id in attempts and is_gateway_call(span)),
        key=call_order,
    )
    links = read_links(calls)
    by_span = {transition.span_id: transition for transition in transitions}
    attributes = {span.span_id: span.attributes for span in calls}
    breaks: list[Break] = []
    for call in transitions:
        span, link = links.get(call.span_id, (None, None))
        earlier = None if span is None else by_span.get(span.span_id)
        if link is None or link.tokens is not False or earlier is None:
            continue
        if (call.agent, call.model) == (earlier.agent, earlier.model):
            breaks.append(
                _break(call, earlier, link, attributes[call.span_id], attributes[earlier.span_id])
            )
    return tuple(breaks)


def _break(
    call: Transition, earlier: Transition, link: Link, later: Attributes, before: Attributes
) -> Break:
    tokens = earlier.token_ids
    position = shared_length(tokens, call.prompt_ids)
    inside = "prompt" if position < len(earlier.prompt_ids) else "answer"
    kind = _kind(link, later, before)
    if kind != "edited history" and inside == "prompt":
        changed = later.get(semconv.GEN_AI_TOOL_DEFINITIONS) != before.get(
            semconv.GEN_AI_TOOL_DEFINITIONS
        )
        kind = "tools changed" if changed else kind
    return Break(
        agent=call.agent,
        call_index=call.call_index,
        earlier=earlier.call_index,
        position=position,
        inside=inside,
        kind=kind,
        before=tuple(call.prompt_ids[max(0, position - _BEFORE) : position].tolist()),
        recorded=tuple(tokens[position : position + _AFTER].tolist()),
        found=tuple(call.prompt_ids[position : position + _AFTER].tolist()),
    )


def _kind(link: Link, later: Attributes, before: Attributes) -> BreakKind:
    if semconv.CALL_PROMPT in later:
        return "retokenised"
    messages = input_messages(before)
    if not messages or semconv.GEN_AI_INPUT_MESSAGES not in later:
        return "unknown"
    return "retokenised" if link.messages > len(messages) else "edited history"
