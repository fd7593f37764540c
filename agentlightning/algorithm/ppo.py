"""PPO: a critic says what each sampled token is worth; what turns out better becomes likelier (arXiv:1707.06347)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from agentlightning.algorithm.rl.reinforcement import Reinforcement
from agentlightning.data.credit_table import RewardedGroup, make_credit
from agentlightning.data.sequences import CreditedTransition
from agentlightning.data.transitions import FloatArray
from agentlightning.errors import check_settings
from agentlightning.learner.base import Critic, CriticTrunk
from agentlightning.learner.losses import Loss


@dataclass(kw_only=True)
class PPO(Reinforcement):
    """A_k = δ_k + γλ·A_{k+1} with δ_k = r_k + γ·V_{k+1} − V_k over the sampled tokens (GAE, arXiv:1506.02438), whitened
    over the rollouts of the batch (or over its tokens: `whiten_over`), in PPO's clipped loss. One rollout per task is
    enough: the critic takes the place of a group.

    V is a linear layer on the policy's last hidden state (`critic="shared"`), or on that of a second model that starts
    as a copy of the policy's (`"separate"`: twice the memory, and neither disturbs the other). Its targets are A + V.
    To the loss is added `value_coefficient` · ½·max((V − target)², (V' − target)²), where V' is V kept within
    `value_clip` of what it was (None: no such limit). `critic_learning_rate` is by default ten times the policy's; for
    the first `critic_warmup` steps the critic alone is trained.

    Each call is an episode that ends in what `returns` gives it (`data/credit_table.py`); with `across_calls` the
    rollout is one, whose calls end in rewards."""

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
        options = {name: getattr(self, name) for name in ("gamma", "lam", "across_calls", "whiten_over")}
        self.credit = make_credit(self.returns, self.returns_options, "gae", options, reward=self.reward, critic=True)
        trunks = {"critic": get_args(CriticTrunk)}
        check_settings(self, least={"critic_warmup": 0}, above={"critic_learning_rate": 0}, choices=trunks)
        self._critic = Critic(self.critic, self.critic_learning_rate)

    @property
    def trained_critic(self) -> Critic:
        return self._critic

    def advantages(self, groups: Sequence[RewardedGroup]) -> list[list[list[CreditedTransition]]]:
        """Those of a critic that says 0, as it does at first."""
        return self.credit.advantages(groups)

    def advantages_with_values(
        self, groups: Sequence[RewardedGroup], values: Sequence[FloatArray]
    ) -> list[list[list[CreditedTransition]]]:
        return self.credit.advantages(groups, values)

    def make_loss(self, step: int = 1) -> Loss:
        return replace(super().make_loss(step), critic_alone=step <= self.critic_warmup)
