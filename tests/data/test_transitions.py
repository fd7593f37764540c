"""What one rollout offers to learning: which calls train, which are left out and why, and what the
rollout comes to."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest

import agentlightning as agl
from agentlightning import semconv
from agentlightning.algorithm.rl.groups import CompleteGroup, Ticket
from agentlightning.algorithm.rl.metrics import rollout_metrics
from agentlightning.data.call_filter import KEEPABLE, CallFilter
from agentlightning.data.recordings import rewarded_group
from agentlightning.data.transitions import TracedRollout
from agentlightning.errors import ConfigError
from agentlightning.gateway import backend, capture
from agentlightning.gateway.backends import tokens
from agentlightning.types import Rollout, Span
from tests.data.recordings import reward, sampled, span, trace_stored


def rollout(status: Any = "succeeded") -> Rollout:
    return Rollout(rollout_id="r", input="task", start_time=0.0, status=status)


def call(
    index: int = 0,
    *,
    prompt: tuple[int, ...] = (1, 2),
    attempt: str = "a",
    about: Any = (),
    **choice: Any,
) -> Span:
    attributes = {semconv.CALL_INDEX: index, semconv.GEN_AI_RESPONSE_MODEL: "policy", **dict(about)}
    name, capture = f"{attempt}{index}", sampled(*prompt, **choice)
    return span(name, float(index), index + 0.5, attempt=attempt, tokens=capture, **attributes)


def without_tokens(made: Span) -> Span:
    return msgspec.structs.replace(made, tokens=None)


def indices(traced: TracedRollout) -> list[int]:
    return [transition.call_index for transition in traced.transitions]


def test_calls_become_transitions_in_call_order_with_exact_ids_and_versions() -> None:
    traced = trace_stored(rollout(), [call(1), reward(0.3), call(0, prompt=tuple(range(100_000)))])
    assert (indices(traced), traced.reward) == ([0, 1], 0.3)
    first, second = traced.transitions
    assert (len(first.prompt_ids), int(first.prompt_ids[-1])) == (100_000, 99_999)
    arrays = (second.prompt_ids, second.response_ids, second.logprobs, second.versions)
    assert [array.tolist() for array in arrays] == [[1, 2], [7, 8], [-0.5, -0.25], [3, 4]]


def test_only_the_final_attempt_trains() -> None:
    spans = [
        call(0, attempt="old"),
        reward(1.0, 9.0, attempt="old"),
        call(5, attempt="new", about=NEW),
    ]
    traced = trace_stored(rollout(), spans)
    assert [transition.attempt_id for transition in traced.transitions] == ["new"]
    assert traced.reward is None


NEW = {semconv.CALL_INDEX: 0}
KEEP_ALL = CallFilter(keep=KEEPABLE)
LEFT: list[tuple[Any, CallFilter, dict[str, int]]] = [
    (call(about={semconv.CALL_FLAG: "aborted"}), CallFilter(), {"aborted": 1}),
    (call(about={semconv.CALL_TRAINABLE: False}), CallFilter(), {"frozen model": 1}),
    (call(), CallFilter(models=["writer"]), {"other model": 1}),
    (call(finish_reason="length"), CallFilter(train_truncated=False), {"cut off at max_tokens": 1}),
    (call(prompt=(1,) * 9), CallFilter(max_prompt_length=8), {"prompt over max_prompt_length": 1}),
    (call(), CallFilter(max_response_length=1), {"response over max_response_length": 1}),
    (
        without_tokens(
            call(
                about={semconv.CALL_ENDPOINT: "chat/completions", semconv.CALL_FLAG: capture.FAILED}
            )
        ),
        CallFilter(),
        {"call failed": 1},
    ),
    (
        without_tokens(
            call(
                about={semconv.CALL_ENDPOINT: "chat/completions", semconv.CALL_FLAG: capture.FAILED}
            )
        ),
        CallFilter(keep=("call failed",)),
        {"no token ids": 1},
    ),
]


@pytest.mark.parametrize(("left", "chosen", "excluded"), LEFT)
def test_calls_that_must_not_train_are_left_out_whole_and_counted(
    left: Span, chosen: CallFilter, excluded: Any
) -> None:
    traced = trace_stored(rollout(), [left, reward(1.0)], calls=chosen)
    assert (traced.transitions, traced.excluded, traced.kept) == ((), excluded, {})


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ({"prompt": ()}, "no token ids"),
        ({"token_ids": (), "logprobs": ()}, "no token ids"),
        ({"logprobs": (-0.1,)}, "ids and logprobs differ in length"),
        ({"logprobs": (-0.1, math.nan)}, "logprob is not finite"),
        ({"logprobs": (-0.1, -math.inf)}, "logprob is not finite"),
        ({"logprobs": (-0.1, 0.5)}, "logprob is above 0"),
        ({"token_ids": (7, -8)}, "token id is negative"),
        ({"prompt": (1, -2)}, "token id is negative"),
    ],
)
def test_tokens_that_cannot_be_right_never_train(broken: dict[str, Any], reason: str) -> None:
    traced = trace_stored(rollout(), [call(**broken), reward(1.0)], calls=KEEP_ALL)
    assert (traced.transitions, traced.excluded, traced.outcome) == (
        (),
        {reason: 1},
        "nothing trainable",
    )
    with pytest.raises(ConfigError, match="cannot be kept"):
        CallFilter(keep=(reason,))


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (call(about={semconv.CALL_FLAG: "ended by a stop string"}), "ended by a stop string"),
        (call(finish_reason="length"), "cut off at max_tokens"),
    ],
)
def test_a_flagged_call_whose_reason_is_kept_trains_and_is_counted(made: Span, reason: str) -> None:
    traced = trace_stored(rollout(), [made, call(1)], calls=KEEP_ALL)
    assert (len(traced.transitions), traced.excluded, traced.kept) == (2, {}, {reason: 1})


def test_every_reason_of_the_gateway_that_leaves_the_tokens_whole_can_be_kept() -> None:
    reasons = {
        capture.FAILED,
        capture.ABORTED,
        capture.COUNTS_DIFFER,
        backend.STOPPED_BY_STRING,
        backend.CONSTRAINED,
        backend.WEIGHTS_UNKNOWN,
        tokens.TRUNCATED,
    }
    assert reasons <= set(KEEPABLE)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"keep": ["ended by stop string"]}, "did you mean 'ended by a stop string'"),
        ({"keep": "has images"}, "must be a list"),
        ({"max_prompt_length": 0}, "max_prompt_length"),
        ({"max_response_length": -1}, "max_response_length"),
        ({"agents": "writer|("}, "not a pattern"),
    ],
)
def test_a_filter_that_cannot_be_meant_is_refused_by_the_algorithm(
    wrong: dict[str, Any], match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        agl.GRPO(**wrong)


def test_choices_nobody_is_known_to_have_used_are_counted_not_trained() -> None:
    traced = trace_stored(rollout(), [call(0, choices=3)])
    assert (indices(traced), traced.excluded) == ([0], {"unused choice": 2})


def test_an_attempt_that_lacks_a_call_trains_nothing_and_a_call_that_failed_is_no_gap() -> None:
    traced = trace_stored(rollout(), [call(0), call(1), call(3), reward(1.0)])
    assert (traced.transitions, traced.excluded) == (
        (),
        {"another call of the attempt was not recorded": 3},
    )
    assert indices(trace_stored(rollout(), [call(0), without_tokens(call(1)), call(2)])) == [0, 2]


def test_an_answer_that_nobody_received_is_not_trained() -> None:
    retried = call(1, about={semconv.CALL_DISCARDS: [0]})
    left = span(semconv.UNDELIVERED, 9.0, 9.5, **{semconv.CALL_DISCARDS: [2]})
    traced = trace_stored(rollout(), [call(0), retried, call(2), left, call(3)])
    assert (indices(traced), traced.excluded) == ([1, 3], {"nobody received the answer": 2})


DATA = "data:image/png;base64,iVBORw0KGgo="
IMAGE = {"type": "image_url", "image_url": {"url": DATA}}


def asking(index: int, messages: Any) -> Span:
    return call(index, about={semconv.GEN_AI_INPUT_MESSAGES: json.dumps(messages)})


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ([IMAGE], True),
        ([{"type": "input_image", "image_url": DATA}], True),
        (
            [
                {
                    "type": "tool_result",
                    "content": [{"type": "image", "source": {"type": "base64", "data": "iVBO"}}],
                }
            ],
            True,
        ),
        ([{"type": "text", "text": 'an "image_url" of nothing'}], False),
        ([{"type": "tool_use", "input": {"image_url": "https://a/no.png"}}], False),
    ],
)
def test_images_are_seen_in_every_protocol(content: Any, found: bool) -> None:
    for messages in (
        [{"role": "user", "content": content}],
        [{"type": "function_call_output", "output": content}],
    ):
        assert trace_stored(rollout(), [asking(0, messages)]).excluded == (
            {"has images": 1} if found else {}
        )


def complete(*rollouts: TracedRollout) -> CompleteGroup:
    return CompleteGroup(Ticket(0, 0), 0, rollouts, rewarded_group(rollouts, "exclude"))


EMBEDDED = without_tokens(
    call(about={semconv.GEN_AI_OPERATION: "embeddings", semconv.CALL_ENDPOINT: "embeddings"})
)


@pytest.mark.parametrize(
    ("status", "spans", "outcome"),
    [
        ("succeeded", [call(), reward(1.0)], "trainable"),
        ("succeeded", [], "no spans"),
        ("succeeded", [reward(1.0)], "no calls"),
        ("succeeded", [EMBEDDED], "no calls"),
        ("succeeded", [call(prompt=()), reward(1.0)], "nothing trainable"),
        ("succeeded", [call()], "no reward"),
        ("succeeded", [call(), reward(math.nan)], "no reward"),
        ("failed", [call(), reward(1.0)], "failed"),
        ("cancelled", [], "cancelled"),
    ],
)
def test_what_a_rollout_comes_to_has_a_name_that_is_counted(
    status: Any, spans: list[Any], outcome: str
) -> None:
    traced = trace_stored(rollout(status), spans)
    assert traced.outcome == outcome and (status != "failed" or traced.reward is None)
    metrics = rollout_metrics([complete(traced, trace_stored(rollout(), [call(), reward(0.5)]))])
    assert metrics[f"rollouts/{outcome}"] == 1 + (outcome == "trainable")
