"""The settings of a policy: where it learns and is sampled, its optimiser, its adapter.

They are the part of a run's settings that learner and sampler read. Imports neither torch nor
NumPy."""

from __future__ import annotations

import math
import typing
from collections.abc import Callable, Mapping
from functools import cache
from operator import ge, gt, le
from typing import Annotated, Any, Final, Literal, TypeAlias, get_args

import msgspec
from msgspec import Meta

from agentlightning.errors import ConfigError, check_settings
from agentlightning.learner.pair_specs import read_learner

Schedule: TypeAlias = Literal["constant", "linear", "cosine"]
DType: TypeAlias = Literal["float32", "bfloat16"]


_BOUNDS: Final[dict[str, tuple[str, Callable[[Any, Any], bool]]]] = {
    "minimum": ("at least", ge),
    "exclusiveMinimum": ("above", gt),
    "maximum": ("at most", le),
}


def flag(
    description: str,
    metavar: str | None = None,
    name: str | None = None,
    bounds: dict[str, float] | None = None,
    **settings: Any,
) -> Meta:
    """The text of a setting that has a flag, for `agl train --help` too. `name` is the flag's
    unless it is the setting's, `bounds` have JSON schema's words, and `settings` are click's."""
    extra = {"name": name, "metavar": metavar, **settings}
    return Meta(description=description, extra_json_schema=bounds, extra=extra)


class AdamW(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The optimiser's settings.

    Settings: learning_rate: its highest value. betas, weight_decay: as in AdamW (arXiv:1711.05101).
        max_grad_norm: gradients are clipped to this norm. warmup_steps: steps over which the
        learning rate rises from 0. schedule: `constant`, or `linear` or `cosine` down to 0 at
        `total_steps`. total_steps: default: the training's optimiser steps. micro_batch_tokens:
        padded tokens computed at once, which bounds the memory. A batch of any size is one exact
            step.
        gradient_checkpointing: compute activations again instead of keeping them: a third more
            work, much less memory.

    ConfigError for a value out of range."""

    learning_rate: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    warmup_steps: int = 0
    schedule: Schedule = "constant"
    total_steps: int | None = None
    micro_batch_tokens: int = 8192
    gradient_checkpointing: bool = False

    def __post_init__(self) -> None:
        least = {"warmup_steps": 0, "micro_batch_tokens": 1, "weight_decay": 0}
        above = {"learning_rate": 0, "max_grad_norm": 0}
        check_settings(self, least=least, above=above, choices={"schedule": get_args(Schedule)})
        if not (math.isfinite(self.learning_rate) and all(0 <= beta < 1 for beta in self.betas)):
            raise ConfigError(
                f"learning_rate {self.learning_rate} must be finite, betas {self.betas} in [0, 1)"
            )
        if self.total_steps is not None and not self.total_steps > self.warmup_steps:
            raise ConfigError(
                f"total_steps is {self.total_steps}; it must be more than warmup_steps "
                f"({self.warmup_steps})"
            )

    def until(self, steps: int) -> AdamW:
        """These settings with a schedule that ends after so many steps, unless `total_steps` is
        set."""
        ends = self.schedule == "constant" or self.total_steps is not None
        return self if ends else msgspec.structs.replace(self, total_steps=steps)

    def rate(self, step: int) -> float:
        """The learning rate of optimiser step `step`, from 1. ConfigError if the schedule needs
        `total_steps` and has none."""
        warm = min(1.0, step / max(1, self.warmup_steps))
        if self.schedule == "constant":
            return self.learning_rate * warm
        if self.total_steps is None:
            raise ConfigError(
                f"schedule {self.schedule!r} falls to 0 at total_steps; give AdamW(total_steps=…)"
            )
        done = max(
            0.0, min(1.0, (step - 1 - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        )
        fall = 1 - done if self.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.learning_rate * warm * fall


class LoRA(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Train a low-rank adapter instead of the weights (arXiv:2106.09685): each weight W acts as W +
    alpha / rank · B·A.

    `targets` are names of linear layers, such as `("q_proj", "v_proj")`; default: all but the head.
    There is no dropout, since the trained distribution must be the sampled one. ConfigError unless
    `rank` and `alpha` are positive."""

    rank: int = 16
    alpha: float = 32.0
    targets: str | tuple[str, ...] = "all-linear"

    def __post_init__(self) -> None:
        check_settings(self, least={"rank": 1}, above={"alpha": 0})


class PolicyConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of each policy that a run trains.

    ConfigError for a value of another type, or out of its bounds."""

    learner: Annotated[
        str | Mapping[str, Any] | None,
        Meta(
            description="Where the model learns: `torch` (default), `{fsdp: 2}` or `{tinker: URL}`."
        ),
    ] = None
    sampler: Annotated[
        str | Mapping[str, Any] | None,
        Meta(description="What samples: `embedded`, `vllm`, `{vllm: URL}` or `{sglang: URL}`."),
    ] = None
    optimizer: Annotated[
        AdamW,
        Meta(
            description="Settings of AdamW, such as `learning_rate`, `warmup_steps` and `schedule`."
        ),
    ] = AdamW()
    lora: Annotated[
        LoRA | None,
        Meta(
            description="Train a low-rank adapter instead of all weights: `rank`, `alpha`, "
            "`targets`."
        ),
    ] = None
    max_sequence_length: Annotated[
        int | None,
        flag("Limit of prompt and answer together; default: the model's, at most 4096.", "TOKENS"),
    ] = None
    device: Annotated[
        str | None, flag("cpu, cuda or mps; default: cuda if available, else cpu.", "NAME")
    ] = None
    dtype: Annotated[
        DType | None, flag("Type of the weights; default: bfloat16 on a GPU, else float32.")
    ] = None
    threads: Annotated[
        int | None,
        flag(
            "Number of torch threads; default: 1 for models below 10M parameters.",
            "N",
            bounds={"minimum": 1},
        ),
    ] = None
    deterministic: Annotated[
        bool, Meta(description="Give the same weights for the same seed, to the last bit.")
    ] = False
    seed: Annotated[
        int, flag("Random seed.", bounds={"minimum": -(2**63), "maximum": 2**63 - 1})
    ] = 0

    def __post_init__(self) -> None:
        check_settings(self, choices={"dtype": get_args(DType)})
        for name, meta in settings_of(type(self)).items():
            value = getattr(self, name)
            for bound, most in (meta.extra_json_schema or {}).items():
                words, fits = _BOUNDS[bound]
                if value is not None and not fits(value, most):
                    raise ConfigError(f"{name} is {value}; it must be {words} {most:g}")
        read_learner(self.learner)


@cache
def settings_of(kind: type[PolicyConfig]) -> dict[str, Meta]:
    """The description of each setting, by name."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {name: hint.__metadata__[-1] for name, hint in hints.items() if get_args(hint)[1:]}
