"""Which reward a rollout has, read back from its spans."""

from __future__ import annotations

from agentlightning.tracing.context import recording
from agentlightning.tracing.emit import emit_message, emit_reward
from agentlightning.tracing.rewards import (
    find_final_reward,
    find_reward_spans,
    get_reward_value,
    get_rewards_from_span,
    is_final_reward,
    is_reward_span,
)


def test_the_last_final_reward_is_the_rollouts() -> None:
    with recording() as tracer:
        emit_reward(0.1)
        emit_reward(0.5)
        emit_message("bye")
    spans = tracer.get_last_trace()
    assert find_final_reward(spans) == 0.5
    assert [get_reward_value(span) for span in spans] == [0.1, 0.5, None]


def test_an_intermediate_reward_never_displaces_the_final_one() -> None:
    with recording() as tracer:
        emit_reward(1.0)
        step = emit_reward(0.25, final=False)
    assert find_final_reward(tracer.get_last_trace()) == 1.0
    assert not is_final_reward(step)
    assert [get_reward_value(span) for span in find_reward_spans(tracer.get_last_trace())] == [1.0, 0.25]


def test_the_order_is_that_of_time_not_of_the_list() -> None:
    with recording() as tracer:
        emit_reward(0.1)
        emit_reward(0.9)
    assert find_final_reward(reversed(tracer.get_last_trace())) == 0.9


def test_all_dimensions_are_read_back_with_the_primary_one_first() -> None:
    with recording():
        span = emit_reward({"speed": 0.1, "correct": True}, primary_key="correct")
        message = emit_message("hello")
    assert get_rewards_from_span(span) == [("correct", 1.0), ("speed", 0.1)]
    assert is_reward_span(span)
    assert get_rewards_from_span(message) == []
    assert not is_reward_span(message)
