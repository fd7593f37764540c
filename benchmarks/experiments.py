"""The three experiments and what is claimed of the method, over several seeds.

    make .venv-experiments/.setup
    python benchmarks/experiments.py [--part tasks,claims] [--seeds 1-3] [--at-once 3] [--out runs/experiments]

`tasks`: examples/text_to_sql, multi_hop_rag and math_tools, each trained as its `train.py` does.
`claims`: short runs of the quickstart's flight task, each with one thing changed (`_flight_variants.py`).

Every run is a process of its own, those of claims forked from one that has imported everything, and one that was
finished before in --out is read, not run again. Prints Markdown tables, writes `benchmarks/results/experiments.json`
and the curves, `docs/images/experiments.png`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from _flight_variants import VARIANTS
from _flight_variants import main as run_variant
from quickstart_seeds import seeds_of

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "experiments.json"
PICTURE = ROOT / "docs" / "images" / "experiments.png"
PYTHON = ROOT / ".venv-experiments" / "bin" / "python"
FORKING: Final = multiprocessing.get_context("forkserver")
FORKING.set_forkserver_preload(["_flight_variants"])

TASKS: Final[dict[str, list[str]]] = {
    "text to SQL": ["text_to_sql"],
    "multi-hop questions": ["multi_hop_rag"],
    "math": ["math_tools"],
    "math with AIR": ["math_tools", "--air"],
}
GOAL: Final = 0.5  # a mean training reward that is counted towards
WINDOW: Final = 3  # steps

Run = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default="tasks,claims")
    parser.add_argument("--seeds", type=seeds_of, default=seeds_of("1-3"))
    parser.add_argument("--at-once", type=int, default=3, help="runs; each waits for a third of its time")
    parser.add_argument("--only", help="names with commas: of all tasks and variants these, shown and not written")
    parser.add_argument("--out", type=Path, default=Path("runs/experiments"))
    arguments = parser.parse_args()
    parts = arguments.part.split(",")
    if unknown := set(parts) - {"tasks", "claims"}:
        parser.error(f"--part is {', '.join(unknown)}; known: tasks, claims")
    if "tasks" in parts and not PYTHON.exists():
        sys.exit("there is no .venv-experiments; `make .venv-experiments/.setup` makes it")
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    # Several runs share the cores: threads of their own would only get in each other's way.
    os.environ |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    known = [*(TASKS if "tasks" in parts else ()), *(VARIANTS if "claims" in parts else ())]
    chosen = arguments.only.split(",") if arguments.only else known
    if unknown := set(chosen) - set(known):
        parser.error(f"--only has {', '.join(unknown)}; known: {', '.join(known)}")
    tasks, claims = ([name for name in part if name in chosen] for part in (TASKS, VARIANTS))
    if not tasks:
        run_all(claims[:1], arguments, out)  # makes what all others start from
    found = run_all([*claims[:1], *tasks, *claims[1:]], arguments, out)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if tasks:
        results["tasks"] = {name: found[name] for name in tasks if name in found}
        show_tasks(results["tasks"])
    if claims:
        results["claims"] = {name: found[name] for name in claims if name in found}
        show_claims(results["claims"])
    if arguments.only is None:  # some rows do not take the place of all
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        if tasks:
            draw(results["tasks"], PICTURE)


def show_tasks(found: dict[str, list[Run]]) -> None:
    print("\n| experiment | held-out before | after | gain | minutes |\n|---|---|---|---|---|")
    for name, runs in found.items():
        gains = [one["after"] - one["before"] for one in runs]
        cells = spread(one["before"] for one in runs), spread(one["after"] for one in runs), spread(gains)
        print(f"| {name} | {' | '.join(cells)} | {spread((one['seconds'] / 60 for one in runs), '.1f')} |")


def show_claims(found: dict[str, list[Run]]) -> None:
    print(f"\n| variant | held-out | mean of training | rollouts to {GOAL} | tool calls that succeed | minutes |")
    print("|---|---|---|---|---|---|")
    for name, runs in found.items():
        reached = [rollouts_to(GOAL, one["curve"]) for one in runs]
        cells = (
            spread(one["after"] for one in runs),
            spread(statistics.mean(step["reward"] for step in one["curve"]) for one in runs),
            ", ".join("never" if one is None else f"{one:,.0f}" for one in reached),
            spread(one["tool_success"] for one in runs),
            spread((one["seconds"] / 60 for one in runs), ".1f"),
        )
        print(f"| {name} | {' | '.join(cells)} |")


# --- the runs ---


def run_all(names: Iterable[str], arguments: argparse.Namespace, out: Path) -> dict[str, list[Run]]:
    """The reports of all runs that ended well, by name and in the order of seeds."""
    jobs = [(name, seed) for name in names for seed in arguments.seeds]
    with ThreadPoolExecutor(arguments.at_once) as pool:
        made = list(pool.map(lambda job: run(*job, out), jobs))
    found: dict[str, list[Run]] = {name: [] for name, _ in jobs}
    for (name, _), report in zip(jobs, made, strict=True):
        if report is not None:
            found[name].append(report)
    return {name: runs for name, runs in found.items() if runs}


def measured(directory: Path) -> Run:
    """What the run in a directory measured."""
    steps = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    heldout = [step for step in steps if "val_reward" in step]
    before, after = heldout[0]["val_reward"], heldout[-1]["val_reward"]
    return {"before": before, "after": after, "tool_success": heldout[-1].get("val_tool_success", 0.0), "curve": steps}


def train(name: str, seed: int, directory: Path, log: Path) -> int:
    """The exit code of a task's training."""
    example, *options = TASKS[name]
    command = [PYTHON, ROOT / "examples" / example / "train.py", *options, "--seed", str(seed), "--out", directory]
    with log.open("w") as output:
        return subprocess.run(command, stdout=output, stderr=output, check=False).returncode


def vary(name: str, seed: int, directory: Path, log: Path) -> int | None:
    """The exit code of a variant's training."""
    start = directory.parent / f"flight-start-{seed}"
    process = FORKING.Process(target=_logged, args=(log, name, seed, start, directory))
    process.start()
    process.join()
    return process.exitcode


def _logged(log: Path, *arguments: Any) -> None:
    with log.open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    run_variant(*arguments)


def run(name: str, seed: int, out: Path) -> Run | None:
    directory = out / f"{re.sub('[^a-zA-Z]+', '-', name).strip('-')}-seed-{seed}"
    report = directory / "result.json"
    if not report.is_file():
        subprocess.run(["rm", "-rf", directory], check=True)  # of a run that was cut short
        directory.mkdir(parents=True)
        log, began = directory / "log.txt", time.monotonic()
        if (train if name in TASKS else vary)(name, seed, directory, log):
            print(f"{name}, seed {seed} failed: see {log}", file=sys.stderr, flush=True)
            return None
        if not report.is_file():  # which the variants write
            seconds = time.monotonic() - began
            report.write_text(json.dumps(measured(directory / "run") | {"seed": seed, "seconds": seconds}))
    found = json.loads(report.read_text())
    print(f"{name}, seed {seed}: {found['before']:.3f} → {found['after']:.3f}", file=sys.stderr, flush=True)
    kept = ("seed", "before", "after", "seconds", "tool_success", "changed", "settings")
    curve = [
        {key: step[key] for key in ("reward", "rollouts", "learn_seconds", "tokens_computed") if key in step}
        for step in found["curve"]
        if "reward" in step
    ]
    return {key: found[key] for key in kept if key in found} | {"curve": curve}


def rollouts_to(goal: float, curve: list[dict[str, float]]) -> float | None:
    """How many rollouts it took until the mean reward of `WINDOW` steps in a row was at least the goal."""
    rewards = [step["reward"] for step in curve]
    for end in range(WINDOW, len(rewards) + 1):
        if statistics.mean(rewards[end - WINDOW : end]) >= goal:
            return sum(step["rollouts"] for step in curve[:end])
    return None


# --- what is shown ---


def spread(values: Iterable[float], form: str = ".3f") -> str:
    """Mean ± sample standard deviation."""
    of = list(values)
    return f"{statistics.mean(of):{form}}" + (f" ± {statistics.stdev(of):{form}}" if len(of) > 1 else "")


def draw(found: dict[str, list[Run]], path: Path) -> None:
    """Mean training reward against rollouts, a line per seed, held-out reward before and after as dots."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.4 * len(found), 3.2), layout="constrained")
    for axes, (name, runs) in zip(
        figure.subplots(1, len(found), sharey=True, squeeze=False).flat, found.items(), strict=True
    ):
        for index, one in enumerate(runs):
            rollouts, total = [], 0.0
            for step in one["curve"]:
                total += step["rollouts"]
                rollouts.append(total)
            rewards = [step["reward"] for step in one["curve"]]
            axes.plot(rollouts, rewards, color=f"C{index}", linewidth=1, label=f"seed {one['seed']}")
            ends = (0, total), (one["before"], one["after"])
            axes.plot(*ends, "o", color=f"C{index}", markersize=5, markeredgecolor="black", markeredgewidth=0.6)
        axes.set(title=name, ylim=(0, 1), xlabel="rollouts")
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("reward: line training, dots held-out")
    figure.axes[0].legend(loc="lower right", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
