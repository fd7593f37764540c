"""Do the algorithms learn? The quickstart's flight task with each of several algorithms, over
several seeds.

    python benchmarks/algorithms_seeds.py --algorithms grpo,ppo,reinforce++ --seeds 1-3 --out runs/experiments

Prints a Markdown table (also `table.md` in --out), and writes
`benchmarks/results/algorithms_seeds.json` and the curves, `docs/images/algorithms.png`. Every run
is a process of its own that starts from the same warm-started policy as `agl quickstart` with that
seed, and has `--minutes` for everything, the warm start included. A run that was finished before
with the same settings is read, not run again. A run passes when the held-out reward goes from under
0.35 to 0.6 or more."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quickstart_seeds import seeds_of

from agentlightning.algorithm.base import NoProgress

ROOT = Path(__file__).parent.parent
CALLED_FOR = ("grpo", "ppo", "reinforce++")
LOW, HIGH = 0.35, 0.6  # held-out reward before and after

# Of every algorithm: what it shares with the quickstart, 144 rollouts a step of at most 40 tokens
# an answer.
COMMON: dict[str, Any] = {"steps": 60, "max_tokens": 40, "minibatches": 2, "target_reward": 0.97}
GROUPS: dict[str, Any] = {"tasks_per_step": 18, "group_size": 8}
SINGLE: dict[str, Any] = {"tasks_per_step": 144, "group_size": 1}

OPTIMIZER: dict[str, Any] = {"learning_rate": 1.5e-4, "micro_batch_tokens": 4096}
SETTINGS: dict[str, dict[str, Any]] = {
    "grpo": {**GROUPS, "clip_high": 0.28},
    "ppo": {
        **SINGLE,
        "clip_high": 0.28,
        "minibatches": 4,
        "critic": "separate",
        "critic_learning_rate": 5e-4,
    },
    "reinforce++": {**SINGLE, "clip_high": 0.28},
    "reinforce++_baseline": {**GROUPS, "clip_high": 0.28},
    "rloo": {**GROUPS, "clip_high": 0.28},
    "dr_grpo": {**GROUPS, "clip_high": 0.28},
    "dapo": {**GROUPS},
    "gspo": {**GROUPS},
    "cispo": {**GROUPS},
    "sft": {**GROUPS},
}


class Lines(NoProgress):
    """One line a step on stderr."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        print(f"  step {step}: reward {metrics['reward']:.3f}", file=sys.stderr, flush=True)

    def note(self, message: str) -> None:
        print(f"  {message}", file=sys.stderr, flush=True)


def train(
    name: str, settings: dict[str, Any], seed: int, directory: Path, minutes: float
) -> dict[str, Any]:
    """One run, in this process."""
    from _flight import recipe, tasks
    from _flight import train as flight

    from agentlightning.config import make_algorithm
    from agentlightning.learner.policy_config import AdamW
    from agentlightning.trainer import Trainer

    started = time.monotonic()
    progress = Lines()
    policy = recipe.starting_policy(seed)
    trainer = Trainer(
        model=policy,
        algorithm=make_algorithm(settings),
        optimizer=AdamW(**OPTIMIZER),
        **recipe.SIZES,
        run_dir=directory,
        seed=seed,
        time_limit=60 * minutes - (time.monotonic() - started),
        progress=progress,
    )
    result = trainer.fit(flight.flight, tasks.train_tasks(seed=seed), tasks.heldout_tasks())
    steps = [one for one in result.metrics if "reward" in one.values]
    worked = [
        one.values["val_tool_success"] for one in result.metrics if "val_tool_success" in one.values
    ]
    curve, rollouts = [], 0.0
    for one in steps:
        rollouts += one.values["rollouts"]
        curve.append([rollouts, round(one.values["reward"], 4)])
    return {
        "algorithm": name,
        "seed": seed,
        "before": round(result.evaluations[0].reward, 4),
        "after": round(result.evaluations[-1].reward, 4),
        "tool_success": {"before": round(worked[0], 4), "after": round(worked[-1], 4)}
        if worked
        else None,
        "minutes": round((time.monotonic() - started) / 60, 2),
        "rollouts": int(rollouts),
        "steps": len(steps),
        "stopped_because": result.stopped_because,
        "settings": settings,
        "curve": curve,
    }


def run(name: str, seed: int, arguments: argparse.Namespace) -> dict[str, Any] | None:
    """The report of one run in a process of its own, or of one that was finished before; None where
    it failed."""
    report = arguments.out / f"{name}-seed-{seed}.json"
    if not report.is_file() or json.loads(report.read_text())["settings"] != settings_of(
        name, arguments
    ):
        report.unlink(missing_ok=True)
        print(f"{name}, seed {seed}", file=sys.stderr, flush=True)
        shutil.rmtree(report.with_suffix(""), ignore_errors=True)  # of a run that was cut short
        one = [
            "--one",
            name,
            "--seeds",
            str(seed),
            "--out",
            str(arguments.out),
            "--minutes",
            str(arguments.minutes),
        ]
        changes = [part for change in arguments.set for part in ("--set", change)]
        subprocess.run([sys.executable, __file__, *one, *changes], check=False)
    return json.loads(report.read_text()) if report.is_file() else None


def settings_of(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    changes = {
        key: json.loads(value)
        for key, _, value in (change.partition("=") for change in arguments.set)
    }
    return {"name": name, **COMMON, **SETTINGS[name], **changes}


def passes(report: Mapping[str, Any]) -> bool:
    return report["before"] < LOW and report["after"] >= HIGH


def table(reports: list[dict[str, Any]]) -> str:
    """In Markdown: a line per run, then one per algorithm with mean ± sample standard deviation."""
    lines = [
        "| algorithm | seed | held-out before | after | minutes | rollouts |",
        "|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(report["algorithm"] for report in reports):
        of = [report for report in reports if report["algorithm"] == name]
        lines += [
            f"| `{name}` | {one['seed']} | {one['before']:.3f} | {one['after']:.3f} | "
            f"{one['minutes']:.1f} | {one['rollouts']} |"
            for one in of
        ]
        if len(of) > 1:
            cells = [
                _spread([one[key] for one in of], form)
                for key, form in (
                    ("before", ".3f"),
                    ("after", ".3f"),
                    ("minutes", ".1f"),
                    ("rollouts", ".0f"),
                )
            ]
            lines.append(f"| **`{name}`** | mean ± std | {' | '.join(cells)} |")
    return "\n".join(lines)


def _spread(values: list[float], form: str) -> str:
    return f"{statistics.mean(values):{form}} ± {statistics.stdev(values):{form}}"


def draw(reports: list[dict[str, Any]], path: Path) -> None:
    """Mean training reward of a step against the rollouts so far: a thin line per seed, a panel per
    algorithm."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(report["algorithm"] for report in reports))
    columns = min(3, len(names))
    rows = -(-len(names) // columns)
    figure = Figure(figsize=(4 * columns, 3.2 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat
    for name, axes in zip(names, panels, strict=False):
        for index, report in enumerate(one for one in reports if one["algorithm"] == name):
            color = f"C{index}"
            axes.plot(
                *zip(*report["curve"], strict=True),
                color=color,
                linewidth=1,
                label=f"seed {report['seed']}",
            )
            ends = (0, report["rollouts"]), (report["before"], report["after"])
            axes.plot(
                *ends, "o", color=color, markersize=5, markeredgecolor="black", markeredgewidth=0.6
            )
        axes.axhline(HIGH, color="grey", linewidth=0.8, linestyle=":")
        axes.set(title=name, ylim=(0, 1), xlabel="rollouts")
        axes.grid(alpha=0.3)
    for axes in list(panels)[len(names) :]:
        axes.axis("off")
    first = figure.axes[0]
    first.set_ylabel("reward: line training, dots held-out")
    first.legend(loc="lower right", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--algorithms", default=",".join(CALLED_FOR), help=f"of {', '.join(SETTINGS)}"
    )
    parser.add_argument("--seeds", type=seeds_of, default=seeds_of("1-3"))
    parser.add_argument("--out", type=Path, default=Path("runs/experiments"))
    parser.add_argument("--minutes", type=float, default=4.0, help="for each run, all included")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=JSON", help="change an algorithm setting"
    )
    parser.add_argument(
        "--results", type=Path, default=ROOT / "benchmarks/results/algorithms_seeds.json"
    )
    parser.add_argument("--picture", type=Path, default=ROOT / "docs/images/algorithms.png")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.one:
        seed, path = (
            arguments.seeds[0],
            arguments.out / f"{arguments.one}-seed-{arguments.seeds[0]}",
        )
        report = train(
            arguments.one, settings_of(arguments.one, arguments), seed, path, arguments.minutes
        )
        path.with_suffix(".json").write_text(json.dumps(report))
        return 0
    names = arguments.algorithms.split(",")
    if unknown := [name for name in names if name not in SETTINGS]:
        parser.error(f"no settings for {', '.join(unknown)}; there are {', '.join(SETTINGS)}")
    made = [run(name, seed, arguments) for name in names for seed in arguments.seeds]
    reports = [report for report in made if report is not None]
    machine = (
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}"
    )
    print(f"{machine}\n")
    print(table(reports))
    (arguments.out / "table.md").write_text(table(reports) + "\n")
    passed = sum(map(passes, reports))
    print(
        "\n"
        f"{passed} of {len(made)} runs pass: from under {LOW} to {HIGH} or more in "
        f"{arguments.minutes:g} minutes"
    )
    if reports:
        draw(reports, arguments.picture)
        summary = {
            "machine": machine,
            "passed": passed,
            "runs": len(made),
            "minutes": arguments.minutes,
        }
        summary |= {"optimizer": OPTIMIZER, "table": table(reports), "reports": reports}
        arguments.results.write_text(json.dumps(summary, indent=1) + "\n")
    return 0 if passed == len(made) else 1


if __name__ == "__main__":
    sys.exit(main())
