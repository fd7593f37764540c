"""0.3's adapters: the spans of one rollout as its triplets, or as the conversations of its calls.

Thin names over `trace_rollout` and `read_calls`. This module knows 0.3's shapes,
where it put a reward, and which of its options mean something here. It does not know groups, credit or training.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from agentlightning import semconv
from agentlightning.data.clocks import align_clocks
from agentlightning.data.rewards import ancestors
from agentlightning.errors import ConfigError, InvalidError
from agentlightning.tracing.messages import input_messages, output_messages
from agentlightning.tracing.rewards import find_reward_spans, get_reward_value, is_reward_span
from agentlightning.types import Attributes, Noun, Rollout, Span

if TYPE_CHECKING:
    from agentlightning.data.transitions import Transition

Source = TypeVar("Source")
Target = TypeVar("Target")

_CALL_OF_0_3: Final = "openai.chat.completions.create"  # what 0.3's tracers called the spans that are calls here


class Triplet(Noun, frozen=True, kw_only=True):
    """0.3's view of a transition: prompt, response and reward of one LLM call."""

    prompt: Any
    response: Any
    reward: float | None = None
    metadata: dict[str, Any] = {}  # noqa: RUF012 - msgspec copies it


class Adapter(Generic[Source, Target]):
    """What makes one form of data of another; derive from it and write `adapt`. It can be called like a function."""

    def adapt(self, source: Source, /) -> Target:
        raise NotImplementedError(f"{type(self).__name__} has no method adapt(source), which makes its result")

    def __call__(self, source: Source, /) -> Target:
        return self.adapt(source)


class TraceAdapter(Adapter[Sequence[Span], Target], Generic[Target]):
    """What makes something of the spans of one rollout."""


class TraceToTripletBase(TraceAdapter[list[Triplet]]):
    """What makes triplets of the spans of one rollout."""


class TracerTraceToTriplet(TraceToTripletBase):
    """A triplet for each call of the final attempt that may be trained, in the order of the calls.

    `agent_match` is looked for in the name of the agent (a regular expression, case counts), as are calls by their
    span's name in 0.3: here every call is one, so `llm_call_match` must find them all. A reward, in order of time, goes
    to the last call that had ended and has none yet; with `reward_match="first_sibling"` among those within the same
    span. Calls below a reward's own span are left out if `exclude_llm_call_in_reward`. ConfigError for what cannot be
    honoured."""

    def __init__(
        self,
        repair_hierarchy: bool = True,
        llm_call_match: str = r"openai\.chat\.completion",
        agent_match: str | None = None,
        exclude_llm_call_in_reward: bool = True,
        reward_match: str = "first_occurrence",
        _skip_empty_token_spans: bool = True,
    ) -> None:
        calls = _pattern("llm_call_match", llm_call_match)
        for wrong, what, why in (
            (not repair_hierarchy, "repair_hierarchy=False", "the agent of a call is where its framework reported it"),
            (not _skip_empty_token_spans, "_skip_empty_token_spans=False", "only calls with token ids can be learned; "
             "agl.TraceToMessages reads what was said in others"),
            (not calls.search(_CALL_OF_0_3), "llm_call_match", "calls are what the gateway recorded, by whatever name"),
        ):  # fmt: skip
            if wrong:
                raise ConfigError(f"{what} cannot be honoured: {why}. Leave it out")
        if reward_match not in ("first_occurrence", "first_sibling"):
            raise ConfigError(f"reward_match is {reward_match!r}; give 'first_occurrence' or 'first_sibling'")
        self.agent_match = agent_match
        self.exclude_llm_call_in_reward = exclude_llm_call_in_reward
        self.reward_match = reward_match
        self._agents = None if agent_match is None else _pattern("agent_match", agent_match)

    def adapt(self, source: Sequence[Span], /) -> list[Triplet]:
        """InvalidError where the spans are of several rollouts."""
        spans, found = _traced(source)
        above = {span.span_id: span.parent_id for span in spans}
        rewarding = {span.span_id for span in spans if _rewards(span)}
        found = [(call, one) for call, one in found if self._chosen(one)]
        if self.exclude_llm_call_in_reward:
            found = [(call, one) for call, one in found if rewarding.isdisjoint(ancestors(call, above))]
        parents = _parents(spans) if self.reward_match == "first_sibling" else None

        def earned(call: Span, reward: Span) -> bool:
            near = parents is None or parents[call.span_id] == parents[reward.span_id]
            return near and call.end_time <= reward.start_time

        calls = sorted((call for call, _ in found), key=lambda call: call.start_time)
        rewards = _matched(calls, find_reward_spans(spans), earned)
        return [_triplet(call.attributes, one, rewards.get(call.span_id)) for call, one in found]

    def _chosen(self, transition: Transition) -> bool:
        agent = transition.agent
        return self._agents is None or (agent is not None and self._agents.search(agent) is not None)


class LlmProxyTraceToTriplet(TraceToTripletBase):
    """A triplet for each call of the final attempt that may be trained, with token ids and the id of the answer alone.

    A reward goes to the last call that was stored before it and has none yet: clocks are not asked."""

    def adapt(self, source: Sequence[Span], /) -> list[Triplet]:
        """InvalidError where the spans are of several rollouts."""
        spans, found = _traced(source)
        found.sort(key=lambda pair: pair[0].sequence_id)
        rewards = sorted(filter(is_reward_span, spans), key=lambda reward: reward.sequence_id)
        calls = [call for call, _ in found]
        matched = _matched(calls, rewards, lambda call, reward: call.sequence_id < reward.sequence_id)
        return [
            Triplet(
                prompt={"token_ids": one.prompt_ids.tolist()},
                response={"token_ids": one.response_ids.tolist()},
                reward=matched.get(call.span_id),
                metadata={"response_id": call.attributes.get(semconv.GEN_AI_RESPONSE_ID)},
            )
            for call, one in found
        ]


class TraceToMessages(TraceAdapter[list[dict[str, Any]]]):
    """For each call `{"messages": [...], "tools": [...] or None}` in the form of chat completions, the answer last.

    Reads the gateway's calls and those that other instrumentation traced; of several answers, the first. Calls whose
    messages were not recorded are left out. Of a rollout with several attempts, the calls of each follow each other."""

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


def _pattern(name: str, text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise ConfigError(f"{name} is {text!r}, which is no regular expression: {error}") from None


# --- triplets ----------------------------------------------------------------------------------------------------


def _traced(source: Sequence[Span]) -> tuple[Sequence[Span], list[tuple[Span, Transition]]]:
    """The spans of the final attempt, and the calls of it that may be trained."""
    from agentlightning.data.call_filter import HAS_IMAGES, CallFilter
    from agentlightning.data.transitions import trace_rollout  # here, as it needs numpy, which the agent side may lack

    rollouts = {span.rollout_id for span in source}
    if len(rollouts) > 1:
        raise InvalidError(f"the spans are of {len(rollouts)} rollouts; adapt those of one, as query_spans gives them")
    rollout = Rollout(rollout_id="".join(rollouts), input=None, start_time=0.0, status="succeeded")
    transitions = trace_rollout(rollout, source, calls=CallFilter(keep=(HAS_IMAGES,))).transitions
    spans, _ = align_clocks([one for one in source if transitions and one.attempt_id == transitions[0].attempt_id])
    by_id = {span.span_id: span for span in spans}
    return spans, [(by_id[one.span_id], one) for one in transitions]


def _triplet(attributes: Attributes, transition: Transition, reward: float | None) -> Triplet:
    sent = input_messages(attributes)
    return Triplet(
        prompt={"token_ids": transition.prompt_ids.tolist(), "raw_content": sent, "image_urls": _image_urls(sent)},
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
    return {name.removeprefix(prefix): value for name, value in attributes.items() if name.startswith(prefix)}


def _image_urls(messages: Iterable[Mapping[str, Any]]) -> list[str]:
    contents = [content for message in messages if isinstance(content := message.get("content"), list)]
    return [
        url
        for content in contents
        for part in content
        if isinstance(part, dict) and isinstance(image := part.get("image_url"), dict) and (url := image.get("url"))
    ]


# --- rewards -----------------------------------------------------------------------------------------------------


def _matched(
    calls: Sequence[Span], rewards: Sequence[Span], earned: Callable[[Span, Span], bool]
) -> dict[str, float | None]:
    """By the id of a call its reward: one after the other goes to the last call that earned it and has none yet."""
    matched: dict[str, float | None] = {}
    for reward in rewards:
        free = (call for call in reversed(calls) if call.span_id not in matched and earned(call, reward))
        if (call := next(free, None)) is not None:
            matched[call.span_id] = get_reward_value(reward)
    return matched


def _rewards(span: Span) -> bool:
    """Whether the span gives a reward, or is an operation that does."""
    named = span.name == semconv.OPERATION and span.attributes.get(semconv.OPERATION_NAME) == semconv.REWARD
    return named or is_reward_span(span)


def _parents(spans: Sequence[Span]) -> dict[str, str | None]:
    """By its id, the id of the span around each. What lies side by side at the top, because no tracer knew better, is
    moved into the shortest span that encloses it in time."""
    known = {span.span_id for span in spans}
    parents = {span.span_id: span.parent_id if span.parent_id in known else None for span in spans}
    outer: set[str] = set()
    side_by_side = [span for span in spans if parents[span.span_id] is None]
    while len(side_by_side) == 1:
        (top,) = side_by_side
        outer.add(top.span_id)
        side_by_side = [span for span in spans if parents[span.span_id] == top.span_id and span.span_id not in outer]
    for span in side_by_side:
        around = [one for one in spans if one.span_id not in outer and _encloses(one, span)]
        if around:
            parents[span.span_id] = min(around, key=lambda one: one.end_time - one.start_time).span_id
    return parents


def _encloses(outer: Span, span: Span) -> bool:
    longer = outer.end_time - outer.start_time > span.end_time - span.start_time
    return longer and outer.start_time <= span.start_time and span.end_time <= outer.end_time
