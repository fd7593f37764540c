"""Reads the agent's reports: rewards of calls and of the rollout, and the states in which calls
were made; and the terms that training adds to R."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal

import msgspec

from agentlightning import semconv
from agentlightning.data.clocks import TOOL_CALL_IDS
from agentlightning.errors import ConfigError, check_settings
from agentlightning.tracing.rewards import (
    find_final_rewards,
    find_reward_spans,
    get_reward_value,
    is_final_reward,
)
from agentlightning.tracing.steps import DEPTH, Step, tool_requests
from agentlightning.types import Span

# Why a reward belongs to no transition and not to the rollout.
NOT_FINITE: Final = "not a finite number"  # or one that no gradient survives
BEFORE_ANY_CALL: Final = "given before any call had ended"
NOT_TRAINED: Final = "of a call that does not train"
UNCLEAR: Final = "of one of several agents that ran side by side"

RELATIVE: Final[tuple[str, ...]] = (
    "relative_length",
    "relative_turns",
    "relative_tool_calls",
)  # terms that compare a group

# they may name a reward's call
_IDS: Final = (*TOOL_CALL_IDS, "tool_call_id", semconv.GEN_AI_RESPONSE_ID)


@dataclass(frozen=True)
class GivenRewards:
    """The rewards in the spans of one attempt. `named` are the dimensions of the last final reward;
    `of_calls` are the intermediate rewards of each gateway call, summed, by span id; `total` is the
    sum of all intermediate rewards, including those without a call; `lost` counts rewards without a
    call or that are not numbers, by reason."""

    named: Mapping[str, float]
    of_calls: Mapping[str, float]
    total: float | None
    lost: Counter[str]


def given_rewards(spans: Sequence[Span], steps: Sequence[Step]) -> GivenRewards:
    """The rewards of ONE attempt, from its spans and the steps read from them.

    An intermediate reward belongs to the call that it names, by response id or tool-call id.
    Otherwise it belongs to the latest call that ended before it: among the calls below the nearest
    enclosing span that has any (a tool without calls stands for the call that requested it), else
    those of the same agent, else all. Housekeeping calls count only if named. A reward that could
    be of several agents, tools or operations that ran at the same time belongs to no call.
    Intermediate rewards never replace the final one."""
    lost: Counter[str] = Counter()
    of_calls: dict[str, float] = {}
    values: list[float] = []
    receiver = _Receivers(spans, steps)
    rewards = find_reward_spans(spans)
    for span in rewards:
        value = get_reward_value(span)
        assert value is not None
        if not _usable(value):
            lost[NOT_FINITE] += 1
        elif not is_final_reward(span):
            values.append(value)
            call = receiver.of(span)
            if isinstance(call, str):
                lost[call] += 1
            else:
                of_calls[call.span_id] = of_calls.get(call.span_id, 0.0) + value
    dimensions = find_final_rewards(rewards)
    named = dict(dimensions) if all(_usable(dimension.value) for dimension in dimensions) else {}
    return GivenRewards(named, of_calls, math.fsum(values) if values else None, lost)


def _usable(value: float) -> bool:
    return math.isfinite(value) and abs(value) <= semconv.LARGEST_REWARD


class _Receivers:
    """Finds the call that a reward belongs to."""

    def __init__(self, spans: Sequence[Span], steps: Sequence[Step]) -> None:
        self._spans = {span.span_id: span for span in spans}
        self._steps = steps
        self._above = {span.span_id: span.parent_id for span in spans}

    def of(self, reward: Span) -> Span | str:
        """The call, or the reason why there is none."""
        named = self._named_by(reward)
        if len(named) == 1:
            return named[0]
        ended = [
            (call, around) for call, around in self._trained if call.end_time <= reward.start_time
        ]
        found = [call for call, _ in ended]
        for outer in ancestors(reward, self._above):
            if below := [call for call, around in ended if outer in around]:
                found = below
                break
            if outer in self._asked_by:
                return self._asked_by[outer]
        else:
            agent = self._agents.get(reward.span_id)
            found = [
                call for call in found if agent and self._agents.get(call.span_id) == agent
            ] or found
        last = max(found, key=_end, default=None)
        if last is None:
            return BEFORE_ANY_CALL
        around = ancestors(last, self._above)
        sure = reward.parent_id in around or not self._ran_beside(reward, last, around)
        return last if sure else UNCLEAR

    def _named_by(self, reward: Span) -> list[Span]:
        """The calls with an id that the reward names."""
        given = reward.attributes
        links = [
            str(given.get(f"{name.removesuffix('key_match')}value_match", ""))
            for name, key in given.items()
            if name.startswith(f"{semconv.LINK}.") and name.endswith(".key_match") and key in _IDS
        ]
        ids = links or [value for name in _IDS if isinstance(value := given.get(name), str)]
        return [call for name in ids for call in self._by_id.get(name, ())]

    def _ran_beside(self, reward: Span, call: Span, around: Sequence[str]) -> bool:
        """Whether spans ran beside those that enclose the reward, and the `call`, enclosed by
        `around`, may be theirs.

        A reward that nothing encloses may be of any one span that was open, so that it takes two of
        them."""
        chain = [reward, *(self._spans[outer] for outer in ancestors(reward, self._above))]
        others = [
            other
            for branch in chain
            for other in self._lanes.get(self._parent(branch), ())
            if other is not branch
            and other.start_time <= branch.end_time
            and branch.start_time <= other.end_time
        ]
        if len(chain) == 1:
            return len(others) > 1
        return any(
            other.span_id in around or (not around and _contains(other, call))
            for other in others
            if other.trace_id == reward.trace_id  # that of another trace may enclose both
        )

    def _parent(self, span: Span) -> str | None:
        return span.parent_id if span.parent_id in self._above else None

    @cached_property
    def _lanes(self) -> dict[str | None, list[Span]]:
        """The agents, tools and operations by the span around them; None: by no known one."""
        lanes: dict[str | None, list[Span]] = {}
        for step in self._steps:
            span = step.span
            if step.kind != "call" and span.name != semconv.LOG and span.end_time > span.start_time:
                lanes.setdefault(self._parent(span), []).append(span)
        return lanes

    @cached_property
    def _calls(self) -> list[Span]:
        return [step.span for step in self._steps if step.call is step.span]

    @cached_property
    def _trained(self) -> list[tuple[Span, set[str]]]:
        """Calls other than housekeeping, and the spans around each."""
        trained = (call for call in self._calls if semconv.CALL_HOUSEKEEPING not in call.attributes)
        return [(call, set(ancestors(call, self._above))) for call in trained]

    @cached_property
    def _agents(self) -> dict[str, str | None]:
        return {step.span.span_id: step.agent for step in self._steps}

    @cached_property
    def _asked_by(self) -> dict[str, Span]:
        return {
            step.span.span_id: step.call
            for step in self._steps
            if step.kind == "tool" and step.call is not None
        }

    @cached_property
    def _by_id(self) -> dict[str, list[Span]]:
        """The calls with this id: several if a server numbers tool calls from 0 in every answer."""
        named: dict[str, list[Span]] = {}
        for call in self._calls:
            names = {request.id for request in tool_requests(call)}
            if semconv.GEN_AI_RESPONSE_ID in call.attributes:
                names.add(str(call.attributes[semconv.GEN_AI_RESPONSE_ID]))
            for name in names:
                named.setdefault(name, []).append(call)
        return named


def _end(span: Span) -> float:
    return span.end_time


def _contains(outer: Span, inner: Span) -> bool:
    return outer.start_time <= inner.start_time and inner.end_time <= outer.end_time


def ancestors(span: Span, above: Mapping[str, str | None]) -> list[str]:
    """The ids of the enclosing spans, nearest first, at most DEPTH."""
    found: list[str] = []
    at = span.parent_id
    while at is not None and at in above and at not in found and len(found) < DEPTH:
        found.append(at)
        at = above[at]
    return found


_STATE: Final = "state"
_ANYWHERE: Final = ""  # no span has this id


def named_states(spans: Sequence[Span], calls: Container[str]) -> dict[str, str]:
    """The state in which each of these `calls` of ONE attempt was made, by span id, as JSON, if the
    agent named states: `emit_annotation({"state": …})`. A state holds for calls that start after
    it, until the next one.

    Concurrent agents have separate states: states named below the nearest span around a call take
    precedence; without any, all count."""
    # by the span below which a state was named
    moments: dict[str | None, list[tuple[float, int, str]]] = {}
    for span in spans:
        if (state := _state(span)) is not None:
            for place in (span.parent_id, _ANYWHERE):
                moments.setdefault(place, []).append((span.start_time, span.sequence_id, state))
    found: dict[str, str] = {}
    if not moments:
        return found
    for named in moments.values():
        named.sort()
    above = {span.span_id: span.parent_id for span in spans}
    for span in spans:
        for place in (*ancestors(span, above), _ANYWHERE) if span.span_id in calls else ():
            named = moments.get(place, [])
            if index := bisect_right(named, span.start_time, key=lambda moment: moment[0]):
                found[span.span_id] = named[index - 1][2]
                break
    return found


def _state(span: Span) -> str | None:
    """The state in an annotation: a value, or a mapping, whose items are stored below the name."""
    if span.name != semconv.ANNOTATION:
        return None
    value = span.attributes.get(_STATE)
    if value is None:
        value = {
            name: item for name, item in span.attributes.items() if name.startswith(f"{_STATE}.")
        } or None
    return None if value is None else msgspec.json.encode(value, order="sorted").decode()


class RewardSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The parts of R in training: `base` plus every term with a weight. Evaluation measures
    `base`.

    `base` is the `final` reward, or the `sum` of it and all intermediate ones. With `weights` of
    named rewards, R starts with Σ weight · reward instead, one term per name. The other terms are
    computed from the calls that train:
    - `tool_success` · mean status (+1 or −1) of their tool calls, 0 without any;
    - `format_bonus` if the whole last answer matches the regular expression `answer_format` (`.`
      matches any character);
    - −`length_penalty` · sampled tokens / 1000;
    - `overlong_penalty` · DAPO's soft punishment (arXiv:2503.14476) of the longest answer: 0 up to
      `overlong_length` − `overlong_buffer` tokens, then falling to −1 at `overlong_length` tokens;
    - `relative_length`, `relative_turns`, `relative_tool_calls` · `relative_costs` of the sampled
      tokens, the calls and the tool calls, compared with the rewarded rollouts of the group.

    `failed_tool` is a regular expression that is searched in tool results to detect failures,
    instead of the words in `tracing/dialects.py`. It sets the status of tools here, in evaluation
    and in `returns`."""

    base: Literal["final", "sum"] = "final"
    weights: dict[str, float] = {}
    tool_success: float = 0.0
    format_bonus: float = 0.0
    answer_format: str | None = None
    length_penalty: float = 0.0
    overlong_penalty: float = 0.0
    overlong_length: int | None = None
    overlong_buffer: int | None = None
    relative_length: float = 0.0
    relative_turns: float = 0.0
    relative_tool_calls: float = 0.0
    failed_tool: str | None = None

    def __post_init__(self) -> None:
        costs: dict[str, float] = dict.fromkeys(
            ("length_penalty", "overlong_penalty", *RELATIVE), 0.0
        )
        check_settings(self, least=costs, choices={"base": ("final", "sum")})
        if self.weights and self.base == "sum":
            raise ConfigError(
                "reward.weights weighs the parts of the final reward; leave base: sum out"
            )
        if bool(self.format_bonus) != (self.answer_format is not None):
            raise ConfigError(
                "format_bonus and answer_format belong together: give both, or neither"
            )
        length = self.overlong_length
        buffer = self.overlong_buffer
        if (bool(self.overlong_penalty), length is not None) != (
            length is not None,
            buffer is not None,
        ):
            raise ConfigError(
                "overlong_penalty, overlong_length and overlong_buffer belong together: give all, "
                "or none"
            )
        if length is not None and buffer is not None and not 0 < buffer <= length:
            raise ConfigError(
                f"overlong_buffer is {buffer}; it must be from 1 to overlong_length ({length})"
            )
        for name in ("answer_format", "failed_tool"):
            try:
                re.compile(getattr(self, name) or "")
            except re.error as error:
                raise ConfigError(
                    f"{name} is {getattr(self, name)!r}, which is not a pattern: {error}"
                ) from None

    @property
    def counts_calls(self) -> bool:
        """Whether a term counts the tools, calls or tokens of a rollout."""
        costs = ("tool_success", "length_penalty", "overlong_penalty", *RELATIVE)
        return any(getattr(self, name) for name in costs)

    def given_terms(self, final: float | None, given: GivenRewards) -> dict[str, float]:
        """The starting terms of R, by name, from the rollout's final reward and those in its spans;
        empty if it has none. ConfigError for a weight of a reward that the agent did not give."""
        if self.weights and given.named:
            if unknown := self.weights.keys() - given.named.keys():
                raise ConfigError(
                    f"reward.weights has {', '.join(sorted(unknown))}, and the agent gave a "
                    f"reward of {', '.join(given.named)}; return or emit each, such as {{'right': "
                    "1.0, 'short': 0.5} with a primary_key"
                )
            return {name: weight * given.named[name] for name, weight in self.weights.items()}
        if self.base == "final" or given.total is None:
            return {} if final is None else {self.base: final}
        return {self.base: given.total + (final or 0.0)}

    def given_part(self, terms: Mapping[str, float]) -> float:
        """The part of R that the agent gave, from a rollout's `terms`."""
        return math.fsum(terms.get(name, 0.0) for name in self.weights or (self.base,))

    def weight_of(self, term: str) -> float:
        """The factor of a term of R."""
        if term in self.weights:
            return self.weights[term]
        return 1.0 if term in ("final", "sum") else float(getattr(self, term, 1.0))

    def terms(
        self, statuses: Sequence[int], lengths: Sequence[int], last_answer: str
    ) -> dict[str, float]:
        """The added terms of R, by name. `statuses` are those of the tool calls, `lengths` the
        sampled tokens of each call, `last_answer` the text of the last answer."""
        terms: dict[str, float] = {}
        if self.tool_success:
            terms["tool_success"] = self.tool_success * (
                sum(statuses) / len(statuses) if statuses else 0.0
            )
        if self.answer_format is not None:
            matches = re.fullmatch(self.answer_format, last_answer, re.DOTALL) is not None
            terms["format_bonus"] = self.format_bonus * matches
        if self.length_penalty:
            terms["length_penalty"] = -self.length_penalty * sum(lengths) / 1000
        if self.overlong_length is not None and self.overlong_buffer is not None:
            free = self.overlong_length - self.overlong_buffer
            over = (max(lengths, default=0) - free) / self.overlong_buffer
            terms["overlong_penalty"] = -self.overlong_penalty * min(1.0, max(0.0, over))
        return terms


PLAIN: Final = RewardSpec()
"""The final reward, with nothing added."""


def relative_costs(costs: Sequence[float], earned: Sequence[bool]) -> list[float]:
    """½ − (cost − least) / (most − least) of each rollout of a group, at most 0 if it earned
    nothing; 0 if all cost the same (the length reward of Kimi k1.5, arXiv:2501.12599).

    ([10, 30, 20, 10], [True, True, True, False]) → [0.5, −0.5, 0, 0]."""
    least = min(costs, default=0.0)
    most = max(costs, default=0.0)
    if least == most:
        return [0.0] * len(costs)
    values = [0.5 - (cost - least) / (most - least) for cost in costs]
    return [
        value if gained else min(0.0, value) for value, gained in zip(values, earned, strict=True)
    ]
