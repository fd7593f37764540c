"""On-policy distillation: the student samples, and a teacher says how likely it would have sampled
each token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from agentlightning.algorithm.base import RunContext
from agentlightning.algorithm.grpo import GRPO
from agentlightning.algorithm.rl.batch import values_of
from agentlightning.algorithm.rl.groups import Groups
from agentlightning.data.credit import RewardedGroup
from agentlightning.data.sequences import CreditedTransition
from agentlightning.errors import ConfigError
from agentlightning.learner.teacher import Teacher, open_teacher, read_teacher


@dataclass(kw_only=True)
class OPD(GRPO):
    """On-policy distillation (arXiv:2306.13649; thinkingmachines.ai/blog/on-policy-distillation).
    Each sampled token gets

        A = `teacher_coefficient` · (log p_teacher − log p_student) + `reward_coefficient` ·
        A_reward

    The expectation of the first term is minus the reverse KL of student and teacher. Rewards are
    needed only if `reward_coefficient` is above 0; A_reward then follows from `returns` and
    `baseline`, as in GRPO.

    `teacher` is a model (a path, an id, `file.py:function`), the URL of a vLLM server, or
    `{vllm: URL}` with `model` and `api_key`. It must have the student's tokenizer. The metric
    `teacher_kl` is the mean of log p_student − log p_teacher."""

    teacher: Any = None
    teacher_coefficient: float = 1.0
    reward_coefficient: float = 0.0
    baseline: Any = "none"
    loss: Any = "importance_sampling"
    aggregation: Any = "token-mean"
    group_size: int = 1
    unrewarded: Literal["exclude"] | float = 0.0
    name: str = "opd"

    def __post_init__(self) -> None:
        super().__post_init__()
        read_teacher(self.teacher)
        if self.temperature != 1:
            raise ConfigError(
                f"temperature is {self.temperature}; a teacher's probabilities are those of "
                "temperature 1"
            )
        if self.forks:
            raise ConfigError("a teacher scores every answer alike: leave forks out")
        if self.dynamic_sampling:
            raise ConfigError("opd learns from any group: leave dynamic_sampling out")
        self._teacher: Teacher | None = None

    @property
    def fewest_rewarded(self) -> int:
        return super().fewest_rewarded if self.reward_coefficient else 1

    def why_useless(self, group: RewardedGroup) -> str | None:
        return None  # the teacher scores whatever was sampled

    @asynccontextmanager
    async def groups(self, context: RunContext) -> AsyncGenerator[Groups]:
        if len(context.policies) > 1:
            raise ConfigError(
                f"opd has one teacher, and {len(context.policies)} models are trained: train one"
            )
        context.progress.phase("open the teacher")
        for policy in context.policies.values():
            self._teacher = await asyncio.to_thread(
                open_teacher, self.teacher, policy.learner.token_bytes
            )
        async with super().groups(context) as groups:
            yield groups

    def advantages(self, groups: Sequence[RewardedGroup]) -> list[list[list[CreditedTransition]]]:
        """Asks the teacher, and blocks."""
        if self._teacher is None:
            raise ConfigError("the teacher is opened by a run; its advantages are not known before")
        teacher = iter(values_of(groups, self.level, self._teacher))
        credited = super().advantages(groups)
        items = [item for group in credited for calls in group for item in calls]
        differences = [next(teacher) - item.transition.logprobs for item in items]
        total = sum(map(len, differences))
        self.measured = {
            "teacher_kl": -float(sum(difference.sum() for difference in differences))
            / max(1, total)
        }
        sums = (
            self.teacher_coefficient * difference + self.reward_coefficient * item.advantages
            for item, difference in zip(items, differences, strict=True)
        )
        made = (
            replace(item, advantages=advantages.astype(np.float32))
            for item, advantages in zip(items, sums, strict=True)
        )
        return [[[next(made) for _ in calls] for calls in group] for group in credited]
