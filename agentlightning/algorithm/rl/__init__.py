"""Reinforcement learning: settings and credit (`reinforcement`), a step's batch (`batch`), the loop (`loop`)."""

from agentlightning.algorithm.rl.reinforcement import Reinforcement

__all__ = ["Reinforcement"]
