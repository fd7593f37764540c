"""What an environment is: an agent that brings its tasks. Knows no hub; what all hubs share is here.

A task is the hub's own, as JSON. Playing it gives named rewards, metrics and errors, which become spans of the attempt.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from agentlightning.errors import AgentLightningError, ConfigError
from agentlightning.runner.agent import LitAgent, RolloutRawResult, pick_resource
from agentlightning.tracing.emit import emit_annotation
from agentlightning.types import LLM, AttemptedRollout, NamedResources


class EpisodeError(AgentLightningError):
    """The hub played a task and reports that this failed."""


@dataclass(frozen=True)
class Played:
    """What became of a task. `reward` is what is optimised: the sum of `rewards` where it is None."""

    rewards: Mapping[str, float]
    metrics: Mapping[str, Any] = field(default_factory=dict[str, Any])
    reward: float | None = None


@dataclass(eq=False)
class Environment(LitAgent[Any]):
    """Tasks and the agent that plays them. Without datasets `Trainer.fit` trains on its own tasks.

    `limit` takes only the first tasks. `held_out` is the share of them that is not trained on but measured, chosen by
    their content; or settings of the hub's, such as `{"split": "test"}`, that give the held-out tasks."""

    name: str
    _: dataclasses.KW_ONLY
    limit: int | None = None
    held_out: float | Mapping[str, Any] = 0.2

    extra: ClassVar[str]  # of this package, with which the hub's is installed

    def __post_init__(self) -> None:
        share = self.held_out
        if not isinstance(share, Mapping) and not 0 <= share < 1:
            raise ConfigError(f"held_out is {share!r}; give the share of tasks, at least 0 and below 1, or settings")

    def tasks(self, **settings: Any) -> list[Any]:
        """All tasks, with other settings than the environment's own. ConfigError where there are none to be had."""
        raise NotImplementedError

    async def play(self, task: Any, llm: LLM, attempt_id: str) -> Played:
        """Play a task with the model. EpisodeError where the hub reports a failure."""
        raise NotImplementedError

    def split(self) -> tuple[list[Any], list[Any]]:
        """The tasks to train on, and those held out."""
        tasks = self.tasks()
        if isinstance(self.held_out, Mapping):
            return tasks, self.tasks(**self.held_out)
        by_content = sorted(range(len(tasks)), key=lambda index: _digest(tasks[index]))
        chosen = set(by_content[: round(len(tasks) * self.held_out)])
        sides: tuple[list[Any], list[Any]] = ([], [])
        for index, task in enumerate(tasks):
            sides[index in chosen].append(task)
        return sides

    async def rollout_async(self, task: Any, resources: NamedResources, rollout: AttemptedRollout) -> RolloutRawResult:
        played = await self.play(task, pick_resource(resources, "llm", LLM), rollout.attempt.attempt_id)
        if played.metrics:
            emit_annotation({"metrics": {name: value for name, value in played.metrics.items() if value is not None}})
        if not played.rewards and played.reward is None:
            return None
        total = sum(played.rewards.values()) if played.reward is None else played.reward
        if list(played.rewards.values()) == [total]:
            return dict(played.rewards)
        return {**played.rewards, "reward": total, "primary_key": "reward"}

    def __deepcopy__(self, memo: Any) -> Environment:
        """All rollouts share it: it keeps nothing of theirs."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Its settings go to another process, not what it has open."""
        given = {one.name: getattr(self, one.name) for one in dataclasses.fields(self) if one.init}
        return _remade, (type(self), given)


def own_tasks(agent: Any, train_dataset: Any, val_dataset: Any) -> tuple[Any, Any]:
    """Both datasets as they are given; an environment's own tasks where nothing is to be trained on."""
    if not isinstance(agent, Environment) or train_dataset is not None:
        return train_dataset, val_dataset
    train_tasks, held_out = agent.split()
    return train_tasks, val_dataset or held_out or None


def _remade(kind: type[Environment], given: dict[str, Any]) -> Environment:
    return kind(**given)


def _digest(task: Any) -> bytes:
    return hashlib.sha256(json.dumps(task, sort_keys=True).encode()).digest()


def imported(module: str, extra: str) -> Any:
    """A module of the hub's package. ConfigError says what to install where it is not there, or not of our version."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"this environment needs {module}, which cannot be imported ({error}): "
            f"pip install 'agent-lightning-next[{extra}]'"
        ) from None


def found_in(folder: str | Path) -> None:
    """Let modules in `folder` be imported, by this process and those that it starts for the agent."""
    if (place := str(Path(folder).resolve())) not in sys.path:
        sys.path.append(place)


def some(tasks: Iterable[Any], limit: int | None, what: str) -> list[Any]:
    """The first `limit` tasks. ConfigError where there is none."""
    taken = [task for _, task in zip(range(sys.maxsize if limit is None else limit), tasks, strict=False)]
    if not taken:
        raise ConfigError(f"{what} has no tasks")
    return taken
