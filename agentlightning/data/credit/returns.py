"""Returns: how a rollout's rewards are divided over its transitions.

A return is a function of R and the rollout's transitions, in call order: `(reward, transitions, **options) →
float64[T]`. It sees one rollout; only `tree` sees a group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from agentlightning.data.transitions import Transition
from agentlightning.errors import ConfigError

Float64Array: TypeAlias = npt.NDArray[np.float64]
ToolWeights: TypeAlias = float | Mapping[str, float]


def identical(reward: float, transitions: Sequence[Transition]) -> Float64Array:
    """x_t = R: each call is as good as the whole (LightningRL, arXiv:2508.03680)."""
    return np.full(len(transitions), reward, np.float64)


def air(
    reward: float, transitions: Sequence[Transition], *, alpha: float = 0.2, tool_weights: ToolWeights = 1.0
) -> Float64Array:
    """x_t = α·r_t + (1 − α)·R: automatic intermediate rewarding (LightningRL), with r_t of `intermediate`."""
    if not 0 <= alpha <= 1:
        raise ConfigError(f"alpha is {alpha}; the share of intermediate rewards lies between 0 and 1")
    return alpha * intermediate(transitions, tool_weights) + (1 - alpha) * reward


def air_dense(reward: float, transitions: Sequence[Transition], *, tool_weights: ToolWeights = 1.0) -> Float64Array:
    """x_t = r_t of `intermediate`, and R on the last transition, with what it was given itself (not its tools' status).

    Flight: memory 0.3, search 0.2 and an answer worth 1.0 → [0.3, 0.2, 1.0]."""
    values = intermediate(transitions, tool_weights)
    values[-1] = reward + (transitions[-1].reward or 0.0)
    return values


def discounted(reward: float, transitions: Sequence[Transition], *, gamma: float = 0.9) -> Float64Array:
    """x_t = Σ_k γ^k·r_{t+k} over the rewards the transitions were given, with R added to the last."""
    if not 0 <= gamma <= 1:
        raise ConfigError(f"gamma is {gamma}; a discount lies between 0 and 1")
    given = np.array([transition.reward or 0.0 for transition in transitions])
    given[-1] += reward
    return discount(given, np.full(len(given), gamma))


def tree(rewards_G: Sequence[float], transitions_G: Sequence[Sequence[Transition]]) -> list[Float64Array]:
    """x_t = R_i − the mean R of the other rollouts that reached the same state; one float64[T] per rollout.

    A state is the prompt of a call, and a rollout reached it if a prompt of its own begins with it, once however often.
    Of the states on the way to a call, the deepest that two rollouts reached counts; without one, the whole group does.
    Whatever calls followed, it is a baseline that the call itself has no part in."""
    prompts = [{transition.prompt_ids.tobytes() for transition in transitions} for transitions in transitions_G]
    states = set[bytes]().union(*prompts)
    reached = {
        state: [rollout for rollout, own in enumerate(prompts) if any(prompt.startswith(state) for prompt in own)]
        for state in states
    }
    shared = sorted((state for state in states if len(reached[state]) > 1), key=len, reverse=True)
    rewards = np.asarray(rewards_G, np.float64)

    def advantage(rollout: int, prompt: bytes) -> float:
        state = next((state for state in shared if prompt.startswith(state)), None)
        members = range(len(rewards)) if state is None else reached[state]
        others = [member for member in members if member != rollout]
        return float((rewards[rollout] - rewards[others]).mean()) if others else 0.0

    return [
        np.array([advantage(rollout, transition.prompt_ids.tobytes()) for transition in transitions], np.float64)
        for rollout, transitions in enumerate(transitions_G)
    ]


def intermediate(transitions: Sequence[Transition], tool_weights: ToolWeights = 1.0) -> Float64Array:
    """r_t of each transition, float64[T]: the rewards it was given, else the mean of w_tool · status (+1 returned, −1
    failed) over the tool calls it made, else 0.

    `tool_weights` is one w for all tools, or those that count by name. A mean, lest calling more tools at once earn
    more."""
    return np.array([_earned(transition, tool_weights) for transition in transitions], np.float64)


def _earned(transition: Transition, tool_weights: ToolWeights) -> float:
    if transition.reward is not None:
        return transition.reward
    statuses = [
        tool.status * (tool_weights.get(tool.tool, 0.0) if isinstance(tool_weights, Mapping) else tool_weights)
        for tool in transition.tools
    ]
    return sum(statuses) / len(statuses) if statuses else 0.0


def discount(rewards_T: npt.ArrayLike, gammas_T: npt.ArrayLike) -> Float64Array:
    """G_t = r_t + γ_t·G_{t+1}, with γ_t what lies between t and the next."""
    values = np.array(rewards_T, np.float64)
    gammas = np.asarray(gammas_T, np.float64)
    for index in range(len(values) - 2, -1, -1):
        values[index] += gammas[index] * values[index + 1]
    return values
