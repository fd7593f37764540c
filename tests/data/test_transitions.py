"""What one rollout offers to learning."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from agentlightning import semconv
from agentlightning.data.call_filter import CallFilter
from agentlightning.data.transitions import trace_rollout
from agentlightning.types import Rollout, SampledChoice, Span, TokenCapture


def rollout(status: Any = "succeeded") -> Rollout:
    return Rollout(rollout_id="r", input="task", start_time=0.0, status=status)


def call(index: int, *, attempt: str = "a", start: float | None = None, choices: int = 1, **attributes: Any) -> Span:
    choice = SampledChoice(token_ids=(7, 8), logprobs=(-0.1, -0.2), finish_reason="stop", versions=((3, 1), (4, 1)))
    return Span(
        rollout_id="r",
        attempt_id=attempt,
        sequence_id=index + 1,
        trace_id="0" * 32,
        span_id=f"{attempt}{index}",
        name="chat policy",
        start_time=float(index) if start is None else start,
        end_time=float(index) + 0.5,
        attributes={semconv.CALL_INDEX: index, semconv.GEN_AI_RESPONSE_MODEL: "policy"} | attributes,
        tokens=TokenCapture(prompt_token_ids=(1, 2, index), choices=(choice,) * choices),
    )


def reward(value: float, *, attempt: str = "a", start: float = 9.0) -> Span:
    return Span(
        rollout_id="r",
        attempt_id=attempt,
        sequence_id=99,
        trace_id="0" * 32,
        span_id=f"reward-{attempt}-{start}",
        name=semconv.ANNOTATION,
        start_time=start,
        end_time=start,
        attributes={semconv.reward_name(0): "primary", semconv.reward_value(0): value},
    )


def test_calls_become_transitions_in_call_order_with_exact_ids_and_versions() -> None:
    traced = trace_rollout(rollout(), [call(1), reward(0.3), call(0)])
    assert [transition.call_index for transition in traced.transitions] == [0, 1]
    first = traced.transitions[0]
    assert first.prompt_ids.tolist() == [1, 2, 0]
    assert first.response_ids.tolist() == [7, 8]
    np.testing.assert_array_equal(first.logprobs, np.array([-0.1, -0.2], np.float32))
    assert first.versions.tolist() == [3, 4]
    assert traced.reward == 0.3


def test_only_the_final_attempt_trains() -> None:
    spans = [call(0, attempt="old", start=0.0), reward(1.0, attempt="old"), call(0, attempt="new", start=5.0)]
    traced = trace_rollout(rollout(), spans)
    assert [transition.attempt_id for transition in traced.transitions] == ["new"]
    assert traced.reward is None


def test_a_rollout_that_did_not_succeed_has_no_reward() -> None:
    assert trace_rollout(rollout("failed"), [call(0), reward(1.0)]).reward is None


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [({semconv.CALL_FLAG: "aborted"}, "aborted"), ({semconv.CALL_TRAINABLE: False}, "frozen model")],
)
def test_calls_that_must_not_train_are_excluded_and_counted(attributes: dict[str, Any], reason: str) -> None:
    traced = trace_rollout(rollout(), [call(0), call(1, **attributes)])
    assert len(traced.transitions) == 1
    assert traced.excluded == {reason: 1}


def test_a_call_of_another_model_is_excluded_when_models_are_named() -> None:
    assert trace_rollout(rollout(), [call(0)], calls=CallFilter(models=["writer"])).excluded == {"other model": 1}


def test_choices_nobody_is_known_to_have_used_are_counted_not_trained() -> None:
    traced = trace_rollout(rollout(), [call(0, choices=3)])
    assert len(traced.transitions) == 1
    assert traced.excluded == {"unused choice": 2}


def test_an_attempt_without_a_call_is_empty_not_an_error() -> None:
    assert trace_rollout(rollout(), []).transitions == ()
    assert trace_rollout(rollout(), [reward(0.5)]).reward == 0.5


def test_an_attempt_that_lacks_a_call_trains_nothing_and_says_so() -> None:
    traced = trace_rollout(rollout(), [call(0), call(1), call(3), reward(1.0)])
    assert traced.transitions == ()
    assert traced.excluded == {"another call of the attempt was not recorded": 3}


def test_a_call_that_failed_without_tokens_is_no_gap() -> None:
    failed = msgspec.structs.replace(call(1), tokens=None)
    assert [one.call_index for one in trace_rollout(rollout(), [call(0), failed, call(2)]).transitions] == [0, 2]


def test_an_answer_that_nobody_received_is_not_trained() -> None:
    retried = call(1, **{semconv.CALL_DISCARDS: [0]})
    left = msgspec.structs.replace(
        call(9), name=semconv.UNDELIVERED, attributes={semconv.CALL_DISCARDS: [2]}, tokens=None
    )
    traced = trace_rollout(rollout(), [call(0), retried, call(2), left, call(3)])
    assert [one.call_index for one in traced.transitions] == [1, 3]
    assert traced.excluded == {"nobody received the answer": 2}
