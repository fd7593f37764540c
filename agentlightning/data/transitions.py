"""Spans → transitions: what a rollout offers for learning, what was left out, and why.

A transition is one choice of one LLM call of the policy: (prompt ids, response ids, behaviour
logprobs)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from agentlightning import semconv
from agentlightning.data import call_filter
from agentlightning.data.agents import agent_of, agent_pattern, chosen
from agentlightning.data.call_filter import (
    EVERY_CALL,
    CallFilter,
    call_index,
    call_order,
    discarded_calls,
    token_problem,
)
from agentlightning.data.clocks import align_clocks
from agentlightning.data.lineage import Answers, answers_of, first_sampled
from agentlightning.data.rewards import (
    NOT_TRAINED,
    PLAIN,
    RELATIVE,
    GivenRewards,
    RewardSpec,
    given_rewards,
    named_states,
    relative_costs,
)
from agentlightning.data.tool_statuses import ToolStatus, tool_statuses
from agentlightning.errors import ConfigError
from agentlightning.store.sources import CallName
from agentlightning.tracing import dialects
from agentlightning.tracing.dialects import content_text, model_name, output_messages
from agentlightning.tracing.links import Links, read_links
from agentlightning.tracing.steps import Step, read_steps
from agentlightning.types import Rollout, SampledChoice, Span, TokenCapture

if TYPE_CHECKING:
    from agentlightning.data.continuity import Break

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]

Outcome: TypeAlias = Literal[
    "trainable",
    "no spans",
    "no calls",
    "nothing trainable",
    "no reward",
    "failed",
    "cancelled",
    "unfinished",
]


class Transition(msgspec.Struct, frozen=True):
    """One sampled answer of the policy.

    Fields: prompt_ids, response_ids: int32[P] and int32[T]; a sampled EOS is included. logprobs:
        float32[T], under the distribution sampled from. versions: int32[T], the policy version that
        sampled each token. agent: name of the agent that made the call. tools: outcomes of the
        answer's tool calls. reward: r_t, the sum of its intermediate rewards; None without any.
        state: the state named by the agent, as JSON (`named_states`). continues: span id of the
        latest transition with whose prompt and answer its prompt starts."""

    rollout_id: str
    attempt_id: str
    span_id: str
    call_index: int
    choice: int
    model: str
    prompt_ids: IntArray
    response_ids: IntArray
    logprobs: FloatArray
    versions: IntArray
    finish_reason: str
    agent: str | None = None
    tools: tuple[ToolStatus, ...] = ()
    reward: float | None = None
    state: str | None = None
    continues: str | None = None

    @property
    def token_ids(self) -> IntArray:
        """Prompt and response, int32[P + T]."""
        return np.concatenate([self.prompt_ids, self.response_ids])


@dataclass(frozen=True)
class TracedRollout:
    """A finished rollout as learning sees it.

    Fields: reward: R; None if it has none (failed, cancelled or never rewarded). excluded: calls
        that do not train, counted by reason; `left_out` has each call's reason by span id.
        other_agents: names of the agents that were not chosen for training. reward_terms: the terms
        that add up to R, by name. rewards_lost: rewards without a transition or that are not
        numbers, counted by reason. kept: reasons against calls that train anyway, counted. outcome:
        a summary in a word, or how the rollout ended if it did not succeed. clock_skew: seconds by
        which the agent's clock was ahead of the gateway's; None if unknown. breaks: calls that
        should continue an earlier one but do not, if checked (`data/continuity.py`).
        prefix_version: the oldest policy version of the answers that a fork was given again; None
        without any. answers: all answers that the agent received, and what sampled them."""

    rollout: Rollout
    transitions: tuple[Transition, ...]
    reward: float | None
    excluded: Counter[str] = field(default_factory=Counter[str])
    other_agents: frozenset[str] = frozenset()
    reward_terms: Mapping[str, float] = field(default_factory=dict[str, float])
    rewards_lost: Counter[str] = field(default_factory=Counter[str])
    left_out: Mapping[str, str] = field(default_factory=dict[str, str])
    kept: Counter[str] = field(default_factory=Counter[str])
    outcome: Outcome = "trainable"
    clock_skew: float | None = None
    breaks: tuple[Break, ...] = ()
    prefix_version: int | None = None
    answers: Answers = field(default_factory=dict[CallName, CallName])

    @property
    def is_lost_fork(self) -> bool:
        """Whether this is a fork that sampled no answer: it ended before its call, or asked
        something else than its source."""
        forks = self.rollout.source is not None
        return forks and first_sampled(self.rollout, self.answers) is None


def tool_success(rollouts: Iterable[TracedRollout]) -> float | None:
    """The share of tool calls that succeeded, among those with a known outcome; None without
    any."""
    statuses = [
        tool.status for traced in rollouts for call in traced.transitions for tool in call.tools
    ]
    return statuses.count(1) / len(statuses) if statuses else None


def trace_rollout(
    rollout: Rollout,
    spans: Sequence[Span],
    *,
    calls: CallFilter = EVERY_CALL,
    reward: RewardSpec = PLAIN,
) -> TracedRollout:
    """All transitions of the rollout's last attempt, in call order, with its reward.

    Args:
        spans: the rollout's spans, of any attempt, in any order; only the last attempt counts.
        calls: which calls train.
        reward: what R consists of, and which tools failed.

    A rollout that did not succeed has reward None even if a reward span exists: the partial score
    of a crashed agent is not the score of its task."""
    final, clock_skew = align_clocks(_final_attempt(spans))
    steps = read_steps(final, reward.failed_tool)
    given = given_rewards(final, steps)
    found = _sort_calls(final, steps, given, calls, reward.failed_tool)
    succeeded = rollout.status == "succeeded"
    terms = reward.given_terms(rollout.reward, given) if succeeded else {}
    if terms:
        terms |= _added(reward, found.transitions, final)
    outcome: Outcome = "trainable" if terms else "no reward"
    if rollout.status != "succeeded":
        outcome = rollout.status if rollout.status in ("failed", "cancelled") else "unfinished"
    elif not found.transitions:
        outcome = "no calls" if final else "no spans"
        if found.left_out:
            outcome = "nothing trainable"
    untrained = given.of_calls.keys() - {call.span_id for call in found.transitions}
    return TracedRollout(
        rollout=rollout,
        transitions=tuple(found.transitions),
        reward=math.fsum(terms.values()) if terms else None,
        excluded=Counter(found.left_out.values())
        + Counter({call_filter.UNUSED_CHOICE: found.unused}),
        other_agents=frozenset(found.other_agents),
        reward_terms=terms,
        rewards_lost=given.lost + Counter({NOT_TRAINED: len(untrained)}),
        left_out=found.left_out,
        kept=found.kept,
        outcome=outcome,
        clock_skew=clock_skew,
        prefix_version=_prefix_version(final),
        answers=answers_of(final),
    )


def _prefix_version(spans: Sequence[Span]) -> int | None:
    versions = [
        version
        for span in spans
        if span.attributes.get(semconv.CALL_FLAG) == semconv.REPLAYED
        and isinstance(version := span.attributes.get(semconv.CALL_FIRST_VERSION), int)
    ]
    return min(versions, default=None)


def compare_costs(group: Sequence[TracedRollout], reward: RewardSpec) -> list[TracedRollout]:
    """The rollouts of a group with the terms of R that compare their costs, among those with a
    reward."""
    compared = list(group)
    rewarded = [index for index, traced in enumerate(compared) if traced.reward_terms]
    earned = [reward.given_part(compared[index].reward_terms) > 0 for index in rewarded]
    for name in (name for name in RELATIVE if getattr(reward, name)):
        cost = _COSTS[name]
        costs = [sum(map(cost, compared[index].transitions)) for index in rewarded]
        for index, value in zip(rewarded, relative_costs(costs, earned), strict=True):
            terms = {**compared[index].reward_terms, name: getattr(reward, name) * value}
            compared[index] = replace(
                compared[index], reward_terms=terms, reward=math.fsum(terms.values())
            )
    return compared


_COSTS: Final[dict[str, Callable[[Transition], int]]] = {
    "relative_length": lambda call: len(call.response_ids),
    "relative_turns": lambda call: 1,
    "relative_tool_calls": lambda call: len(call.tools),
}


@dataclass
class _SortedCalls:
    """The calls of an attempt that train, and those that do not."""

    transitions: list[Transition] = field(default_factory=list[Transition])
    left_out: dict[str, str] = field(default_factory=dict[str, str])
    kept: Counter[str] = field(default_factory=Counter[str])
    other_agents: set[str] = field(default_factory=set[str])
    unused: int = 0


def _sort_calls(
    spans: Sequence[Span],
    steps: Sequence[Step],
    given: GivenRewards,
    calls: CallFilter,
    failed_tool: str | None,
) -> _SortedCalls:
    found = _SortedCalls()
    names = {step.span.span_id: agent_of(step) for step in steps if step.call is step.span}
    answered = sorted(
        (
            span
            for span in spans
            if span.span_id in names
            and span.attributes.get(semconv.GEN_AI_OPERATION) != "embeddings"
        ),
        key=call_order,
    )
    links = read_links(answered)
    states = named_states(spans, names)
    tools = tool_statuses(steps, links, failed_tool)
    pattern = None if calls.agents is None else agent_pattern(calls.agents)
    indices = {index for span in spans if (index := call_index(span)) is not None}
    incomplete = indices != set(range(len(indices)))
    discarded = discarded_calls(spans)
    trained = set[str]()
    for span in answered:
        agent = names[span.span_id]
        reasons = list(
            _call_reasons(
                span, calls, incomplete=incomplete, discarded=call_index(span) in discarded
            )
        )
        if not chosen(pattern, agent):
            reasons.append(
                call_filter.HOUSEKEEPING if agent.housekeeping else call_filter.OTHER_AGENT
            )
        transition = None
        if span.tokens is not None and span.tokens.choices and all(map(calls.keeps, reasons)):
            transition = _transition(
                span,
                span.tokens,
                agent=agent.name,
                tools=tuple(tools.get(span.span_id, ())),
                reward=given.of_calls.get(span.span_id),
                state=states.get(span.span_id),
                continues=_continued(span, links, trained),
            )
            reasons += _token_reasons(transition, calls)
            if _has_images(span):
                reasons.append(call_filter.HAS_IMAGES)
        against = next((reason for reason in reasons if not calls.keeps(reason)), None)
        if against is None and transition is not None and span.tokens is not None:
            found.transitions.append(transition)
            found.kept.update(reasons)
            found.unused += len(span.tokens.choices) - 1
            trained.add(span.span_id)
        else:
            found.left_out[span.span_id] = against or call_filter.NO_TOKEN_IDS
            if against == call_filter.OTHER_AGENT:
                found.other_agents.add(str(agent))
    return found


def _continued(call: Span, links: Links, trained: Collection[str]) -> str | None:
    """The latest of the trained calls with whose prompt and answer a call's prompt starts."""
    while call.span_id in links and links[call.span_id][1].tokens:
        call = links[call.span_id][0]
        if call.span_id in trained:
            return call.span_id
    return None


def _added(
    spec: RewardSpec, transitions: Sequence[Transition], spans: Sequence[Span]
) -> dict[str, float]:
    """The terms that the spec adds to R. ConfigError if it needs the text of an answer and none was
    recorded."""
    answer = ""
    if spec.answer_format is not None and transitions:
        attributes = next(
            span.attributes for span in spans if span.span_id == transitions[-1].span_id
        )
        messages = output_messages(attributes)
        if not messages:
            raise ConfigError(
                "format_bonus reads the text of answers, which the gateway records with --capture "
                "full"
            )
        answer = content_text(messages[0].get("content"))
    statuses = [tool.status for transition in transitions for tool in transition.tools]
    return spec.terms(
        statuses, [len(transition.response_ids) for transition in transitions], answer
    )


def _final_attempt(spans: Sequence[Span]) -> list[Span]:
    """Spans of the attempt that started last (a retry starts after the attempt it replaces)."""
    if not spans:
        return []
    started: dict[str, float] = {}
    for span in spans:
        started[span.attempt_id] = min(span.start_time, started.get(span.attempt_id, np.inf))
    last = max(started, key=lambda attempt_id: started[attempt_id])
    return [span for span in spans if span.attempt_id == last]


def _call_reasons(
    span: Span, calls: CallFilter, *, incomplete: bool, discarded: bool
) -> Iterator[str]:
    """Reasons against training a call, apart from its tokens."""
    if span.attributes.get(semconv.CALL_TRAINABLE) is False:
        yield call_filter.FROZEN
    if calls.models is not None and model_name(span.attributes) not in calls.models:
        yield call_filter.OTHER_MODEL
    if incomplete:
        yield call_filter.CALL_MISSING
    if discarded:
        yield call_filter.NOT_RECEIVED
    if flag := span.attributes.get(semconv.CALL_FLAG):
        yield str(flag)


def _token_reasons(transition: Transition, calls: CallFilter) -> Iterator[str]:
    if problem := token_problem(
        transition.prompt_ids, transition.response_ids, transition.logprobs
    ):
        yield problem
    if calls.max_prompt_length is not None and len(transition.prompt_ids) > calls.max_prompt_length:
        yield call_filter.LONG_PROMPT
    if (
        calls.max_response_length is not None
        and len(transition.response_ids) > calls.max_response_length
    ):
        yield call_filter.LONG_RESPONSE
    if transition.finish_reason == "length":
        yield call_filter.TRUNCATED


# of the three protocols
_IMAGE_PARTS: Final = ("image", "image_url", "input_image", "computer_screenshot")
# JSON with such a part contains one of these
_IMAGE_MARKS: Final = ('"image', '_image"', '_screenshot"')


def _has_images(call: Span) -> bool:
    """Whether a call's messages contain an image, tool results included."""
    messages = dialects.text_of(call, semconv.GEN_AI_INPUT_MESSAGES) or ""
    if not any(mark in messages for mark in _IMAGE_MARKS):
        return False
    parts: list[Any] = [dialects.json_of(messages)]
    while parts:
        part = parts.pop()
        if dialects.mapping(part).get("type") in _IMAGE_PARTS:
            return True
        inner = [dialects.mapping(part).get(name) for name in ("content", "output")]
        parts += [child for child in (*dialects.items(part), *inner) if child]
    return False


def _transition(span: Span, tokens: TokenCapture, **found: Any) -> Transition:
    # With n > 1 it is unknown which choices the agent used; every SDK example reads the first.
    choice = tokens.choices[0]
    return Transition(
        rollout_id=span.rollout_id,
        attempt_id=span.attempt_id,
        span_id=span.span_id,
        call_index=call_index(span) or 0,
        choice=0,
        model=model_name(span.attributes) or "",
        prompt_ids=np.asarray(tokens.prompt_token_ids),
        response_ids=np.asarray(choice.token_ids),
        logprobs=np.asarray(choice.logprobs),
        versions=_expand(choice),
        finish_reason=choice.finish_reason,
        **found,
    )


def _expand(choice: SampledChoice) -> IntArray:
    """Run-length versions → one per token; ((3, 2), (4, 1)) → [3, 3, 4]. Unknown versions are
    −1."""
    runs = np.array(choice.versions, np.int32).reshape(-1, 2)
    versions = np.repeat(runs[:, 0], runs[:, 1])
    count = len(choice.token_ids)
    return versions if len(versions) == count else np.full(count, -1, np.int32)
