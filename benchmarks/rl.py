"""Reinforcement learning from end to end: against TRL's GRPOTrainer, and asynchronous against
synchronous.

    make .venv-trl/.setup
    python benchmarks/rl.py [--part trl,sums,async] [--seeds 1] [--steps 25] [--threads 1]

The task is the travel desk of examples/flight: one to five turns, with three tools.

`trl`: a Qwen3 model of 5M parameters, warm-started once, is trained by TRL (its own tool loop and
environment) and by `Trainer.fit` (OpenAI's SDK over HTTP, gateway, store), the same tasks, group
size, lengths, learning rate, loss and threads, in turns. The SDK's clients are in a runner process,
whose CPU seconds are told apart. What counts is the seconds of training, without evaluation, until
the held-out reward is at least the target.

`sums`: the same of `chain_sum` of reasoning-gym, one answer of a model of 0.5M parameters each
(`_rl_sums.py`): held-out reward by CPU second.

`async`: a model of 0.5M parameters, 64 rollouts at once, and a tool whose latency is log-normal
(mean 0.5 s, 99th percentile 5 s): `max_staleness=4` against 0, as many steps of both."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import _rl_sums as sums
from _rl_options import Options, Outcome

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RESULTS = HERE / "results" / "rl.json"
TRL = ROOT / ".venv-trl" / "bin" / "python"
TARGET = 0.7


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", default="trl,sums,async")
    parser.add_argument("--seeds", type=int, default=1, help="of each kind of run")
    parser.add_argument("--steps", type=int, default=25, help="of the part against TRL")
    parser.add_argument("--async-steps", type=int, default=24)
    parser.add_argument(
        "--size", default="5M", choices=["5M", "0.5M"], help="of the model against TRL"
    )
    parser.add_argument("--threads", type=int, default=1, help="of torch, for both")
    parser.add_argument("--level", default="tree", help="of this package's learner")
    chosen = parser.parse_args()
    parts = chosen.part.split(",")
    known = {"trl": against_trl, "sums": sums_against_trl, "async": against_synchronous}
    if unknown := set(parts) - known.keys():
        parser.error(f"--part is {', '.join(unknown)}; known: {', '.join(known)}")
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for part in parts:
        results[part] = known[part](chosen)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


# --- the parts ---


def against_trl(chosen: argparse.Namespace) -> dict[str, Any]:
    options = options_of(
        chosen, start=start(chosen.size, "desk"), steps=chosen.steps, evaluate_every=5
    )
    runs = beside_trl(options, chosen.seeds)
    times = {
        name: statistics.median(reached(one) or math.inf for one in some)
        for name, some in runs.items()
    }
    print(
        f"to a held-out reward of {TARGET}: {times['TRL'] / times['here']:.2f} times as fast as "
        "TRL, by the medians"
    )
    for what, of in (("generated", "sample_seconds"), ("trained", "learn_seconds")):
        speed = {
            name: sum(getattr(o, what) for o in some) / sum(getattr(o, of) for o in some)
            for name, some in runs.items()
        }
        print(f"{what} tokens per second: {speed['here'] / speed['TRL']:.2f} times TRL's")
    found = {
        name: [vars(one) | {"to_target": reached(one)} for one in some]
        for name, some in runs.items()
    }
    return {"options": vars(options) | {"start": chosen.size}, "target": TARGET, "runs": found}


def sums_against_trl(chosen: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        options = options_of(
            chosen,
            start=start("0.5M", "sums"),
            steps=2 * chosen.steps,
            learning_rate=2e-4,
            evaluate_every=10,
            heldout=192,
            call_tokens=8,
            conversation_tokens=8,
            sums=folder,
        )
        # neighbouring seeds of a generator itself would share all tasks but one
        sums.write(folder, "train", sums.made(options.steps * options.tasks_per_step, 1))
        sums.write(folder, "heldout", sums.made(options.heldout, 2))
        runs = beside_trl(options, chosen.seeds)
    print("\n| | before | after | CPU s | gain per 100 CPU s |\n|---|---|---|---|---|")
    for name, some in runs.items():
        ends = [(one.curve[0][2], one.curve[-1][2]) for one in some]
        cpu = [one.cpu_seconds + one.agents_cpu_seconds for one in some]
        gains = [100 * (end - begin) / of for (begin, end), of in zip(ends, cpu, strict=True)]
        before, after = (
            ", ".join(f"{end:.2f}" for end in side) for side in zip(*ends, strict=True)
        )
        print(
            f"| {name} | {before} | {after} | {statistics.median(cpu):.0f} | "
            f"{statistics.median(gains):.2f} |"
        )
    kept = vars(options) | {"start": "0.5M", "sums": "chain_sum"}
    return {"options": kept, "runs": {name: list(map(vars, some)) for name, some in runs.items()}}


def beside_trl(options: Options, seeds: int) -> dict[str, list[Outcome]]:
    """Runs of TRL and of this package in turns, shown as they end."""
    if not TRL.exists():
        sys.exit("there is no .venv-trl; `make .venv-trl/.setup` makes it")
    ours, theirs = [HERE / "_rl_ours.py"], [HERE / "_rl_trl.py"]
    runs: dict[str, list[Outcome]] = {"TRL": [], "here": []}
    titles = (
        "",
        "seed",
        "to target",
        "last",
        "train",
        "sample",
        "learn",
        "CPU",
        "agents",
        "gen/s",
        "trained/s",
        "computed",
    )
    print("".join(f"{title:>10}" for title in titles))
    for seed in range(seeds):
        for name, command in (("TRL", [TRL, *theirs]), ("here", [sys.executable, *ours])):
            one = run(command, replace(options, seed=seed))
            runs[name].append(one)
            seconds = (
                one.train_seconds,
                one.sample_seconds,
                one.learn_seconds,
                one.cpu_seconds,
                one.agents_cpu_seconds,
            )
            cells = [
                name,
                str(seed),
                shown(reached(one)),
                f"{one.curve[-1][2]:.2f}",
                *(f"{one:.1f}" for one in seconds),
            ]
            cells += [
                f"{one.generated / one.sample_seconds:.0f}",
                f"{one.trained / one.learn_seconds:.0f}",
            ]
            print("".join(f"{cell:>10}" for cell in (*cells, f"{one.computed:,.0f}")), flush=True)
    return runs


def against_synchronous(chosen: argparse.Namespace) -> dict[str, Any]:
    options = options_of(
        chosen,
        start=start("0.5M", "desk"),
        steps=chosen.async_steps,
        threads=1,
        evaluate_every=0,
        slow_tool=True,
    )
    runs: dict[int, list[Outcome]] = {0: [], 4: []}
    print("staleness seed rollouts/h       reward  train    CPU learner idle")
    for seed in range(chosen.seeds):
        for staleness, some in runs.items():
            one = run(
                [sys.executable, HERE / "_rl_ours.py"],
                replace(options, seed=seed, max_staleness=staleness),
            )
            some.append(one)
            print(
                f"{staleness:>9} {seed:>4} {per_hour([one]):>10,.0f} {one.curve[0][2]:>5.2f} → "
                f"{one.curve[-1][2]:.2f} {one.train_seconds:>6.1f} {one.cpu_seconds:>6.1f} "
                f"{one.sample_seconds / one.train_seconds:>12.0%}",
                flush=True,
            )
    print(
        f"rollouts per hour: {per_hour(runs[4]) / per_hour(runs[0]):.2f} times those of a "
        "synchronous run"
    )
    return {
        "options": vars(options) | {"start": "0.5M"},
        "runs": {k: [vars(o) for o in v] for k, v in runs.items()},
    }


# --- their runs ---


def options_of(chosen: argparse.Namespace, **changed: Any) -> Options:
    """The options of all parts, with what differs."""
    shared = {"tasks_per_step": 8, "learning_rate": 1.5e-4, "heldout": 96, "level": chosen.level}
    return Options(**{"directory": "", "seed": 0, "threads": chosen.threads} | shared | changed)


def start(size: str, task: str) -> str:
    """The directory of the policy to start from, made once for what it is made of."""
    made_of = b"".join(
        (HERE / name).read_bytes()
        for name in ("_rl_start.py", "_rl_sums.py", "../examples/flight/demonstrations.py")
    )
    directory = (
        ROOT / "runs" / f"benchmark-rl-{task}-{size}-{hashlib.sha256(made_of).hexdigest()[:8]}"
    )
    if not (directory / "config.json").is_file():
        code = (
            "import sys, pathlib, _rl_start; "
            "_rl_start.make(sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3]))"
        )
        subprocess.run([sys.executable, "-c", code, size, task, directory], check=True, cwd=HERE)
    return str(directory)


def run(command: list[Any], options: Options) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        options = replace(options, directory=f"{folder}/run")
        done = subprocess.run(
            [*map(str, command), options.text()], capture_output=True, text=True, cwd=HERE
        )
        if done.returncode:
            sys.exit(f"{command[-1]} failed:\n{done.stderr[-4000:]}")
        return Outcome(**json.loads(done.stdout.splitlines()[-1]))


def reached(one: Outcome) -> float | None:
    """Seconds of training until the held-out reward was at least the target."""
    return next((seconds for _, seconds, reward in one.curve if reward >= TARGET), None)


def shown(seconds: float | None) -> str:
    return "never" if seconds is None else f"{seconds:.1f} s"


def per_hour(some: list[Outcome]) -> float:
    return 3600 * sum(one.rollouts for one in some) / sum(one.train_seconds for one in some)


if __name__ == "__main__":
    main()
