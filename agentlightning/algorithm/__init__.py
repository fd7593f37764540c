"""Algorithms: what improves the agent. `GRPO` trains weights by reinforcement learning, `Baseline` only evaluates."""

from agentlightning.algorithm.base import Algorithm, NoProgress, Progress, RunContext
from agentlightning.algorithm.baseline import Baseline
from agentlightning.algorithm.function import algo
from agentlightning.algorithm.grpo import GRPO
from agentlightning.algorithm.rl import Reinforcement

__all__ = ["GRPO", "Algorithm", "Baseline", "NoProgress", "Progress", "Reinforcement", "RunContext", "algo"]
