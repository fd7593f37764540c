"""Weights and masks equal those of verl; masked tokens leave every denominator; only what fits is
taken."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import agentlightning as agl
from agentlightning.algorithm.rl.policies import optimiser_steps
from agentlightning.data.sequences import TrainingSequence
from agentlightning.errors import ConfigError, TrainingError
from agentlightning.learner.corrections import Corrections, corrected, prepare
from agentlightning.learner.losses import Loss
from tests.golden import INPUTS, MASK, OUTPUTS, sampled
from tests.learner.test_torch import Still, batch, gradient, learner, mean_gradient, relative

# the transition of each sampled token: one per golden row
ROWS = torch.from_numpy(np.nonzero(MASK)[0])
BEHAVIOUR, PROXIMAL = sampled(INPUTS["rollout_log_prob"]), sampled(INPUTS["old_log_prob"])


def bounds(statistic: str, over: str, low: float | None, high: float) -> dict[str, Any]:
    return {"name": "bound", "statistic": statistic, "over": over, "low": low, "high": high}


def evaluated(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    corrections = Corrections.read(list(given), "proximal")
    weights, kept, _ = corrections.of(BEHAVIOUR, PROXIMAL, PROXIMAL, transitions=ROWS)
    return weights, kept


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_truncated_weights_are_those_of_verl(level: str) -> None:
    weights, kept = evaluated({"name": "truncate", "level": level})
    torch.testing.assert_close(
        weights, sampled(OUTPUTS[f"verl.tis.{level}.2.0"]), atol=1e-6, rtol=0
    )
    assert kept.all()


@pytest.mark.parametrize(
    ("oracle", "settings"),
    [  # verl bounds exp(k1)
        ("token_k1.0.6_1.5", bounds("k1", "token", math.log(0.6), math.log(1.5))),
        ("token_k2.0.05", bounds("k2", "token", None, 0.05)),
        ("token_k3.0.05", bounds("k3", "token", None, 0.05)),
        ("seq_sum_k1.0.5_2.0", bounds("k1", "sum", math.log(0.5), math.log(2.0))),
        ("seq_mean_k1.0.9_1.1", bounds("k1", "mean", math.log(0.9), math.log(1.1))),
        ("seq_mean_k3.0.02", bounds("k3", "mean", None, 0.02)),
        ("seq_max_k3.0.1", bounds("k3", "max", None, 0.1)),
    ],
)
def test_masks_are_those_of_verl(oracle: str, settings: dict[str, Any]) -> None:
    weights, kept = evaluated(settings)
    torch.testing.assert_close(
        kept.float(), sampled(OUTPUTS[f"verl.rs.{oracle}"]), atol=1e-6, rtol=0
    )
    assert (weights == 1).all()


@pytest.mark.parametrize(
    ("level", "low", "high"), [("token", 0.9, 1.2), ("sequence", 0.7, 1.5), ("geometric", 0.9, 1.1)]
)
def test_a_mask_is_the_ratio_where_it_is_between_its_bounds(
    level: str, low: float, high: float
) -> None:
    weights, kept = evaluated({"name": "mask", "level": level, "low": low, "high": high})
    differences = np.array(INPUTS["old_log_prob"]) - np.array(INPUTS["rollout_log_prob"])
    expected = np.zeros(MASK.shape)
    for row, mask in enumerate(MASK):
        own = differences[row][mask]
        expected[row][mask] = np.exp(
            {"token": own, "sequence": own.sum(), "geometric": own.mean()}[level]
        )
    np.testing.assert_allclose(weights.numpy(), expected[MASK], rtol=1e-5)
    np.testing.assert_array_equal(kept.numpy(), (expected[MASK] >= low) & (expected[MASK] <= high))
    assert 0 < kept.sum() < len(kept)


def test_several_corrections_multiply_weights_and_keep_what_all_keep() -> None:
    mask, bound = (
        {"name": "mask", "level": "sequence", "low": 0.0, "high": 2.0},
        bounds("k2", "token", None, 0.02),
    )
    (weights, kept), (of_mask, first), (_, second) = (
        evaluated(mask, bound),
        evaluated(mask),
        evaluated(bound),
    )
    torch.testing.assert_close(weights, of_mask)
    assert torch.equal(kept, first & second) and not torch.equal(first, second)


def near(one: Any, sequences: Sequence[TrainingSequence]) -> list[TrainingSequence]:
    """The same, sampled by weights not far from the learner's."""
    random = np.random.default_rng(1)
    return [
        replace(
            s, logprobs=(p.numpy() + random.normal(0, 0.5, len(s.positions))).astype(np.float32)
        )
        for s, p in zip(sequences, one.logprobs(sequences, 0.8), strict=True)
    ]


def start(one: Any, sequences: list[TrainingSequence], given: Any, old: Any = "proximal") -> Any:
    prepared, _ = prepare(one, sequences, 0.8, None)
    return corrected(prepared, Corrections.read(given, old), old)


def test_the_proximal_policy_is_that_of_the_start_of_the_step(tokenizer: Any) -> None:
    one, loss = learner(tokenizer, learning_rate=1e-2), Loss(old="proximal", temperature=0.8)
    sequences = near(one, batch())
    made, metrics = start(one, sequences, {"name": "truncate", "cap": 1.5})
    proximal = one.logprobs(sequences, 0.8)
    seen: list[float] = []
    for before, after, logprobs in zip(sequences, made, proximal, strict=True):
        np.testing.assert_allclose(after.logprobs, logprobs, atol=1e-6)
        weights = np.minimum(np.exp(logprobs.numpy() - before.logprobs), 1.5)
        np.testing.assert_allclose(after.advantages, before.advantages * weights, rtol=1e-5)
        seen += weights.tolist()
    assert metrics["weight_max"] == max(seen) == pytest.approx(1.5)
    assert metrics["weight_min"] == pytest.approx(min(seen)) and min(seen) < 0.9
    assert metrics["weight_mean"] == pytest.approx(np.mean(seen))
    assert metrics["masked"] == 0
    assert one.step(made, loss)["max_ratio_error"] < 1e-5  # of the first optimiser step
    assert one.step(made, loss)["max_ratio_error"] > 1e-3  # of the next


def plain_gradient(
    one: Any, sequences: Sequence[TrainingSequence], kept: Any, aggregation: str
) -> Any:
    """Of −A·log p over the tokens that are kept, each transition alone in the model."""
    calls: list[tuple[str, torch.Tensor]] = []
    for sequence, keeps in zip(sequences, kept, strict=True):
        ids = torch.from_numpy(sequence.token_ids.astype(np.int64))
        logprobs = torch.log_softmax(one.model(ids[None]).logits[0] / 0.8, -1)
        for call in range(int(sequence.transitions[-1]) + 1):
            at = np.flatnonzero((sequence.transitions == call) & keeps)
            positions = torch.from_numpy(sequence.positions[at].astype(np.int64))
            if len(at):
                own = (
                    -torch.from_numpy(sequence.advantages[at])
                    * logprobs[positions - 1, ids[positions]]
                )
                calls.append((sequence.rollout_id, own))
    return mean_gradient(one.model, calls, aggregation)


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean", "rollout-mean", "constant"])
@pytest.mark.parametrize("tokens", [40, 100_000])
def test_masked_tokens_leave_every_denominator(
    tokenizer: Any, aggregation: str, tokens: int
) -> None:
    one = learner(tokenizer, max_grad_norm=1e9, micro_batch_tokens=tokens)
    sequences = near(one, batch())
    made, metrics = start(one, sequences, bounds("k2", "token", None, 0.01), "behaviour")
    loss = Loss("policy_gradient", aggregation=aggregation, constant_length=7, temperature=0.8)
    differences = [
        p.numpy() - s.logprobs for s, p in zip(sequences, one.logprobs(sequences, 0.8), strict=True)
    ]
    kept = [one**2 / 2 <= 0.01 for one in differences]
    pairs = zip(sequences, kept, strict=True)
    calls = [keeps[s.transitions == call] for s, keeps in pairs for call in set(s.transitions)]
    assert (
        metrics["masked"] == pytest.approx(1 - np.concatenate(kept).mean())
        and metrics["masked"] > 0.2
    )
    assert metrics["masked_calls"] == pytest.approx(np.mean([not keeps.any() for keeps in calls]))
    assert metrics["masked_calls"] > 0
    assert (
        relative(gradient(one, made, loss), plain_gradient(one, sequences, kept, aggregation))
        < 5e-4
    )


@pytest.mark.parametrize("old", ["behaviour", "proximal"])
def test_engine_and_learner_are_compared_on_tokens_of_the_present_weights(
    tokenizer: Any, old: Any
) -> None:
    one = learner(tokenizer)
    exact = [
        replace(s, logprobs=p.numpy()) for s, p in zip(batch(), one.logprobs(batch()), strict=True)
    ]
    stale = [replace(s, logprobs=s.logprobs - 1, versions=s.versions + 6) for s in exact]
    off = replace(
        exact[0],
        logprobs=exact[0].logprobs - np.eye(len(exact[0].positions), dtype=np.float32)[0] * 0.1,
    )
    one.optimizer = Still(one.model.parameters(), lr=0.0)

    def told(sequences: list[TrainingSequence], version: int | None) -> dict[str, float]:
        algorithm = agl.GRPO(old=old)
        (metrics,) = optimiser_steps(one, sequences, algorithm, seed=0, step=1, version=version)
        return {name: value for name, value in metrics.items() if name.startswith("inference_")}

    assert told([*exact, *stale], 0)["inference_mismatch"] < 1e-5
    apart = told([off, *exact[1:], *stale], 0)
    assert apart["inference_mismatch"] == pytest.approx(np.expm1(0.1), rel=1e-3)
    tokens = sum(len(sequence.positions) for sequence in exact)
    assert apart["inference_kl"] == pytest.approx((np.expm1(0.1) - 0.1) / tokens, rel=1e-3)
    assert told(exact, 3) == told(exact, None) == {}


def test_present_log_probabilities_are_those_of_each_optimiser_step(tokenizer: Any) -> None:
    one = learner(tokenizer, learning_rate=1e-2)
    seen: list[tuple[float, float]] = []

    def watch(behaviour: Any, proximal: Any, present: Any) -> Any:
        seen.append(
            (float((proximal - behaviour).abs().max()), float((present - proximal).abs().max()))
        )
        return present > -math.inf

    algorithm = agl.GRPO(correction=watch, epochs=3)
    list(optimiser_steps(one, near(one, batch()), algorithm, seed=0, step=1, version=None))
    assert seen[0][0] == seen[1][0] > 0
    assert seen[0][1] == 0 < seen[1][1] != seen[2][1]


def test_a_step_whose_every_token_is_masked_is_skipped(tokenizer: Any) -> None:
    one = learner(tokenizer)
    before = [parameter.detach().clone() for parameter in one.model.parameters()]
    algorithm = agl.GRPO(correction=bounds("k1", "token", 50.0, 60.0), minibatches=2)
    for metrics in optimiser_steps(one, batch(), algorithm, seed=0, step=1, version=None):
        assert metrics["masked"] == metrics["masked_calls"] == 1
    assert all(torch.equal(a, b) for a, b in zip(before, one.model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"correction": "truncate"}, "give old='proximal', or one that only drops tokens"),
        (
            {"old": "proximal", "correction": {"name": "mask", "hihg": 2}},
            "no option 'hihg'; did you mean 'high'",
        ),
        (
            {"old": "proximal", "correction": {"high": 2}},
            "correction is None; give one of truncate, mask, bound",
        ),
        (
            {"old": "proximal", "correction": {"name": "truncate", "cap": 0}},
            "cap is 0; it lies between 1e-06 and inf",
        ),
        (
            {"old": "proximal", "correction": {"name": "mask", "level": "call"}},
            "known: token, sequence, geometric",
        ),
        ({"correction": "bound"}, "'bound' needs the option 'high'"),
        ({"correction": bounds("k4", "token", None, 1.0)}, "known: k1, k2, k3"),
        (
            {"old": "proximal", "correction": {"name": "mask", "low": 1.5}},
            "low is 1.5; it lies between 0 and 1",
        ),
        ({"correction": lambda behavior: behavior}, "'behavior', which nothing fills: .*behaviour"),
    ],
)
def test_what_cannot_be_meant_is_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        agl.GRPO(**settings)


@pytest.mark.parametrize(
    ("function", "old", "why"),
    [
        (lambda behaviour, proximal: (behaviour, proximal), "proximal", "a bool that says whether"),
        (lambda behaviour: behaviour.mean() < 0, "behaviour", "for each of 2 tokens, a bool"),
        (lambda behaviour: None, "behaviour", "it returned None"),
        (lambda behaviour: (-behaviour, behaviour < 0), "behaviour", "weighs tokens, but with old"),
        (lambda behaviour: 1 / 0, "proximal", "correction <lambda> failed: ZeroDivisionError"),
    ],
)
def test_what_a_correction_returns_is_checked_at_each_call(
    function: Any, old: Any, why: str
) -> None:
    logprobs = torch.tensor([-0.25, -1.0])
    with pytest.raises(ConfigError, match=why):
        Corrections.read([function], old).of(
            logprobs, logprobs, logprobs, transitions=torch.tensor([0, 0])
        )


def test_a_weight_that_is_no_number_ends_the_step_by_name() -> None:
    def odd(proximal: Any) -> tuple[Any, Any]:
        return 1 / (proximal + 0.25).abs(), proximal < 1

    logprobs = torch.tensor([-0.25, -1.0])
    with pytest.raises(TrainingError, match="odd gave a weight that is negative or not finite"):
        Corrections.read([odd], "proximal").of(
            logprobs, logprobs, logprobs, transitions=torch.tensor([0, 0])
        )
