"""Automatic intermediate rewards against the final reward alone, on the flight task and on math with tools.

    python benchmarks/air.py --seeds 1-3 --out runs/air

Prints a Markdown table, writes `benchmarks/results/air.json` and draws `docs/images/air.png`. Every run is a process of
its own; one that was finished before with the same settings is read, not run again. Steps are counted until the mean
training reward of three is `--target` or more. Math needs the environment that `make .venv-experiments/.setup` makes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import algorithms_seeds
from quickstart_seeds import seeds_of

ROOT = Path(__file__).parent.parent
MATH = ROOT / "examples" / "math_tools" / "train.py"
WINDOW = 3  # steps

FINAL: dict[str, Any] = {"returns": "identical", "baseline": "dr_grpo"}
AIR: dict[str, Any] = {**FINAL, "returns": "air", "returns_options": {"alpha": 0.2}}
DENSE: dict[str, Any] = {**FINAL, "returns": "air_dense", "returns_options": {"tool_weights": 0.2}}
WORKED = {**DENSE, "returns_options": {"tool_weights": {"memory": 0.3, "search": 0.2}}}
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "math": {"final reward": FINAL, "air": AIR, "air_dense": DENSE},
    "flight": {"final reward": FINAL, "air": AIR, "air_dense": WORKED},
}
FLIGHT: dict[str, Any] = {"name": "grpo", **algorithms_seeds.COMMON, **algorithms_seeds.SETTINGS["grpo"]}


def train_flight(settings: dict[str, Any], seed: int, directory: Path) -> None:
    """In this process, as `algorithms_seeds` does."""
    report = algorithms_seeds.train("grpo", {**FLIGHT, **settings}, seed, directory / "run", minutes=10)
    (directory / "result.json").write_text(json.dumps(report))


def run(task: str, variant: str, seed: int, options: argparse.Namespace) -> dict[str, Any] | None:
    """The report of one run; None where it failed."""
    directory = options.out / f"{task}-{variant.replace(' ', '-')}-{seed}"
    report = directory / "result.json"
    settings = {**VARIANTS[task][variant], "steps": options.steps}
    if not report.is_file() or not settings.items() <= json.loads(report.read_text())["settings"].items():
        print(f"{task}, {variant}, seed {seed}", file=sys.stderr, flush=True)
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        changes = [part for key, value in settings.items() for part in ("--set", f"{key}={json.dumps(value)}")]
        python = ROOT / ".venv-experiments/bin/python"
        script = [options.python or python, MATH] if task == "math" else [sys.executable, __file__, "--one", "flight"]
        start = ["--seed", str(seed), "--start", options.out / f"math-start-{seed}"]
        command = [*script, "--out", directory, *(start if task == "math" else ["--seeds", str(seed)]), *changes]
        with (directory / "log").open("w") as log:
            paths = {**os.environ, "PYTHONPATH": str(ROOT)}
            subprocess.run(command, check=False, stdout=log, stderr=log, env=paths)
    return json.loads(report.read_text()) | {"task": task, "variant": variant} if report.is_file() else None


def steps_to(target: float, curve: list[list[float]]) -> int | None:
    """How many steps were made when the mean reward of `WINDOW` first reached `target`."""
    rewards = [point[1] for point in curve]
    means = [statistics.mean(rewards[end - WINDOW : end]) for end in range(WINDOW, len(rewards) + 1)]
    return next((end + WINDOW for end, mean in enumerate(means) if mean >= target), None)


def table(reports: list[dict[str, Any]], target: float) -> str:
    """In Markdown: a line per task and variant, mean ± sample standard deviation over its seeds."""
    lines = [
        f"| task | reward by | seeds | held-out before | after | tools that worked, before | after | to {target} |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for task, variant in dict.fromkeys((one["task"], one["variant"]) for one in reports):
        of = [one for one in reports if (one["task"], one["variant"]) == (task, variant)]
        reached = [steps_to(target, one["curve"]) for one in of]
        cells = [_spread([one[when] for one in of]) for when in ("before", "after")]
        cells += [_spread([(one["tool_success"] or {}).get(when) for one in of]) for when in ("before", "after")]
        steps = ", ".join("never" if one is None else str(one) for one in reached)
        lines.append(f"| {task} | {variant} | {len(of)} | {' | '.join(cells)} | {steps} |")
    return "\n".join(lines)


def _spread(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "none"
    return f"{statistics.mean(known):.3f}" + (f" ± {statistics.stdev(known):.3f}" if len(known) > 1 else "")


def draw(reports: list[dict[str, Any]], path: Path) -> None:
    """Mean over the seeds of each step's training reward and, where it was noted, of the share of tools that worked."""
    from matplotlib.figure import Figure

    tasks = list(dict.fromkeys(one["task"] for one in reports))
    figure = Figure(figsize=(4.5 * len(tasks), 6), layout="constrained")
    panels = figure.subplots(2, len(tasks), sharex="col", sharey=True, squeeze=False)
    for column, task in enumerate(tasks):
        for row, name in enumerate(("training reward", "tools that worked")):
            axes = panels[row][column]
            for index, variant in enumerate(VARIANTS[task]):
                curves = [one["curve"] for one in reports if (one["task"], one["variant"]) == (task, variant)]
                steps = list(zip(*curves, strict=False)) if curves and len(curves[0][0]) > row + 1 else []
                means = [statistics.mean(point[row + 1] or 0.0 for point in points) for points in steps]
                if means:
                    axes.plot(range(1, len(means) + 1), means, color=f"C{index}", label=f"{variant} ({len(curves)})")
            axes.set(title=task if row == 0 else "", xlabel="step" if row else "", ylabel=name if column == 0 else "")
            axes.grid(alpha=0.3)
    panels[0][0].legend(title="rewarded by (seeds)", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default=",".join(VARIANTS), help=f"of {', '.join(VARIANTS)}")
    parser.add_argument("--variants", default="final reward,air,air_dense")
    parser.add_argument("--seeds", type=seeds_of, default=seeds_of("1-3"))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--target", type=float, default=0.6)
    parser.add_argument("--out", type=Path, default=Path("runs/air"))
    parser.add_argument("--python", help="of the environment with AutoGen; default .venv-experiments")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks/results/air.json")
    parser.add_argument("--picture", type=Path, default=ROOT / "docs/images/air.png")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--set", action="append", default=[], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        changes = {key: json.loads(value) for key, _, value in (one.partition("=") for one in options.set)}
        train_flight(changes, options.seeds[0], options.out)
        return 0
    made = [
        run(task, variant, seed, options)
        for seed in options.seeds
        for task in options.tasks.split(",")
        for variant in options.variants.split(",")
    ]
    reports = [one for one in made if one is not None]
    print(table(reports, options.target))
    options.results.write_text(
        json.dumps({"steps": options.steps, "target": options.target, "reports": reports}, indent=1) + "\n"
    )
    if reports:
        draw(reports, options.picture)
    return 0 if len(reports) == len(made) else 1


if __name__ == "__main__":
    sys.exit(main())
