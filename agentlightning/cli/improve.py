"""`agl improve`: better prompts, then fine-tuning on what succeeded, then reinforcement learning; a
step begins with what the steps before it brought."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec
from rich.console import Console

from agentlightning.cli.fit import fit
from agentlightning.cli.options import (
    json_option,
    key_flags,
    make_table,
    note,
    number,
    print_json,
    print_table,
    set_option,
)
from agentlightning.cli.run_file import check_files, load_config
from agentlightning.cli.store_location import RUNS, STORE_FILE, StoreLocation
from agentlightning.cli.training import exit_code
from agentlightning.config import RunConfig, make_algorithm
from agentlightning.errors import ConfigError
from agentlightning.prompts.components import FILE, PROMPTS, read_candidate

if TYPE_CHECKING:
    from agentlightning.algorithm import Reinforcement
    from agentlightning.algorithm.budget import Budget
    from agentlightning.trainer import FitResult

RESULT: Final = "result.json"
_SHARES: Final = {"prompts": 1 / 3, "fine-tuning": 1 / 3, "training": 1.0}
"""Of the budget that is left, what each step may spend."""
_FINE_TUNING_STEPS: Final = 5


class Step(msgspec.Struct, kw_only=True):
    """The result of a step. `interval` is of the mean difference on the same held-out tasks; `kept`
    whether the next step begins with it."""

    name: str
    before: float
    after: float
    interval: tuple[float, float] | None
    rollouts: int
    tokens: int
    usd: float
    seconds: float
    stopped_because: str
    checkpoint: str | None = None

    @property
    def kept(self) -> bool:
        return self.after > self.before


@click.command()
@click.argument("run_file", type=click.Path(dir_okay=False, path_type=Path), metavar="RUN.yaml")
@click.option(
    "--reflection-model",
    metavar="NAME",
    default="gpt-5-mini",
    show_default=True,
    help="Model that writes better prompts, asked with OPENAI_API_KEY.",
)
@click.option(
    "--reflection-endpoint", metavar="URL", help="Its OpenAI-compatible URL; default: OpenAI's."
)
@set_option
@json_option
@key_flags("resume")
def improve(
    run_file: Path,
    reflection_model: str,
    reflection_endpoint: str | None,
    assignments: tuple[str, ...],
    as_json: bool,
    **flags: Any,
) -> int:
    """Improve an agent: prompts first, then weights.

    RUN.yaml is that of a training by rewards, with a budget (algorithm.budget) for all steps
    together: a prompt search (GEPA), fine-tuning on the best rollouts, and the training itself.
    What raises the reward on held-out tasks is kept for the next step. Without a model to train,
    prompts are all that is improved.

    The same command with --run-dir continues: finished steps are not repeated."""
    from agentlightning.display import terminal

    console = terminal(stderr=as_json)
    config = load_config(run_file, assignments, flags)
    check_files(config)
    plan = Plan.of(config, {"reflection_model": reflection_model, "endpoint": reflection_endpoint})
    steps: list[Step] = []
    for step in plan.run(console):
        steps.append(step)
        if exit_code(step.stopped_because):
            note(f"go on with: agl improve {run_file} --run-dir {plan.directory}")
            break
    if as_json:
        print_json({"directory": str(plan.directory), "steps": steps})
    else:
        if steps:
            _show(steps)
        note(f"prompts: {plan.prompts or 'as they were'}; model: {plan.config.model or 'hosted'}")
    return exit_code(steps[-1].stopped_because) if steps else 0


@dataclass
class Plan:
    """The steps that are left, and the settings that the steps before them have brought."""

    config: RunConfig
    directory: Path
    algorithm: Reinforcement
    editing: dict[str, Any]
    budget: Budget
    prompts: Path | None = field(default=None, init=False)

    @classmethod
    def of(cls, config: RunConfig, editing: dict[str, Any]) -> Plan:
        """ConfigError for settings with which not every step can run."""
        from agentlightning.algorithm import Reinforcement
        from agentlightning.algorithm.budget import UNLIMITED

        algorithm = make_algorithm(config.algorithm)
        if not isinstance(algorithm, Reinforcement) or algorithm.budget == UNLIMITED:
            raise ConfigError(
                "agl improve spends a budget on prompts and weights: give an algorithm that learns "
                "from rewards, such as grpo, and its budget: {rollouts: …}"
            )
        if config.val_dataset is None and config.environment is None:
            raise ConfigError("what a step brought is measured on held-out tasks: give val_dataset")
        if config.resume:
            raise ConfigError("--run-dir continues by itself: leave --resume out")
        directory = Path(config.run_dir or RUNS / f"improve-{time.strftime('%Y%m%d-%H%M%S')}")
        return cls(config, directory.absolute(), algorithm, editing, algorithm.budget)

    def run(self, console: Console) -> Iterator[Step]:
        """Each step when it has ended, from its record if it has run before."""
        from agentlightning.algorithm.budget import BudgetTooSmall

        self.directory.mkdir(parents=True, exist_ok=True)
        for name in _SHARES if self.config.trained else ("prompts",):
            folder = self.directory / name
            record = folder / RESULT
            if record.is_file():
                step = msgspec.json.decode(record.read_bytes(), type=Step)
            else:
                note(f"{name}, within {_in_words(self._budget_of(name))}")
                try:
                    step = self._measured(name, fit(self._settings(name, folder), console))
                except BudgetTooSmall as error:
                    note(f"{name} is left out: {error}")
                    continue
                if not exit_code(step.stopped_because):
                    record.write_bytes(msgspec.json.encode(step))
            self._take(step, folder)
            yield step

    def _budget_of(self, name: str) -> dict[str, float]:
        """The step's part of the budget that is left."""
        share = _SHARES[name] if self.config.trained else 1.0
        left = msgspec.structs.asdict(self.budget)
        whole = ("rollouts", "tokens")
        return {
            limit: max(1, int(value * share)) if limit in whole else value * share
            for limit, value in left.items()
            if value is not None
        }

    def _settings(self, name: str, folder: Path) -> RunConfig:
        from agentlightning.algorithm.directory import MARK

        own = {"budget": self._budget_of(name), "prices": self.algorithm.prices}
        given = self.config.algorithm_fields
        algorithm: dict[str, Any] = {**given, **own}
        if name == "prompts":
            editing = {key: value for key, value in self.editing.items() if value is not None}
            algorithm = {"name": "gepa", **editing, **own}
        elif name == "fine-tuning":
            kept = ("tasks_per_step", "group_size", "max_tokens", "temperature", "judge", "agents")
            same = {key: given[key] for key in kept if key in given}
            algorithm = {"name": "sft", "steps": _FINE_TUNING_STEPS, **same, **own}
        return msgspec.structs.replace(
            self.config, algorithm=algorithm, run_dir=str(folder), resume=(folder / MARK).is_file()
        )

    def _measured(self, name: str, result: FitResult) -> Step:
        import numpy as np

        from agentlightning.algorithm.budget import BudgetTooSmall
        from agentlightning.algorithm.measures import mean_interval

        if not result.evaluations:
            raise BudgetTooSmall(result.stopped_because)
        first = result.evaluations[0]
        last = result.evaluations[-1]
        gained = [
            (after.reward or 0.0) - (before.reward or 0.0)
            for before, after in zip(first.tasks, last.tasks, strict=True)
        ]
        spent = result.metrics[-1].values if result.metrics else {}
        return Step(
            name=name,
            before=first.reward,
            after=last.reward,
            interval=mean_interval(np.array(gained), 0.95) if len(gained) > 1 else None,
            rollouts=_count_rollouts(result.directory),
            tokens=int(spent.get("tokens", 0)),
            usd=spent.get("usd", 0.0),
            seconds=result.seconds,
            stopped_because=result.stopped_because,
            checkpoint=None if result.checkpoint is None else str(result.checkpoint),
        )

    def _take(self, step: Step, folder: Path) -> None:
        """Spend what the step has spent, and begin the next one with what it brought."""
        limits = msgspec.structs.asdict(self.budget)
        spent = {"rollouts": step.rollouts, "tokens": step.tokens, "usd": step.usd}
        spent["hours"] = step.seconds / 3600
        left: dict[str, Any] = {
            name: max(1 if isinstance(limit, int) else 1e-9, limit - spent[name])
            for name, limit in limits.items()
            if limit is not None
        }
        self.budget = type(self.budget)(**left)
        if step.kept and step.name == "prompts" and (folder / FILE).is_file():
            self.prompts = folder / FILE
            given = {**self.config.initial_resources, PROMPTS: read_candidate(folder)}
            self.config = msgspec.structs.replace(self.config, initial_resources=given)
        elif step.kept and step.checkpoint is not None:
            self.config = msgspec.structs.replace(self.config, model=step.checkpoint)


def _count_rollouts(directory: Path) -> int:
    import asyncio

    async def count() -> int:
        async with StoreLocation(str(directory / STORE_FILE)).open(reading=True) as store:
            return len(await store.query_rollouts())

    return asyncio.run(count())


def _in_words(budget: dict[str, float]) -> str:
    return ", ".join(f"{number(limit)} {name}" for name, limit in budget.items())


def _show(steps: list[Step]) -> None:
    rows: list[tuple[object, ...]] = [
        (
            step.name,
            f"{step.before:.3f}",
            f"{step.after:.3f}",
            "" if step.interval is None else f"{step.interval[0]:+.3f} to {step.interval[1]:+.3f}",
            step.rollouts,
            number(step.tokens),
            f"{step.usd:.2f}",
            f"{step.seconds:.0f}",
            "yes" if step.kept else "no",
        )
        for step in steps
    ]
    names = ("step", "before", "after", "difference, 95 %", "rollouts", "tokens", "usd", "seconds")
    print_table(make_table((*names, "kept"), rows, right=names[1:]))
