"""`agl sweep`: one run per combination of settings and seed, and a table of the results."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from statistics import fmean, stdev
from typing import Any
from urllib.parse import quote
from zlib import crc32

import click
import yaml
from rich.console import Console

from agentlightning.cli.options import (
    COUNT,
    Flag,
    json_option,
    key_flags,
    make_table,
    note,
    print_json,
    print_table,
    quiet,
    set_option,
    steps_option,
)
from agentlightning.cli.run_file import NAMED_KEYS, check_files, load_config, read_value
from agentlightning.config import make_algorithm
from agentlightning.errors import ConfigError


@click.command()
@click.argument("run_file", type=click.Path(dir_okay=False, path_type=Path), metavar="RUN.yaml")
@click.option(
    "--over",
    multiple=True,
    required=True,
    metavar="KEY=A,B,…",
    help=("Values to try: optimizer.learning_rate=1e-4,1e-3. Repeatable: all combinations."),
)
@set_option
@steps_option
@click.option("--seeds", type=COUNT, default=1, help="Runs of each: seeds 0, 1, ….")
@click.option(
    "--run-dir",
    "out",
    cls=Flag,
    former=["--out"],
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory of the runs; default: below runs/. Finished runs are not repeated.",
)
@json_option
@key_flags("run_dir", "resume", "seed")
def sweep(
    run_file: Path,
    over: Sequence[str],
    assignments: Sequence[str],
    steps: int | None,
    seeds: int,
    out: Path | None,
    as_json: bool,
    api_key: str | None,
    **flags: Any,
) -> int:
    """Train with combinations of settings and compare.

    The runs of RUN.yaml take turns, and a table compares their results.

    The exit code is 1 if a run failed. The same command with --run-dir continues and does not
    repeat finished runs. Flags change all runs, as in `agl train`."""
    from agentlightning.algorithm.check import check_algorithm

    assignments = [*assignments, *_as_assignments(flags)]
    assignments += [] if steps is None else [f"algorithm.steps={steps}"]
    combinations = _combinations(over)
    for chosen in combinations:  # a wrong value is refused before the first run
        config = load_config(run_file, [*assignments, *chosen])
        check_files(config)
        check_algorithm(make_algorithm(config.algorithm))
        if config.model is not None:
            import_module("torch")  # which each run would miss
            import_module("transformers")
    out = out or Path(f"runs/sweep-{time.strftime('%Y%m%d-%H%M%S')}")
    out.mkdir(parents=True, exist_ok=True)
    mark = out / "sweep.json"
    asked = json.dumps({"run_file": str(run_file.resolve()), "set": assignments})
    if mark.is_file() and mark.read_text() != asked:
        raise ConfigError(
            f"{out} holds runs of another run file or --set; choose another --run-dir"
        )
    mark.write_text(asked)
    rows = list[tuple[object, ...]]()
    failed = 0
    total = len(combinations) * seeds
    for number, chosen in enumerate(combinations):
        results: list[dict[str, Any]] = []
        for seed in range(seeds):
            settings = [*chosen, f"seed={seed}"]
            note(f"run {number * seeds + seed + 1}/{total}: {' '.join([*assignments, *settings])}")
            result = _run(run_file, [*assignments, *settings], out / _directory(settings), api_key)
            failed += result is None
            results += [] if result is None else [result]
        keys, _, values = zip(*(text.partition("=") for text in chosen), strict=True)
        found = _summary(results)
        rows.append((*values, *found.values()))
        if as_json:
            print_json({"settings": dict(zip(keys, values, strict=True)), **found})
    names = (
        *(text.partition("=")[0] for text in combinations[0]),
        "runs",
        "before",
        "after",
        "± seeds",
        "seconds",
    )
    print_table(make_table(names, rows), Console(stderr=as_json))
    note(f"Runs: {out}")
    return 1 if failed else 0


def _combinations(over: Sequence[str]) -> list[tuple[str, ...]]:
    """`["a=1,2", "b=x"]` → `[("a=1", "b=x"), ("a=2", "b=x")]`; values are YAML."""
    axes: dict[str, list[str]] = {}
    for given in over:
        key, _, text = given.partition("=")
        several = read_value(f"--over {key}", f"[{text}]")
        if not key or not several or key in axes:
            raise ConfigError(
                f"--over {given!r}: write a key once, with its values: algorithm.group_size=4,8"
            )
        axes[key] = [f"{key}={_yaml(value)}" for value in several]
    return list(itertools.product(*axes.values()))


def _as_assignments(flags: Mapping[str, Any]) -> list[str]:
    """The flags of `agl train` as what `--set` takes: `{"algorithm": "rloo"}` →
    `["algorithm.name=rloo"]`."""
    return [
        f"{name}.name={value}" if name in NAMED_KEYS else f"{name}={_yaml(value)}"
        for name, value in flags.items()
        if value is not None
    ]


def _yaml(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("\n...\n").strip()


def _directory(settings: Sequence[str]) -> str:
    """The name of the run's directory; file systems take at most 255 bytes."""
    name = quote(",".join(settings), safe="=,")
    return name if len(name) <= 200 else f"{name[:191]}-{crc32(name.encode()):08x}"


def _run(
    run_file: Path, assignments: Sequence[str], directory: Path, key: str | None
) -> dict[str, Any] | None:
    """The result of the run in `directory`, once it has ended; None if it failed."""
    kept = directory / "result.json"
    if kept.is_file():
        return json.loads(kept.read_bytes())
    begun = (directory / "run.yaml").is_file()
    command = [
        sys.executable,
        "-m",
        "agentlightning.cli.main",
        "train",
        "--json",
        "--run-dir",
        str(directory),
    ]
    command += ["--quiet"] if quiet() else []
    command += ["--resume"] if begun else [str(run_file)]
    command += [word for assignment in assignments if not begun for word in ("--set", assignment)]
    environment = os.environ if key is None else {**os.environ, "AGL_KEY": key}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=environment)
    if done.returncode == 130:
        raise KeyboardInterrupt
    if done.returncode:
        return None
    last = done.stdout.rstrip().rpartition("\n")[2]
    kept.write_text(last)
    return json.loads(last)


def _summary(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means over seeds, with the standard deviation of the last reward; None if there is none."""
    rewards = [result["reward"] for result in results if result["reward"] is not None]
    after = [reward["after"] for reward in rewards]
    return {
        "runs": len(results),
        "before": fmean(reward["before"] for reward in rewards) if rewards else None,
        "after": fmean(after) if after else None,
        "deviation": stdev(after) if len(after) > 1 else None,
        "seconds": fmean(result["seconds"] for result in results) if results else None,
    }
