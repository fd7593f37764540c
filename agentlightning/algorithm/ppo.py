"""PPO: a critic estimates the value of each sampled token (arXiv:1707.06347)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from agentlightning.algorithm.rl.reinforcement import Reinforcement
from agentlightning.data.credit import RewardedGroup
from agentlightning.data.credit_table import make_credit
from agentlightning.data.sequences import CreditedTransition
from agentlightning.data.transitions import FloatArray
from agentlightning.errors import ConfigError, check_settings
from agentlightning.learner.base import Critic, CriticTrunk
from agentlightning.learner.losses import Loss


@dataclass(kw_only=True)
class PPO(Reinforcement):
    """PPO with a critic: A_k = δ_k + γλ·A_{k+1} and δ_k = r_k + γ·V_{k+1} − V_k over the sampled
    tokens (GAE, arXiv:1506.02438), whitened, in PPO's clipped loss. One rollout per task is enough:
    the critic replaces the group.

    Settings: returns, returns_options: as in GRPO. gamma, lam: γ and λ, per token. across_calls:
        False: each call is an episode that ends in its return. True: the rollout is one episode,
        and its
            calls end in rewards.
        critic: `shared`, a linear layer on the policy's last hidden state, or `separate`, a layer
            on a second model, which begins as a copy of the policy: twice the memory, but neither
            disturbs the other.
        critic_learning_rate: default: ten times the policy's.
        critic_warmup: first steps, which train the critic alone.
        value_coefficient: weight of the critic's loss ½·max((V − target)², (V' − target)²), with
        target A + V.
        value_clip: V' is V kept within this distance of its earlier value; None: no limit.
        whiten_over: `rollouts` of the batch, or its `tokens`."""

    returns: Any = "identical"  # str or function: what reads run files knows no such union
    returns_options: dict[str, Any] = field(default_factory=dict[str, Any])
    gamma: float = 1.0
    lam: float = 0.95
    across_calls: bool = False
    whiten_over: Literal["rollouts", "tokens"] = "rollouts"
    critic: CriticTrunk = "shared"
    critic_learning_rate: float | None = None
    critic_warmup: int = 0
    value_coefficient: float = 0.5
    value_clip: float | None = 0.2
    tasks_per_step: int = 128
    group_size: int = 1
    minibatches: int = 4
    name: str = "ppo"

    def __post_init__(self) -> None:
        super().__post_init__()
        options = {
            name: getattr(self, name) for name in ("gamma", "lam", "across_calls", "whiten_over")
        }
        self.credit = make_credit(
            self.returns, self.returns_options, "gae", options, reward=self.reward, critic=True
        )
        if self.dynamic_sampling:
            raise ConfigError("ppo learns from any group: leave dynamic_sampling out")
        trunks = {"critic": get_args(CriticTrunk)}
        check_settings(
            self, least={"critic_warmup": 0}, above={"critic_learning_rate": 0}, choices=trunks
        )
        self._critic = Critic(self.critic, self.critic_learning_rate)

    @property
    def trained_critic(self) -> Critic:
        return self._critic

    def advantages(
        self, groups: Sequence[RewardedGroup], values: Sequence[FloatArray] | None = None
    ) -> list[list[list[CreditedTransition]]]:
        """Without `values`, for a critic that answers 0, as it does at first."""
        return self.credit.advantages(groups, values)

    def make_loss(self, step: int = 1) -> Loss:
        return replace(super().make_loss(step), critic_alone=step <= self.critic_warmup)
