"""Tokens that the policy observed may be learned beside those that it sampled: at any level, in any
split of a batch, and without a change to the gradient of what was sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch

import agentlightning as agl
from agentlightning.algorithm.rl.batch import make_batches
from agentlightning.data.credit import RewardedGroup
from agentlightning.data.sequences import (
    CreditedTransition,
    Level,
    TrainingSequence,
    build_sequences,
)
from agentlightning.data.transitions import Transition
from agentlightning.errors import ConfigError
from agentlightning.learner.losses import Loss
from agentlightning.learner.tinker import gradient as tinker_gradient
from tests.learner.test_torch import conversation, gradient, learner, mean_gradient, relative
from tests.transitions import group_of

AGGREGATIONS = ("token-mean", "sequence-mean", "rollout-mean", "constant")


def observing(seed: int) -> list[CreditedTransition]:
    """A conversation whose prompts have weights, some of them 0; the first token, which nothing
    predicts, too."""
    random = np.random.default_rng(100 + seed)
    made: list[CreditedTransition] = []
    for item in conversation(seed):
        prompt, response = len(item.transition.prompt_ids), len(item.transition.response_ids)
        count = prompt + response
        weights = (random.uniform(0, 1, count) * random.integers(0, 2, count)).astype(np.float32)
        weights[prompt:] = 1.0
        made.append(replace(item, weights=weights))
    return made


def sequences(level: Level = "trajectory", rollouts: int = 4) -> list[TrainingSequence]:
    return [one for seed in range(rollouts) for one in build_sequences(observing(seed), level)]


def loss(aggregation: str = "sequence-mean", **settings: Any) -> Loss:
    return Loss(aggregation=aggregation, constant_length=7, temperature=0.8, **settings)


def plain_gradient(one: Any, aggregation: str) -> torch.Tensor:
    """Of the observations alone: each call by itself in the model, every mean taken in plain
    Python."""
    calls: list[tuple[str, torch.Tensor]] = []
    for seed in range(4):
        for item in observing(seed):
            prompt, weights = item.transition.prompt_ids, item.weights
            assert weights is not None
            ids = torch.from_numpy(prompt.astype(np.int64))
            logprobs = torch.log_softmax(one.model(ids[None]).logits[0] / 0.8, -1)
            at = np.flatnonzero(weights[1 : len(prompt)]) + 1
            own = -torch.from_numpy(weights[at]) * logprobs[at - 1, ids[at]]
            if len(at):
                calls.append((item.transition.rollout_id, own))
    return mean_gradient(one.model, calls, aggregation)


def without(batch: Sequence[TrainingSequence]) -> list[TrainingSequence]:
    return [replace(one, observed=None) for one in batch]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize(
    ("level", "tokens"), [("transition", 100_000), ("trajectory", 64), ("tree", 64)]
)
def test_the_gradient_is_that_of_samples_plus_that_of_observations(
    tokenizer: Any, aggregation: str, level: Level, tokens: int
) -> None:
    one = learner(tokenizer, max_grad_norm=1e9, micro_batch_tokens=tokens)
    of = loss(aggregation)
    both, samples = (
        gradient(one, sequences(level), of),
        gradient(one, without(sequences(level)), of),
    )
    assert relative(both - samples, plain_gradient(one, aggregation)) < 1e-5


def test_metrics_of_samples_are_as_without_observations(tokenizer: Any) -> None:
    one, other = (learner(tokenizer, micro_batch_tokens=64) for _ in range(2))
    both, samples = one.step(sequences(), loss()), other.step(without(sequences()), loss())
    for name in ("tokens", "entropy", "ratio_mean", "ratio_max", "behaviour_kl", "clip_fraction"):
        assert both[name] == pytest.approx(samples[name], rel=1e-6), name
    assert both["loss"] == pytest.approx(samples["loss"] + both["observation_loss"], rel=1e-5)
    assert both["tokens_observed"] == sum(
        len(s.observed.positions) for s in sequences() if s.observed
    )
    assert "observation_loss" not in samples


def test_observations_alone_are_learned(tokenizer: Any) -> None:
    one = learner(tokenizer, max_grad_norm=1e9)
    alone = [item for seed in range(4) for item in observing(seed)]
    for item in alone:
        assert item.weights is not None
        item.weights[len(item.transition.prompt_ids) :] = 0.0
    batch = [made for item in alone for made in build_sequences([item], "transition")]
    assert not any(len(made.positions) for made in batch)
    assert (
        relative(gradient(one, batch, loss("token-mean")), plain_gradient(one, "token-mean")) < 1e-4
    )
    assert set(one.step(batch, loss())) >= {"observation_loss", "grad_norm"}


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_tinker_server_is_sent_the_same_gradient(tokenizer: Any, aggregation: str) -> None:
    """Two calls of one sequence observe the same tokens; the slope of each adds up at its place."""
    one, batch, of = (
        learner(tokenizer),
        sequences("trajectory"),
        Loss(aggregation=aggregation, constant_length=7),
    )
    rows: list[np.ndarray] = []
    lines: list[torch.Tensor] = []
    for made in batch:
        ids = torch.from_numpy(made.token_ids.astype(np.int64))
        lines.append(
            torch.log_softmax(one.model(ids[None]).logits[0, :-1], -1).gather(1, ids[1:, None])[
                :, 0
            ]
        )
        rows.append(lines[-1].detach().numpy())
    slopes, totals = tinker_gradient(batch, rows, of, 0)
    found = torch.autograd.grad(
        sum(
            (line * torch.from_numpy(slope)).sum()
            for line, slope in zip(lines, slopes, strict=True)
        ),  # type: ignore[arg-type]
        list(one.model.parameters()),
    )
    expected = gradient(learner(tokenizer, max_grad_norm=1e9), batch, of)
    assert relative(torch.cat([part.flatten() for part in found]), expected) < 1e-5
    assert totals.metrics()["loss"] == pytest.approx(one.step(batch, of)["loss"], rel=1e-5)


# --- the setting ----------------------------------------------------------------------------------


def predict_prompts(transitions: Sequence[Transition], *, weight: float = 0.1) -> list[np.ndarray]:
    return [
        np.repeat([weight, 1.0], [len(one.prompt_ids), len(one.response_ids)])
        for one in transitions
    ]


@pytest.mark.parametrize("level", get_args(Level))
def test_a_function_weighs_the_tokens_of_each_rollout(level: Level) -> None:
    calls = [[item.transition for item in conversation(seed)] for seed in range(4)]
    groups = [RewardedGroup(calls[:2], [0.0, 1.0]), RewardedGroup(calls[2:], [1.0, 1.0])]
    algorithm = agl.GRPO(
        group_size=2, token_weights={"name": predict_prompts, "weight": 0.25}, level=level
    )
    batch = make_batches(algorithm, groups, {"policy": None})["policy"]
    plain = make_batches(agl.GRPO(group_size=2, level=level), groups, {"policy": None})["policy"]
    sampled = [one for one in batch.sequences if len(one.positions)]
    assert [one.positions.tolist() for one in sampled] == [
        one.positions.tolist() for one in plain.sequences
    ]
    # without variance there is something to observe all the same
    assert len(batch.sequences) > len(sampled)
    assert batch.metrics["groups_without_variance"] == plain.metrics["groups_without_variance"] == 1
    observed = [one.observed for one in batch.sequences if one.observed is not None]
    assert {float(weight) for one in observed for weight in one.weights} == {0.25}
    assert sum(len(one.positions) for one in observed) == sum(
        len(one.prompt_ids) - 1 for of in calls for one in of
    )


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (
            lambda transitions: [np.ones(3)],
            r"token_weights must return an array for each of 2 calls, not 1",
        ),
        (
            lambda transitions: [np.ones(3) for _ in transitions],
            r"a finite number for each of its 4 tokens, prompt included",
        ),
        (
            lambda transitions: [np.full(4, np.nan), np.ones(2)],
            "finite number for each of its 4 tokens",
        ),
        (lambda transitions: transitions.ids, r"token_weights failed: AttributeError.*\.py:\d+"),
    ],
)
def test_what_is_no_weight_is_refused(function: Any, why: str) -> None:
    algorithm = agl.GRPO(group_size=2, token_weights=function)
    with pytest.raises(ConfigError, match=why):
        make_batches(algorithm, [group_of(0.0, 1.0)], {"policy": None})


@pytest.mark.parametrize(
    ("function", "why"),
    [
        ("weigh", "token_weights 'weigh' is unknown"),
        ({"name": predict_prompts, "wieght": 1.0}, "did you mean 'weight'"),
        (lambda calls: calls, "'calls', which nothing fills: .*transitions"),
    ],
)
def test_a_function_of_other_arguments_is_refused(function: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        agl.GRPO(token_weights=function)
