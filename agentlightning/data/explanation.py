"""One rollout as learning sees it: its calls, how they go on from one another and where not, and what they cost.

A pure reading of a traced rollout, in a form that is printed or written as JSON. Knows no stores and no terminals.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from agentlightning.data.agents import agent_of
from agentlightning.data.continuity import Break, Continuity, continuity
from agentlightning.data.conversations import call_index
from agentlightning.data.forest import prefix_order, shared_length
from agentlightning.data.sequences import CreditedTransition, Level, build_sequences
from agentlightning.data.transitions import IntArray, TracedRollout, Transition
from agentlightning.tracing.messages import model_name, token_counts
from agentlightning.tracing.steps import read_steps
from agentlightning.types import Rollout, Span

if TYPE_CHECKING:
    from agentlightning.data.drift_kinds import Classifier

_LEVELS: Final[tuple[Level, ...]] = ("transition", "trajectory", "tree")


class Shared(msgspec.Struct, frozen=True):
    """The longest beginning of a prompt that an earlier call holds."""

    tokens: int
    call_index: int


class ExplainedCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call of the final attempt. Of one that does not train, `left_out` says why, and what is only known of those
    that do is None. `versions` are the policy versions of its first and last token, `tools` how each went (±1)."""

    call_index: int
    agent: str | None
    model: str | None
    prompt_tokens: int
    sampled_tokens: int
    left_out: str | None = None
    shared: Shared | None = None
    continues: int | None = None
    conversation: int | None = None
    versions: tuple[int, int] | None = None
    finish_reason: str | None = None
    reward: float | None = None
    tools: tuple[tuple[str, int], ...] = ()


class LevelSize(msgspec.Struct, frozen=True):
    """What training the rollout takes at a level; `saved` is the share of the tokens of level `transition`."""

    level: Level
    sequences: int
    tokens: int
    saved: float


class ExplainedBreak(msgspec.Struct, frozen=True, kw_only=True):
    """A break, what can be done about it, and the texts of its tokens where a tokenizer was given."""

    found: Break
    suggestion: str
    before: tuple[str, ...] | None = None
    recorded: tuple[str, ...] | None = None
    anew: tuple[str, ...] | None = None


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    rollout: Rollout
    outcome: str
    reward: float | None
    reward_terms: dict[str, float]
    rewards_lost: dict[str, int]
    calls: tuple[ExplainedCall, ...]
    levels: tuple[LevelSize, ...]
    breaks: tuple[ExplainedBreak, ...]


def explain_rollout(traced: TracedRollout, spans: Sequence[Span], classifier: Classifier | None = None) -> Explanation:
    """What `trace_rollout` made of these spans, explained; `classifier` knows the tokenizer."""
    read = continuity(traced.transitions, spans, classifier)
    calls = [*_trained(traced.transitions, read), *_left_out(traced, spans)]
    return Explanation(
        rollout=traced.rollout,
        outcome=traced.outcome,
        reward=traced.reward,
        reward_terms=dict(traced.reward_terms),
        rewards_lost=dict(traced.rewards_lost),
        calls=tuple(sorted(calls, key=lambda call: call.call_index)),
        levels=tuple(_sizes(traced.transitions)) if traced.transitions else (),
        breaks=tuple(explain_break(found, classifier) for found in read.breaks),
    )


def _trained(transitions: Sequence[Transition], read: Continuity) -> Iterable[ExplainedCall]:
    earlier: list[tuple[IntArray, int]] = []
    for one, continues, conversation in zip(transitions, read.continues, read.conversations, strict=True):
        shared = [Shared(shared_length(tokens, one.prompt_ids), index) for tokens, index in earlier]
        known = one.versions[one.versions >= 0]
        yield ExplainedCall(
            call_index=one.call_index,
            agent=one.agent,
            model=one.model,
            prompt_tokens=len(one.prompt_ids),
            sampled_tokens=len(one.response_ids),
            shared=max(shared, key=lambda most: (most.tokens, most.call_index), default=None),
            continues=None if continues is None else transitions[continues].call_index,
            conversation=conversation,
            versions=(int(known[0]), int(known[-1])) if len(known) else None,
            finish_reason=one.finish_reason,
            reward=one.reward,
            tools=tuple((tool.tool, tool.status) for tool in one.tools),
        )
        earlier.append((np.concatenate([one.prompt_ids, one.response_ids]), one.call_index))


def _left_out(traced: TracedRollout, spans: Sequence[Span]) -> Iterable[ExplainedCall]:
    attempt_id = next((span.attempt_id for span in spans if span.span_id in traced.left_out), None)
    for step in read_steps([span for span in spans if span.attempt_id == attempt_id]):
        span = step.span
        if span.span_id not in traced.left_out:
            continue
        read, written = token_counts(span.attributes) or (0, 0)
        if span.tokens is not None:
            read = len(span.tokens.prompt_token_ids)
            written = sum(len(choice.token_ids) for choice in span.tokens.choices)
        yield ExplainedCall(
            call_index=call_index(span) or 0,
            agent=agent_of(step).name,
            model=model_name(span.attributes),
            prompt_tokens=read,
            sampled_tokens=written,
            left_out=traced.left_out[span.span_id],
        )


def _sizes(transitions: Sequence[Transition]) -> Iterable[LevelSize]:
    credited = [CreditedTransition(one, np.zeros(len(one.response_ids), np.float32)) for one in transitions]
    alone = sum(len(one.prompt_ids) + len(one.response_ids) for one in transitions)
    for level in _LEVELS:
        rows = [sequence.token_ids for sequence in build_sequences(credited, level)]
        shared = int(prefix_order(rows)[1].sum()) if level == "tree" else 0
        tokens = sum(map(len, rows)) - shared
        yield LevelSize(level, len(rows), tokens, 1 - tokens / alone)


def explain_break(found: Break, classifier: Classifier | None) -> ExplainedBreak:
    """A break with what can be done about it, and, with a classifier, the texts of its tokens."""
    if classifier is None:
        return ExplainedBreak(found=found, suggestion=found.suggestion)
    before, recorded, anew = (classifier.shown(ids) for ids in (found.before, found.recorded, found.found))
    return ExplainedBreak(found=found, suggestion=found.suggestion, before=before, recorded=recorded, anew=anew)
