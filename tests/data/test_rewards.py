"""Which call an intermediate reward belongs to, and what a rollout's R is made of."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from agentlightning import semconv
from agentlightning.data.rewards import UNCLEAR, RewardSpec, ancestors
from agentlightning.data.transitions import TracedRollout
from agentlightning.errors import ConfigError
from agentlightning.tracing.steps import DEPTH
from agentlightning.types import Rollout, Span
from tests.data import recordings
from tests.data.recordings import sampled, span, trace_stored

SUCCEEDED = Rollout(rollout_id="r", input="task", start_time=0.0, status="succeeded")


def call(
    index: int, start: float, parent: str | None = None, *, end: float | None = None, text: str = ""
) -> Span:
    answer = msgspec.json.encode([{"role": "assistant", "content": text}]).decode()
    about = {semconv.CALL_INDEX: index, semconv.GEN_AI_OUTPUT_MESSAGES: answer}
    return span(
        f"call{index}",
        start,
        start + 0.5 if end is None else end,
        parent,
        tokens=sampled(1, index),
        **about,
    )


def reward(value: float, at: float, parent: str | None = None, *, final: bool = False) -> Span:
    return recordings.reward(value, at, parent, final=final)


def agent(name: str, start: float, end: float, parent: str | None = None) -> Span:
    about = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": name}
    return span(f"agent-{name}", start, end, parent, **about)


def rewards(traced: TracedRollout) -> list[float | None]:
    return [transition.reward for transition in traced.transitions]


@pytest.mark.parametrize(
    ("spans", "given"),
    [
        ([call(0, 1), call(1, 2), reward(0.2, 2.6), call(2, 3)], [None, 0.2, None]),
        # a call that has not ended did not earn it
        ([call(0, 1), call(1, 2, end=5.0), reward(0.2, 3)], [0.2, None]),
        # several add up, in any order of the spans
        ([reward(0.25, 1.7), call(0, 1), reward(0.5, 1.8)], [0.75]),
        (
            [
                agent("lead", 0, 9),
                agent("helper", 1.8, 4, "agent-lead"),
                call(0, 1, "agent-lead"),
                call(1, 2, "agent-helper"),
                call(2, 2.6, "agent-lead"),
                reward(0.2, 3.5, "agent-helper"),
                reward(0.1, 3.6, "agent-lead"),
            ],
            [None, 0.2, 0.1],
        ),
    ],
    ids=["the call before it", "ended calls", "sums", "the agent's span"],
)
def test_an_intermediate_reward_belongs_to_a_call(
    spans: list[Span], given: list[float | None]
) -> None:
    traced = trace_stored(SUCCEEDED, [*spans, reward(1.0, 8, final=True)])
    assert (rewards(traced), traced.reward) == (given, 1.0)


LANES = [span("one", 0, 5), span("two", 0.5, 6)]  # operations that run side by side
CALLS = [call(0, 1), call(1, 2)]  # of one of them each, and nothing says which


@pytest.mark.parametrize(
    ("spans", "given"),
    [
        ([*LANES, *CALLS, reward(0.2, 3, "one"), reward(0.3, 4, "two")], [None, None]),
        (
            [
                *LANES,
                call(0, 1, "one"),
                call(1, 2, "two"),
                reward(0.2, 3, "one"),
                reward(0.3, 4, "two"),
            ],
            [0.2, 0.3],
        ),
        ([*LANES, call(0, 1, "two"), reward(0.2, 3, "one")], [None]),  # it is another's
        # the reward may be of both
        ([*LANES, call(0, 1, "one"), call(1, 2, "two"), reward(0.2, 3)], [None, None]),
        # in turn
        (
            [span("plan", 0, 2.6), *CALLS, span("grade", 3, 4), reward(0.2, 3.5, "grade")],
            [None, 0.2],
        ),
        (
            [
                span("all", 0, 9),
                *CALLS,
                span("one", 0, 5, "all"),
                span("grade", 5.5, 6, "all"),
                reward(0.2, 5.7, "grade"),
            ],
            [None, 0.2],
        ),
        (
            [
                span("all", 0, 9),
                call(0, 1, "two"),
                span("one", 0, 5, "all"),
                span("two", 0, 5, "all"),
                reward(0.2, 3, "one"),
            ],
            [None],
        ),
        # one agent, and a reward from elsewhere
        ([span("all", 0, 9), *CALLS, reward(0.2, 3)], [None, 0.2]),
        ([*LANES, *CALLS, reward(0.2, 8)], [None, 0.2]),  # behind both
    ],
    ids=[
        "nobody's",
        "placed",
        "another's",
        "a reward's",
        "in turn",
        "nested",
        "beside in one",
        "alone",
        "behind",
    ],
)
def test_a_reward_whose_owner_cannot_be_told_is_counted_and_given_to_nobody(
    spans: list[Span], given: list[float | None]
) -> None:
    traced = trace_stored(SUCCEEDED, [*spans, reward(1.0, 8.5, final=True)])
    assert rewards(traced) == given
    received = any(value is not None for value in given)
    assert traced.rewards_lost == (
        {} if received else {UNCLEAR: sum("reward" in one.name for one in spans)}
    )


def test_a_link_without_a_value_names_no_call() -> None:
    """Not the call without a response id either."""
    named = msgspec.structs.replace(
        call(1, 2), attributes={semconv.CALL_INDEX: 1, semconv.GEN_AI_RESPONSE_ID: "x"}
    )
    link = {f"{semconv.LINK}.0.key_match": semconv.GEN_AI_RESPONSE_ID}
    given = recordings.reward(0.2, 2.7, final=False, **link)
    assert rewards(trace_stored(SUCCEEDED, [call(0, 1), named, given])) == [None, 0.2]


def test_spans_within_spans_within_spans_take_no_time_of_their_own() -> None:
    """An agent may put every call at the bottom of 20,000 spans: only so many around it count."""
    chain = [
        span("at0", 0, 9),
        *(span(f"at{depth}", 0, 9, f"at{depth - 1}") for depth in range(1, 20_000)),
    ]
    spans = [
        *chain,
        *(call(index, 1, chain[-1].span_id) for index in range(100)),
        reward(0.5, 2, chain[-1].span_id),
    ]
    above = {one.span_id: one.parent_id for one in spans}
    assert len(ancestors(spans[-1], above)) == DEPTH
    assert sum(filter(None, rewards(trace_stored(SUCCEEDED, spans)))) == 0.5


def test_a_reward_that_no_gradient_survives_counts_like_nan_whatever_door_it_came_by() -> None:
    traced = trace_stored(SUCCEEDED, [call(0, 1), reward(-1e39, 2), reward(1e300, 3, final=True)])
    assert (rewards(traced), traced.reward, traced.rewards_lost) == (
        [None],
        None,
        {"not a finite number": 2},
    )


def test_rewards_that_reach_no_transition_are_counted_by_reason() -> None:
    frozen = msgspec.structs.replace(
        call(1, 2), attributes={semconv.CALL_INDEX: 1, semconv.CALL_TRAINABLE: False}
    )
    spans = [reward(0.1, 0.5), call(0, 1), frozen, reward(0.2, 2.7), reward(math.nan, 3)]
    traced = trace_stored(SUCCEEDED, [*spans, reward(math.inf, 4, final=True)])
    assert (rewards(traced), traced.reward) == ([None], None)
    assert traced.rewards_lost == {
        "given before any call had ended": 1,
        "of a call that does not train": 1,
        "not a finite number": 2,
    }


def test_r_is_the_final_reward_or_the_sum() -> None:
    spans, total = [call(0, 1), reward(0.2, 2), reward(1.0, 3, final=True)], RewardSpec(base="sum")
    assert trace_stored(SUCCEEDED, spans, reward=total).reward == pytest.approx(1.2)
    assert trace_stored(SUCCEEDED, spans[:2], reward=total).reward == 0.2
    assert trace_stored(SUCCEEDED, spans[:2]).reward is None


def test_terms_compose_and_are_named() -> None:
    spec = RewardSpec(
        format_bonus=0.5,
        answer_format=r"Answer: .+",
        length_penalty=10.0,
        overlong_penalty=1.0,
        overlong_length=4,
        overlong_buffer=4,
    )
    spans = [
        call(0, 1, text="let me see"),
        call(1, 2, text="Answer: 3\nOslo"),
        reward(1.0, 3, final=True),
    ]
    traced = trace_stored(SUCCEEDED, spans, reward=spec)
    assert traced.reward_terms == {
        "final": 1.0,
        "format_bonus": 0.5,
        "length_penalty": -0.04,
        "overlong_penalty": -0.5,
    }
    assert traced.reward == pytest.approx(0.96)
    assert trace_stored(SUCCEEDED, spans[:2], reward=spec).reward_terms == {}


def test_each_term_by_itself() -> None:
    overlong = RewardSpec(overlong_penalty=2.0, overlong_length=10, overlong_buffer=4)
    found = [overlong.terms([], [length], "")["overlong_penalty"] for length in (6, 8, 10, 99)]
    assert found == [0.0, -1.0, -2.0, -2.0]
    tools = RewardSpec(tool_success=0.4)
    assert tools.terms([1, 1, -1, 1], [], "") == {"tool_success": pytest.approx(0.2)}
    assert tools.terms([], [], "") == {"tool_success": 0.0}


def test_a_format_is_not_judged_by_text_that_was_not_recorded() -> None:
    silent = msgspec.structs.replace(call(0, 1), attributes={semconv.CALL_INDEX: 0})
    spec = RewardSpec(format_bonus=0.5, answer_format=".*")
    with pytest.raises(ConfigError, match="capture full"):
        trace_stored(SUCCEEDED, [silent, reward(1.0, 3, final=True)], reward=spec)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"base": "last"}, "final.*sum"),
        ({"format_bonus": 0.1}, "answer_format"),
        ({"answer_format": ".*"}, "format_bonus"),
        ({"format_bonus": 0.1, "answer_format": "("}, "not a pattern"),
        ({"failed_tool": "("}, "not a pattern"),
        ({"length_penalty": -1.0}, "at least 0"),
        ({"overlong_penalty": 1.0, "overlong_length": 10}, "overlong_buffer"),
        ({"overlong_penalty": 1.0, "overlong_length": 10, "overlong_buffer": 11}, "from 1 to"),
        ({"weights": {"right": 1.0}, "base": "sum"}, "leave base: sum out"),
        ({"relative_length": -0.1}, "relative_length"),
    ],
)
def test_a_spec_that_cannot_be_meant_is_refused(wrong: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        RewardSpec(**wrong)
