"""Makes an algorithm, a `Trainer` and a run from a `TrainConfig`."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec
from rich.console import Console

from agentlightning.cli.config import ALGORITHMS, TrainConfig, build, kept
from agentlightning.cli.options import instrument_agents
from agentlightning.errors import ConfigError, nearest

if TYPE_CHECKING:
    from agentlightning.trainer import FitResult

_NOT_THE_TRAINERS: Final = {
    *("agent", "environment", "instrument", "train_dataset", "val_dataset", "resume"),
    *("algorithm", "optimizer", "lora"),
}


def fit(config: TrainConfig, console: Console, limit: int | None = None) -> FitResult:
    """Train once as in `config`, with progress on `console`. Only the first `limit` held-out tasks are used."""
    if "torch" not in sys.modules:  # which takes seconds
        console.print("loading libraries and the agent …", highlight=False)
    algorithm = make_algorithm(config.algorithm)
    from agentlightning.display import LiveProgress, hide_library_progress
    from agentlightning.environments import tasks_of
    from agentlightning.learner.base import AdamW, LoRA
    from agentlightning.trainer import Trainer

    hide_library_progress()
    optimizer = build(AdamW, config.optimizer, "optimizer")
    lora = None if config.lora is None else build(LoRA, config.lora, "lora")
    passed = {key: value for key, value in msgspec.structs.asdict(config).items() if key not in _NOT_THE_TRAINERS}
    instrument_agents(config.instrument, here=isinstance(config.agent, str))
    with LiveProgress(console, steps=getattr(algorithm, "steps", None), time_limit=config.time_limit) as progress:
        trainer = Trainer(
            algorithm=algorithm, optimizer=optimizer, lora=lora, progress=progress, run_file=kept(config), **passed
        )
        agent, val_dataset = config.load_agent(), config.val_dataset
        if limit is not None:
            val_dataset = tasks_of(agent, config.train_dataset, val_dataset)[1][:limit]
        return trainer.fit(agent, config.train_dataset, val_dataset, resume=config.resume)


def make_algorithm(spec: Mapping[str, Any]) -> Any:
    """The algorithm of `{"name": …, field: value}`, after checking the name and type of every field."""
    from agentlightning.data.references import is_reference, load_reference

    fields = dict(spec)
    name = fields.pop("name", "grpo")
    if not isinstance(name, str) or (name not in ALGORITHMS and not is_reference(name)):
        raise ConfigError(f"algorithm.name: no algorithm {name!r}; {nearest(str(name), ALGORITHMS)} or file.py:Class")
    maker = load_reference(f"agentlightning.algorithm:{ALGORITHMS[name]}" if name in ALGORITHMS else name)
    if not isinstance(maker, type) or not dataclasses.is_dataclass(maker):
        raise ConfigError(f"algorithm.name: {name} is no dataclass; an algorithm declares its fields as one")
    return build(maker, fields, "algorithm")
