"""Which reward a rollout has, read back from its spans."""

from __future__ import annotations

import pytest

from agentlightning.errors import InvalidError
from agentlightning.tracing.context import recording
from agentlightning.tracing.emit import emit_message, emit_reward
from agentlightning.tracing.rewards import (
    find_final_reward,
    find_reward_spans,
    get_reward_value,
    is_final_reward,
    read_reward,
)


def test_the_last_final_reward_is_the_rollouts_and_no_intermediate_one_displaces_it() -> None:
    with recording() as tracer:
        step = emit_reward(0.25, final=False)
        assert find_final_reward(tracer.get_last_trace()) is None
        emit_reward(0.1)
        emit_reward({"speed": 0.1, "correct": 1}, primary_key="correct")
        emit_reward(0.25, final=False)
        emit_message("bye")
    spans = tracer.get_last_trace()
    # by time, not by place in the list
    assert find_final_reward(spans) == find_final_reward(reversed(spans)) == 1.0
    assert [get_reward_value(span) for span in spans] == [0.25, 0.1, 1.0, 0.25, None]
    assert find_reward_spans(spans) == spans[:-1]
    assert not is_final_reward(step)


@pytest.mark.parametrize("value", [-1e39, 1.7e308, -1.1e12, 10**13])
def test_a_reward_that_no_gradient_survives_is_refused_like_nan(value: float) -> None:
    with pytest.raises(InvalidError, match="beyond ±1e"):
        read_reward({"right": 1.0, "reward": value})
    assert read_reward(1e12).reward == 1e12
