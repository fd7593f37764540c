"""Algorithms: they improve the agent. Most train weights by reinforcement learning; `Baseline` only
evaluates."""

from typing import TYPE_CHECKING

from agentlightning.algorithm.apo import APO
from agentlightning.algorithm.base import Algorithm, NoProgress, Progress, RunContext, algo
from agentlightning.algorithm.budget import Budget
from agentlightning.algorithm.evaluation import Baseline
from agentlightning.algorithm.gepa import GEPA
from agentlightning.algorithm.grpo import (
    CISPO,
    DAPO,
    GRPO,
    GSPO,
    RLOO,
    DrGRPO,
    REINFORCEPlusPlus,
    REINFORCEPlusPlusBaseline,
)
from agentlightning.algorithm.opd import OPD
from agentlightning.algorithm.ppo import PPO
from agentlightning.algorithm.rl.reinforcement import Reinforcement
from agentlightning.algorithm.sft import SFT

if not TYPE_CHECKING:  # names of Agent Lightning 0.3
    from agentlightning import __getattr__ as __getattr__

__all__ = [
    "APO",
    "CISPO",
    "DAPO",
    "GEPA",
    "GRPO",
    "GSPO",
    "OPD",
    "PPO",
    "RLOO",
    "SFT",
    "Algorithm",
    "Baseline",
    "Budget",
    "DrGRPO",
    "NoProgress",
    "Progress",
    "REINFORCEPlusPlus",
    "REINFORCEPlusPlusBaseline",
    "Reinforcement",
    "RunContext",
    "algo",
]
