"""The check of an algorithm before anything is loaded."""

from __future__ import annotations

from typing import Any

from agentlightning.algorithm.rl.settings import RLSettings
from agentlightning.data.functions import check_parameters
from agentlightning.errors import ConfigError


def check_algorithm(algorithm: Any) -> None:
    """ConfigError unless it is an algorithm, and one that trains has the `advantages` that its run
    calls and a state that can be restored.

    Settings, and the functions among them, are checked when the algorithm is made; what functions
    return is checked at each call."""
    if isinstance(algorithm, type) or not hasattr(algorithm, "run"):
        raise ConfigError(
            f"algorithm is {algorithm!r}; give an instance, such as agl.GRPO(steps=100)"
        )
    if not isinstance(algorithm, RLSettings):
        return
    name = type(algorithm).__name__
    if type(algorithm).advantages is RLSettings.advantages:
        raise ConfigError(f"{name} does not define advantages")
    critic = algorithm.trained_critic is not None
    filled = ("groups", "values") if critic else ("groups",)
    check_parameters(f"{name}.advantages", algorithm.advantages, filled)
    algorithm.saved_state()
