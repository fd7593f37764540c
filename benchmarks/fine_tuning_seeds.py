"""Does reinforcement learning start better from a policy that was fine-tuned on its own best
rollouts?

    python benchmarks/fine_tuning_seeds.py --seeds 1-3 --out runs/experiments/fine_tuning

Two ways to spend the same number of training rollouts on the quickstart's flight task, from the
same warm-started policy: best of 8 → fine-tuning on these traces → GRPO, as
examples/sft_from_traces does it; and GRPO from the start. Rollouts of the best-of-8 stage count;
held-out rollouts, which only measure, do not. Prints a Markdown table and writes
`benchmarks/results/fine_tuning_seeds.json` and the curve, `docs/images/fine-tuning.png`. Each seed
is a process of its own; what was finished before is read, not run again."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from quickstart_seeds import seeds_of

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "sft_from_traces" / "train.py"
STEPS = 10  # of reinforcement learning, where all rollouts go into it
EVERY = 5  # steps between two measurements
Curve = list[tuple[int, float]]  # (training rollouts so far, held-out reward)


def measure(seed: int, directory: Path) -> dict[str, Any]:
    """Both ways with one seed, in this process."""
    from _flight import recipe, tasks  # first: it has a module of the same name

    from agentlightning.algorithm.base import STOPPED_BY_USER
    from agentlightning.data.references import load_reference

    example = sys.modules[load_reference(f"{EXAMPLE}:main").__module__]
    heldout, train = tasks.heldout_tasks(), tasks.train_tasks(seed=seed)
    per_step, spent = (
        recipe.algorithm().tasks_per_step * recipe.algorithm().group_size,
        8 * example.SAMPLED,
    )

    def stage(
        name: str, model: Any, algorithm: Any, *data: Any, rate: float | None = None
    ) -> dict[str, Any]:
        """What a run came to; one that was finished before is not run again."""
        report, run = directory / f"{name}.json", directory / name
        if not report.is_file():
            shutil.rmtree(run, ignore_errors=True)  # of a stage that was cut short
            result = example.trainer(model, algorithm, run, seed, rate).fit(example.flight, *data)
            if result.stopped_because == STOPPED_BY_USER:
                raise SystemExit(f"{name} was stopped; start again to go on")
            told = {
                "seconds": round(result.seconds, 1),
                "checkpoint": result.checkpoint and str(result.checkpoint),
            }
            curve = [(one.step, round(one.reward, 4)) for one in result.evaluations]
            report.write_text(json.dumps(told | {"curve": curve}))
        return json.loads(report.read_text())

    start = directory / "start"
    if not (start / "config.json").is_file():
        recipe.starting_policy(seed).save(start)
    learning = replace(recipe.algorithm(STEPS), evaluate_every=EVERY, target_reward=None)
    sampled = stage("sampled", start, example.best_of_8, train[: example.SAMPLED])
    imitation = example.agl.SFT(
        traces=str(directory / "sampled"), **example.KEPT, **example.FINE_TUNING
    )
    tuned = stage("tuned", start, imitation, None, heldout, rate=example.RATE)
    left = replace(learning, steps=STEPS - spent // per_step)
    learned = stage("learned", tuned["checkpoint"], left, train[example.SAMPLED :], heldout)
    direct = stage("direct", start, learning, train, heldout)
    stages = {"sampled": sampled, "tuned": tuned, "learned": learned, "direct": direct}
    return {
        "seed": seed,
        "from_tuned": [
            (0, tuned["curve"][0][1]),
            (spent, tuned["curve"][-1][1]),
            *((spent + per_step * step, reward) for step, reward in learned["curve"][1:]),
        ],
        "from_start": [(per_step * step, reward) for step, reward in direct["curve"]],
        "seconds": {name: one["seconds"] for name, one in stages.items()},
    }


def table(reports: list[dict[str, Any]]) -> str:
    """In Markdown: held-out reward after so many training rollouts; mean ± sample standard
    deviation over the seeds."""
    counts = [count for count, _ in reports[0]["from_tuned"]]
    lines = ["| training rollouts | best of 8, fine-tuning, GRPO | GRPO |", "|---|---|---|"]
    for count in counts:
        cells = [
            _spread([dict(map(tuple, one[way]))[count] for one in reports])
            for way in ("from_tuned", "from_start")
        ]
        lines.append(f"| {count:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _spread(values: list[float]) -> str:
    return f"{statistics.mean(values):.3f}" + (
        f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    )


def draw(reports: list[dict[str, Any]], path: Path) -> None:
    """A thin line per seed and a thick one for their mean, against the training rollouts."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for color, way, label in (
        ("C0", "from_tuned", "best of 8, fine-tuning, GRPO"),
        ("C1", "from_start", "GRPO"),
    ):
        for one in reports:
            axes.plot(*zip(*one[way], strict=True), color=color, linewidth=0.7, alpha=0.6)
        means = [
            (points[0][0], statistics.mean(reward for _, reward in points))
            for points in zip(*(one[way] for one in reports), strict=True)
        ]
        axes.plot(*zip(*means, strict=True), color=color, linewidth=2.5, marker="o", label=label)
    axes.set(xlabel="training rollouts", ylabel="held-out reward", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=seeds_of, default=seeds_of("1-3"))
    parser.add_argument("--out", type=Path, default=Path("runs/experiments/fine_tuning"))
    parser.add_argument(
        "--results", type=Path, default=ROOT / "benchmarks/results/fine_tuning_seeds.json"
    )
    parser.add_argument("--picture", type=Path, default=ROOT / "docs/images/fine-tuning.png")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    reports: list[dict[str, Any]] = []
    for seed in arguments.seeds:
        report = arguments.out / f"seed-{seed}.json"
        if arguments.one:
            report.write_text(json.dumps(measure(seed, report.with_suffix(""))))
            return 0
        arguments.out.mkdir(parents=True, exist_ok=True)
        if not report.is_file():
            one = [
                sys.executable,
                __file__,
                "--one",
                "--seeds",
                str(seed),
                "--out",
                str(arguments.out),
            ]
            subprocess.run(one, check=True)
        reports.append(json.loads(report.read_text()))
    print(table(reports))
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    summary = {"machine": machine, "table": table(reports), "reports": reports}
    arguments.results.write_text(json.dumps(summary, indent=1) + "\n")
    draw(reports, arguments.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
