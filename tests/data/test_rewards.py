"""Which call an intermediate reward belongs to, and what a rollout's R is made of."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from agentlightning import semconv
from agentlightning.data.rewards import RewardSpec, ancestors
from agentlightning.data.transitions import TracedRollout, trace_rollout
from agentlightning.errors import ConfigError
from agentlightning.tracing.steps import DEPTH
from agentlightning.types import Rollout, SampledChoice, Span, TokenCapture

SUCCEEDED = Rollout(rollout_id="r", input="task", start_time=0.0, status="succeeded")


def span(name: str, start: float, end: float, parent: str | None = None, **attributes: Any) -> Span:
    return Span(
        rollout_id="r",
        attempt_id="a",
        sequence_id=int(start * 10),
        trace_id="0" * 32,
        span_id=name,
        parent_id=parent,
        name=name,
        start_time=start,
        end_time=end,
        attributes=attributes,
    )


def call(index: int, start: float, parent: str | None = None, *, end: float | None = None, said: str = "") -> Span:
    answer = msgspec.json.encode([{"role": "assistant", "content": said}]).decode()
    about = {semconv.CALL_INDEX: index, semconv.GEN_AI_OUTPUT_MESSAGES: answer}
    made = span(f"call{index}", start, start + 0.5 if end is None else end, parent, **about)
    choice = SampledChoice(token_ids=(7, 8), logprobs=(-0.1, -0.2), finish_reason="stop", versions=((0, 2),))
    return msgspec.structs.replace(made, tokens=TokenCapture(prompt_token_ids=(1, index), choices=(choice,)))


def reward(value: float, at: float, parent: str | None = None, *, final: bool = False) -> Span:
    about = {semconv.reward_name(0): "primary", semconv.reward_value(0): value}
    return span(f"reward{at}", at, at, parent, **(about if final else about | {semconv.REWARD_FINAL: False}))


def agent(name: str, start: float, end: float, parent: str | None = None) -> Span:
    about = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": name}
    return span(f"agent-{name}", start, end, parent, **about)


def rewards(traced: TracedRollout) -> list[float | None]:
    return [transition.reward for transition in traced.transitions]


def test_an_intermediate_reward_belongs_to_the_call_before_it_and_leaves_the_final_one() -> None:
    """A1 S1 A2: the 0.2 after the sub-agent is the sub-agent's, the 1.0 at the end the rollout's."""
    spans = [call(0, 1), call(1, 2), reward(0.2, 2.6), call(2, 3), reward(1.0, 4, final=True)]
    traced = trace_rollout(SUCCEEDED, spans)
    assert rewards(traced) == [None, 0.2, None]
    assert traced.reward == 1.0


def test_a_reward_inside_an_agents_span_belongs_to_a_call_of_that_span() -> None:
    spans = [
        agent("lead", 0, 9),
        agent("helper", 1.8, 4, "agent-lead"),
        call(0, 1, "agent-lead"),
        call(1, 2, "agent-helper"),
        call(2, 2.6, "agent-lead"),  # the lead goes on beside its helper
        reward(0.2, 3.5, "agent-helper"),
        reward(0.1, 3.6, "agent-lead"),
    ]
    assert rewards(trace_rollout(SUCCEEDED, spans)) == [None, 0.2, 0.1]


def test_spans_within_spans_within_spans_take_no_time_of_their_own() -> None:
    """An agent may put every call at the bottom of 20,000 spans: only so many around it count."""
    chain = [span("at0", 0, 9), *(span(f"at{depth}", 0, 9, f"at{depth - 1}") for depth in range(1, 20_000))]
    spans = [*chain, *(call(index, 1, chain[-1].span_id) for index in range(100)), reward(0.5, 2, chain[-1].span_id)]
    above = {one.span_id: one.parent_id for one in spans}
    assert len(ancestors(spans[-1], above)) == DEPTH
    assert sum(filter(None, rewards(trace_rollout(SUCCEEDED, spans)))) == 0.5


def test_a_call_that_has_not_ended_did_not_earn_it() -> None:
    spans = [call(0, 1), call(1, 2, end=5.0), reward(0.2, 3)]
    assert rewards(trace_rollout(SUCCEEDED, spans)) == [0.2, None]


def test_several_rewards_of_a_call_are_added_up_in_whatever_order_spans_come() -> None:
    spans = [reward(0.25, 1.7), call(0, 1), reward(0.5, 1.8)]
    assert rewards(trace_rollout(SUCCEEDED, spans)) == [0.75]


def test_rewards_that_reach_no_transition_are_counted_by_reason() -> None:
    frozen = msgspec.structs.replace(
        call(1, 2), attributes=dict(call(1, 2).attributes) | {semconv.CALL_TRAINABLE: False}
    )
    spans = [reward(0.1, 0.5), call(0, 1), frozen, reward(0.2, 2.7), reward(math.nan, 3)]
    traced = trace_rollout(SUCCEEDED, spans)
    assert rewards(traced) == [None]
    assert traced.rewards_lost == {
        "given before any call had ended": 1, "of a call that does not train": 1, "not a finite number": 1,
    }  # fmt: skip


def test_a_final_reward_that_is_no_number_is_no_reward() -> None:
    traced = trace_rollout(SUCCEEDED, [call(0, 1), reward(math.inf, 2, final=True)])
    assert (traced.reward, traced.rewards_lost) == (None, {"not a finite number": 1})


def test_r_is_the_final_reward_or_the_sum() -> None:
    spans = [call(0, 1), reward(0.2, 2), reward(1.0, 3, final=True)]
    assert trace_rollout(SUCCEEDED, spans, reward=RewardSpec(base="sum")).reward == pytest.approx(1.2)
    assert trace_rollout(SUCCEEDED, spans[:2], reward=RewardSpec(base="sum")).reward == 0.2
    assert trace_rollout(SUCCEEDED, spans[:2]).reward is None


def test_terms_compose_and_are_named() -> None:
    spec = RewardSpec(
        format_bonus=0.5, answer_format=r"Answer: .+", length_penalty=10.0, overlong_penalty=1.0, overlong_length=4,
        overlong_buffer=4,
    )  # fmt: skip
    spans = [call(0, 1, said="let me see"), call(1, 2, said="Answer: 3\nOslo"), reward(1.0, 3, final=True)]
    traced = trace_rollout(SUCCEEDED, spans, reward=spec)
    assert traced.reward_terms == {"final": 1.0, "format_bonus": 0.5, "length_penalty": -0.04, "overlong_penalty": -0.5}
    assert traced.reward == pytest.approx(0.96)
    assert trace_rollout(SUCCEEDED, spans[:2], reward=spec).reward_terms == {}


def test_each_term_by_itself() -> None:
    overlong = RewardSpec(overlong_penalty=2.0, overlong_length=10, overlong_buffer=4)
    assert [overlong.terms([], [length], "")["overlong_penalty"] for length in (6, 8, 10, 99)] == [
        0.0,
        -1.0,
        -2.0,
        -2.0,
    ]
    tools = RewardSpec(tool_success=0.4)
    assert tools.terms([1, 1, -1, 1], [], "") == {"tool_success": pytest.approx(0.2)}
    assert tools.terms([], [], "") == {"tool_success": 0.0}


def test_a_format_is_not_judged_by_text_that_was_not_recorded() -> None:
    silent = msgspec.structs.replace(call(0, 1), attributes={semconv.CALL_INDEX: 0})
    spec = RewardSpec(format_bonus=0.5, answer_format=".*")
    with pytest.raises(ConfigError, match="capture full"):
        trace_rollout(SUCCEEDED, [silent, reward(1.0, 3, final=True)], reward=spec)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"base": "last"}, "final.*sum"),
        ({"format_bonus": 0.1}, "answer_format"),
        ({"answer_format": ".*"}, "format_bonus"),
        ({"format_bonus": 0.1, "answer_format": "("}, "not a pattern"),
        ({"length_penalty": -1.0}, "positive"),
        ({"overlong_penalty": 1.0, "overlong_length": 10}, "overlong_buffer"),
        ({"overlong_penalty": 1.0, "overlong_length": 10, "overlong_buffer": 11}, "from 1 to"),
    ],
)
def test_a_spec_that_cannot_be_meant_is_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        RewardSpec(**wrong)
