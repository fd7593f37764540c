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
from agentlightning.environments.base import tasks_of
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
    if config.environment == kept.get("environment"):
        tasks = tasks_of(config.load_agent(), config.train_dataset, config.val_dataset)
        for name, now in zip(("train", "val"), map(fingerprint, tasks), strict=True):
            then, source = run.manifest["data"][name], getattr(config, f"{name}_dataset")
            if then != now and source == kept.get(f"{name}_dataset"):
                raise ConfigError(
                    f"{source or 'the environment'} holds other tasks than when run {run.run_id} was started "
                    f"({then['tasks']} then, {now['tasks']} now): bring them back, or name a copy with "
                    f"--{name}-dataset to train on other tasks knowingly"
                )
    return config
