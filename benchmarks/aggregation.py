"""Which aggregation of the loss never destroys a policy, and learns at least as well: token-,
sequence-, rollout-mean.

    make .venv-experiments/.setup
    python benchmarks/aggregation.py [--only game,template] [--seeds 1-5] [--steps 20] [--learning-rate 2e-4]

Everything but `algorithm.aggregation` is as each task has it: a game in which failing rollouts make
more calls (`_six_questions.py`) and a task in which failing answers are longer (`_talk.py`), with
the settings of the template; the template of `agl init`; the quickstart; and the three experiments.

Each run is a process, pinned to a core, at nice 15. A run that was finished in --out is read, not
run again; the table and `benchmarks/results/aggregation.json` are of all that were finished there.
A run collapsed if it ended at a held-out reward below half of what it began with."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import chdir
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

from experiments import CORES, FORKING, PYTHON, ROOT, TASKS, measured, spread
from quickstart_seeds import seeds_of

AGGREGATIONS: Final = ("token-mean", "sequence-mean", "rollout-mean")
EXPERIMENTS: Final = ("text to SQL", "multi-hop questions", "math")
TEMPLATE: Final = ROOT / "agentlightning" / "templates" / "agent"
RESULTS: Final = ROOT / "benchmarks" / "results" / "aggregation.json"

Run = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help=f"of {', '.join(CASES)}: names with commas")
    parser.add_argument("--aggregations", default=",".join(AGGREGATIONS))
    parser.add_argument("--seeds", type=seeds_of, default=seeds_of("1-5"))
    parser.add_argument("--steps", type=int, help="at most so many, instead of what each task has")
    parser.add_argument(
        "--learning-rate", help="of game, talk and template, instead of the template's"
    )
    parser.add_argument(
        "--workers", type=int, default=len(CORES), help="how many runs go on at once"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/aggregation"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    chosen = arguments.only.split(",") if arguments.only else list(CASES)
    if unknown := set(chosen) - set(CASES):
        parser.error(f"--only has {', '.join(unknown)}; known: {', '.join(CASES)}")
    if arguments.learning_rate and not set(chosen) <= {"game", "talk", "template"}:
        parser.error("--learning-rate is for game, talk and template: name them with --only")
    if set(chosen) & set(EXPERIMENTS) and not PYTHON.exists():
        sys.exit("there is no .venv-experiments; `make .venv-experiments/.setup` makes it")
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    os.environ |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}  # a run has one core
    cores: SimpleQueue[int] = SimpleQueue()
    for worker in range(arguments.workers):
        cores.put(CORES[worker % len(CORES)])
    jobs = [
        partial(run, case, aggregation, seed, arguments.steps, arguments.learning_rate, out, cores)
        for case in chosen
        for seed in arguments.seeds
        for aggregation in arguments.aggregations.split(",")
    ]
    with ThreadPoolExecutor(arguments.workers) as pool:
        failed = list(pool.map(partial.__call__, jobs)).count(False)
    found = finished(out)
    lines = table(found)
    print("\n".join(lines))
    machine = f"{platform.processor() or platform.machine()}, Python {platform.python_version()}"
    summary = {"machine": machine, "table": lines, "runs": found}
    arguments.results.write_text(json.dumps(summary, indent=1) + "\n")
    sys.exit(1 if failed else 0)


# --- the runs ---


def place(case: str, aggregation: str, seed: int, steps: int | None, rate: str | None) -> str:
    changed = (f"_steps-{steps}" if steps else "") + (f"_rate-{rate}" if rate else "")
    return f"{case.replace(' ', '-')}_{aggregation}_seed-{seed}{changed}"


def run(
    case: str,
    aggregation: str,
    seed: int,
    steps: int | None,
    rate: str | None,
    out: Path,
    cores: SimpleQueue[int],
) -> bool:
    """Run one, unless it was finished before. False where it failed."""
    directory = out / place(case, aggregation, seed, steps, rate)
    report = directory.with_suffix(".json")
    if report.is_file():
        return True
    shutil.rmtree(directory, ignore_errors=True)  # of a run that was cut short
    directory.mkdir()
    log, core, began = directory / "log.txt", cores.get(), time.monotonic()
    process = FORKING.Process(
        target=train, args=(case, aggregation, seed, steps, rate, directory, log, core)
    )
    process.start()
    process.join()
    cores.put(core)
    name = f"{case}, {aggregation}, seed {seed}"
    if process.exitcode:
        print(f"{name} failed: see {log}", file=sys.stderr, flush=True)
        return False
    one: Run = {
        "case": case,
        "aggregation": aggregation,
        "seed": seed,
        "seconds": time.monotonic() - began,
    }
    one |= {"steps": steps, "learning_rate": rate}
    one |= measured(directory / "run")
    kept = ("reward", "rollouts", "sampled_tokens", "grad_norm", "entropy")
    one["curve"] = [
        {key: step[key] for key in kept if key in step} for step in one["curve"] if "reward" in step
    ]
    written = report.with_suffix(".partial")
    written.write_text(json.dumps(one))
    written.rename(report)
    print(f"{name}: {one['before']:.3f} → {one['after']:.3f}", file=sys.stderr, flush=True)
    return True


def train(
    case: str,
    aggregation: str,
    seed: int,
    steps: int | None,
    rate: str | None,
    directory: Path,
    log: Path,
    core: int,
) -> None:
    """Train in this process, which was made for it."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})
    os.nice(15)
    with log.open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    changed = {"algorithm.aggregation": aggregation, "algorithm.stop_on_collapse": 0}
    changed |= {"algorithm.steps": steps} if steps else {}
    changed |= {"optimizer.learning_rate": rate} if rate else {}
    CASES[case](changed, seed, directory)


def settings(changed: dict[str, Any]) -> list[str]:
    return [f"{name}={value}" for name, value in changed.items()]


def train_template(changed: dict[str, Any], seed: int, directory: Path) -> None:
    from rich.console import Console

    from agentlightning.cli.run_file import load_config
    from agentlightning.cli.training import fit

    folder = shutil.copytree(TEMPLATE, directory / "project")
    sys.modules.pop("agent", None)  # that of the quickstart, which was imported before the fork
    sys.path.insert(0, str(folder))
    with chdir(folder):
        fit(
            load_config(
                folder / "run.yaml",
                settings(changed),
                {"seed": seed, "run_dir": str(directory / "run")},
            ),
            Console(),
        )


def train_game(changed: dict[str, Any], seed: int, directory: Path) -> None:
    import _six_questions as game

    train_as_the_template(
        game.make(seed),
        game.player,
        game.tasks,
        {"algorithm.max_tokens": 24} | changed,
        seed,
        directory,
    )


def train_talk(changed: dict[str, Any], seed: int, directory: Path) -> None:
    import _talk as talk

    train_as_the_template(
        talk.make(seed),
        talk.answerer,
        talk.tasks,
        {"algorithm.max_tokens": 40} | changed,
        seed,
        directory,
    )


def train_as_the_template(
    policy: Any,
    agent: Any,
    tasks: Callable[..., list[Any]],
    changed: dict[str, Any],
    seed: int,
    directory: Path,
) -> None:
    import agentlightning as agl
    from agentlightning.cli.run_file import load_config
    from agentlightning.config import make_algorithm

    config = load_config(TEMPLATE / "run.yaml", settings(changed), {})
    agl.Trainer(
        model=policy,
        algorithm=make_algorithm(config.algorithm),
        optimizer=config.optimizer,
        n_runners=64,
        max_sequence_length=512,
        run_dir=directory / "run",
        seed=seed,
    ).fit(agent, tasks(400, seed), tasks(120, "held-out"))


def train_quickstart(changed: dict[str, Any], seed: int, directory: Path) -> None:
    from _flight import recipe, tasks, train

    import agentlightning as agl

    agl.Trainer(
        model=recipe.starting_policy(seed),
        algorithm=replace(
            recipe.algorithm(),
            **{name.removeprefix("algorithm."): changed[name] for name in changed},
        ),
        optimizer=recipe.optimizer(),
        **recipe.SIZES,
        run_dir=directory / "run",
        seed=seed,
    ).fit(train.flight, tasks.train_tasks(seed=seed), tasks.heldout_tasks())


def experiment(name: str) -> Callable[[dict[str, Any], int, Path], None]:
    def train_experiment(changed: dict[str, Any], seed: int, directory: Path) -> None:
        script = ROOT / "examples" / TASKS[name][0] / "train.py"
        flags = [word for setting in settings(changed) for word in ("--set", setting)]
        os.execv(
            PYTHON, [str(PYTHON), str(script), *flags, "--seed", str(seed), "--out", str(directory)]
        )

    return train_experiment


CASES: Final[dict[str, Callable[[dict[str, Any], int, Path], None]]] = {
    "game": train_game,
    "talk": train_talk,
    "template": train_template,
    "quickstart": train_quickstart,
    **{name: experiment(name) for name in EXPERIMENTS},
}


# --- what is shown ---


def finished(out: Path) -> list[Run]:
    """All runs that were finished, in the order of cases, rates, aggregations and seeds."""
    found = [json.loads(path.read_text()) for path in out.glob("*_seed-*.json")]
    return sorted(found, key=lambda one: (*setting(one), one["seed"]))


def setting(one: Run) -> tuple[int, str, str, int]:
    case, aggregation = list(CASES).index(one["case"]), AGGREGATIONS.index(one["aggregation"])
    return case, str(one.get("steps") or ""), one.get("learning_rate") or "", aggregation


def collapsed(one: Run) -> bool:
    return one["after"] < one["before"] / 2


def table(found: Sequence[Run]) -> list[str]:
    """A row of Markdown for each task and aggregation."""
    columns = (
        "seeds",
        "held-out before",
        "after",
        "worst",
        "mean of training",
        "collapsed",
        "steps",
        "minutes",
    )
    lines = [
        f"| task | rate | aggregation | {' | '.join(columns)} |",
        "|---" * (len(columns) + 3) + "|",
    ]
    for same in dict.fromkeys(map(setting, found)):
        runs = [one for one in found if setting(one) == same]
        case, rate, aggregation = runs[0]["case"], same[2] or "its own", runs[0]["aggregation"]
        fallen = [str(one["seed"]) for one in runs if collapsed(one)]
        cells = [
            str(len(runs)),
            spread(one["before"] for one in runs),
            spread(one["after"] for one in runs),
            f"{min(one['after'] for one in runs):.3f}",
            spread(statistics.mean(step["reward"] for step in one["curve"]) for one in runs),
            f"{len(fallen)} of {len(runs)}" + (f" (seeds {', '.join(fallen)})" if fallen else ""),
            spread((len(one["curve"]) for one in runs), ".0f"),
            spread((one["seconds"] / 60 for one in runs), ".1f"),
        ]
        lines.append(f"| {case} | {rate} | {aggregation} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    main()
