"""Tokens are drawn from the distribution asked for, with random numbers of the request's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from agentlightning.engine.sampler import Sampler, uniforms
from agentlightning.errors import BackendError
from agentlightning.gateway.generation import GenerationRequest

DRAWS = 4000


def draw(
    request: GenerationRequest, logits: torch.Tensor, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Ids and logprobs of DRAWS draws from the same logits `[v]`, as successive tokens of one
    request."""
    sampler = Sampler(1, seed)
    sampler.assign(0, request)
    slots, indices = np.zeros(DRAWS, dtype=np.int64), np.arange(DRAWS, dtype=np.int64)
    ids, logprobs = sampler.sample(logits.expand(DRAWS, -1), slots, indices)
    return np.array(ids), np.array(logprobs)


def request(**fields: object) -> GenerationRequest:
    return GenerationRequest([1], seed=1, **fields)


LOGITS = torch.tensor([0.5, 2.0, -1.0, 1.0, float("-inf"), 0.0])


def expected(temperature: float = 1.0, kept: tuple[int, ...] = (0, 1, 2, 3, 5)) -> torch.Tensor:
    logits = torch.full_like(LOGITS, float("-inf"))
    logits[list(kept)] = LOGITS[list(kept)] / temperature
    return logits.softmax(-1)


@pytest.mark.parametrize(
    ("fields", "probabilities"),
    [
        ({}, expected()),
        ({"temperature": 0.5}, expected(0.5)),
        ({"temperature": 2.0}, expected(2.0)),
        ({"top_k": 2}, expected(kept=(1, 3))),
        ({"top_k": 100}, expected()),
        ({"top_p": 0.6}, expected(kept=(1, 3))),
        ({"top_p": 0.01}, expected(kept=(1,))),
        # top_p counts within what top_k left: 2.0 has 0.73 of (2.0, 1.0).
        ({"top_k": 2, "top_p": 0.7}, expected(kept=(1,))),
        ({"temperature": 2.0, "top_k": 3}, expected(2.0, kept=(0, 1, 3))),
    ],
)
def test_frequencies_and_logprobs_are_those_of_the_truncated_distribution(
    fields: dict[str, object], probabilities: torch.Tensor
) -> None:
    ids, logprobs = draw(request(**fields), LOGITS)
    frequencies = np.bincount(ids, minlength=len(LOGITS)) / DRAWS
    assert np.abs(frequencies - probabilities.numpy()).max() < 4 * 0.5 / np.sqrt(DRAWS)
    assert (frequencies[probabilities.numpy() == 0] == 0).all()
    assert np.abs(logprobs - probabilities.log().numpy()[ids]).max() < 1e-6


def test_temperature_0_takes_the_likeliest_with_its_logprob_at_temperature_1() -> None:
    ids, logprobs = draw(request(temperature=0.0, top_k=3, top_p=0.5), LOGITS)
    assert (ids == 1).all()
    assert np.abs(logprobs - LOGITS.log_softmax(-1)[1].item()).max() < 1e-6


@pytest.mark.parametrize(("temperature", "share"), [(1e-300, 1.0), (1e-6, 1.0), (1e300, 0.2)])
def test_extreme_temperatures_are_their_limits(temperature: float, share: float) -> None:
    ids, logprobs = draw(request(temperature=temperature), LOGITS[LOGITS.isfinite()])
    assert (ids == 1).mean() == pytest.approx(share, abs=0.03)
    assert logprobs == pytest.approx(np.log(share), abs=1e-6)


def test_uniforms_are_uniform_and_depend_on_seed_and_index_alone() -> None:
    seeds = np.repeat(np.arange(100, dtype=np.uint64), 100)
    indices = np.tile(np.arange(100, dtype=np.uint64), 100)
    numbers = uniforms(seeds, indices)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.01
    assert np.abs(np.histogram(numbers, 10, (0, 1))[0] / 1000 - 1).max() < 0.12
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03
    assert len(np.unique(numbers)) > 9990
    assert (uniforms(seeds[::-1], indices[::-1]) == numbers[::-1]).all()


def test_any_integer_is_a_seed() -> None:
    for seed in (-1, 0, 2**64 + 5, -(2**70)):
        ids, _ = draw(GenerationRequest([1], seed=seed), LOGITS)
        assert len(set(ids.tolist())) > 1


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_an_error(value: float) -> None:
    sampler = Sampler(1, 0)
    sampler.assign(0, request())
    with pytest.raises(BackendError, match="diverged"):
        sampler.sample(
            torch.tensor([[0.0, value]]), np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
        )
