"""0.3's adapters: the spans of one rollout as triplets or conversations."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from agentlightning import semconv
from agentlightning.data.rewards import ancestors
from agentlightning.errors import ConfigError, InvalidError
from agentlightning.tracing.dialects import input_messages, output_messages
from agentlightning.tracing.rewards import get_reward_value, is_reward_span
from agentlightning.types import Attributes, Noun, Rollout, Span

if TYPE_CHECKING:
    from agentlightning.algorithm.base import Algorithm
    from agentlightning.data.transitions import Transition

Source = TypeVar("Source")
Target = TypeVar("Target")


class Triplet(Noun, frozen=True, kw_only=True):
    """A transition of 0.3: prompt, response and reward of one LLM call."""

    prompt: Any
    response: Any
    reward: float | None = None
    metadata: dict[str, Any] = {}  # noqa: RUF012 - msgspec copies it


class Adapter(Generic[Source, Target]):
    """Converts data. Derive from it and write `adapt`; instances are callable."""

    def adapt(self, source: Source, /) -> Target:
        raise NotImplementedError(
            f"{type(self).__name__} has no method adapt(source), which makes its result"
        )

    def __call__(self, source: Source, /) -> Target:
        return self.adapt(source)


class TraceAdapter(Adapter[Sequence[Span], Target], Generic[Target]):
    """Converts the spans of one rollout."""


class TraceToTripletBase(TraceAdapter[list[Triplet]]):
    """Converts the spans of one rollout into triplets."""


class TracerTraceToTriplet(TraceToTripletBase):
    """A triplet for each trainable call of the final attempt, in order.

    `agent_match` is a case-sensitive regular expression for the agent's name. Each reward, in order
    of time, goes to the last ended call that has none yet. Calls inside a reward's own span are
    left out."""

    def __init__(self, agent_match: str | None = None) -> None:
        self.agent_match = agent_match
        try:
            self._agents = re.compile(agent_match or "")
        except re.error as error:
            raise ConfigError(
                f"agent_match is {agent_match!r}, which is no regular expression: {error}"
            ) from None

    def adapt(self, source: Sequence[Span], /) -> list[Triplet]:
        """InvalidError if the spans are of several rollouts."""
        above = {span.span_id: span.parent_id for span in source}
        rewarding = {span.span_id for span in source if _rewards(span)}
        found = [
            (call, transition)
            for call, transition in _trained(source)
            if (
                self.agent_match is None
                or (transition.agent is not None and self._agents.search(transition.agent))
            )
            and rewarding.isdisjoint(ancestors(call, above))
        ]
        calls = sorted(
            ((call.end_time, call) for call, _ in found), key=lambda pair: pair[1].start_time
        )
        rewards = [(span.start_time, span) for span in source if is_reward_span(span)]
        matched = _matched(calls, sorted(rewards, key=lambda pair: (pair[0], pair[1].sequence_id)))
        return [
            _triplet(call.attributes, transition, matched.get(call.span_id))
            for call, transition in found
        ]


class LlmProxyTraceToTriplet(TraceToTripletBase):
    """A triplet for each trainable call of the final attempt, with token ids and the answer's id
    only.

    Each reward goes to the last call stored before it that has none yet."""

    def adapt(self, source: Sequence[Span], /) -> list[Triplet]:
        """InvalidError if the spans are of several rollouts."""
        found = sorted(_trained(source), key=lambda pair: pair[0].sequence_id)
        rewards = [(span.sequence_id, span) for span in source if is_reward_span(span)]
        matched = _matched(
            [(call.sequence_id, call) for call, _ in found],
            sorted(rewards, key=lambda pair: pair[0]),
        )
        return [
            Triplet(
                prompt={"token_ids": transition.prompt_ids.tolist()},
                response={"token_ids": transition.response_ids.tolist()},
                reward=matched.get(call.span_id),
                metadata={"response_id": call.attributes.get(semconv.GEN_AI_RESPONSE_ID)},
            )
            for call, transition in found
        ]


class TraceToMessages(TraceAdapter[list[dict[str, Any]]]):
    """For each call `{"messages": [...], "tools": [...] or None}` in the form of chat completions,
    the answer last.

    Reads the calls of the gateway and of other instrumentation; of several answers, the first.
    Calls without recorded messages are left out. The calls of several attempts follow each
    other."""

    def adapt(self, source: Sequence[Span], /) -> list[dict[str, Any]]:
        from agentlightning.data.conversations import read_calls

        attempts: dict[str, list[Span]] = {}
        for span in source:
            attempts.setdefault(span.attempt_id, []).append(span)
        return [
            {"messages": [*call.messages, call.answer], "tools": call.tools or None}
            for spans in attempts.values()
            for call in read_calls(spans)[0]
        ]


def with_adapter(algorithm: Algorithm | None, adapter: Any) -> Algorithm:
    """A function decorated with `agl.algo`, with this adapter or a TracerTraceToTriplet with these
    options. APO accepts a TraceToMessages, which it does anyway. ConfigError for another
    algorithm."""
    from agentlightning.algorithm.apo import APO
    from agentlightning.algorithm.base import FunctionAlgorithm

    if isinstance(adapter, Mapping):
        try:
            adapter = TracerTraceToTriplet(**cast(Mapping[str, Any], adapter))
        except TypeError as error:
            raise ConfigError(f"adapter: {error}; its only option is agent_match") from None
    if not isinstance(adapter, Adapter):
        raise ConfigError(
            f"adapter is a {type(adapter).__name__}; give an agl.TraceAdapter, or a mapping of "
            "options"
        )
    if isinstance(algorithm, FunctionAlgorithm):
        algorithm = copy.copy(algorithm)
        algorithm.adapter = adapter
        return algorithm
    if isinstance(algorithm, APO) and type(adapter) is TraceToMessages:
        return algorithm
    raise ConfigError(
        "adapter is only for functions decorated by agl.algo: other algorithms read the gateway's "
        "exact tokens. Leave it out; choose agents by agl.GRPO(agents='writer|rewriter'), rewards "
        "by its returns=, baseline= and reward="
    )


def _trained(source: Sequence[Span]) -> list[tuple[Span, Transition]]:
    from agentlightning.data.call_filter import HAS_IMAGES, CallFilter

    # here, as it needs numpy, which the agent side may lack
    from agentlightning.data.transitions import trace_rollout

    rollouts = {span.rollout_id for span in source}
    if len(rollouts) > 1:
        raise InvalidError(
            f"the spans are of {len(rollouts)} rollouts; adapt those of one, as query_spans gives "
            "them"
        )
    rollout = Rollout(rollout_id="".join(rollouts), input=None, start_time=0.0, status="succeeded")
    by_id = {span.span_id: span for span in source}
    transitions = trace_rollout(rollout, source, calls=CallFilter(keep=(HAS_IMAGES,))).transitions
    return [(by_id[transition.span_id], transition) for transition in transitions]


def _triplet(attributes: Attributes, transition: Transition, reward: float | None) -> Triplet:
    return Triplet(
        prompt={
            "token_ids": transition.prompt_ids.tolist(),
            "raw_content": input_messages(attributes),
        },
        response={
            "token_ids": transition.response_ids.tolist(),
            "raw_content": output_messages(attributes),
            "logprobs": [{"logprob": logprob} for logprob in transition.logprobs.tolist()],
        },
        reward=reward,
        metadata={
            "request": _below(attributes, "gen_ai.request."),
            "response": _below(attributes, "gen_ai.response."),
            "response_id": attributes.get(semconv.GEN_AI_RESPONSE_ID),
            "agent_name": transition.agent or "*",
        },
    )


def _below(attributes: Attributes, prefix: str) -> dict[str, Any]:
    return {
        name.removeprefix(prefix): value
        for name, value in attributes.items()
        if name.startswith(prefix)
    }


def _matched(
    calls: Sequence[tuple[float, Span]], rewards: Sequence[tuple[float, Span]]
) -> dict[str, float | None]:
    """The reward of each call by id: each goes to the last earlier call that has none."""
    matched: dict[str, float | None] = {}
    for given, reward in rewards:
        free = (
            call for came, call in reversed(calls) if call.span_id not in matched and came <= given
        )
        if (call := next(free, None)) is not None:
            matched[call.span_id] = get_reward_value(reward)
    return matched


def _rewards(span: Span) -> bool:
    """Whether the span gives a reward, or is an operation that does."""
    named = (
        span.name == semconv.OPERATION
        and span.attributes.get(semconv.OPERATION_NAME) == semconv.REWARD
    )
    return named or is_reward_span(span)
