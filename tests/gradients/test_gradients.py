"""What a return, a baseline and an aggregation estimate, against the gradient that they are to
estimate: exact expectations over all rollouts and all groups of small games."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

import agentlightning as agl
from agentlightning.algorithm.rl.batch import make_batches
from agentlightning.data.aggregation import aggregation_weights
from agentlightning.data.credit import RewardedGroup
from agentlightning.data.sequences import pack
from agentlightning.errors import ConfigError
from agentlightning.learner.losses import policy_loss
from tests.gradients.__main__ import PLANS, games
from tests.gradients.enumeration import (
    FORK,
    OF_TURN,
    TREE,
    Combination,
    Enumeration,
    Estimate,
    FloatArray,
    Game,
    Outcome,
    Run,
    error,
    forked_groups,
    groups_of,
    scale,
)

GAMES = [game for _, game in games(3, most=7)]


def estimate(groups: Enumeration, combination: Combination, aggregation: str) -> Estimate:
    return groups.estimate(groups.advantages(combination.credit()), groups.weights(aggregation))


def errors(combination: Combination, aggregation: str, *, steps: bool = False) -> list[float]:
    """Of each game, with groups of three."""
    return [
        error(
            estimate(Enumeration(groups_of(game, 3)), combination, aggregation).mean,
            game.gradient(steps=steps),
        )
        for game in GAMES
    ]


@pytest.mark.parametrize(
    ("combination", "size"),
    [
        (Combination("identical", "none"), 1.0),
        (Combination("identical", "rloo"), 1.0),
        (Combination("identical", "dr_grpo"), 2 / 3),
        (TREE, 1.0),
        (FORK, 1.0),
        (Combination("identical", OF_TURN, options={"others": True}), 1.0),
    ],
    ids=str,
)
def test_these_with_a_constant_denominator_are_the_gradient_of_the_reward(
    combination: Combination, size: float
) -> None:
    for game in GAMES:
        mean = estimate(Enumeration(groups_of(game, 3)), combination, "constant").mean
        assert error(mean, game.gradient()) < 1e-6
        assert scale(mean, game.gradient()) == pytest.approx(size)


@pytest.mark.parametrize(
    ("combination", "aggregation"),
    [
        (Combination("identical", "rloo"), "token-mean"),
        (Combination("identical", "rloo"), "sequence-mean"),
        (Combination("identical", "rloo"), "rollout-mean"),
        (Combination("identical", "grpo"), "constant"),
        (Combination("identical", "grpo"), "rollout-mean"),
        (Combination("identical", OF_TURN), "constant"),
        (Combination("air", "rloo"), "constant"),
    ],
    ids=str,
)
def test_these_are_not(combination: Combination, aggregation: str) -> None:
    assert max(errors(combination, aggregation)) > 0.01


@pytest.mark.parametrize("baseline", ["none", "rloo"])
def test_rewards_of_calls_added_up_are_the_gradient_of_all_rewards(baseline: str) -> None:
    added = Combination("discounted", baseline, {"gamma": 1.0}, equal_rewards=baseline != "none")
    assert max(errors(added, "constant", steps=True)) < 1e-6
    alone = Combination("air_dense", baseline, equal_rewards=baseline != "none")
    assert max(errors(alone, "constant", steps=True)) > 0.1


@pytest.mark.parametrize("settings", [{}, {"baseline": "rloo", "aggregation": "constant"}])
def test_a_training_makes_of_a_group_what_is_enumerated(settings: dict[str, Any]) -> None:
    """Through the batch, the packing and the loss of a training, to the gradient of logits."""
    game = GAMES[0]
    groups = Enumeration(groups_of(game, 2))
    algorithm = agl.GRPO(group_size=2, constant_length=1, **settings)
    combination = Combination("identical", settings.get("baseline", "grpo"))
    weights = groups.weights(settings.get("aggregation", "rollout-mean"))
    expected = groups.each(groups.advantages(combination.credit()), weights)
    for number in range(0, len(groups.groups), 7):
        named = [
            [structs.replace(call, rollout_id=str(place)) for call in calls]
            for place, calls in enumerate(groups.groups[number].transitions)
        ]
        group = RewardedGroup(named, groups.groups[number].rewards)
        batch = make_batches(algorithm, [group], {"policy": None})["policy"]
        found = trained(game, batch.sequences, algorithm) if batch.sequences else 0 * expected[0]
        np.testing.assert_allclose(found, expected[number], atol=1e-5)


def trained(game: Game, sequences: Sequence[Any], algorithm: agl.GRPO) -> FloatArray:
    """Minus the gradient of the loss with respect to the policy's logits."""
    loss = algorithm.make_loss()
    micro = pack(sequences, aggregation_weights(sequences, loss.aggregation, loss.constant_length))
    logits = torch.from_numpy(np.log(game.policy.clip(1e-300))).requires_grad_()
    policy = logits.log_softmax(1)
    logprobs = torch.stack(
        [
            policy[before - 30, token - 10] if token < 20 else logits.new_zeros(())
            for before, token in (
                micro.token_ids[row, position - 1 : position + 1]
                for row, position in zip(micro.rows, micro.positions, strict=True)
            )
        ]
    )
    of_tokens = policy_loss(
        logprobs,
        logprobs.detach(),
        torch.from_numpy(micro.advantages),
        torch.from_numpy(micro.transitions),
        loss,
    )
    (of_tokens.values * torch.from_numpy(micro.weights)).sum().backward()
    assert logits.grad is not None
    return -logits.grad.numpy().reshape(-1)


UNBIASED = ("none", "call 1", "all calls", "calls in state 1")


@pytest.mark.parametrize("combination", [FORK, TREE], ids=str)
@pytest.mark.parametrize("plan", UNBIASED)
def test_forks_chosen_by_the_state_are_the_gradient_of_the_reward(
    combination: Combination, plan: str
) -> None:
    for game in GAMES:
        size = 1 if plan == "all calls" else 2
        outcomes = forked_groups(game, size, PLANS[plan])
        if len(outcomes) < 1000:
            mean = estimate(Enumeration(outcomes), combination, "constant").mean
            assert error(mean, game.gradient()) < 1e-6
            assert scale(mean, game.gradient()) == pytest.approx(1)


def test_forks_that_are_taken_for_independent_or_chosen_by_what_came_of_them_are_not() -> None:
    apart: list[float] = []
    chosen: list[float] = []
    for game in GAMES:
        groups = Enumeration(forked_groups(game, 2, PLANS["call 1"]), independent=True)
        apart.append(scale(estimate(groups, TREE, "constant").mean, game.gradient()))
        failed = Enumeration(forked_groups(game, 2, PLANS["the last call, if it failed"]))
        chosen.append(error(estimate(failed, FORK, "constant").mean, game.gradient()))
    assert min(apart) < 0.8
    assert max(chosen) > 0.05


@pytest.mark.parametrize("combination", [FORK, TREE], ids=str)
def test_a_fork_of_a_fork_is_too(combination: Combination) -> None:
    """Two rollouts; the first is forked at call 1, and that fork at call 2, or at call 1 again."""
    game = GAMES[0]
    for at in (1, 2):
        outcomes: list[Outcome] = []
        for path, other in itertools.product(game.paths, game.paths):
            forks = game.continuations(path, 1) if len(path.calls) > 1 else [None]
            for fork in forks:
                again = game.continuations(fork, at) if fork and len(fork.calls) > at else [None]
                for last in again:
                    runs = [Run(path), Run(other)]
                    runs += [Run(fork, 0, 1)] if fork else []
                    runs += [Run(last, 2, at)] if last else []
                    chance = math.prod(float(run.path.chances[run.own].prod()) for run in runs)
                    outcomes.append(Outcome(chance, tuple(runs)))
        groups = Enumeration(outcomes)
        assert groups.chances.sum() == pytest.approx(1)
        mean = estimate(groups, combination, "constant").mean
        assert error(mean, game.gradient()) < 1e-6
        assert scale(mean, game.gradient()) == pytest.approx(1)


@pytest.mark.parametrize("baseline", ["none", "rloo", "grpo", "gigpo", "reinforce++"])
def test_what_takes_forks_for_independent_tries_is_refused(baseline: str) -> None:
    outcomes = forked_groups(GAMES[0], 1, PLANS["call 1"])
    group = next(outcome for outcome in outcomes if len(outcome.runs) > 1).group()
    with pytest.raises(ConfigError, match="give returns='fork' or 'tree'"):
        Combination("identical", baseline).credit().advantages([group])
