"""Which calls train, which are left out and why, and what a rollout comes to: bad input has a name."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import agentlightning as agl
from agentlightning import semconv
from agentlightning.algorithm.rl.batch import make_batches
from agentlightning.algorithm.rl.groups import CompleteGroup, Ticket
from agentlightning.algorithm.rl.metrics import rollout_metrics
from agentlightning.data.call_filter import KEEPABLE, CallFilter
from agentlightning.data.recordings import rewarded_group
from agentlightning.data.transitions import TracedRollout, trace_rollout
from agentlightning.errors import ConfigError
from agentlightning.gateway import backend, capture
from agentlightning.gateway.backends import tokens
from agentlightning.types import SampledChoice, Span, TokenCapture
from tests.data.test_transitions import call, reward, rollout


def sampled(index: int = 0, *, prompt: tuple[int, ...] = (1, 2), **choice: Any) -> Any:
    fields = {"token_ids": (7, 8), "logprobs": (-0.1, -0.2), "finish_reason": "stop", "versions": ((3, 2),)} | choice
    tokens = TokenCapture(prompt_token_ids=prompt, choices=(SampledChoice(**fields),))
    return msgspec.structs.replace(call(index), tokens=tokens)


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
    everything = CallFilter(keep=KEEPABLE)
    traced = trace_rollout(rollout(), [sampled(**broken), reward(1.0)], calls=everything)
    assert (traced.transitions, traced.excluded, traced.outcome) == ((), {reason: 1}, "nothing trainable")
    with pytest.raises(ConfigError, match="cannot be kept"):
        CallFilter(keep=(reason,))


def test_a_call_without_any_tokens_is_counted_too() -> None:
    hosted = msgspec.structs.replace(
        call(0, **{semconv.CALL_ENDPOINT: "chat/completions", semconv.CALL_FLAG: capture.FAILED}), tokens=None
    )
    assert trace_rollout(rollout(), [hosted, sampled(1)]).excluded == {"call failed": 1}
    assert trace_rollout(rollout(), [hosted], calls=CallFilter(keep=("call failed",))).excluded == {"no token ids": 1}


def test_calls_for_embeddings_are_none_of_the_policy() -> None:
    about = {semconv.GEN_AI_OPERATION: "embeddings", semconv.CALL_ENDPOINT: "embeddings"}
    assert trace_rollout(rollout(), [msgspec.structs.replace(call(0, **about), tokens=None)]).outcome == "no calls"


def test_a_flagged_call_trains_where_its_reason_is_kept_and_is_counted() -> None:
    flagged = call(0, **{semconv.CALL_FLAG: "ended by a stop string"})
    traced = trace_rollout(rollout(), [flagged, call(1)], calls=CallFilter(keep=("ended by a stop string",)))
    assert len(traced.transitions) == 2
    assert (traced.excluded, traced.kept) == ({}, {"ended by a stop string": 1})


def test_every_reason_of_the_gateway_that_leaves_the_tokens_whole_can_be_kept() -> None:
    reasons = {
        capture.FAILED, capture.ABORTED, capture.COUNTS_DIFFER, backend.STOPPED_BY_STRING, backend.CONSTRAINED,
        backend.WEIGHTS_UNKNOWN, tokens.TRUNCATED,
    }  # fmt: skip
    assert reasons <= set(KEEPABLE)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"keep": ["ended by stop string"]}, "did you mean 'ended by a stop string'"),
        ({"keep": "has images"}, "a list of reasons"),
        ({"max_prompt_length": 0}, "max_prompt_length is 0"),
        ({"max_response_length": -1}, "max_response_length is -1"),
        ({"agents": "writer|("}, "not a pattern"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_the_algorithm(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        agl.GRPO(**wrong)


def test_an_answer_cut_off_at_max_tokens_trains_and_is_counted_unless_it_should_not() -> None:
    cut = sampled(finish_reason="length")
    traced = trace_rollout(rollout(), [cut])
    assert (len(traced.transitions), traced.kept) == (1, {"cut off at max_tokens": 1})
    left = trace_rollout(rollout(), [cut], calls=CallFilter(train_truncated=False))
    assert (left.transitions, left.excluded, left.kept) == ((), {"cut off at max_tokens": 1}, {})


def test_calls_over_a_limit_are_left_out_whole() -> None:
    calls = [sampled(0), sampled(1, prompt=(1,) * 9), sampled(2, token_ids=(7,) * 9, logprobs=(-0.1,) * 9)]
    traced = trace_rollout(rollout(), calls, calls=CallFilter(max_prompt_length=8, max_response_length=8))
    assert [one.call_index for one in traced.transitions] == [0]
    assert traced.excluded == {"prompt over max_prompt_length": 1, "response over max_response_length": 1}


def test_a_prompt_of_a_hundred_thousand_tokens_is_a_prompt() -> None:
    (transition,) = trace_rollout(rollout(), [sampled(prompt=tuple(range(100_000)))]).transitions
    assert (len(transition.prompt_ids), int(transition.prompt_ids[-1])) == (100_000, 99_999)


DATA = "data:image/png;base64,iVBORw0KGgo="


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ([{"type": "image_url", "image_url": {"url": DATA}}], True),
        ([{"type": "input_image", "image_url": DATA}], True),
        ([{"type": "tool_result", "content": [{"type": "image", "source": {"type": "base64", "data": "iVBO"}}]}], True),
        ([{"type": "text", "text": 'an "image_url" of nothing'}], False),
        ([{"type": "tool_use", "input": {"image_url": "https://a/no.png"}}], False),
    ],
)
def test_images_are_seen_in_every_protocol(content: Any, found: bool) -> None:
    for messages in ([{"role": "user", "content": content}], [{"type": "function_call_output", "output": content}]):
        seen = call(0, **{semconv.GEN_AI_INPUT_MESSAGES: msgspec.json.encode(messages).decode()})
        assert trace_rollout(rollout(), [seen]).excluded == ({"has images": 1} if found else {})


def complete(*rollouts: TracedRollout) -> CompleteGroup:
    return CompleteGroup(Ticket(0, 0), 0, rollouts, rewarded_group(rollouts, "exclude"))


@pytest.mark.parametrize(
    ("status", "spans", "outcome"),
    [
        ("succeeded", [call(0), reward(1.0)], "trainable"),
        ("succeeded", [], "no spans"),
        ("succeeded", [reward(1.0)], "no calls"),
        ("succeeded", [sampled(prompt=()), reward(1.0)], "nothing trainable"),
        ("succeeded", [call(0)], "no reward"),
        ("succeeded", [call(0), reward(math.nan)], "no reward"),
        ("failed", [call(0), reward(1.0)], "failed"),
        ("cancelled", [], "cancelled"),
    ],
)
def test_what_a_rollout_comes_to_has_a_name_that_is_counted(status: Any, spans: list[Any], outcome: str) -> None:
    traced = trace_rollout(rollout(status), spans)
    assert traced.outcome == outcome
    metrics = rollout_metrics([complete(traced, trace_rollout(rollout(), [call(0), reward(0.5)]))])
    assert metrics[f"rollouts/{outcome}"] == 1 + (outcome == "trainable")


def test_what_was_kept_and_sampled_by_whom_is_in_the_metrics() -> None:
    algorithm = agl.GRPO(group_size=2)
    rollouts = [trace_rollout(rollout(), [sampled(finish_reason="length"), reward(value)]) for value in (0.0, 1.0)]
    group = complete(*rollouts)
    metrics = rollout_metrics([group]) | make_batches(algorithm, [group.rewarded], {"policy": None})["policy"].metrics
    assert metrics["kept/cut off at max_tokens"] == 2
    assert metrics["policy_version_oldest"] == 3
    assert metrics["clock_skew_seconds"] == 0


@given(st.lists(st.tuples(st.sampled_from("abi"), st.booleans()), min_size=1, max_size=8))
def test_a_call_has_an_image_if_any_of_its_messages_has_one(turns: list[tuple[str, bool]]) -> None:
    """Of conversations that go on, or begin anew: what an earlier call had is not looked at again."""
    words: dict[str, Any] = {"i": [{"type": "image_url", "image_url": {"url": DATA}}], "a": "a", "b": 'an "image"'}
    said: list[Any] = []
    calls: list[Span] = []
    wanted = 0
    for index, (word, anew) in enumerate(turns):
        said = [*([] if anew else said), {"role": "user", "content": words[word]}]
        calls.append(call(index, **{semconv.GEN_AI_INPUT_MESSAGES: msgspec.json.encode(said).decode()}))
        wanted += any(isinstance(one["content"], list) for one in said)
    assert trace_rollout(rollout(), calls).excluded["has images"] == wanted
