"""`agl train --from RUN`: the manifest of a run → the configuration that repeats it, and what would be different.

That a run of this configuration is trained is the business of `training`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from agentlightning.algorithm.directory import fingerprint
from agentlightning.cli.config import TrainConfig, load_config
from agentlightning.cli.place import Place
from agentlightning.cli.runs import choose_runs
from agentlightning.data.datasets import load_dataset
from agentlightning.errors import ConfigError
from agentlightning.types import Run


def find_run(name: str, place: Place) -> Run:
    """The run of this name, as `choose_runs` finds it."""
    return asyncio.run(choose_runs([name], place))[0].run


def repeated(run: Run, assignments: Iterable[str], flags: Mapping[str, Any]) -> TrainConfig:
    """The configuration of `run` with everything as it was then, defaults too, but for what is said otherwise.

    ConfigError for a run that was started from Python, and for datasets that hold other tasks now."""
    resolved: dict[str, Any] = run.manifest["config"]
    kept = resolved.get("run_file")
    if kept is None:
        raise ConfigError(
            f"run {run.run_id} cannot be repeated from its manifest: it was started from Python, and the manifest has "
            f"no names for its agent, its model and its datasets. Start it as it was started then: "
            f"{' '.join(run.manifest.get('command', ())) or 'the command is not known'}"
        )
    config = load_config(kept, assignments, flags)
    if config.algorithm.get("name") == kept["algorithm"].get("name"):
        config = msgspec.structs.replace(config, algorithm={**resolved["algorithm"], **config.algorithm})
    config = msgspec.structs.replace(config, optimizer={**resolved["optimizer"], **config.optimizer})
    if config.lora is not None:
        config = msgspec.structs.replace(config, lora={**(resolved["lora"] or {}), **config.lora})
    for name, source in (("train", config.train_dataset), ("val", config.val_dataset)):
        if source is not None and source == kept.get(f"{name}_dataset"):
            _check_same_tasks(run, name, source)
    return config


def _check_same_tasks(run: Run, name: str, source: Any) -> None:
    then, now = run.manifest["data"][name], fingerprint(load_dataset(source))
    if then != now:
        raise ConfigError(
            f"{source} holds other tasks than when run {run.run_id} was started ({then['tasks']} then, {now['tasks']} "
            f"now): bring them back, or name a copy with --{name}-dataset to train on other tasks knowingly"
        )
