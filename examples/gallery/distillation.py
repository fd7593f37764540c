"""Self-distillation: the model that training starts from, told the answer, teaches itself without
it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from agentlightning.algorithm import OPD
from agentlightning.algorithm.base import RunContext
from agentlightning.algorithm.rl.groups import Groups
from agentlightning.data.credit import RewardedGroup
from agentlightning.data.sequences import CreditedTransition
from agentlightning.data.transitions import Transition
from agentlightning.errors import ConfigError


@dataclass(kw_only=True)
class SelfDistillation(OPD):
    """A = log p(token | `hint`, prompt) under `teacher` − log p(token | prompt) when sampled
    (on-policy self-distillation, OPSD, arXiv:2601.18734). No reward is needed.

    `teacher` is the model that training starts from. `hint` stands before each prompt that the
    teacher reads, in the markup of the model's chat template, with fields of the task:
    `<|system|>The answer is {answer}.<|end|>`."""

    hint: str = ""
    name: str = "self_distillation"

    def __post_init__(self) -> None:
        super().__post_init__()
        if "{" not in self.hint:
            raise ConfigError(
                f"hint is {self.hint!r}; name a field of the task in it, such as {{answer}}"
            )
        self._tokenizer: Any = None

    @asynccontextmanager
    async def groups(self, context: RunContext) -> AsyncGenerator[Groups]:
        async with super().groups(context) as groups:
            for policy in context.policies.values():
                if policy.learner.token_bytes is None:
                    raise ConfigError(
                        f"{self.name} writes hints in the model's tokens, and its tokenizer is "
                        "not known"
                    )
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
            raise ConfigError(
                f"hint {self.hint!r} does not fit the task {group.task!r}: {error!r}"
            ) from None
        ids = np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

        def hinted(call: Transition) -> Transition:
            return msgspec.structs.replace(call, prompt_ids=np.concatenate([ids, call.prompt_ids]))

        return replace(
            group, transitions=[[hinted(call) for call in calls] for calls in group.transitions]
        )
