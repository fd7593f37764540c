"""The interface of algorithms: what one gets (`RunContext`), reports (`Progress`) and does (`run`).

Nothing here imports torch: algorithms that only evaluate or edit prompts run without it.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import agentlightning
from agentlightning.algorithm.budget import Budget, Price, Spending
from agentlightning.algorithm.tracking import Tracker, Tracking
from agentlightning.data.functions import check_parameters, takes
from agentlightning.errors import AgentLightningError, ConfigError
from agentlightning.learner.base import Learner, Sampler
from agentlightning.store.base import LightningStore
from agentlightning.types import LLM, ResourcesUpdate, Run

T = TypeVar("T")

STOPPED_BY_USER = "stopped by the user"


class Progress(Protocol):
    """Reports of a running job to a display. Calls are cheap and come from the event loop's
    thread."""

    def phase(self, name: str, total: int | None = None) -> None:
        """A phase begins, of `total` units if known."""

    def advance(self, done: int) -> None:
        """`done` units of the phase are finished."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Training step number `step` (from 1) is finished."""

    def note(self, message: str) -> None:
        """One line worth showing."""


class NoProgress(Progress):
    """Shows nothing."""


@dataclass(frozen=True)
class TrainedPolicy:
    """A model that is trained, and what samples from it."""

    learner: Learner
    sampler: Sampler


class Stopped(AgentLightningError):
    """The user, or the time limit, asked the job to end; its progress is saved."""


@dataclass
class RunContext:
    """Everything that a job needs, provided by the trainer.

    `run_time` is when this process began its part of the run, on the store's clock. Rollouts are
    queued with `resources_id`; None is the latest. `policies` are the models trained here, by the
    name that agents use. Inside `calls_held()`, agents' calls of them wait, and the clocks of their
    attempts stand still. `stop` is set when the job should end; `deadline` is a loop time (seconds
    of `asyncio.get_running_loop().time()`) or None. Metrics go to `tracking`, which passes them to
    the `trackers`. What is run counts in `spending`, where the algorithm has a budget."""

    run: Run
    store: LightningStore
    directory: Path
    train_tasks: Sequence[Any]
    val_tasks: Sequence[Any]
    seed: int = 0
    deterministic: bool = False
    resources_id: str | None = None
    policies: Mapping[str, TrainedPolicy] = field(default_factory=dict[str, TrainedPolicy])
    calls_held: Callable[[], AbstractAsyncContextManager[None]] = nullcontext
    progress: Progress = field(default_factory=NoProgress)
    trackers: Sequence[Tracker] = ()
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    deadline: float | None = None
    resume: bool = False
    owns_runner: bool = True
    run_time: float = field(default_factory=time.time)
    spending: Spending | None = None

    def __post_init__(self) -> None:
        self.tracking = Tracking(
            self.store, self.run, self.directory, self.trackers, self.progress.note, self.stop
        )

    async def resources(self) -> ResourcesUpdate:
        """The resources of rollouts. ConfigError if the store has none."""
        name = self.resources_id
        store = self.store
        found = await (
            store.get_latest_resources() if name is None else store.get_resources_by_id(name)
        )
        if found is None:
            raise ConfigError(
                "the store has no resources; give the Trainer some, with initial_resources=…"
            )
        return found

    async def limit(self, budget: Budget, prices: Mapping[str, Price]) -> None:
        """Count what the run spends and has spent. ConfigError if money is limited, and a model of
        the resources has no price."""
        self.spending = Spending(budget, prices, frozenset(self.policies))
        given = (await self.resources()).resources.values() if budget.usd is not None else ()
        models = {resource.model for resource in given if isinstance(resource, LLM)}
        self.spending.require_prices(*models)
        await self.spending.add_run(self.store, self.run.run_id)

    def noise(self, sample: str) -> dict[str, Any]:
        """Metadata of the rollout `sample` of this run, from which runs with the same seed draw the
        same random numbers."""
        names = {"seed": self.seed, "sample": sample}
        return names | {"deterministic": True} if self.deterministic else names

    async def unless_stopped(self, work: Awaitable[T]) -> T:
        """The result of `work`. Stopped, with `work` cancelled, if the job must end first; if it
        must end already, `work` does not begin."""
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(work)
        stop = asyncio.ensure_future(self.stop.wait())
        remaining = None if self.deadline is None else self.deadline - loop.time()
        try:
            if not self.stop.is_set() and (remaining is None or remaining > 0):
                await asyncio.wait(
                    {task, stop}, timeout=remaining, return_when=asyncio.FIRST_COMPLETED
                )
                if task.done():
                    return task.result()
            raise Stopped(STOPPED_BY_USER if self.stop.is_set() else "time limit reached")
        finally:
            stop.cancel()
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)


class Algorithm(Protocol):
    """Improves the agent's resources until it is done, stopped or out of budget."""

    name: str

    async def run(self, context: RunContext) -> None:
        """Do the whole job. Results go to the store, the run's directory and `context.progress`."""
        ...


INJECTED = ("store", "train_dataset", "val_dataset", "initial_resources", "adapter", "context")


class FunctionAlgorithm:
    """Runs `function` with the arguments that its parameters name; it stays callable as a plain
    function."""

    def __init__(self, function: Callable[..., Awaitable[None]]) -> None:
        if not inspect.iscoroutinefunction(function):
            raise ConfigError(
                f"{function!r} is not `async def`; an algorithm awaits the store, so write it as "
                "one"
            )
        self.function = function
        self.name = function.__name__
        self.adapter: Any = None
        check_parameters(self.name, function, INJECTED)
        self._injected = [name for name in INJECTED if takes(function, name)]

    def __call__(self, *args: Any, **kwargs: Any) -> Awaitable[None]:
        return self.function(*args, **kwargs)

    async def run(self, context: RunContext) -> None:
        """Call the function and wait. Stopped if the job must end first."""
        resources = (
            (await context.resources()).resources if "initial_resources" in self._injected else {}
        )
        values = {
            "store": context.store,
            "train_dataset": context.train_tasks,
            "val_dataset": context.val_tasks,
            "initial_resources": resources,
            "adapter": self.adapter or agentlightning.TracerTraceToTriplet(),
            "context": context,
        }
        await context.unless_stopped(
            self.function(**{name: values[name] for name in self._injected})
        )


def algo(function: Callable[..., Awaitable[None]]) -> FunctionAlgorithm:
    """Make an async function an algorithm, for `Trainer(algorithm=…)`.

    Parameters are filled in by name: `store`, `train_dataset`, `val_dataset`, `initial_resources`,
    `context`, and `adapter` (the trainer's, as in Agent Lightning 0.3, or a TracerTraceToTriplet).
    ConfigError for other parameters without a default."""
    return FunctionAlgorithm(function)
