"""The three experiments, a game, and what is claimed of the method, over several seeds.

    make .venv-experiments/.setup
    python benchmarks/experiments.py [--part tasks,claims,air,game,long] [--seeds 1-3] [--out runs/experiments]

`tasks`: examples/text_to_sql, multi_hop_rag and math_tools, each trained as its `train.py` does from
the policy of examples/policy.py. `claims`: short runs of the quickstart's flight task, each with one thing changed
(`_flight_variants.py`). `air`: a task whose tools fail, with and without automatic intermediate
rewards (`_booking.py`). `game`: examples/guess_number, trained as its `run.yaml` says. `long`:
examples/tower_of_hanoi with its reward divided in several ways (`_tower.py`).

Every run has a process and a core of its own, and one that was finished before in --out is read,
not run again. Prints Markdown tables, writes `benchmarks/results/experiments.json` and the curves,
`experiments.png`, `air.png`, `guess-number.png` and `tower.png` in `docs/images`."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path
from queue import SimpleQueue
from typing import Final

from _booking import BOOKINGS
from _booking import train as train_booking
from _curves import SPENT, Run, draw, draw_air, draw_spent, reward, spent
from _flight_variants import VARIANTS
from _flight_variants import main as run_variant
from _tower import TOWERS
from _tower import train as train_tower
from quickstart_seeds import seeds_of

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "experiments.json"
EXAMPLES = ROOT / "examples"
IMAGES = ROOT / "docs" / "images"
PYTHON = ROOT / ".venv-experiments" / "bin" / "python"
CORES: Final = (
    sorted(os.sched_getaffinity(0))
    if hasattr(os, "sched_getaffinity")
    else range(os.cpu_count() or 1)
)
# each run from a process that has imported everything
FORKING: Final = multiprocessing.get_context("forkserver")
FORKING.set_forkserver_preload(["_flight_variants", "_booking"])

TASKS: Final[dict[str, list[str]]] = {
    "text to SQL": ["text_to_sql"],
    "multi-hop questions": ["multi_hop_rag"],
    "math": ["math_tools"],
    "math with AIR": ["math_tools", "--air"],
}
GAME: Final = "guess a number"
GOAL: Final = 0.5  # a mean training reward that is counted towards
LONG_GOAL: Final = 0.8
WINDOW: Final = 3  # steps

Columns = dict[str, Callable[[list[Run]], str]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", default=",".join(PARTS))
    parser.add_argument("--seeds", type=seeds_of, default=seeds_of("1-3"))
    parser.add_argument(
        "--only", help="names with commas: the tasks and variants to run; other rows stay"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/experiments"))
    arguments = parser.parse_args()
    parts = arguments.part.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--part is {', '.join(unknown)}; known: {', '.join(PARTS)}")
    if "tasks" in parts and not PYTHON.exists():
        sys.exit("there is no .venv-experiments; `make .venv-experiments/.setup` makes it")
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    # A run has one core, where threads would only get in each other's way.
    os.environ |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    known = [name for part in parts for name in PARTS[part]]
    chosen = arguments.only.split(",") if arguments.only else known
    if unknown := set(chosen) - set(known):
        parser.error(f"--only has {', '.join(unknown)}; known: {', '.join(known)}")
    names = {part: [name for name in PARTS[part] if name in chosen] for part in parts}
    # The first of a part makes the policies that its others start from.
    run_all([name for part in parts for name in names[part][:1]], arguments.seeds, out)
    found = run_all([name for part in parts for name in names[part]], arguments.seeds, out)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for part in parts:
        rows = results.get(part, {}) | {name: found[name] for name in names[part] if name in found}
        results[part] = {name: rows[name] for name in PARTS[part] if name in rows}
        SHOWN[part](results[part])
        if part in PICTURES:
            picture, name = PICTURES[part]
            picture(results[part], IMAGES / name)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


# --- the runs ---


def run_all(names: Iterable[str], seeds: Sequence[int], out: Path) -> dict[str, list[Run]]:
    """The reports of all runs that ended well, by name and in the order of seeds."""
    jobs = [(name, seed) for name in names for seed in seeds]
    cores: SimpleQueue[int] = SimpleQueue()
    for core in CORES:
        cores.put(core)
    with ThreadPoolExecutor(len(CORES)) as pool:
        made = list(pool.map(lambda job: run(*job, out, cores), jobs))
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
    return {
        "before": before,
        "after": after,
        "tool_success": heldout[-1].get("val_tool_success"),
        "curve": steps,
    }


def train(name: str, seed: int, directory: Path, log: Path, core: int) -> None:
    """Train a task or a variant in this process, which was made for it."""
    if hasattr(os, "sched_setaffinity"):  # two runs that share two cores take a seventh longer
        os.sched_setaffinity(0, {core})
    with log.open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    if name == GAME:
        play(seed, directory)
    elif name in TOWERS:
        began = time.monotonic()
        start = directory.parent / f"tower-start-{seed}"
        ends = train_tower(name, seed, start, directory / "run")
        took = {"seed": seed, "seconds": time.monotonic() - began}
        report = measured(directory / "run") | ends | took
        for step in report["curve"]:  # the share of solved puzzles, whatever else is trained
            step |= {"reward": step["reward/solved"]} if "reward/solved" in step else {}
        (directory / "result.json").write_text(json.dumps(report))
    elif name in BOOKINGS:
        train_booking(name, seed, directory.parent / f"booking-start-{seed}", directory / "run")
    elif name in VARIANTS:
        run_variant(name, seed, directory.parent / f"flight-start-{seed}", directory)
    else:
        example, *options = TASKS[name]
        start = directory.parent / f"policy-{seed}"
        policy = [PYTHON, EXAMPLES / "policy.py", "--seed", str(seed), "--out", start]
        subprocess.run(policy, check=True)  # where it is not there
        command = [PYTHON, EXAMPLES / example / "train.py", *options, "--start", start / "policy"]
        command += ["--seed", str(seed), "--out", directory]
        os.execv(PYTHON, [os.fspath(word) for word in command])


def play(seed: int, directory: Path) -> None:
    """Train the game, and report what it took."""
    began = time.monotonic()
    command = [
        sys.executable,
        "-m",
        "agentlightning.cli.main",
        "train",
        "run.yaml",
        "--seed",
        str(seed),
    ]
    subprocess.run(
        [*command, "--run-dir", directory / "run"],
        cwd=EXAMPLES / "guess_number",
        check=True,
    )
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    took = {
        "seed": seed,
        "seconds": time.monotonic() - began,
        "cpu_seconds": used.ru_utime + used.ru_stime,
    }
    (directory / "result.json").write_text(json.dumps(measured(directory / "run") | took))


def run(name: str, seed: int, out: Path, cores: SimpleQueue[int]) -> Run | None:
    directory = out / f"{re.sub('[^a-zA-Z0-9]+', '-', name).strip('-')}-seed-{seed}"
    report = directory / "result.json"
    if not report.is_file():
        subprocess.run(["rm", "-rf", directory], check=True)  # of a run that was cut short
        directory.mkdir(parents=True)
        log, began = directory / "log.txt", time.monotonic()
        core = cores.get()
        process = FORKING.Process(target=train, args=(name, seed, directory, log, core))
        process.start()
        process.join()
        cores.put(core)
        if process.exitcode:
            print(f"{name}, seed {seed} failed: see {log}", file=sys.stderr, flush=True)
            return None
        if not report.is_file():  # which the variants write
            seconds = time.monotonic() - began
            report.write_text(
                json.dumps(measured(directory / "run") | {"seed": seed, "seconds": seconds})
            )
    found = json.loads(report.read_text())
    print(
        f"{name}, seed {seed}: {found['before']:.3f} → {found['after']:.3f}",
        file=sys.stderr,
        flush=True,
    )
    kept = (
        "seed",
        "before",
        "after",
        "seconds",
        "cpu_seconds",
        "tool_success",
        "changed",
        "settings",
    )
    measures = ("reward", "rollouts", "calls", "tool_success", *chain(*SPENT.values()))
    curve = [
        {key: step[key] for key in measures if key in step}
        for step in found["curve"]
        if "reward" in step
    ]
    heldout = {step["step"]: step["val_reward"] for step in found["curve"] if "val_reward" in step}
    return {key: found[key] for key in kept if key in found} | {"curve": curve, "heldout": heldout}


# --- what is shown ---


def show_tasks(found: dict[str, list[Run]]) -> None:
    columns: Columns = {
        "held-out before": lambda runs: spread(one["before"] for one in runs),
        "after": lambda runs: spread(one["after"] for one in runs),
        "gain": lambda runs: spread(one["after"] - one["before"] for one in runs),
    }
    show(found, columns | COLUMNS)


def show_claims(found: dict[str, list[Run]]) -> None:
    columns: Columns = {
        "held-out": lambda runs: spread(one["after"] for one in runs),
        "mean of training": lambda runs: spread(map(training, runs)),
        "tokens learned from": lambda runs: f"{statistics.mean(map(tokens, runs)) / 1000:,.0f}k",
    }
    show(found, columns | COLUMNS)


def show_air(found: dict[str, list[Run]]) -> None:
    columns: Columns = {
        "held-out, last third": lambda runs: spread(map(last_third, runs)),
        "by seed": lambda runs: ", ".join(f"{last_third(one):.2f}" for one in runs),
        "all evaluations": lambda runs: spread(
            statistics.mean(one["heldout"].values()) for one in runs
        ),
        "steps 1–10: tool calls that fail": lambda runs: failures(runs, slice(10)),
        "steps 31–40": lambda runs: failures(runs, slice(30, 40)),
        "calls per rollout, last step": lambda runs: spread(
            (one["curve"][-1]["calls"] / one["curve"][-1]["rollouts"] for one in runs), ".1f"
        ),
    }
    show(found, columns | {name: COLUMNS[name] for name in COLUMNS if "tool" not in name})


def show_game(found: dict[str, list[Run]]) -> None:
    """A row for each seed."""
    columns: Columns = {
        "reward, first three steps": lambda runs: f"{reward(runs[0]['curve'][:WINDOW]):.3f}",
        "last three": lambda runs: f"{reward(runs[0]['curve'][-WINDOW:]):.3f}",
        "held-out before": lambda runs: f"{runs[0]['before']:.3f}",
        "after": lambda runs: f"{runs[0]['after']:.3f}",
        "games": lambda runs: f"{sum(step['rollouts'] for step in runs[0]['curve']):,.0f}",
        "CPU s": lambda runs: f"{runs[0]['cpu_seconds']:.0f}",
        "minutes": COLUMNS["minutes"],
    }
    show({f"seed {one['seed']}": [one] for runs in found.values() for one in runs}, columns)


def show_long(found: dict[str, list[Run]]) -> None:
    columns: Columns = {
        "held-out before": lambda runs: spread(one["before"] for one in runs),
        "after": lambda runs: spread(one["after"] for one in runs),
    }
    for what in SPENT:
        columns[f"{what} to {LONG_GOAL}, by seed"] = partial(spent_to_goal, what)
    columns["calls per rollout, last step"] = lambda runs: spread(
        (one["curve"][-1]["calls"] / one["curve"][-1]["rollouts"] for one in runs), ".1f"
    )
    show(found, columns | {"minutes": COLUMNS["minutes"]})


def spent_to_goal(what: str, runs: list[Run]) -> str:
    """What each seed had spent when three steps in a row had a mean training reward of the goal."""
    ends = [steps_to(LONG_GOAL, one["curve"]) for one in runs]
    return ", ".join(
        "never" if end is None else f"{spent(one, what)[end - 1]:,.0f}"
        for one, end in zip(runs, ends, strict=True)
    )


def last_third(one: Run) -> float:
    """The mean held-out reward of the evaluations in the last third of the steps."""
    least = len(one["curve"]) * 2 / 3
    return statistics.mean(reward for step, reward in one["heldout"].items() if int(step) > least)


def failures(runs: list[Run], steps: slice) -> str:
    """The mean share of tool calls that fail in these steps, of those in which there are any."""
    shares = [
        [1 - step["tool_success"] for step in one["curve"][steps] if "tool_success" in step]
        for one in runs
    ]
    return spread((statistics.mean(of) for of in shares if of), ".2f") if any(shares) else "–"


def show(found: dict[str, list[Run]], columns: Columns) -> None:
    """A Markdown table with a row for each of what was found."""
    print(f"\n| | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}")
    for name, runs in found.items():
        print(f"| {name} | {' | '.join(cell(runs) for cell in columns.values())} |")


def steps_to(goal: float, curve: list[dict[str, float]]) -> int | None:
    """How many steps it took until the mean reward of `WINDOW` in a row was at least the goal."""
    rewards = [step["reward"] for step in curve]
    for end in range(WINDOW, len(rewards) + 1):
        if statistics.mean(rewards[end - WINDOW : end]) >= goal:
            return end
    return None


def reached(runs: list[Run]) -> str:
    """The rollouts to the goal, of each seed."""
    ends = [steps_to(GOAL, one["curve"]) for one in runs]
    return ", ".join(
        "never" if end is None else f"{sum(step['rollouts'] for step in one['curve'][:end]):,.0f}"
        for one, end in zip(runs, ends, strict=True)
    )


def tools(runs: list[Run]) -> str:
    """The share of tool calls that succeed, where there are any."""
    shares = [one["tool_success"] for one in runs if one["tool_success"] is not None]
    return spread(shares, ".2f") if shares else "–"


def training(one: Run) -> float:
    """The mean reward of all steps."""
    return reward(one["curve"])


def tokens(one: Run) -> float:
    """How many tokens the learner computed."""
    return sum(step["tokens_computed"] for step in one["curve"])


def spread(values: Iterable[float], form: str = ".3f") -> str:
    """Mean ± sample standard deviation."""
    of = list(values)
    return f"{statistics.mean(of):{form}}" + (
        f" ± {statistics.stdev(of):{form}}" if len(of) > 1 else ""
    )


COLUMNS: Final[Columns] = {
    f"rollouts to {GOAL}, by seed": reached,
    "tool calls that succeed": tools,
    "minutes": lambda runs: spread((one["seconds"] / 60 for one in runs), ".1f"),
}


PARTS: Final[dict[str, Iterable[str]]] = {
    "tasks": TASKS,
    "claims": VARIANTS,
    "air": BOOKINGS,
    "game": [GAME],
    "long": TOWERS,
}
SHOWN: Final = {
    "tasks": show_tasks,
    "claims": show_claims,
    "air": show_air,
    "game": show_game,
    "long": show_long,
}
PICTURES: Final = {
    "tasks": (draw, "experiments.png"),
    "air": (draw_air, "air.png"),
    "game": (draw, "guess-number.png"),
    "long": (draw_spent, "tower.png"),
}

if __name__ == "__main__":
    main()
