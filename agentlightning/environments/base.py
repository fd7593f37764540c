"""An environment: an agent that brings its tasks. What all hubs share is here."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

from agentlightning.datasets.tasks import load_dataset
from agentlightning.errors import AgentLightningError, ConfigError, check_settings
from agentlightning.runner.agent import LitAgent, RolloutRawResult, pick_resource
from agentlightning.types import LLM, AttemptedRollout, NamedResources


class EpisodeError(AgentLightningError):
    """The hub played a task and reports a failure."""


@dataclass(eq=False)
class Environment(LitAgent[Any]):
    """Tasks, each a JSON value of the hub, and the agent that plays them. `Trainer.fit` needs no dataset with it.

    `args` are the hub's settings of its tasks. `limit` takes the first tasks only. `held_out` is the share of tasks
    that are measured instead of trained, chosen by their content; or args of held-out tasks, such as `{"split":
    "test"}`. `reward` names the optimised reward; default: `reward`, or else the first."""

    name: str
    _: dataclasses.KW_ONLY
    args: Mapping[str, Any] = field(default_factory=dict[str, Any])
    limit: int | None = None
    held_out: float | Mapping[str, Any] = 0.2
    reward: str | None = None

    def __post_init__(self) -> None:
        check_settings(self, least={"limit": 1})
        if not isinstance(self.held_out, Mapping) and not 0 <= self.held_out < 1:
            raise ConfigError(f"held_out is {self.held_out!r}; give a share, at least 0 and below 1, or args")

    def read_tasks(self, args: Mapping[str, Any]) -> Iterable[Any]:
        """The hub's tasks with these args. ConfigError if there are none."""
        raise NotImplementedError

    async def play(self, task: Any, llm: LLM, rollout: AttemptedRollout) -> Mapping[str, float]:
        """Play a task with the model and return its rewards by name. EpisodeError if the hub reports a failure."""
        raise NotImplementedError

    def tasks(self, **args: Any) -> list[Any]:
        """The tasks, with these args over its own. ConfigError if there are none."""
        try:
            if found := list(islice(self.read_tasks({**self.args, **args}), self.limit)):
                return found
        except AgentLightningError:
            raise
        except Exception as error:
            raise ConfigError(f"the tasks of {self.name} cannot be read: {type(error).__name__}: {error}") from error
        raise ConfigError(f"the environment {self.name} has no tasks")

    def split(self) -> tuple[list[Any], list[Any]]:
        """The tasks to train on, and those held out."""
        tasks = self.tasks()
        if isinstance(self.held_out, Mapping):
            return tasks, self.tasks(**self.held_out)
        by_content = sorted(tasks, key=lambda task: hashlib.sha256(json.dumps(task, sort_keys=True).encode()).digest())
        held_out = round(len(tasks) * self.held_out)
        return by_content[held_out:], by_content[:held_out]

    async def rollout_async(self, task: Any, resources: NamedResources, rollout: AttemptedRollout) -> RolloutRawResult:
        rewards = await self.play(task, pick_resource(resources, "llm", LLM), rollout)
        chosen = self.reward or ("reward" if "reward" in rewards else next(iter(rewards), "reward"))
        if chosen not in rewards:
            raise EpisodeError(f"the environment gave no {chosen!r}; its rewards: {', '.join(rewards) or 'none'}")
        return {"reward": rewards, "primary_key": chosen}

    def own_copy(self) -> Environment:
        return self  # all rollouts share it: it keeps nothing of theirs

    def __reduce__(self) -> tuple[Any, ...]:
        """Send the settings to another process, not open resources."""
        return partial(type(self), **{field.name: getattr(self, field.name) for field in dataclasses.fields(self)}), ()


def tasks_of(agent: Any, train_dataset: Any, val_dataset: Any) -> list[list[Any]]:
    """The tasks of both datasets; without a training dataset, those of the environment."""
    if isinstance(agent, Environment) and train_dataset is None:
        train_dataset, held_out = agent.split()
        val_dataset = held_out or None if val_dataset is None else val_dataset
    return [[] if dataset is None else load_dataset(dataset) for dataset in (train_dataset, val_dataset)]
