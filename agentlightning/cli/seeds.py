"""`agl train --seeds`: the same training with several seeds, and how far their results lie apart.

What is finished is kept in `seeds.json` at once, so that whatever ends the command costs the seed it was at, and
`--resume` goes on there.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from agentlightning.algorithm.base import STOPPED_BY_USER
from agentlightning.algorithm.directory import MARK
from agentlightning.cli.config import TrainConfig
from agentlightning.cli.options import print_json
from agentlightning.cli.training import exit_code, fit, fit_summary, show_fit
from agentlightning.errors import ConfigError

_FINISHED = "seeds.json"


def train_seeds(config: TrainConfig, seeds: Sequence[int], console: Console, *, as_json: bool) -> int:
    """One run after another, each in a directory `seed-N`; then a table. The exit code, 1 where a seed is left.

    ConfigError where there are no held-out tasks to compare the seeds by, or the directory holds runs already."""
    if config.val_dataset is None and config.environment is None:
        raise ConfigError("--seeds compares held-out rewards; give the held-out tasks with --val-dataset")
    directory = _directory(config)
    finished: dict[int, dict[str, Any]] = {one["seed"]: one for one in _read(directory)}
    stopped = "done"
    for seed in seeds:
        if seed in finished:
            continue
        own = directory / f"seed-{seed}"
        began = (own / MARK).is_file()
        console.print(f"seed {seed}, in {own}", markup=False, highlight=False, soft_wrap=True)
        one = msgspec.structs.replace(config, seed=seed, run_dir=str(own), resume=began)
        result = fit(one, console)
        show_fit(console, result)
        stopped = result.stopped_because
        if stopped == STOPPED_BY_USER or not result.evaluations:
            break
        finished[seed] = fit_summary(result, one)
        _write(directory, list(finished.values()))
    summaries = [finished[seed] for seed in seeds if seed in finished]
    _show(console, directory, summaries, len(seeds))
    if as_json:
        whole = {"directory": str(directory), "reward": _over_seeds(summaries), "seeds": summaries}
        print_json(whole)
    return exit_code(stopped) or int(len(summaries) < len(seeds))


def _directory(config: TrainConfig) -> Path:
    """A new directory with nothing finished, or with `resume` the one that is named or the newest."""
    root = Path(config.run_dir or "runs").expanduser()
    if config.resume:
        found = [root] if config.run_dir else sorted(
            (mark.parent for mark in root.glob(f"*/{_FINISHED}")), key=lambda one: one.stat().st_mtime
        )  # fmt: skip
        if not found or not (found[-1] / _FINISHED).is_file():
            raise ConfigError(f"{root} holds no runs of several seeds to resume; start them without --resume")
        return found[-1]
    if config.run_dir is None:
        root /= f"seeds-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    if (root / _FINISHED).is_file() or (root / MARK).is_file():
        raise ConfigError(f"{root} holds runs already; resume them, or choose another directory")
    _write(root, [])
    return root


def _read(directory: Path) -> list[dict[str, Any]]:
    try:
        return msgspec.json.decode((directory / _FINISHED).read_bytes(), type=list[dict[str, Any]])
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"{directory / _FINISHED} cannot be read: {error}; delete it to train all seeds anew"
        ) from None


def _write(directory: Path, summaries: list[dict[str, Any]]) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        partial = directory / f".{_FINISHED}.partial"
        partial.write_bytes(msgspec.json.format(msgspec.json.encode(summaries)))
        partial.replace(directory / _FINISHED)
    except OSError as error:
        raise ConfigError(f"cannot write to {directory}: {error.strerror}. Choose another directory") from None


def _over_seeds(summaries: Sequence[dict[str, Any]]) -> dict[str, dict[str, float | None]]:
    """Mean and sample standard deviation of the held-out reward, before and after; None of too few seeds."""
    return {
        when: {
            "mean": statistics.mean(rewards) if rewards else None,
            "std": statistics.stdev(rewards) if len(rewards) > 1 else None,
        }
        for when in ("before", "after")
        for rewards in [[one["reward"][when] for one in summaries]]
    }


def _show(console: Console, directory: Path, summaries: Sequence[dict[str, Any]], asked: int) -> None:
    table = Table("seed", "held-out before", "after", "seconds", box=None, pad_edge=False)
    for one in summaries:
        reward = one["reward"]
        table.add_row(str(one["seed"]), f"{reward['before']:.3f}", f"{reward['after']:.3f}", f"{one['seconds']:.0f}")
    over = _over_seeds(summaries)
    for statistic in ("mean", "std"):
        cells = (over[when][statistic] for when in ("before", "after"))
        table.add_row(statistic, *("–" if value is None else f"{value:.3f}" for value in cells))
    console.print(table)
    console.print(f"Runs: {directory}", markup=False, highlight=False, soft_wrap=True)
    if len(summaries) < asked:
        left = f"{asked - len(summaries)} of {asked} seeds are left; go on with --resume --run-dir {directory}"
        console.print(left, markup=False, highlight=False, soft_wrap=True)
