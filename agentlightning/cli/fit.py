"""Makes an algorithm, a `Trainer` and a run, or the estimate of a run, from a `RunConfig`."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
from rich.console import Console

from agentlightning.cli.options import instrument_agents, number, print_json, quiet
from agentlightning.cli.run_file import repeatable_settings, with_absolute_paths
from agentlightning.cli.store_location import STORE_FILE, StoreLocation
from agentlightning.config import RunConfig, fields_of, make_algorithm
from agentlightning.errors import ConfigError

if TYPE_CHECKING:
    from agentlightning.algorithm.base import Progress
    from agentlightning.algorithm.prompt_search.search import PromptSearch
    from agentlightning.trainer import FitResult

_GROUPS: Final = 2  # that are run, so that what rollouts gain side by side is in the measurement
_SEARCH_TASKS: Final = 5  # that are run to know what a rollout costs
_ONE_STEP: Final = {
    "steps": 1,
    "evaluate_every": 0,
    "dynamic_sampling": False,
    "max_staleness": 0,
    "minibatches": 1,
}
_PLAN: Final = """\
Tasks:       {train_tasks} to learn from, {val_tasks} held out
Training:    {steps} steps × {groups} tasks × {group_size} = {training_rollouts} rollouts
Evaluations: {evaluations} × {val_tasks} rollouts
Measured:    {measured_rollouts} rollouts, side by side, mean reward {measured_reward}
All:         about {calls} calls, {prompt_tokens} prompt and {answer_tokens} answer tokens"""


def fit(config: RunConfig, console: Console, limit: int | None = None) -> FitResult:
    """Train once as in `config`, with progress on `console`. Only the first `limit` held-out tasks
    are used."""
    config = with_absolute_paths(config)
    if "torch" not in sys.modules and not quiet():  # which takes seconds
        console.print("loading libraries and the agent …", highlight=False)
    from agentlightning.algorithm.base import NoProgress
    from agentlightning.display import LiveProgress, hide_library_progress
    from agentlightning.environments import tasks_of
    from agentlightning.trainer import Trainer

    hide_library_progress()
    run_file = repeatable_settings(config)
    algorithm = make_algorithm(config.algorithm)
    config = msgspec.structs.replace(config, algorithm=algorithm)
    instrument_agents(config.instrument, here=isinstance(config.agent, str))
    shown: AbstractContextManager[Progress] = nullcontext(NoProgress())
    if not quiet():
        steps = getattr(algorithm, "steps", None)
        shown = LiveProgress(console, steps=steps, time_limit=config.time_limit)
    with shown as progress:
        settings = msgspec.structs.asdict(config)
        trainer = Trainer(**settings, progress=progress, run_file=run_file)
        agent = config.load_agent()
        val_dataset = config.val_dataset
        if limit is not None:
            val_dataset = tasks_of(agent, config.train_dataset, val_dataset)[1][:limit]
        return trainer.fit(agent, val_dataset=val_dataset)


def resolved(config: RunConfig) -> dict[str, Any]:
    """The run file of `config` with the defaults that it leaves out, and without secrets."""
    values = repeatable_settings(config)
    algorithm = make_algorithm(config.algorithm)
    names = fields_of(type(algorithm)).__struct_fields__
    fields = {name: getattr(algorithm, name) for name in names}
    plain = {name: value for name, value in fields.items() if isinstance(value, str | int | float)}
    return values | {"algorithm": plain | values["algorithm"]}


# --- the estimate of a run ------------------------------------------------------------------------


def run_dry(config: RunConfig, console: Console, *, as_json: bool) -> None:
    """Run two groups of `config`'s run, or some tasks of a prompt search, in a temporary directory,
    and print what the whole run will take.

    The model is not written. ConfigError unless it is a search, or reinforcement learning from
    tasks."""
    from agentlightning.algorithm import Reinforcement
    from agentlightning.algorithm.prompt_search.search import PromptSearch
    from agentlightning.environments import tasks_of

    config = with_absolute_paths(config)
    algorithm = make_algorithm(config.algorithm)
    if isinstance(algorithm, PromptSearch):
        _run_dry_search(config, algorithm, console, as_json=as_json)
        return
    if not isinstance(algorithm, Reinforcement) or "traces" in config.algorithm_fields:
        raise ConfigError(
            "--dry-run measures prompt searches and reinforcement learning from tasks, and "
            f"{algorithm.name} is neither"
        )
    train, val = tasks_of(config.load_agent(), config.train_dataset, config.val_dataset)
    every = algorithm.evaluation_interval
    evaluations = 2 + (every and (algorithm.steps - 1) // every) if val else 0
    groups = min(_GROUPS, algorithm.tasks_per_step)
    own = {key: value for key, value in _ONE_STEP.items() if hasattr(algorithm, key)} | {
        "tasks_per_step": groups
    }
    with tempfile.TemporaryDirectory(prefix="agl-dry-run-") as folder:
        changed: dict[str, Any] = {
            "algorithm": {**config.algorithm_fields, **own},
            "run_dir": f"{folder}/run",
            "trackers": [],
        }
        changed |= {"val_dataset": None, "time_limit": None, "resume": False, "store": None}
        measured = fit(msgspec.structs.replace(config, **changed), console).metrics[-1].values
        hosted = asyncio.run(_hosted_tokens(Path(folder) / "run" / STORE_FILE, set(config.models)))
    training = algorithm.steps * algorithm.tasks_per_step
    group = round(measured["rollouts"] / groups)  # with forks
    share = (training * group + evaluations * len(val)) / max(1.0, measured["rollouts"])
    plan: dict[str, Any] = {
        "steps": algorithm.steps,
        "groups": algorithm.tasks_per_step,
        "group_size": group,
        "train_tasks": len(train),
        "val_tasks": len(val),
        "training_rollouts": training * group,
        "evaluations": evaluations,
        "measured_rollouts": measured["rollouts"],
        "measured_reward": measured.get("reward"),
        "calls": measured["calls"] * share,
        "prompt_tokens": measured.get("prompt_tokens_mean", 0.0) * measured["calls"] * share,
        "answer_tokens": measured["sampled_tokens"] * share,
        "hosted_tokens": {
            name: [count * share for count in counts] for name, counts in hosted.items()
        },
        "rollout_seconds": measured["rollout_seconds"] * share,
        "learn_seconds": measured["learn_seconds"] * training / groups,
        "learning_measured": bool(measured.get("sequences")),
        "budget": msgspec.structs.asdict(algorithm.budget),
    }
    if as_json:
        print_json(plan)
        return
    # Two groups had the machine to themselves; the groups of a step share it, as far as there are
    # runners.
    at_once = max(groups, min(algorithm.tasks_per_step, (config.n_runners or 64) // group)) / groups
    for line in _lines(plan, at_once):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _lines(plan: dict[str, Any], at_once: float) -> list[str]:
    from agentlightning.display import duration

    shown = {
        key: number(value) if isinstance(value, int | float) else value
        for key, value in plan.items()
    }
    lines = [_PLAN.format_map(shown)]
    for name, (read, written) in plan["hosted_tokens"].items():
        lines.append(
            f"Hosted:      {name}: about {number(read)} prompt and {number(written)} answer tokens"
        )
    learning = plan["learn_seconds"]
    rolling = plan["rollout_seconds"]
    least = duration(rolling / at_once + learning)
    most = duration(rolling + learning)
    shared = f"{least} to {most}: the other groups of a step run beside these two, or wait for them"
    lines.append(f"Time:        about {shared if at_once > 1 else most}")
    if not plan["learning_measured"]:
        lines.append("             without learning: no group had two different rewards")
    limits = [f"{number(limit)} {name}" for name, limit in plan["budget"].items() if limit]
    if limits:
        lines.append(f"Budget:      ends before {', '.join(limits)} are exceeded")
    return lines


def _run_dry_search(
    config: RunConfig, search: PromptSearch, console: Console, *, as_json: bool
) -> None:
    """Run the first prompts on some held-out tasks, and print what the search will cost."""
    from agentlightning.algorithm.budget import usage_of
    from agentlightning.environments import tasks_of

    train, val = tasks_of(config.load_agent(), config.train_dataset, config.val_dataset)
    with tempfile.TemporaryDirectory(prefix="agl-dry-run-") as folder:
        changed: dict[str, Any] = {
            "algorithm": {"name": "baseline", "rollout": {"timeout_seconds": 300.0}},
            "run_dir": f"{folder}/run",
            "trackers": [],
            "time_limit": None,
            "resume": False,
            "store": None,
        }
        evaluation = fit(
            msgspec.structs.replace(config, **changed), console, limit=_SEARCH_TASKS
        ).evaluations[0]
    usages = [usage_of(task.spans) for task in evaluation.tasks]
    tokens = [sum(map(sum, usage.values())) for usage in usages]
    models = sorted({model for usage in usages for model in usage})
    prices = {model: search.prices.get(model) for model in (*models, *search.editing_models)}
    unpriced = sorted(model for model, price in prices.items() if price is None)
    spending = search.spending(frozenset(config.trained))
    plan: dict[str, Any] = {
        "train_tasks": len(train),
        "val_tasks": len(val),
        "measured_rollouts": len(usages),
        "measured_reward": evaluation.reward,
        "rollouts": search.budget.rollouts,
        "rollout_tokens": _range(tokens),
        "rollout_usd": _range([spending.cost_of(usage) for usage in usages]),
        "unpriced": [model for model in unpriced if model not in config.trained],
        "budget": msgspec.structs.asdict(search.budget),
    }
    if as_json:
        print_json(plan)
        return
    for line in _search_lines(plan):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _range(values: list[float] | list[int]) -> dict[str, float]:
    return {"mean": sum(values) / len(values), "least": min(values), "most": max(values)}


def _search_lines(plan: dict[str, Any]) -> list[str]:
    rollouts = plan["rollouts"] or 100
    what = f"{rollouts} rollouts" if plan["rollouts"] else "each 100 rollouts; no limit is set"
    tokens = {key: number(rollouts * value) for key, value in plan["rollout_tokens"].items()}
    usd = {key: number(rollouts * value) for key, value in plan["rollout_usd"].items()}
    lines = [
        f"Tasks:     {plan['train_tasks']} to learn from, {plan['val_tasks']} held out",
        f"Measured:  {plan['measured_rollouts']} rollouts with the first prompts, mean reward "
        f"{number(plan['measured_reward'])}",
        f"Search:    {what}",
        f"Tokens:    about {tokens['mean']}, {tokens['least']} to {tokens['most']}, and those of "
        "the editing model",
        f"Cost:      about ${usd['mean']}, ${usd['least']} to ${usd['most']}, and that of the "
        "editing model; no cached prompts, as each candidate is new to the API",
    ]
    if plan["unpriced"]:
        lines.append(
            f"           without {', '.join(plan['unpriced'])}: give algorithm.prices, dollars for "
            "a million tokens read and written"
        )
    return lines


async def _hosted_tokens(store: Path, frozen: set[str]) -> dict[str, tuple[int, int]]:
    """Prompt and answer tokens of the groups' calls to models that are not trained."""
    from agentlightning.tracing.dialects import model_name, token_counts

    read = Counter[str]()
    written = Counter[str]()
    async with StoreLocation(str(store)).open(reading=True) as opened:
        for rollout in await opened.query_rollouts() if frozen else ():
            for span in await opened.query_spans(rollout.rollout_id, "latest"):
                name = model_name(span.attributes)
                counts = token_counts(span.attributes)
                if name in frozen and counts is not None:
                    read[name] += counts[0]
                    written[name] += counts[1]
    return {name: (read[name], written[name]) for name in sorted(read)}
