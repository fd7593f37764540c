"""GRPO and its relatives: what a rollout's calls are worth, compared with other rollouts, and in which loss.

A relative is GRPO with other defaults; each says its formula and where that is from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from agentlightning.algorithm.rl.reinforcement import Reinforcement
from agentlightning.data.credit_table import RewardedGroup, make_credit
from agentlightning.data.sequences import CreditedTransition
from agentlightning.errors import ConfigError
from agentlightning.learner.losses import KLEstimator


@dataclass(kw_only=True)
class GRPO(Reinforcement):
    """Policy optimisation without a critic, by default GRPO: each sampled token of rollout i gets
    A_i = (R_i − mean) / (std + ε) over its group, in PPO's clipped loss (arXiv:2402.03300).

    `returns` says how a rollout's reward is divided over its calls, `baseline` what that is compared with. Both are a
    name of `data/credit_table.py`, a reference (`file.py:function`) or a function, and are called with their options.
    With `equal_rewards` a group whose rewards are all equal is trained on too, where its calls have different returns.
    What does not go together is refused."""

    returns: Any = "identical"  # str or function: what reads run files knows no such union
    returns_options: dict[str, Any] = field(default_factory=dict[str, Any])
    baseline: Any = "grpo"
    baseline_options: dict[str, Any] = field(default_factory=dict[str, Any])
    equal_rewards: bool = False
    name: str = "grpo"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.credit = make_credit(
            self.returns,
            self.returns_options,
            self.baseline,
            self.baseline_options,
            equal_rewards=self.equal_rewards,
            reward=self.reward,
        )
        if self.group_size < 2 and self.credit.compares_group:
            raise ConfigError(
                f"group_size is {self.group_size}; baseline {self.baseline!r} with returns {self.returns!r} compares "
                "rollouts of one task and needs at least 2"
            )

    @property
    def credit_by_settings(self) -> bool:
        """Whether the settings alone say what calls are worth, so that a dashboard can."""
        return type(self).advantages is GRPO.advantages

    def try_advantages(self) -> None:
        if self.credit.built_in or not self.credit_by_settings:  # `make_credit` has tried your own functions
            super().try_advantages()

    def advantages(self, groups: Sequence[RewardedGroup]) -> list[list[list[CreditedTransition]]]:
        return self.credit.advantages(groups)


@dataclass(kw_only=True)
class RLOO(GRPO):
    """A_i = R_i − the mean R of the others of its group (arXiv:2402.14740). It is not divided by a spread, so that a
    group counts as much as its rewards differ."""

    baseline: Any = "rloo"
    name: str = "rloo"


@dataclass(kw_only=True)
class DrGRPO(GRPO):
    """GRPO without its two biases, towards long wrong answers and towards tasks of little spread (arXiv:2503.20783):
    A_i = R_i − mean over the group, and a call's loss is the sum over its tokens divided by `constant_length`,
    `max_tokens` unless given."""

    baseline: Any = "dr_grpo"
    aggregation: Any = "constant"
    name: str = "dr_grpo"

    def __post_init__(self) -> None:
        if self.aggregation == "constant" and self.constant_length is None:
            if self.max_tokens is None:
                raise ConfigError("Dr. GRPO divides by a constant length; give max_tokens, or constant_length")
            self.constant_length = self.max_tokens
        super().__post_init__()


@dataclass(kw_only=True)
class DAPO(GRPO):
    """GRPO with four changes for long answers and sparse rewards (arXiv:2503.14476): a higher upper clip (`clip_high`),
    groups without variance replaced by others (`dynamic_sampling`), the mean over all tokens (`aggregation`), and a
    soft penalty on answers that come close to `max_tokens`.

    The penalty is R − min(1, max(0, (longest answer − (L − B)) / B)) with L = `max_tokens` and B the last fifth of it,
    unless `reward` states an `overlong_penalty` of its own; `overlong=False` leaves it out."""

    aggregation: Any = "token-mean"
    clip_low: float | None = 0.2
    clip_high: float | None = 0.28
    dynamic_sampling: bool = True
    overlong: bool = True
    name: str = "dapo"

    def __post_init__(self) -> None:
        if self.overlong and not self.reward.overlong_penalty:
            if self.max_tokens is None:
                raise ConfigError(
                    "DAPO punishes answers that come close to the longest allowed; give max_tokens, or overlong=False"
                )
            self.reward = msgspec.structs.replace(
                self.reward,
                overlong_penalty=1.0,
                overlong_length=self.max_tokens,
                overlong_buffer=max(1, self.max_tokens // 5),
            )
        super().__post_init__()


@dataclass(kw_only=True)
class GSPO(GRPO):
    """GRPO's advantage, with the importance ratio of a whole call (arXiv:2507.18071): every token of a call is
    weighed by s = exp(mean over the call of log p − log p of sampling), clipped to [1 − 3e-4, 1 + 4e-4] unless
    `clip_low` and `clip_high` say otherwise."""

    loss: Any = "gspo"
    aggregation: Any = "sequence-mean"
    name: str = "gspo"


@dataclass(kw_only=True)
class CISPO(GRPO):
    """GRPO's advantage, with the importance weight clipped and not the update, so that no token is without gradient
    (arXiv:2506.13585): the loss of a token is −min(ratio, 1 + `clip_high`)·A·log p, without gradient through the
    ratio. There is no lower bound, as in the paper (`clip_low` 1)."""

    loss: Any = "cispo"
    aggregation: Any = "token-mean"
    clip_low: float | None = 1.0
    clip_high: float | None = 0.2
    name: str = "cispo"


@dataclass(kw_only=True)
class REINFORCEPlusPlus(GRPO):
    """A of a token is γ^(tokens that follow in its call)·R, whitened over the rollouts of the batch (arXiv:2501.03262).
    One rollout per task is enough: more tasks take the place of a group."""

    baseline: Any = "reinforce++"
    tasks_per_step: int = 128
    group_size: int = 1
    kl_estimator: KLEstimator = "k2"
    name: str = "reinforce++"


@dataclass(kw_only=True)
class REINFORCEPlusPlusBaseline(GRPO):
    """A_i = R_i − mean over its group, then whitened over the rollouts of the batch."""

    baseline: Any = "reinforce++_baseline"
    kl_estimator: KLEstimator = "k2"
    name: str = "reinforce++_baseline"
