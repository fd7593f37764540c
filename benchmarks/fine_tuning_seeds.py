"""Does reinforcement learning start better from a policy that was fine-tuned on its own best rollouts?

    python benchmarks/fine_tuning_seeds.py --seeds 1-3 --out runs/experiments/fine_tuning

Two ways to spend the same number of training rollouts on the quickstart's flight task, from the same warm-started
policy: best of 8 → fine-tuning on these traces → GRPO, as examples/sft_from_traces does it; and GRPO from the start.
Rollouts of the best-of-8 stage count; held-out rollouts, which only measure, do not. Prints a Markdown table and writes
`benchmarks/results/fine_tuning_seeds.json` and the curve, `docs/images/fine-tuning.png`. Each seed is a process of its
own; one that was finished before is read, not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from quickstart_seeds import seeds_of

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "sft_from_traces"
STEPS = 15  # of reinforcement learning, where all rollouts go into it
EVERY = 5  # steps between two measurements
Curve = list[tuple[int, float]]  # (training rollouts so far, held-out reward)


def measure(seed: int, directory: Path) -> dict[str, Any]:
    """Both ways with one seed, in this process."""
    sys.path.insert(0, str(EXAMPLE))
    import train as example

    from agentlightning.algorithm import NoProgress

    recipe, tasks = example.FLIGHT.recipe, example.FLIGHT.tasks
    agent, heldout = example.FLIGHT.train.flight, tasks.heldout_tasks(recipe.HELDOUT_TASKS)
    train = tasks.train_tasks(recipe.TRAIN_TASKS, seed)
    per_step = recipe.algorithm().tasks_per_step * recipe.algorithm().group_size
    spent = 8 * example.SAMPLED
    started = time.monotonic()
    start = directory / "start"
    example.make_starting_policy(example.FLIGHT, seed, NoProgress()).save(start)
    seconds = {"warm start": time.monotonic() - started}

    def fit(name: str, model: Path, algorithm: Any, *data: Any, rate: float | None = None, **more: Any) -> Any:
        result = example.trainer(model, algorithm, directory / name, seed, rate).fit(agent, *data, **more)
        seconds[name] = result.seconds
        return result

    def learn(name: str, model: Path, steps: int, own: list[dict], before: int) -> Curve:
        grpo = replace(recipe.algorithm(steps), evaluate_every=EVERY, target_reward=None)
        found = fit(name, model, grpo, own, heldout).evaluations
        return [(before + per_step * one.step, one.reward) for one in found]

    fit("sampled", start, example.best_of_8, train[: example.SAMPLED])
    imitation = example.agl.SFT(traces=str(directory / "sampled"), **example.KEPT, **example.FINE_TUNING)
    tuned = fit("tuned", start, imitation, val_dataset=heldout, rate=example.RATE)
    before, after = (one.reward for one in tuned.evaluations)
    left = STEPS - spent // per_step
    return {
        "seed": seed,
        "before": before,
        "tuned": after,
        "from_tuned": [(0, before), *learn("learned", tuned.checkpoint, left, train[example.SAMPLED :], spent)],
        "from_start": learn("learned-from-start", start, STEPS, train, 0),
        "seconds": {name: round(took, 1) for name, took in seconds.items()},
    }


def table(reports: list[dict[str, Any]]) -> str:
    """In Markdown: held-out reward after so many training rollouts; mean ± sample standard deviation over the seeds."""
    counts = [count for count, _ in reports[0]["from_tuned"]]
    lines = ["| training rollouts | best of 8, fine-tuning, GRPO | GRPO |", "|---|---|---|"]
    for count in counts:
        cells = [
            _spread([dict(map(tuple, one[way]))[count] for one in reports]) for way in ("from_tuned", "from_start")
        ]
        lines.append(f"| {count:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _spread(values: list[float]) -> str:
    return f"{statistics.mean(values):.3f}" + (f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else "")


def draw(reports: list[dict[str, Any]], path: Path) -> None:
    """A thin line per seed and a thick one for their mean, against the training rollouts."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for color, way, label in (("C0", "from_tuned", "best of 8, fine-tuning, GRPO"), ("C1", "from_start", "GRPO")):
        for one in reports:
            axes.plot(*zip(*one[way], strict=True), color=color, linewidth=0.7, alpha=0.6)
        means = [(points[0][0], statistics.mean(reward for _, reward in points))
                 for points in zip(*(one[way] for one in reports), strict=True)]  # fmt: skip
        axes.plot(*zip(*means, strict=True), color=color, linewidth=2.5, marker="o", label=label)
    axes.set(xlabel="training rollouts", ylabel="held-out reward", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=seeds_of, default=seeds_of("1-3"))
    parser.add_argument("--out", type=Path, default=Path("runs/experiments/fine_tuning"))
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks/results/fine_tuning_seeds.json")
    parser.add_argument("--picture", type=Path, default=ROOT / "docs/images/fine-tuning.png")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    reports: list[dict[str, Any]] = []
    for seed in arguments.seeds:
        report = arguments.out / f"seed-{seed}.json"
        if arguments.one:
            report.write_text(json.dumps(measure(seed, arguments.out / f"seed-{seed}-{time.time_ns():x}")))
            return 0
        arguments.out.mkdir(parents=True, exist_ok=True)
        if not report.is_file():
            one = [sys.executable, __file__, "--one", "--seeds", str(seed), "--out", str(arguments.out)]
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
