"""Spans → transitions: what one rollout offers to learning, and what was left out and why.

A transition is one choice of one LLM call of the policy: (prompt ids, response ids, behaviour logprobs). This module
knows spans and rewards; it does not know groups, advantages or models.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from agentlightning import semconv
from agentlightning.data.agents import AgentName, agent_of, chosen
from agentlightning.data.rewards import NOT_TRAINED, PLAIN, RewardSpec, given_rewards
from agentlightning.data.tool_calls import ToolStatus, tool_statuses
from agentlightning.errors import ConfigError
from agentlightning.tracing.messages import output_messages, text_of
from agentlightning.tracing.steps import read_steps
from agentlightning.types import Rollout, SampledChoice, Span

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]


# Why a call does not train, beyond what the gateway says of it.
NOT_RECEIVED = "nobody received the answer"
CALL_MISSING = "another call of the attempt was not recorded"
OTHER_AGENT = "other agent"
UNUSED_CHOICE = "unused choice"


@dataclass(frozen=True)
class Transition:
    """One sampled answer of the policy.

    `prompt_ids` int32[P], `response_ids` int32[T] (EOS included where it was sampled), `logprobs` float32[T] under the
    distribution sampled from, `versions` int32[T] the policy version of each sampled token. `agent` is the name of the
    agent that asked, `tools` how the tool calls in the answer went, `reward` the intermediate rewards it was given,
    added up (r_t), None where it was given none."""

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


@dataclass(frozen=True)
class TracedRollout:
    """A finished rollout as learning sees it.

    `reward` is R, or None where the rollout has none (failed, cancelled, or never rewarded): an explicit state that
    the algorithm chooses about. `reward_terms` are the parts it is the sum of, by name (none without a reward), and
    `rewards_lost` counts rewards that came to no transition or are no number, by reason. `excluded` counts calls that
    do not train, by reason, and `left_out` has the reason of each by its span id; `other_agents` are the names of the
    agents that were not chosen to be trained."""

    rollout: Rollout
    transitions: tuple[Transition, ...]
    reward: float | None
    excluded: Counter[str] = field(default_factory=Counter[str])
    other_agents: frozenset[str] = frozenset()
    reward_terms: Mapping[str, float] = field(default_factory=dict[str, float])
    rewards_lost: Counter[str] = field(default_factory=Counter[str])
    left_out: Mapping[str, str] = field(default_factory=dict[str, str])


def trace_rollout(
    rollout: Rollout,
    spans: Sequence[Span],
    *,
    models: Iterable[str] | None = None,
    agents: re.Pattern[str] | None = None,
    reward: RewardSpec = PLAIN,
) -> TracedRollout:
    """All transitions of the rollout's final attempt, in call order, with its reward.

    Args:
        spans: spans of the rollout, of any of its attempts, in any order; only those of the last attempt count.
        models: names of the models being trained; None takes every model marked trainable.
        agents: what the agents being trained are called; None takes all.
        reward: what R is made of.

    A rollout that did not succeed has reward None even where an earlier reward span exists: a crashed agent's partial
    score is not the score of its task."""
    final = _final_attempt(spans)
    calls = sorted((span for span in final if span.tokens is not None), key=_call_order)
    wanted = None if models is None else frozenset(models)
    incomplete = CALL_MISSING if _lacks_a_call(final) else None
    discarded = _discarded(final)
    steps = read_steps(final)
    names = {step.span.span_id: agent_of(step) for step in steps if step.kind == "call"}
    tools, given = tool_statuses(steps), given_rewards(final, steps)
    transitions: list[Transition] = []
    left_out: dict[str, str] = {}
    unused = 0
    other_agents: set[str] = set()
    for span in calls:
        agent = names[span.span_id]
        reason = incomplete or (NOT_RECEIVED if _index(span) in discarded else None) or _why_not(span, wanted)
        if reason is None and agents is not None and not chosen(agents, agent):
            reason = OTHER_AGENT
            other_agents.add(str(agent))
        if reason:
            left_out[span.span_id] = reason
            continue
        assert span.tokens is not None
        # With n > 1 nobody can tell which choices the agent used; the first is what every SDK example reads.
        said = tuple(tools.get(span.span_id, ()))
        earned = given.of_calls.get(span.span_id)
        transitions.append(_transition(span, 0, span.tokens.choices[0], agent, said, earned))
        unused += len(span.tokens.choices) - 1
    lost = given.lost + Counter({NOT_TRAINED: len(given.of_calls.keys() - {one.span_id for one in transitions})})
    base = reward.base_of(given) if rollout.status == "succeeded" else None
    terms = {} if base is None else {reward.base: base} | _added(reward, transitions, final)
    total = math.fsum(terms.values()) if terms else None
    others = frozenset(other_agents)
    excluded = Counter(left_out.values()) + Counter({UNUSED_CHOICE: unused})
    return TracedRollout(rollout, tuple(transitions), total, excluded, others, terms, lost, left_out)


def _added(spec: RewardSpec, transitions: Sequence[Transition], spans: Sequence[Span]) -> dict[str, float]:
    """The terms that the spec adds to R. ConfigError where it reads the text of an answer and none was recorded."""
    answer = ""
    if spec.answer_format is not None and transitions:
        attributes = next(span.attributes for span in spans if span.span_id == transitions[-1].span_id)
        messages = output_messages(attributes)
        if not messages:
            raise ConfigError("format_bonus reads the text of answers, which the gateway records with --capture full")
        answer = text_of(messages[0])
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


def _index(span: Span) -> int | None:
    index = span.attributes.get(semconv.CALL_INDEX)
    return index if isinstance(index, int) else None


def _call_order(span: Span) -> tuple[int, float, int]:
    return _index(span) or 0, span.start_time, span.sequence_id


def _lacks_a_call(spans: Sequence[Span]) -> bool:
    """Calls 0, 1 and 3 without 2 are not what the agent did: nothing of such an attempt trains."""
    indices = {index for span in spans if (index := _index(span)) is not None}
    return any(index not in indices for index in range(len(indices)))


def _discarded(spans: Sequence[Span]) -> set[int]:
    """Indices of calls whose answers nobody received: the client asked again, or had left."""
    named = [span.attributes.get(semconv.CALL_DISCARDS, ()) for span in spans]
    return {index for indices in named if isinstance(indices, Sequence) for index in indices if isinstance(index, int)}


def _why_not(span: Span, wanted: frozenset[str] | None) -> str | None:
    """The reason this call must not train, or None."""
    tokens = span.tokens
    assert tokens is not None
    if wanted is not None and _model(span) not in wanted:
        return "other model"
    if span.attributes.get(semconv.CALL_TRAINABLE) is False:
        return "frozen model"
    flag = span.attributes.get(semconv.CALL_FLAG)
    if flag:
        return str(flag)
    if not tokens.prompt_token_ids:
        return "no prompt ids"
    if not tokens.choices or not tokens.choices[0].token_ids:
        return "no response ids"
    if len(tokens.choices[0].token_ids) != len(tokens.choices[0].logprobs):
        return "ids and logprobs differ in length"
    return None


def _model(span: Span) -> str:
    return str(span.attributes.get(semconv.GEN_AI_RESPONSE_MODEL) or span.attributes.get(semconv.GEN_AI_REQUEST_MODEL))


def _transition(
    span: Span,
    index: int,
    choice: SampledChoice,
    agent: AgentName,
    tools: tuple[ToolStatus, ...],
    reward: float | None,
) -> Transition:
    assert span.tokens is not None
    return Transition(
        rollout_id=span.rollout_id,
        attempt_id=span.attempt_id,
        span_id=span.span_id,
        call_index=_index(span) or 0,
        choice=index,
        model=_model(span),
        prompt_ids=np.asarray(span.tokens.prompt_token_ids, np.int32),
        response_ids=np.asarray(choice.token_ids, np.int32),
        logprobs=np.asarray(choice.logprobs, np.float32),
        versions=_expand(choice),
        finish_reason=choice.finish_reason,
        agent=agent.name,
        tools=tools,
        reward=reward,
    )


def _expand(choice: SampledChoice) -> IntArray:
    """Run-length versions → one per token; ((3, 2), (4, 1)) → [3, 3, 4]. Unknown versions are −1."""
    if sum(count for _, count in choice.versions) != len(choice.token_ids):
        return np.full(len(choice.token_ids), -1, np.int32)
    return np.repeat(
        np.array([version for version, _ in choice.versions], np.int32),
        np.array([count for _, count in choice.versions], np.int64),
    )
