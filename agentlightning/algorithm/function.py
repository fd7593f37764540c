"""`algo`: an async function as an algorithm. It meets the runners in the store, as every algorithm does."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import agentlightning
from agentlightning.algorithm.base import RunContext
from agentlightning.errors import ConfigError, nearest

INJECTED = ("store", "train_dataset", "val_dataset", "initial_resources", "adapter", "context")


class FunctionAlgorithm:
    """Runs `function` with what its parameters name; still the plain function for everybody else."""

    def __init__(self, function: Callable[..., Awaitable[None]]) -> None:
        if not inspect.iscoroutinefunction(function):
            raise ConfigError(f"{function!r} is not `async def`; an algorithm awaits the store, so write it as one")
        self.function = function
        self.name = function.__name__
        self.adapter: Any = None
        parameters = inspect.signature(function).parameters.values()
        for parameter in parameters:
            if parameter.name not in INJECTED and parameter.default is parameter.empty:
                raise ConfigError(
                    f"{self.name} has the parameter {parameter.name!r}, which nothing fills: "
                    f"{nearest(parameter.name, INJECTED)}"
                )
        self._injected = [parameter.name for parameter in parameters if parameter.name in INJECTED]

    def __call__(self, *args: Any, **kwargs: Any) -> Awaitable[None]:
        return self.function(*args, **kwargs)

    async def run(self, context: RunContext) -> None:
        """Call the function and wait for its end. Stopped if the job must end first."""
        resources = (await context.resources()).resources if "initial_resources" in self._injected else {}
        values = {
            "store": context.store,
            "train_dataset": context.train_tasks,
            "val_dataset": context.val_tasks,
            "initial_resources": resources,
            "adapter": self.adapter or agentlightning.TracerTraceToTriplet(),
            "context": context,
        }
        await context.unless_stopped(self.function(**{name: values[name] for name in self._injected}))


def algo(function: Callable[..., Awaitable[None]]) -> FunctionAlgorithm:
    """Make an algorithm of an async function, for `Trainer(algorithm=…)`.

    `store`, `train_dataset`, `val_dataset`, `initial_resources`, `context` and `adapter` (the trainer's, as in Agent
    Lightning 0.3, else a TracerTraceToTriplet) are recognised by name and filled in. ConfigError for other parameters
    without a default."""
    return FunctionAlgorithm(function)
