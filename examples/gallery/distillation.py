"""On-policy distillation: the student samples, and a teacher says how likely it would have sampled each token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec
import numpy as np

from agentlightning.algorithm import GRPO
from agentlightning.algorithm.base import RunContext
from agentlightning.algorithm.rl.batch import values_of
from agentlightning.algorithm.rl.groups import Groups
from agentlightning.data.credit_table import RewardedGroup
from agentlightning.data.sequences import CreditedTransition
from agentlightning.data.transitions import Transition
from agentlightning.errors import ConfigError
from agentlightning.learner.policy import open_policy
from agentlightning.learner.torch import TorchLearner


@dataclass(kw_only=True)
class OPD(GRPO):
    """A = log p(token) under `teacher` − log p(token) when sampled, whose expectation is minus the reverse KL of
    student and teacher (on-policy distillation, arXiv:2306.13649; thinkingmachines.ai/blog/on-policy-distillation).
    No reward is needed.

    `teacher` is a model (a path, an id, an `agl.Policy`) with the student's tokenizer. The metric `teacher_kl` is the
    mean of log p − log p of the teacher."""

    teacher: Any = None
    baseline: Any = "none"
    loss: Any = "importance_sampling"
    aggregation: Any = "token-mean"
    group_size: int = 1
    unrewarded: Literal["exclude"] | float = 0.0
    name: str = "opd"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temperature != 1:
            raise ConfigError(f"temperature is {self.temperature}; a teacher's probabilities are those of 1")
        self.opened: TorchLearner | None = None

    def try_advantages(self) -> None:
        """The teacher is opened when training starts."""

    def why_useless(self, group: RewardedGroup) -> str | None:
        return None  # the teacher scores whatever was sampled

    @asynccontextmanager
    async def groups(self, context: RunContext) -> AsyncGenerator[Groups]:
        context.progress.phase("open the teacher")
        policy = await asyncio.to_thread(open_policy, self.teacher, seed=0)
        for student in context.policies.values():
            own = student.learner.token_bytes
            if own and policy.token_bytes and own.tokenizer.get_vocab() != policy.token_bytes.tokenizer.get_vocab():
                raise ConfigError("a teacher reads the student's token ids: take one with the same tokenizer")
        self.opened = TorchLearner(policy)
        async with super().groups(context) as groups:
            yield groups

    def advantages(self, groups: Sequence[RewardedGroup]) -> list[list[list[CreditedTransition]]]:
        assert self.opened is not None, "opened by a run"
        learner = self.opened
        scores = iter(values_of(groups, self.level, lambda rows: [row.numpy() for row in learner.logprobs(rows)]))
        credited = [
            [[CreditedTransition(call, next(scores) - call.logprobs) for call in calls] for calls in group.transitions]
            for group in groups
        ]
        found = [item.advantages for group in credited for calls in group for item in calls]
        self.measured = {"teacher_kl": -float(np.concatenate(found).mean()) if found else 0.0}
        return credited


@dataclass(kw_only=True)
class SelfDistillation(OPD):
    """A = log p(token | `hint`, prompt) under `teacher` − log p(token | prompt) when sampled (on-policy
    self-distillation, OPSD, arXiv:2601.18734). No reward is needed.

    `teacher` is the model that training starts from. `hint` stands before each prompt that the teacher reads, in the
    markup of the model's chat template, with fields of the task: `<|system|>The answer is {answer}.<|end|>`."""

    hint: str = ""
    name: str = "self_distillation"

    def __post_init__(self) -> None:
        super().__post_init__()
        if "{" not in self.hint:
            raise ConfigError(f"hint is {self.hint!r}; name a field of the task in it, such as {{answer}}")
        self._tokenizer: Any = None

    @asynccontextmanager
    async def groups(self, context: RunContext) -> AsyncGenerator[Groups]:
        async with super().groups(context) as groups:
            for policy in context.policies.values():
                if policy.learner.token_bytes is None:
                    raise ConfigError(f"{self.name} writes hints in the model's tokens, and its tokenizer is not known")
                self._tokenizer = policy.learner.token_bytes.tokenizer
            yield groups

    def advantages(self, groups: Sequence[RewardedGroup]) -> list[list[list[CreditedTransition]]]:
        credited = super().advantages([self._hinted(group) for group in groups])
        return [
            [
                [replace(item, transition=call) for item, call in zip(items, calls, strict=True)]
                for items, calls in zip(rollouts, group.transitions, strict=True)
            ]
            for rollouts, group in zip(credited, groups, strict=True)
        ]

    def _hinted(self, group: RewardedGroup) -> RewardedGroup:
        """The group as the teacher reads it."""
        try:
            text = self.hint.format_map(group.task)
        except (KeyError, TypeError) as error:
            raise ConfigError(f"hint {self.hint!r} does not fit the task {group.task!r}: {error!r}") from None
        ids = np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

        def hinted(call: Transition) -> Transition:
            return msgspec.structs.replace(call, prompt_ids=np.concatenate([ids, call.prompt_ids]))

        return replace(group, transitions=[[hinted(call) for call in calls] for calls in group.transitions])
