"""Rewards → return per transition → baseline → advantage. Pure functions on NumPy arrays, float64 throughout.

Shapes: `rewards_G` float[G] are the rewards of the G rollouts of one group. Statistics are over rollouts, never over
transitions, so that a long rollout weighs no more than a short one.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Float64Array = npt.NDArray[np.float64]


def grpo(rewards_G: npt.ArrayLike, epsilon: float = 1e-6) -> Float64Array:
    """A_i = (R_i − mean) / (std + ε), std with G−1 in the denominator (GRPO, arXiv:2402.03300, as verl computes it).

    A group of one gets advantage 0; so does every member where all rewards are equal."""
    centred = dr_grpo(rewards_G)
    if centred.size < 2 or not centred.any():
        return centred
    return centred / (centred.std(ddof=1) + epsilon)


def dr_grpo(rewards_G: npt.ArrayLike) -> Float64Array:
    """A_i = R_i − mean: GRPO without the division by the standard deviation (Dr. GRPO, arXiv:2503.20783)."""
    rewards = np.asarray(rewards_G, np.float64)
    if rewards.size < 2:
        return np.zeros_like(rewards)
    if (rewards == rewards[0]).all():  # exactly zero, where subtracting a rounded mean would leave 1e-17
        return np.zeros_like(rewards)
    return rewards - rewards.mean()
