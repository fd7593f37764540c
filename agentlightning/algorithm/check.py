"""The check of an algorithm before anything is loaded."""

from __future__ import annotations

from agentlightning.algorithm.base import Algorithm
from agentlightning.algorithm.rl.settings import RLSettings
from agentlightning.data.functions import check_parameters
from agentlightning.errors import ConfigError


def check_algorithm(algorithm: Algorithm) -> None:
    """ConfigError unless a class of yours has the methods that its run calls, with parameters that
    are filled, and keeps a state that can be restored.

    Settings, and the functions among them, are checked when the algorithm is made; what functions
    return is checked at each call."""
    if not isinstance(algorithm, RLSettings):
        return
    name = type(algorithm).__name__
    if type(algorithm).advantages is RLSettings.advantages:
        raise ConfigError(f"{name} does not define advantages")
    critic = algorithm.trained_critic is not None
    filled = ("groups", "values") if critic else ("groups",)
    check_parameters(f"{name}.advantages", algorithm.advantages, filled)
    algorithm.saved_state()
