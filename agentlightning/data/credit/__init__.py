"""Rewards → return per transition → baseline → advantage per sampled token. Each arrow is one pure NumPy function, and
a function of the same signature may stand in for it; `table` says which go together. float64 throughout.

Suffixes give shapes: T transitions of a rollout, in call order; R rollouts and N transitions of a batch; M its sampled
tokens, transition by transition; G rollouts of a group.
"""

from agentlightning.data.credit.baselines import (
    Returns,
    dr_grpo,
    gae,
    grpo,
    no_baseline,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    rloo,
    whiten,
)
from agentlightning.data.credit.returns import air, air_dense, discount, discounted, identical, intermediate, tree

__all__ = [
    "Returns",
    "air",
    "air_dense",
    "discount",
    "discounted",
    "dr_grpo",
    "gae",
    "grpo",
    "identical",
    "intermediate",
    "no_baseline",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "rloo",
    "tree",
    "whiten",
]
