"""Spans → transitions: what one rollout offers to learning, and what was left out and why.

A transition is one choice of one LLM call of the policy: (prompt ids, response ids, behaviour logprobs). This module
knows spans and rewards; it does not know groups, advantages or models.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from agentlightning import semconv
from agentlightning.data.agents import agent_of, agent_pattern, chosen
from agentlightning.data.call_filter import (
    CALL_MISSING,
    EVERY_CALL,
    FROZEN,
    HAS_IMAGES,
    HOUSEKEEPING,
    LONG_PROMPT,
    LONG_RESPONSE,
    NO_TOKEN_IDS,
    NOT_RECEIVED,
    OTHER_AGENT,
    OTHER_MODEL,
    TRUNCATED,
    UNUSED_CHOICE,
    CallFilter,
    token_problem,
)
from agentlightning.data.clocks import align_clocks
from agentlightning.data.conversations import call_index, call_order, discarded_calls
from agentlightning.data.rewards import (
    NOT_TRAINED,
    PLAIN,
    RELATIVE,
    GivenRewards,
    RewardSpec,
    given_rewards,
    relative_costs,
)
from agentlightning.data.states import named_states
from agentlightning.data.tool_calls import ToolStatus, tool_statuses
from agentlightning.errors import ConfigError
from agentlightning.tracing import dialects
from agentlightning.tracing.messages import content_text, output_messages
from agentlightning.tracing.steps import Step, read_steps
from agentlightning.types import Rollout, SampledChoice, Span, TokenCapture

if TYPE_CHECKING:
    from agentlightning.data.continuity import Break

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]

Outcome: TypeAlias = Literal[
    "trainable", "no spans", "no calls", "nothing trainable", "no reward", "failed", "cancelled", "unfinished"
]


class Transition(msgspec.Struct, frozen=True):
    """One sampled answer of the policy.

    `prompt_ids` int32[P], `response_ids` int32[T] (EOS included where it was sampled), `logprobs` float32[T] under the
    distribution sampled from, `versions` int32[T] the policy version of each sampled token. `agent` is the name of the
    agent that asked, `tools` how the tool calls in the answer went, `reward` the intermediate rewards it was given,
    added up (r_t), None where it was given none, `state` the one that the agent had named, as JSON (`data/states.py`).
    """

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


@dataclass(frozen=True)
class TracedRollout:
    """A finished rollout as learning sees it.

    `reward` is R, or None where the rollout has none (failed, cancelled, or never rewarded): an explicit state that
    the algorithm chooses about. `reward_terms` are the parts it is the sum of, by name (none without a reward), and
    `rewards_lost` counts rewards that came to no transition or are no number, by reason. `excluded` counts calls that
    do not train, by reason, and `left_out` has the reason of each by its span id; `kept` counts what speaks against
    calls that train all the same; `other_agents` are the names of the agents that were not chosen to be trained.
    `outcome` says it in a word, or how the rollout ended if it did not succeed. `clock_skew` is by how many seconds the
    agent's clock was ahead of the gateway's, None where nothing tells. `breaks` are the calls that should continue an
    earlier one and do not, where they were looked for (`data/continuity.py`)."""

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


def tool_success(rollouts: Iterable[TracedRollout]) -> float | None:
    """The share of tool calls that worked, of those whose outcome is known; None without any."""
    statuses = [one.status for traced in rollouts for call in traced.transitions for one in call.tools]
    return statuses.count(1) / len(statuses) if statuses else None


def trace_rollout(
    rollout: Rollout, spans: Sequence[Span], *, calls: CallFilter = EVERY_CALL, reward: RewardSpec = PLAIN
) -> TracedRollout:
    """All transitions of the rollout's final attempt, in call order, with its reward.

    Args:
        spans: spans of the rollout, of any of its attempts, in any order; only those of the last attempt count.
        calls: which calls train.
        reward: what R is made of, and which tools failed.

    A rollout that did not succeed has reward None even where an earlier reward span exists: a crashed agent's partial
    score is not the score of its task."""
    final, clock_skew = align_clocks(_final_attempt(spans))
    steps = read_steps(final, reward.failed_tool)
    given = given_rewards(final, steps)
    sorted_calls = _sort_calls(final, steps, given, calls, tool_statuses(steps, reward.failed_tool))
    transitions = sorted_calls.transitions
    lost = given.lost + Counter({NOT_TRAINED: len(given.of_calls.keys() - {one.span_id for one in transitions})})
    terms = reward.given_terms(given) if rollout.status == "succeeded" else {}
    if terms:
        terms |= _added(reward, transitions, final)
    return TracedRollout(
        rollout=rollout,
        transitions=tuple(transitions),
        reward=math.fsum(terms.values()) if terms else None,
        excluded=Counter(sorted_calls.left_out.values()) + Counter({UNUSED_CHOICE: sorted_calls.unused}),
        other_agents=frozenset(sorted_calls.other_agents),
        reward_terms=terms,
        rewards_lost=lost,
        left_out=sorted_calls.left_out,
        kept=sorted_calls.kept,
        outcome=_outcome(rollout, final, sorted_calls, rewarded=bool(terms)),
        clock_skew=clock_skew,
    )


def compare_costs(group: Sequence[TracedRollout], reward: RewardSpec) -> list[TracedRollout]:
    """The rollouts of a group with the terms of R that compare them: what each cost beside the others with a reward."""
    names = [name for name in RELATIVE if getattr(reward, name)]
    if not names:
        return list(group)
    rewarded = [one for one in group if one.reward_terms]
    earned = [reward.given_part(one.reward_terms) > 0 for one in rewarded]
    terms = [dict(one.reward_terms) for one in rewarded]
    for name in names:
        costs = [_cost(name, one.transitions) for one in rewarded]
        for own, value in zip(terms, relative_costs(costs, earned), strict=True):
            own[name] = getattr(reward, name) * value
    compared = iter(terms)
    return [
        replace(one, reward_terms=(own := next(compared)), reward=math.fsum(own.values())) if one.reward_terms else one
        for one in group
    ]


def _cost(term: str, transitions: Sequence[Transition]) -> int:
    if term == "relative_turns":
        return len(transitions)
    return sum(len(one.tools if term == "relative_tool_calls" else one.response_ids) for one in transitions)


@dataclass
class _SortedCalls:
    """The calls of an attempt: those that train and those that do not."""

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
    tools: Mapping[str, Sequence[ToolStatus]],
) -> _SortedCalls:
    found = _SortedCalls()
    names = {step.span.span_id: agent_of(step) for step in steps if step.call is step.span}
    states = named_states(spans, names)
    pattern = None if calls.agents is None else agent_pattern(calls.agents)
    incomplete, discarded = _lacks_a_call(spans), discarded_calls(spans)
    before, images = "", False  # the messages of the call before, and whether one has an image
    for span in sorted((one for one in spans if one.span_id in names and _samples(one)), key=call_order):
        agent = names[span.span_id]
        reasons = list(_call_reasons(span, calls, incomplete=incomplete, discarded=call_index(span) in discarded))
        if not chosen(pattern, agent):
            reasons.append(HOUSEKEEPING if agent.housekeeping else OTHER_AGENT)
        transition = None
        if span.tokens is not None and all(map(calls.keeps, reasons)):
            said, earned = tuple(tools.get(span.span_id, ())), given.of_calls.get(span.span_id)
            transition = _transition(span, span.tokens, agent.name, said, earned, states.get(span.span_id))
            reasons += _token_reasons(transition, calls)
            messages = dialects.text_of(span, semconv.GEN_AI_INPUT_MESSAGES) or ""
            goes_on = messages.startswith(before.removesuffix("]"))
            images = (goes_on and images) or has_images(messages, len(before) if goes_on else 0)
            before = messages
            if images:
                reasons.append(HAS_IMAGES)
        against = next((reason for reason in reasons if not calls.keeps(reason)), None)
        if against is None and transition is not None and span.tokens is not None:
            found.transitions.append(transition)
            found.kept.update(reasons)
            found.unused += len(span.tokens.choices) - 1
        else:
            found.left_out[span.span_id] = against or NO_TOKEN_IDS
            if against == OTHER_AGENT:
                found.other_agents.add(str(agent))
    return found


def _samples(span: Span) -> bool:
    """Whether the call asks a model for an answer, as one for embeddings does not."""
    return span.attributes.get(semconv.GEN_AI_OPERATION) != "embeddings"


def _outcome(rollout: Rollout, spans: Sequence[Span], calls: _SortedCalls, *, rewarded: bool) -> Outcome:
    if rollout.status != "succeeded":
        return rollout.status if rollout.status in ("failed", "cancelled") else "unfinished"
    if calls.transitions:
        return "trainable" if rewarded else "no reward"
    if calls.left_out:
        return "nothing trainable"
    return "no calls" if spans else "no spans"


def _added(spec: RewardSpec, transitions: Sequence[Transition], spans: Sequence[Span]) -> dict[str, float]:
    """The terms that the spec adds to R. ConfigError where it reads the text of an answer and none was recorded."""
    answer = ""
    if spec.answer_format is not None and transitions:
        attributes = next(span.attributes for span in spans if span.span_id == transitions[-1].span_id)
        messages = output_messages(attributes)
        if not messages:
            raise ConfigError("format_bonus reads the text of answers, which the gateway records with --capture full")
        answer = content_text(messages[0].get("content"))
    statuses = [tool.status for transition in transitions for tool in transition.tools]
    return spec.terms(statuses, [len(transition.response_ids) for transition in transitions], answer)


def _final_attempt(spans: Sequence[Span]) -> list[Span]:
    """Spans of the attempt that started last (a retry starts after the attempt it replaces)."""
    if not spans:
        return []
    started: dict[str, float] = {}
    for span in spans:
        started[span.attempt_id] = min(span.start_time, started.get(span.attempt_id, np.inf))
    last = max(started, key=lambda attempt_id: started[attempt_id])
    return [span for span in spans if span.attempt_id == last]


def _lacks_a_call(spans: Sequence[Span]) -> bool:
    """Calls 0, 1 and 3 without 2 are not what the agent did: nothing of such an attempt trains."""
    indices = {index for span in spans if (index := call_index(span)) is not None}
    return any(index not in indices for index in range(len(indices)))


def _call_reasons(span: Span, calls: CallFilter, *, incomplete: bool, discarded: bool) -> Iterator[str]:
    """What speaks against training a call, whatever its tokens are."""
    if span.attributes.get(semconv.CALL_TRAINABLE) is False:
        yield FROZEN
    if calls.models is not None and _model(span) not in calls.models:
        yield OTHER_MODEL
    if incomplete:
        yield CALL_MISSING
    if discarded:
        yield NOT_RECEIVED
    if flag := span.attributes.get(semconv.CALL_FLAG):
        yield str(flag)


def _token_reasons(transition: Transition, calls: CallFilter) -> Iterator[str]:
    if problem := token_problem(transition.prompt_ids, transition.response_ids, transition.logprobs):
        yield problem
    if calls.max_prompt_length is not None and len(transition.prompt_ids) > calls.max_prompt_length:
        yield LONG_PROMPT
    if calls.max_response_length is not None and len(transition.response_ids) > calls.max_response_length:
        yield LONG_RESPONSE
    if transition.finish_reason == "length":
        yield TRUNCATED


_IMAGE_PARTS: Final = ("image", "image_url", "input_image", "computer_screenshot")  # of the three protocols
_IMAGE_MARKS: Final = ('"image', '_image"', '_screenshot"')  # a text with such a part holds one of these


def has_images(messages: str, after: int = 0) -> bool:
    """Whether a request's messages (JSON) have a part that is an image, also in the results of tools. Up to `after`
    there is none."""
    if not any(messages.find(mark, after) >= 0 for mark in _IMAGE_MARKS):
        return False
    parts: list[Any] = [dialects.json_of(messages)]
    while parts:
        part = parts.pop()
        if dialects.mapping(part).get("type") in _IMAGE_PARTS:
            return True
        inner = [dialects.mapping(part).get(name) for name in ("content", "output")]
        parts += [one for one in (*dialects.items(part), *inner) if one]
    return False


def _model(span: Span) -> str:
    return str(span.attributes.get(semconv.GEN_AI_RESPONSE_MODEL) or span.attributes.get(semconv.GEN_AI_REQUEST_MODEL))


def _transition(
    span: Span,
    tokens: TokenCapture,
    agent: str | None,
    tools: tuple[ToolStatus, ...],
    reward: float | None,
    state: str | None,
) -> Transition:
    # With n > 1 nobody can tell which choices the agent used; the first is what every SDK example reads.
    choice = tokens.choices[0] if tokens.choices else SampledChoice(token_ids=(), logprobs=(), finish_reason="abort")
    return Transition(
        rollout_id=span.rollout_id,
        attempt_id=span.attempt_id,
        span_id=span.span_id,
        call_index=call_index(span) or 0,
        choice=0,
        model=_model(span),
        prompt_ids=np.asarray(tokens.prompt_token_ids, np.int32),
        response_ids=np.asarray(choice.token_ids, np.int32),
        logprobs=np.asarray(choice.logprobs, np.float32),
        versions=_expand(choice),
        finish_reason=choice.finish_reason,
        agent=agent,
        tools=tools,
        reward=reward,
        state=state,
    )


def _expand(choice: SampledChoice) -> IntArray:
    """Run-length versions → one per token; ((3, 2), (4, 1)) → [3, 3, 4]. Unknown versions are −1."""
    if not choice.versions or sum(count for _, count in choice.versions) != len(choice.token_ids):
        return np.full(len(choice.token_ids), -1, np.int32)
    if len(choice.versions) == 1:
        return np.full(len(choice.token_ids), choice.versions[0][0], np.int32)
    versions, counts = zip(*choice.versions, strict=True)
    return np.repeat(np.array(versions, np.int32), counts)
