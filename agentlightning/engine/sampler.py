"""Draws one token per row of logits, with each request's sampling parameters and random numbers.
These depend only on the request's seed and the token's index."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agentlightning.engine.slots import TokenArray
from agentlightning.errors import BackendError
from agentlightning.gateway.generation import GenerationRequest

_MASK_64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MOST = (1 << 63) - 1  # of top_k; no vocabulary has as many tokens


def mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64, element by element (Steele, Lea and Flood, 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def uniforms(
    seeds: npt.NDArray[np.uint64], indices: npt.NDArray[np.uint64]
) -> npt.NDArray[np.float32]:
    """Numbers in [0, 1) with 23 random bits, from (seed, index) alone.

    With 23 bits, the product of a number and a float32 is below that float32, even after
    rounding."""
    golden = np.uint64(_GOLDEN)
    bits = mix(mix(seeds + golden) + (indices + np.uint64(1)) * golden) >> np.uint64(41)
    return bits.astype(np.float32) * np.float32(2.0**-23)


class Sampler:
    """The sampling parameters of all slots, and the draw."""

    def __init__(self, slots: int, seed: int) -> None:
        self._temperature = np.ones(slots, dtype=np.float32)
        self._top_p = np.ones(slots, dtype=np.float32)
        self._top_k = np.zeros(slots, dtype=np.int64)
        self._seed = np.zeros(slots, dtype=np.uint64)
        self._own_seed = seed & _MASK_64
        self._unseeded = 0

    def assign(self, slot: int, request: GenerationRequest) -> None:
        """Use a request's parameters for a slot. A request without a seed gets the sampler's next
        one."""
        # Far beyond any effect, float32 would turn the ends of the range into 0 and infinity.
        self._temperature[slot] = (
            min(max(request.temperature, 1e-30), 1e30) if request.temperature > 0 else 0
        )
        self._top_p[slot] = request.top_p
        self._top_k[slot] = min(request.top_k, _MOST)
        if request.seed is None:
            self._unseeded += 1
            # Odd multiplier: distinct counters never meet.
            self._seed[slot] = (self._own_seed + self._unseeded * 0xD1342543DE82EF95) & _MASK_64
        else:
            self._seed[slot] = request.seed & _MASK_64

    def exchange(self, first: int, second: int) -> None:
        """Swap two slots."""
        for parameter in (self._temperature, self._top_p, self._top_k, self._seed):
            parameter[[first, second]] = parameter[[second, first]]

    def sample(
        self, logits: Tensor, slots: TokenArray, indices: TokenArray
    ) -> tuple[list[int], list[float]]:
        """Ids and logprobs from logits `[n, vocabulary]` of the requests in `slots` `[n]`, whose
        next tokens have the `indices` `[n]`.

        BackendError if logits are not finite, which means that weights are not."""
        logits = logits.float()
        temperature = self._temperature[slots]
        greedy = temperature == 0
        if (temperature != 1).any():
            # Relative to the likeliest, so that a tiny temperature gives −∞ and never ∞.
            logits = logits - logits.amax(-1, keepdim=True)
            logits = (
                logits
                / torch.from_numpy(np.where(greedy, 1, temperature)).to(logits.device)[:, None]
            )
        truncated = np.flatnonzero(~greedy & ((self._top_p[slots] < 1) | (self._top_k[slots] > 0)))
        if truncated.size > 0:
            rows = torch.from_numpy(truncated).to(logits.device)
            cut = slots[truncated]
            kept = _truncate(logits[rows], self._top_p[cut], self._top_k[cut])
            logits = logits.index_copy(0, rows, kept)
        probabilities = logits.softmax(-1)
        numbers = torch.from_numpy(uniforms(self._seed[slots], indices.astype(np.uint64))).to(
            logits.device
        )
        choice = _inverse_cdf(probabilities, numbers)
        if greedy.any():
            choice = torch.where(
                torch.from_numpy(greedy).to(logits.device), logits.argmax(-1), choice
            )
        chosen = probabilities.gather(1, choice[:, None]).squeeze(1).log()
        logprobs: list[float] = chosen.tolist()
        if not np.isfinite(logprobs).all():
            raise BackendError(
                "the model gave logits that are not finite: its weights have diverged; restore an "
                "earlier checkpoint",
                status=500,
                code="engine_error",
            )
        return choice.tolist(), logprobs


def _truncate(logits: Tensor, top_p: npt.NDArray[np.float32], top_k: TokenArray) -> Tensor:
    """Logits `[n, v]` with −∞ for what top_k, and then top_p of the rest, cut off. The likeliest
    token always stays; of equally likely ones, the lower id."""
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    limit = torch.from_numpy(np.where(top_k == 0, logits.shape[-1], top_k)).to(logits.device)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    ordered = ordered.masked_fill(rank >= limit[:, None], float("-inf"))
    probabilities = ordered.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    bound = torch.from_numpy(np.where(top_p == 1, np.float32(np.inf), top_p)).to(logits.device)
    beyond = (before >= bound[:, None]) & (rank > 0)
    return torch.empty_like(logits).scatter_(1, order, ordered.masked_fill(beyond, float("-inf")))


def _inverse_cdf(probabilities: Tensor, numbers: Tensor) -> Tensor:
    """The first index whose cumulative probability exceeds a number in [0, 1), `[n, v], [n] → [n]`.

    The comparison is strict and every threshold is below the total, so a token of probability 0 is
    never drawn."""
    # Parallel sums on a GPU may differ in the last bits from one index to the next: there they need
    # more of them.
    cumulative = probabilities.cumsum(
        -1, dtype=torch.float64 if probabilities.is_cuda else torch.float32
    )
    threshold = numbers * cumulative[:, -1]
    index = torch.searchsorted(cumulative, threshold[:, None], right=True).squeeze(1)
    # Only where probabilities are NaN, which the caller reports.
    return index.clamp_max(probabilities.shape[-1] - 1)
