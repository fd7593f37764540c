"""Lists of rollouts, and single ones: attempts, steps, conversations, rewards and logs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any, Final

import msgspec

from agentlightning import semconv
from agentlightning.data.agents import agent_of
from agentlightning.data.call_filter import call_index
from agentlightning.data.conversations import Message, conversations, read_calls
from agentlightning.data.recordings import Training
from agentlightning.data.transitions import trace_rollout
from agentlightning.store.base import LightningStore
from agentlightning.tracing.dialects import finish_reasons, model_name, token_counts
from agentlightning.tracing.rewards import (
    get_rewards_from_span,
    is_final_reward,
    is_reward_span,
)
from agentlightning.tracing.scores import COMMENT, SCORED_BY
from agentlightning.tracing.steps import Step, read_steps
from agentlightning.tracing.tree import (
    Timeline,
    arranged,
    own_answer,
    refusal_of,
    timeline,
    totals,
    traceback_of,
)
from agentlightning.types import Attempt, Condition, Order, Rollout, Span

_FORKS: Final = 200  # of a rollout that are shown
NEWEST_FIRST: Final = (Order(field="number", descending=True),)
_AT_ONCE: Final = 8  # rollouts of a list whose spans are in memory at once


class RolloutRow(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout and the results of its last attempt; `error` is why that failed."""

    rollout: Rollout
    reward: float | None
    error: str | None
    calls: int
    tokens_read: int
    tokens_written: int
    agents: list[str]
    attempts: int


class RolloutList(msgspec.Struct, frozen=True, kw_only=True):
    items: list[RolloutRow]
    total: int | None
    next_cursor: str | None


async def rows_of(store: LightningStore, rollouts: Sequence[Rollout]) -> list[RolloutRow]:
    """The rows of rollouts, read from their last attempts."""

    few = asyncio.Semaphore(_AT_ONCE)

    async def read(rollout: Rollout) -> RolloutRow:
        async with few:
            attempt = await store.get_latest_attempt(rollout.rollout_id)
            spans = (
                []
                if attempt is None
                else await store.query_spans(rollout.rollout_id, attempt.attempt_id)
            )
            return await asyncio.to_thread(summarise_rollout, rollout, attempt, spans)

    return await asyncio.gather(*map(read, rollouts))


def summarise_rollout(
    rollout: Rollout, attempt: Attempt | None, spans: Sequence[Span]
) -> RolloutRow:
    """The row of a rollout, from its last attempt and that attempt's spans."""
    steps = read_steps(spans)
    took = totals(steps)
    names = (agent_of(step).name for step in steps if step.kind == "call")
    return RolloutRow(
        rollout=rollout,
        reward=rollout.reward,
        error=rollout.error,
        calls=took.calls,
        tokens_read=took.tokens_read,
        tokens_written=took.tokens_written,
        agents=list(dict.fromkeys(name for name in names if name)),
        attempts=0 if attempt is None else attempt.sequence_id,
    )


# --- one of them ----------------------------------------------------------------------------------


class StepView(msgspec.Struct, frozen=True, kw_only=True):
    """A step in depth-first order, below the step at `parent`. Output to a stream has the kind
    `log`."""

    span_id: str
    parent: int | None
    depth: int
    kind: str
    name: str
    agent: str | None
    start_time: float
    end_time: float
    failed: bool
    problem: str | None
    arguments: str | None
    result: str | None
    tokens_read: int | None
    tokens_written: int | None
    finish_reason: str | None
    reward: float | None
    time_to_first_token: float | None
    call_index: int | None


class CallView(msgspec.Struct, frozen=True, kw_only=True):
    """A call of a conversation: its messages beyond those of the previous call, and its answer."""

    span_id: str
    call_index: int | None
    model: str | None
    new_messages: list[Message]
    answer: Message
    tools: list[dict[str, Any]]
    left_out: str | None


class ConversationView(msgspec.Struct, frozen=True, kw_only=True):
    agent: str | None
    calls: list[CallView]


class RewardView(msgspec.Struct, frozen=True, kw_only=True):
    span_id: str
    time: float
    final: bool
    posted: bool
    by: str | None
    comment: str | None
    dimensions: list[dict[str, Any]]


class ForkView(msgspec.Struct, frozen=True, kw_only=True):
    """A fork, and what it answered at the call where it left its source."""

    rollout_id: str
    status: str
    reward: float | None
    answer: str | None
    error: str | None


class Branch(msgspec.Struct, frozen=True, kw_only=True):
    """The forks at call `at`; the mean is over those that were rewarded."""

    at: int
    mean_reward: float | None
    forks: list[ForkView]


class RolloutView(msgspec.Struct, frozen=True, kw_only=True):
    """`shown` is the number of the attempt that the fields after it describe."""

    row: RolloutRow
    attempts: list[Attempt]
    shown: int | None
    timeline: Timeline | None
    steps: list[StepView]
    conversations: list[ConversationView]
    rewards: list[RewardView]
    traceback: str | None


def rollout_view(
    row: RolloutRow,
    attempts: Sequence[Attempt],
    shown: int | None,
    spans: Sequence[Span],
    training: Training,
) -> RolloutView:
    """`spans` are those of the attempt numbered `shown`."""
    rollout = row.rollout
    traced = trace_rollout(rollout, spans, calls=training.calls, reward=training.reward)
    steps = read_steps(
        [span for span in spans if span.name != semconv.UNDELIVERED], training.reward.failed_tool
    )
    return RolloutView(
        row=row,
        attempts=list(attempts),
        shown=shown,
        timeline=timeline(attempts[shown - 1], steps, time.time()) if shown else None,
        steps=list(_depth_first(steps, spans)),
        conversations=_conversations(steps, spans, traced.left_out),
        rewards=[
            _reward(span) for span in spans if is_reward_span(span) or COMMENT in span.attributes
        ],
        traceback=traceback_of(spans),
    )


async def branches_of(store: LightningStore, rollout_id: str) -> list[Branch]:
    """The forks of a rollout, newest first, by the call where they left it."""
    page = await store.page_rollouts(
        Condition("source_id", "eq", rollout_id), NEWEST_FIRST, limit=_FORKS
    )
    few = asyncio.Semaphore(_AT_ONCE)

    async def read(fork: Rollout) -> ForkView:
        async with few:
            spans = await store.query_spans(fork.rollout_id, "latest") if fork.end_time else []
        return ForkView(
            rollout_id=fork.rollout_id,
            status=fork.status,
            reward=fork.reward,
            answer=own_answer(spans),
            error=refusal_of(spans) or fork.error,
        )

    views = await asyncio.gather(*map(read, page.items))
    by_call: dict[int, list[ForkView]] = {}
    for fork, view in zip(page.items, views, strict=True):
        assert fork.source is not None
        by_call.setdefault(fork.source.at, []).append(view)
    made: list[Branch] = []
    for at, forks in sorted(by_call.items()):
        rewards = [fork.reward for fork in forks if fork.reward is not None]
        mean = fmean(rewards) if rewards else None
        made.append(Branch(at=at, mean_reward=mean, forks=forks))
    return made


def _depth_first(steps: Sequence[Step], spans: Sequence[Span]) -> Iterator[StepView]:
    placed = arranged(steps, spans)
    below: dict[int | None, list[int]] = {}
    for place, (_, above) in enumerate(placed):
        below.setdefault(above, []).append(place)
    waiting: list[tuple[int, int | None, int]] = [
        (place, None, 0) for place in reversed(below.get(None, []))
    ]
    number = 0
    while waiting:
        place, parent, depth = waiting.pop()
        yield _step(placed[place][0], parent, depth)
        waiting += [(inner, number, depth + 1) for inner in reversed(below.get(place, []))]
        number += 1


_KINDS: Final = {semconv.EXCEPTION: "error", semconv.LOG: "log"}
_NAMES: Final = {"error": semconv.EXCEPTION_TYPE, "log": semconv.LOG_STREAM}


def _step(step: Step, parent: int | None, depth: int) -> StepView:
    span = step.span
    call = (step.call or span) if step.kind == "call" else None
    counts = token_counts(call.attributes) if call else None
    rewards = get_rewards_from_span(span)
    kind = "reward" if rewards else _KINDS.get(span.name, step.kind)
    raised = [event.attributes for event in span.events if event.name == "exception"]
    message = next(
        (attributes.get(semconv.EXCEPTION_MESSAGE) for attributes in [*raised, span.attributes]),
        None,
    )
    problem = span.status.description or (None if message is None else str(message))
    return StepView(
        span_id=call.span_id if call else span.span_id,
        parent=parent,
        depth=depth,
        kind=kind,
        name=rewards[0].name
        if rewards
        else str(span.attributes.get(_NAMES.get(kind, ""), step.name)),
        agent=step.agent,
        start_time=span.start_time,
        end_time=span.end_time,
        failed=step.failed or kind == "error",
        problem=problem if step.failed or kind == "error" else None,
        arguments=step.arguments,
        result=str(span.attributes.get(semconv.LOG_TEXT, "")) if kind == "log" else step.result,
        tokens_read=counts[0] if counts else None,
        tokens_written=counts[1] if counts else None,
        finish_reason=next(iter(finish_reasons(call.attributes)), None) if call else None,
        reward=rewards[0].value if rewards else None,
        time_to_first_token=_number(call, semconv.GEN_AI_TIME_TO_FIRST_CHUNK) if call else None,
        call_index=call_index(call) if call else None,
    )


def _number(span: Span, name: str) -> float | None:
    return float(value) if isinstance(value := span.attributes.get(name), int | float) else None


def _conversations(
    steps: Sequence[Step], spans: Sequence[Span], left_out: Any
) -> list[ConversationView]:
    agents = {step.span.span_id: agent_of(step).name for step in steps if step.kind == "call"}
    found: list[ConversationView] = []
    for chain in conversations(read_calls(spans)[0]):
        calls: list[CallView] = []
        known = 0
        tools = None
        for call in chain:
            calls.append(
                CallView(
                    span_id=call.span.span_id,
                    call_index=call_index(call.span),
                    model=model_name(call.span.attributes),
                    new_messages=call.messages[known:],
                    answer=call.answer,
                    tools=call.tools if call.tools != tools else [],
                    left_out=left_out.get(call.span.span_id),
                )
            )
            known = len(call.messages) + 1
            tools = call.tools
        found.append(ConversationView(agent=agents.get(chain[0].span.span_id), calls=calls))
    return found


def _reward(span: Span) -> RewardView:
    by, comment = (span.attributes.get(name) for name in (SCORED_BY, COMMENT))
    return RewardView(
        span_id=span.span_id,
        time=span.start_time,
        final=is_final_reward(span),
        posted=span.attributes.get(semconv.REWARD_POSTED) is True,
        by=None if by is None else str(by),
        comment=None if comment is None else str(comment),
        dimensions=[reward._asdict() for reward in get_rewards_from_span(span)],
    )
