"""`agl sweep`: one run per combination of settings and seed, and a table of the results."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import time
import zlib
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Final

import click
import yaml
from rich.console import Console

from agentlightning.cli.config import load_config, read_value
from agentlightning.cli.fit import make_algorithm
from agentlightning.cli.options import COUNT, json_option, make_table, print_json, print_table
from agentlightning.errors import ConfigError

_RESULT: Final = "result.json"  # of a run that ended, in its directory
_MOST_RUNS: Final = 1000


@click.command()
@click.argument("run_file", type=click.Path(dir_okay=False, path_type=Path), metavar="RUN.yaml")
@click.option("--over", multiple=True, required=True, metavar="KEY=A,B,…",
              help="Values to try: optimizer.learning_rate=1e-4,1e-3. Repeatable: all combinations.")  # fmt: skip
@click.option("--set", "assignments", multiple=True, metavar="KEY=VALUE", help="Change one key in all runs.")
@click.option("--seeds", type=COUNT, default=1, help="Runs of each: seeds 0, 1, ….")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), metavar="DIR",
              help="Directory of the runs; default: below runs/. Finished runs are not repeated.")  # fmt: skip
@json_option
def sweep(
    run_file: Path, over: Sequence[str], assignments: Sequence[str], seeds: int, out: Path | None, as_json: bool
) -> int:
    """Train from RUN.yaml with each combination of settings, one run after the other, and compare the results.

    The exit code is 1 if a run failed. The same command with --out continues and does not repeat finished runs."""
    combinations = [tuple(zip(*axes, strict=True)) for axes in _combinations(over)]
    if len(combinations) * seeds > _MOST_RUNS:
        raise ConfigError(f"--over and --seeds ask for {len(combinations) * seeds} runs; at most {_MOST_RUNS}")
    for keys_values in combinations:  # a wrong value is refused before the first run
        config = load_config(run_file, [*assignments, *map("=".join, keys_values)])
        make_algorithm(config.algorithm)
        if config.model is not None:
            import_module("torch")  # which each run would miss
            import_module("transformers")
    out = out or Path(f"runs/sweep-{time.strftime('%Y%m%d-%H%M%S')}")
    _check_same(out / "sweep.json", {"run_file": str(run_file.resolve()), "set": list(assignments)})
    rows, failed = list[tuple[object, ...]](), 0
    for number, chosen in enumerate(combinations):
        results: list[dict[str, Any]] = []
        for seed in range(seeds):
            settings = [*assignments, *map("=".join, chosen), f"seed={seed}"]
            click.echo(f"run {number * seeds + seed + 1}/{len(combinations) * seeds}: {' '.join(settings)}", err=True)
            result = _run(run_file, settings, out / _name(chosen, seed))
            failed += result is None
            results += [] if result is None else [result]
        found = _summary(dict(chosen), results)
        rows.append((*(value for _, value in chosen), *list(found.values())[1:]))
        if as_json:
            print_json(found)
    keys = [key for key, _ in combinations[0]]
    names = (*keys, "runs", "before", "after", "± seeds", "seconds")
    print_table(make_table(names, rows), Console(stderr=as_json))
    click.echo(f"Runs: {out}", err=True)
    return 1 if failed else 0


def _combinations(over: Sequence[str]) -> list[tuple[list[str], tuple[str, ...]]]:
    """`["a=1,2", "b=x"]` → `[(["a", "b"], ("1", "x")), (["a", "b"], ("2", "x"))]`; values are YAML."""
    keys, values = list[str](), list[list[str]]()
    for given in over:
        key, _, text = given.partition("=")
        several = read_value(f"--over {key}", f"[{text}]")
        if not key or not several or key in keys:
            raise ConfigError(f"--over {given!r}: write a key once, with its values: algorithm.group_size=4,8")
        keys.append(key)
        values.append([_written(value) for value in several])
    return [(keys, combination) for combination in itertools.product(*values)]


def _check_same(mark: Path, settings: dict[str, Any]) -> None:
    """ConfigError if the directory has runs of other settings."""
    mark.parent.mkdir(parents=True, exist_ok=True)
    if mark.is_file() and json.loads(mark.read_bytes()) != settings:
        raise ConfigError(f"{mark.parent} holds runs of another run file or --set; choose another --out")
    mark.write_text(json.dumps(settings))


def _name(chosen: Sequence[tuple[str, str]], seed: int) -> str:
    """The directory of a run: `group_size=4,seed=0`, with a hash where settings are long or have odd characters."""
    name = ",".join(f"{key.rpartition('.')[2]}={value}" for key, value in chosen)
    plain = re.sub(r"[^A-Za-z0-9.,=_+-]", "_", name)[:100]
    return plain + (f"-{zlib.crc32(name.encode()):08x}" if plain != name else "") + f",seed={seed}"


def _written(value: object) -> str:
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("\n...\n").strip()


def _run(run_file: Path, assignments: Sequence[str], directory: Path) -> dict[str, Any] | None:
    """The result of the run in `directory`, once it has ended; None if it failed."""
    kept = directory / _RESULT
    if kept.is_file():
        return json.loads(kept.read_bytes())
    begun = (directory / "run.yaml").is_file()
    command = [sys.executable, "-m", "agentlightning.cli.main", "train", "--json", "--run-dir", str(directory)]
    command += ["--resume"] if begun else [str(run_file)]
    command += [word for assignment in assignments if not begun for word in ("--set", assignment)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode == 130:
        raise KeyboardInterrupt
    if done.returncode:
        return None
    last = done.stdout.rstrip().rpartition("\n")[2]
    kept.write_text(last)
    return json.loads(last)


def _summary(settings: dict[str, str], results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means over seeds, with the standard deviation of the last reward; None if there is none."""
    rewards = [reward["reward"] for reward in results if reward["reward"] is not None]
    after = [reward["after"] for reward in rewards]
    return {
        "settings": settings,
        "runs": len(results),
        "before": fmean(reward["before"] for reward in rewards) if rewards else None,
        "after": fmean(after) if after else None,
        "deviation": stdev(after) if len(after) > 1 else None,
        "seconds": fmean(reward["seconds"] for reward in results) if results else None,
    }
