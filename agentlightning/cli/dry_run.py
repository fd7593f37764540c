"""`agl train --dry-run`: estimates a run by running and learning from two groups side by side."""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.console import Console

from agentlightning.cli.config import TrainConfig
from agentlightning.cli.fit import fit, make_algorithm
from agentlightning.cli.options import number, print_json
from agentlightning.cli.place import STORE_FILE, Place
from agentlightning.errors import ConfigError

_GROUPS: Final = 2  # that are run, so that what rollouts gain side by side is in the measurement
_ONE_STEP: Final = {
    "steps": 1,
    "tasks_per_step": _GROUPS,
    "evaluate_every": 0,
    "dynamic_sampling": False,
    "max_staleness": 0,
    "minibatches": 1,
}


def run_dry(config: TrainConfig, console: Console, *, as_json: bool) -> None:
    """Run two groups of `config`'s run in a temporary directory, and print what the whole run will take.

    The model is not written. ConfigError unless it is reinforcement learning from tasks."""
    from agentlightning.algorithm import Reinforcement
    from agentlightning.environments import tasks_of

    algorithm = make_algorithm(config.algorithm)
    if not isinstance(algorithm, Reinforcement) or "traces" in config.algorithm:
        raise ConfigError(f"--dry-run measures reinforcement learning from tasks, and {algorithm.name} is none")
    train, val = tasks_of(config.load_agent(), config.train_dataset, config.val_dataset)
    group: int = getattr(algorithm, "group_size", 1)
    every = algorithm.evaluation_interval
    evaluations = 2 + (every and (algorithm.steps - 1) // every) if val else 0
    plan = {
        "steps": algorithm.steps,
        "groups": algorithm.tasks_per_step,
        "group_size": group,
        "train_tasks": len(train),
        "val_tasks": len(val),
        "training_rollouts": algorithm.steps * algorithm.tasks_per_step * group,
        "evaluations": evaluations,
    }
    measured, frozen = _measure(config, algorithm, console)
    # Two groups have the machine to themselves; the groups of a step share it, as far as there are runners.
    groups = min(_GROUPS, algorithm.tasks_per_step)
    at_once = max(groups, min(algorithm.tasks_per_step, (config.n_runners or 64) // group)) / groups
    total = plan["training_rollouts"] + evaluations * len(val)
    per_rollout = total / max(1.0, measured["rollouts"])
    plan |= {
        "measured_rollouts": measured["rollouts"],
        "measured_reward": measured.get("reward"),
        "calls": measured["calls"] * per_rollout,
        "prompt_tokens": measured.get("prompt_tokens_mean", 0.0) * measured["calls"] * per_rollout,
        "answer_tokens": measured["sampled_tokens"] * per_rollout,
        "hosted_tokens": {name: [count * per_rollout for count in counts] for name, counts in frozen.items()},
        "rollout_seconds": measured["rollout_seconds"] * per_rollout / at_once,
        "learn_seconds": measured["learn_seconds"] * algorithm.steps * algorithm.tasks_per_step / groups,
        "learning_measured": bool(measured.get("sequences")),
    }
    if as_json:
        print_json(plan)
        return
    for line in _lines(plan, at_once):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _measure(
    config: TrainConfig, algorithm: Any, console: Console
) -> tuple[dict[str, float], dict[str, tuple[int, int]]]:
    """The metrics of a step with two groups, and the tokens of its calls to frozen models."""
    with tempfile.TemporaryDirectory(prefix="agl-dry-run-") as folder:
        own = {key: value for key, value in _ONE_STEP.items() if hasattr(algorithm, key)}
        own["tasks_per_step"] = min(_GROUPS, algorithm.tasks_per_step)
        changed: dict[str, Any] = {"algorithm": config.algorithm | own, "run_dir": f"{folder}/run", "trackers": []}
        changed |= {"val_dataset": None, "time_limit": None, "resume": False, "store": None}
        result = fit(msgspec.structs.replace(config, **changed), console)
        frozen = asyncio.run(_frozen_tokens(Path(folder) / "run" / STORE_FILE, set(config.models)))
    return result.metrics[-1].values, frozen


def _lines(plan: dict[str, Any], at_once: float) -> Iterator[str]:
    from agentlightning.display import duration

    shown = {key: number(value) for key, value in plan.items() if isinstance(value, int | float)}
    yield "Tasks:       {train_tasks} to learn from, {val_tasks} held out".format_map(shown)
    yield "Training:    {steps} steps × {groups} tasks × {group_size} = {training_rollouts} rollouts".format_map(shown)
    yield "Evaluations: {evaluations} × {val_tasks} rollouts".format_map(shown)
    reward = shown.get("measured_reward")
    yield f"Measured:    {shown['measured_rollouts']} rollouts, side by side, mean reward {reward}"
    yield "All:         about {calls} calls, {prompt_tokens} prompt and {answer_tokens} answer tokens".format_map(shown)
    for name, (read, written) in plan["hosted_tokens"].items():
        yield f"Hosted:      {name}: about {number(read)} prompt and {number(written)} answer tokens, at its prices"
    learning, rolling = plan["learn_seconds"], plan["rollout_seconds"]
    middle = f"Time:        about {duration(rolling * at_once**0.5 + learning)}"
    if at_once > 1:  # the middle of a range of ratios is the geometric one
        yield f"{middle}: {duration(rolling + learning)} if the other groups of a step take no longer beside these two,"
        yield f"             {duration(rolling * at_once + learning)} if they have to wait for them"
    else:
        yield middle
    if not plan["learning_measured"]:
        yield "             without learning: no group had two different rewards, so nothing was learned from them"


async def _frozen_tokens(store: Path, frozen: set[str]) -> dict[str, tuple[int, int]]:
    """Prompt and answer tokens of the groups' calls to models that are not trained."""
    from agentlightning.tracing.messages import model_name, token_counts

    read, written = Counter[str](), Counter[str]()
    async with Place(str(store)).open(reading=True) as opened:
        for rollout in await opened.query_rollouts() if frozen else ():
            for span in await opened.query_spans(rollout.rollout_id, "latest"):
                name, counts = model_name(span.attributes), token_counts(span.attributes)
                if name in frozen and counts is not None:
                    read[name] += counts[0]
                    written[name] += counts[1]
    return {name: (read[name], written[name]) for name in sorted(read)}
