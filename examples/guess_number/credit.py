"""The return and the baseline of this example: what a guess changed, without the luck of later
guesses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from agent import TRIES

from agentlightning.data.credit import Returns
from agentlightning.data.transitions import Transition


def further_guesses(reward: float, transitions: Sequence[Transition]) -> np.ndarray:
    """x_t = R − (1 − t/10): minus a tenth for each guess that followed guess t."""
    return reward - 1 + np.arange(len(transitions)) / TRIES


def numbers_left(returns: Returns) -> np.ndarray:
    """A_t = e_t − e_{t+1}, with e = x − V the luck from a guess on, and V the mean x of all guesses
    of the step that were made with as many numbers left. That is the temporal difference −1/10 +
    V_{t+1} − V_t. Divided by its standard deviation."""
    _, left = np.unique([call.state or "" for call in returns.calls], return_inverse=True)
    value = np.bincount(left, returns.values) / np.bincount(left)
    luck = returns.values - value[left]
    goes_on = np.append(np.diff(returns.rollouts) == 0, False)
    advantages = luck - np.where(goes_on, np.roll(luck, -1), 0.0)
    return advantages / (advantages.std() + 1e-6)
