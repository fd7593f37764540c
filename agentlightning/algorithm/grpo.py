"""GRPO and its variants: the advantage of each call, from comparisons within a group, and the loss.

A variant is GRPO with other defaults; its docstring has the formula and the paper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from agentlightning.algorithm.rl.reinforcement import Reinforcement
from agentlightning.algorithm.rl.settings import read_calls
from agentlightning.data.credit import RewardedGroup
from agentlightning.data.credit_table import make_credit
from agentlightning.data.sequences import CreditedTransition
from agentlightning.data.transitions import TracedRollout
from agentlightning.errors import ConfigError, check_settings
from agentlightning.learner.losses import KLEstimator


@dataclass(kw_only=True)
class GRPO(Reinforcement):
    """Policy optimisation without a critic. By default, each sampled token of rollout i has the
    advantage A_i = (R_i − mean) / (std + ε) over its group, in PPO's clipped loss (GRPO,
    arXiv:2402.03300).

    Settings: returns: how a rollout's R is divided over its calls: a name of
        `data/credit_table.py`, a function, or
            `file.py:function`.
        returns_options: keyword arguments for it.
        baseline: what returns are compared with; given like `returns`.
        baseline_options: keyword arguments for it.
        equal_rewards: also train groups whose rewards are all equal, if their calls have different
            returns.
        forks: the calls from which each rollout of a group is tried again before the group is
            trained, such as `[10, 20]`; rollouts that have fewer calls are not. With `returns:
            fork` or `tree`, and `aggregation: constant`.

    ConfigError for settings that do not go together."""

    returns: Any = "identical"  # str or function: what reads run files knows no such union
    returns_options: dict[str, Any] = field(default_factory=dict[str, Any])
    baseline: Any = "grpo"
    baseline_options: dict[str, Any] = field(default_factory=dict[str, Any])
    equal_rewards: bool = False
    forks: tuple[int, ...] = ()
    name: str = "grpo"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.credit = credit = make_credit(
            self.returns,
            self.returns_options,
            self.baseline,
            self.baseline_options,
            equal_rewards=self.equal_rewards,
            reward=self.reward,
        )
        if self.forks or type(self).calls_to_fork is not GRPO.calls_to_fork:
            self._check_forks()
        if self.rollouts_per_group < 2 and credit.compares_group:
            raise ConfigError(
                f"group_size is {self.group_size}; baseline {self.baseline!r} with returns "
                f"{self.returns!r} compares rollouts of one task and needs at least 2"
            )
        if self.dynamic_sampling and credit.needs_batch and not credit.compares_group:
            raise ConfigError(
                f"{self.name} with these settings learns from any group: leave dynamic_sampling out"
            )

    def _check_forks(self) -> None:
        read_calls("forks", self.forks)
        if not self.credit.knows_forks:
            self.credit.refuse_forks()
        if self.judge is not None or self.reward.counts_calls:
            raise ConfigError(
                "forks have only the calls from where they left, and a judge, and terms of the "
                "reward that count tools, calls or tokens, compare whole rollouts: leave these out"
            )

    @property
    def rollouts_per_group(self) -> int:
        return self.group_size * (1 + len(self.forks))

    def calls_to_fork(self, rollout: TracedRollout) -> Sequence[int]:
        return self.forks

    @property
    def credit_by_settings(self) -> bool:
        """Whether the settings alone determine the credit of calls, so that the dashboard can show
        it."""
        return type(self).advantages is GRPO.advantages

    def advantages(self, groups: Sequence[RewardedGroup]) -> list[list[list[CreditedTransition]]]:
        return self.credit.advantages(groups)


@dataclass(kw_only=True)
class RLOO(GRPO):
    """GRPO with A_i = R_i − the mean R of the others of its group (arXiv:2402.14740). It is not
    divided by the spread, so groups whose rewards differ more count more. With `aggregation:
    constant` and a `constant_length` its gradient is exactly that of the expected reward."""

    baseline: Any = "rloo"
    name: str = "rloo"


@dataclass(kw_only=True)
class DrGRPO(GRPO):
    """GRPO without its biases towards long wrong answers and tasks of little spread
    (arXiv:2503.20783): A_i = R_i − group mean, and a rollout's loss is the sum over its tokens
    divided by `constant_length`, by default `max_tokens`. ConfigError without either."""

    baseline: Any = "dr_grpo"
    aggregation: Any = "constant"
    name: str = "dr_grpo"

    def __post_init__(self) -> None:
        if self.aggregation == "constant" and self.constant_length is None:
            check_settings(self)
            if self.max_tokens is None:
                raise ConfigError(
                    "Dr. GRPO divides by a constant length; give max_tokens, or constant_length"
                )
            self.constant_length = self.max_tokens
        super().__post_init__()


@dataclass(kw_only=True)
class DAPO(GRPO):
    """GRPO for long answers and sparse rewards (arXiv:2503.14476): a higher upper clip
    (`clip_high`), groups without variance are replaced (`dynamic_sampling`), each token counts the
    same (`aggregation`), and answers close to `max_tokens` are penalised.

    With L = `max_tokens` and B its last fifth, R becomes R − min(1, max(0, (longest answer − (L −
    B)) / B)). `overlong=False` switches this off; an `overlong_penalty` in `reward` replaces it.
    ConfigError without `max_tokens` otherwise."""

    aggregation: Any = "token-mean"
    clip_low: float | None = 0.2
    clip_high: float | None = 0.28
    dynamic_sampling: bool = True
    overlong: bool = True
    name: str = "dapo"

    def __post_init__(self) -> None:
        if self.overlong and not self.reward.overlong_penalty:
            check_settings(self)
            if self.max_tokens is None:
                raise ConfigError(
                    "DAPO punishes answers that come close to the longest allowed; give "
                    "max_tokens, or overlong=False"
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
    """GRPO with the importance ratio of a whole call (arXiv:2507.18071): every token of a call is
    weighted by s = exp(mean over the call of log p − log p when sampled), clipped to [1 − 3e-4, 1 +
    4e-4] by default."""

    loss: Any = "gspo"
    aggregation: Any = "sequence-mean"
    name: str = "gspo"


@dataclass(kw_only=True)
class CISPO(GRPO):
    """GRPO that clips the importance weight instead of the update, so that every token has a
    gradient (arXiv:2506.13585): the loss of a token is −min(ratio, 1 + `clip_high`)·A·log p,
    without gradient through the ratio. As in the paper there is no lower bound (`clip_low` 1)."""

    loss: Any = "cispo"
    aggregation: Any = "token-mean"
    clip_low: float | None = 1.0
    clip_high: float | None = 0.2
    name: str = "cispo"


@dataclass(kw_only=True)
class REINFORCEPlusPlus(GRPO):
    """The advantage of a token is γ^(later tokens of its call)·R, whitened over the batch's
    rollouts (arXiv:2501.03262). One rollout per task is enough: use more tasks instead of a
    group."""

    baseline: Any = "reinforce++"
    tasks_per_step: int = 128
    group_size: int = 1
    kl_estimator: KLEstimator = "k2"
    name: str = "reinforce++"


@dataclass(kw_only=True)
class REINFORCEPlusPlusBaseline(GRPO):
    """REINFORCE++ with a baseline: A_i = R_i − group mean, whitened over the batch's rollouts
    (arXiv:2501.03262)."""

    baseline: Any = "reinforce++_baseline"
    kl_estimator: KLEstimator = "k2"
    name: str = "reinforce++_baseline"
