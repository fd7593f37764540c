"""`agl train --from RUN`: the manifest of a run → the configuration that repeats it, and what would be different.

It finds the run and compares; that a run of this configuration is trained is the business of `training`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from agentlightning.algorithm.directory import MARK, fingerprint, read_mark
from agentlightning.cli.config import TrainConfig, load_config
from agentlightning.cli.place import RUNS, STORE_FILE, Place
from agentlightning.data.datasets import load_dataset
from agentlightning.errors import ConfigError, NotFoundError
from agentlightning.store.base import LightningStore
from agentlightning.types import Run


def find_run(name: str, place: Place) -> Run:
    """The run of a directory, or with an id: in the store or at the server that is named, else below `runs/`.

    NotFoundError where there is none; ConfigError for a directory without a run."""

    async def read() -> Run:
        async with open_run(name, place) as (_, run):
            return run

    return asyncio.run(read())


@contextlib.asynccontextmanager
async def open_run(name: str, place: Place) -> AsyncGenerator[tuple[LightningStore, Run]]:
    """The run that `find_run` finds, and the store that has it."""
    run_id, place = _locate(name, place)
    async with place.open(reading=True) as store:
        found = next((run for run in await store.query_runs() if run.run_id == run_id), None)
        if found is None:
            raise NotFoundError(f"{place} has no run {run_id}; `agl runs {place.address or '--server …'}` lists them")
        yield store, found


def _locate(name: str, place: Place) -> tuple[str, Place]:
    """The run's id, and where it is stored."""
    directory = Path(name)
    if not directory.is_dir() and not place.named:
        marks = (mark.parent for mark in RUNS.glob(f"**/{MARK}"))
        found = next((one for one in marks if read_mark(one).run_id == name), None)
        if found is None:
            raise NotFoundError(
                f"there is no run directory {name}, and no run of that id below {RUNS}/; name its directory, or the "
                "store that has it with --store or --server"
            )
        directory = found
    if not directory.is_dir():
        return name, place
    run_id, own = read_mark(directory).run_id, directory / STORE_FILE
    if own.is_file():
        return run_id, Place(str(own))
    if not place.named:
        raise ConfigError(f"the run in {directory} is stored elsewhere; say where with --store or --server")
    return run_id, place


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
