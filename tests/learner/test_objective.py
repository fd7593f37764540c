"""What a loss measures and may ask of its tokens, and how tokens are aggregated: the same in any
split of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import agentlightning as agl
from agentlightning.algorithm.rl.batch import make_batches
from agentlightning.data.aggregation import Tokens, aggregation_weights
from agentlightning.data.credit import RewardedGroup
from agentlightning.data.sequences import Origin, TrainingSequence
from agentlightning.errors import ConfigError
from agentlightning.learner import losses
from agentlightning.learner.losses import Loss
from agentlightning.types import Rollout
from tests.learner.test_torch import batch, conversation, gradient, learner, relative


def by_level(logprobs: Tensor, advantages: Tensor, tokens: Tokens) -> Any:
    """Each token weighs as much as the level of its task."""
    level = logprobs.new_tensor(tokens.each(lambda of: of.task["level"]))
    return -advantages * level * logprobs, {"level": level, "sure": logprobs > -1.0}


def per_rollout(tokens: Tokens, *, length: float = 7.0) -> np.ndarray:
    return np.full(len(tokens), 1 / (len(tokens.origins) * length))


def from_tasks(sequences: Sequence[TrainingSequence]) -> list[TrainingSequence]:
    """Each rollout of a task of another level."""
    return [
        replace(one, origin=Origin(task={"level": 1.0 + int(one.rollout_id[1:])}))
        for one in sequences
    ]


@pytest.mark.parametrize("tokens", [40, 100_000])
@pytest.mark.parametrize("level", ["transition", "trajectory", "tree"])
def test_a_loss_sees_the_task_of_each_token_and_measures_over_the_batch(
    tokenizer: Any, level: Any, tokens: int
) -> None:
    one, other = (
        learner(tokenizer, max_grad_norm=1e9, micro_batch_tokens=tokens) for _ in range(2)
    )
    sequences, loss = from_tasks(batch(level)), Loss(by_level, temperature=0.8)
    scaled = [
        replace(s, advantages=s.advantages * np.float32(s.origin.task["level"]))
        for s in sequences
        if s.origin
    ]
    expected = gradient(other, scaled, Loss("policy_gradient", temperature=0.8))
    assert relative(gradient(one, sequences, loss), expected) < 1e-5
    metrics, logprobs = one.step(sequences, loss), torch.cat(one.logprobs(sequences, 0.8))
    levels = [s.origin.task["level"] for s in sequences if s.origin for _ in s.positions]
    assert metrics["loss/level"] == pytest.approx(np.mean(levels))
    assert metrics["loss/sure"] == pytest.approx(float((logprobs > -1).float().mean()))


def test_the_batch_of_a_step_knows_task_group_and_reward_terms() -> None:
    records = [
        Rollout(rollout_id=f"r{i}", input={"level": i}, start_time=0, metadata={"a": "b"})
        for i in range(4)
    ]
    calls = [[item.transition for item in conversation(seed)] for seed in range(4)]
    rewards, terms = [0.0, 1.0, 1.5, 0.5], [{"final": one, "style": 0.5} for one in range(4)]
    halves = slice(0, 2), slice(2, 4)
    groups = [RewardedGroup(calls[of], rewards[of], terms[of], records[of]) for of in halves]
    made = make_batches(agl.GRPO(group_size=2), groups, {"policy": None})["policy"].sequences
    tokens = Tokens(made)
    assert tokens.origins == [
        Origin(
            group,
            rewards[2 * group : 2 * group + 2],
            {"level": i},
            {"a": "b"},
            rewards[i],
            terms[i],
        )
        for i, group in enumerate((0, 0, 1, 1))
    ]
    counts = [sum(len(call.response_ids) for call in of) for of in calls]
    np.testing.assert_array_equal(
        tokens.each(lambda of: of.terms["final"]), np.repeat(np.arange(4.0), counts)
    )


@pytest.mark.parametrize("tokens", [40, 100_000])
def test_an_aggregation_may_be_a_function_of_the_whole_batch(tokenizer: Any, tokens: int) -> None:
    one, other = (
        learner(tokenizer, max_grad_norm=1e9, micro_batch_tokens=tokens) for _ in range(2)
    )
    sequences = batch("transition")
    ours = gradient(one, sequences, Loss(aggregation=per_rollout))
    constant = gradient(other, sequences, Loss(aggregation="constant", constant_length=7))
    assert relative(ours, constant) < 1e-5


def test_options_of_a_function_are_given_beside_its_name() -> None:
    loss = agl.GRPO(aggregation={"name": per_rollout, "length": 2.0}).make_loss()
    weights = np.concatenate(aggregation_weights(batch(), loss.aggregation))
    np.testing.assert_allclose(weights, 1 / 8)
    assert agl.GRPO(loss={"name": "ppo_clip"}).make_loss().clip_range == (0.2, 0.2)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"aggregation": "token-meen"}, "did you mean 'token-mean'"),
        ({"aggregation": lambda batch: 1.0}, "'batch', which nothing fills"),
        ({"aggregation": {"name": per_rollout, "lenght": 1}}, "did you mean 'length'"),
        ({"loss": {"name": "gspo", "lo": 1}}, "loss 'gspo' has no option 'lo'"),
    ],
)
def test_what_does_not_fit_is_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        agl.GRPO(**settings)


@pytest.mark.parametrize(
    "aggregation", [lambda tokens: [1.0], lambda tokens: np.full(len(tokens), np.inf)]
)
def test_an_aggregation_returns_a_finite_weight_for_each_token(aggregation: Any) -> None:
    with pytest.raises(ConfigError, match=r"must return a finite weight for each of \d+ tokens"):
        aggregation_weights(batch(), aggregation)


def test_a_metric_of_a_loss_has_a_number_for_each_token() -> None:
    loss = Loss(lambda logprobs: (-logprobs, {"mean": logprobs.mean()}))
    with pytest.raises(ConfigError, match="for each of 2 tokens as its metric 'mean'"):
        losses.policy_loss(*[torch.zeros(2)] * 3, torch.tensor([0, 0]), loss)
