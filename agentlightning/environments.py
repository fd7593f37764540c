"""Environments of public hubs: tasks, the agent that plays them and its rewards in one.

    environment = agl.environments.verifiers("reverse-text")
    agl.Trainer(model="Qwen/Qwen3-0.6B").fit(environment)

Each hub's package is an extra, imported when tasks are read or played.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any, Final

from agentlightning.datasets.tasks import load_dataset
from agentlightning.errors import AgentLightningError, ConfigError, check_settings, imported
from agentlightning.runner.agent import LitAgent, RolloutRawResult, pick_resource
from agentlightning.runner.clients import openai_client
from agentlightning.runner.environment import agent_environment
from agentlightning.tracing.emit import emit_annotation, emit_reward
from agentlightning.types import LLM, AttemptedRollout, NamedResources

_OPENENV: Final = ("openenv.core", "an environment of OpenEnv", "agent-lightning-next[openenv]")


class EpisodeError(AgentLightningError):
    """The hub played a task and reports a failure."""


@dataclass(eq=False)
class Environment(LitAgent[Any]):
    """Tasks, each a JSON value of the hub, and the agent that plays them. `Trainer.fit` needs no
    dataset with it.

    `args` are the hub's settings of its tasks. `limit` takes the first tasks only. `held_out` is
    the share of tasks that are measured instead of trained, chosen by their content; or args of
    held-out tasks, such as `{"split": "test"}`. `reward` names the optimised reward; default:
    `reward`, or else the first."""

    name: str
    _: dataclasses.KW_ONLY
    args: Mapping[str, Any] = field(default_factory=dict[str, Any])
    limit: int | None = None
    held_out: float | Mapping[str, Any] = 0.2
    reward: str | None = None

    def __post_init__(self) -> None:
        check_settings(self, least={"limit": 1})
        if not isinstance(self.held_out, Mapping) and not 0 <= self.held_out < 1:
            raise ConfigError(
                f"held_out is {self.held_out!r}; give a share, at least 0 and below 1, or args"
            )

    def read_tasks(self, args: Mapping[str, Any]) -> Iterable[Any]:
        """The hub's tasks with these args. ConfigError if there are none."""
        raise NotImplementedError

    async def play(self, task: Any, llm: LLM, rollout: AttemptedRollout) -> Mapping[str, float]:
        """Play a task with the model and return its rewards by name. EpisodeError if the hub
        reports a failure."""
        raise NotImplementedError

    def tasks(self, **args: Any) -> list[Any]:
        """The tasks, with these args over its own. ConfigError if there are none."""
        try:
            if found := list(islice(self.read_tasks({**self.args, **args}), self.limit)):
                return found
        except AgentLightningError:
            raise
        except Exception as error:
            raise ConfigError(
                f"the tasks of {self.name} cannot be read: {type(error).__name__}: {error}"
            ) from error
        raise ConfigError(f"the environment {self.name} has no tasks")

    def split(self) -> tuple[list[Any], list[Any]]:
        """The tasks to train on, and those held out."""
        tasks = self.tasks()
        if isinstance(self.held_out, Mapping):
            return tasks, self.tasks(**self.held_out)
        by_content = sorted(
            tasks,
            key=lambda task: hashlib.sha256(json.dumps(task, sort_keys=True).encode()).digest(),
        )
        held_out = round(len(tasks) * self.held_out)
        return by_content[held_out:], by_content[:held_out]

    async def rollout_async(
        self, task: Any, resources: NamedResources, rollout: AttemptedRollout
    ) -> RolloutRawResult:
        rewards = await self.play(task, pick_resource(resources, "llm", LLM), rollout)
        chosen = self.reward or ("reward" if "reward" in rewards else next(iter(rewards), "reward"))
        if chosen not in rewards:
            raise EpisodeError(
                f"the environment gave no {chosen!r}; its rewards: {', '.join(rewards) or 'none'}"
            )
        return {"reward": rewards, "primary_key": chosen}

    def own_copy(self) -> Environment:
        return self  # all rollouts share it: it keeps nothing of theirs

    def __reduce__(self) -> tuple[Any, ...]:
        """Send the settings to another process, not open resources."""
        return partial(
            type(self),
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(self)},
        ), ()


def tasks_of(agent: Any, train_dataset: Any, val_dataset: Any) -> list[list[Any]]:
    """The tasks of both datasets; without a training dataset, those of the environment."""
    if isinstance(agent, Environment) and train_dataset is None:
        train_dataset, held_out = agent.split()
        val_dataset = held_out or None if val_dataset is None else val_dataset
    return [
        [] if dataset is None else load_dataset(dataset) for dataset in (train_dataset, val_dataset)
    ]


@dataclass(eq=False, kw_only=True)
class VerifiersTaskset(Environment):
    """The taskset `name`: an installed package, `owner/name` of the hub, or a file.

    `args` are its settings. `harness` plays it: by default the taskset's own, or else `null`, a
    chat with the task's tools that runs no code of the model. Other harnesses do run code: give
    them a `runtime` such as `docker` instead of a process on this machine. `config` is verifiers'
    own `env` block, for everything else."""

    harness: str | None = None
    runtime: str = "subprocess"
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def read_tasks(self, args: Mapping[str, Any]) -> Iterable[Any]:
        loaded = self._vf.load_taskset(self._config(args).taskset)
        if not loaded.bounded and self.limit is None:
            raise ConfigError(
                f"the taskset {self.name} never ends; give a limit, the number of tasks to take"
            )
        return (
            task.data.model_dump(mode="json", include=task.data.model_fields_set) for task in loaded
        )

    async def play(self, task: Any, llm: LLM, rollout: AttemptedRollout) -> Mapping[str, float]:
        vf = self._vf
        env = copy(self._env)  # a copy, since its servers are this episode's
        kind = type(env.taskset).task_type()
        typed = kind(kind.data_type().model_validate(task), env.config.taskset.task)
        # a harness's process gets no variable named like a key
        key = f"AGL_API_KEY_{rollout.attempt.attempt_id}"
        os.environ[key] = llm.api_key or "none"
        try:
            client = vf.EvalClientConfig(base_url=llm.endpoint, api_key_var=key)
            async with env.serving():
                context = vf.ModelContext(
                    model=llm.model,
                    client=client,
                    sampling=vf.SamplingConfig(**llm.sampling_parameters),
                )
                return _rewards(await env.run_episode(typed, context))
        finally:
            del os.environ[key]

    @cached_property
    def _vf(self) -> Any:
        if self.name.endswith(".py"):
            sys.path.append(str(Path(self.name).resolve().parent))
        return imported("verifiers.v1", "a taskset of verifiers", "agent-lightning-next[verifiers]")

    @cached_property
    def _env(self) -> Any:
        return self._vf.load_environment(self._config(self.args))

    def _config(self, args: Mapping[str, Any]) -> Any:
        """verifiers' configuration: the user's, and for every role what runs on any machine."""
        vf = self._vf
        given = dict(self.config)
        name = Path(self.name).stem if self.name.endswith(".py") else self.name
        given["taskset"] = {"id": name, **given.get("taskset", {}), **args}
        usual = vf.default_harness_id(name)
        harness = self.harness or ("null" if usual == "bash" else usual)
        for role, declared in vf.env_config_type(name, given.get("id", "")).model_fields.items():
            if isinstance(declared.default, vf.AgentConfig):
                own = declared.default.harness is not None and not self.harness
                chosen = {
                    "runtime": {"type": self.runtime},
                    **({} if own else {"harness": {"id": harness}}),
                }
                given[role] = {**chosen, **given.get(role, {})}
        return vf.resolve_env_config(given)


def _rewards(episode: Any) -> Mapping[str, float]:
    """The rewards of the trained roles, by name, or by role and name if there are several. Metrics
    become a span."""
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        raise EpisodeError(
            "; ".join(f"{error.type}: {error.message}" for error in errors)
            or "the episode did not finish"
        )
    traces = [trace for trace in episode.traces if trace.agent.trainable]
    rewards = dict[str, float]()
    metrics = dict[str, float]()
    for trace in traces:
        role = f"{trace.agent.name}." if len(traces) > 1 else ""
        rewards |= {
            f"{role}{name}": reward.value
            for name, reward in trace.rewards.items()
            if reward is not None
        }
        metrics |= {
            f"{role}{name}": value for name, value in trace.metrics.items() if value is not None
        }
    if metrics:
        emit_annotation({"metrics": metrics})
    total = sum(trace.reward for trace in traces) / max(1, len(traces))
    return rewards if list(rewards.values()) in ([], [total]) else {**rewards, "reward": total}


@dataclass(eq=False, kw_only=True)
class InspectTask(Environment):
    """The task `name`: `file.py@task`, or `package/task` of an installed package.

    `args` are the task's parameters, `config` the settings of `inspect_ai.eval` (`solver`,
    `sandbox`, …)."""

    config: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def reads_environment(self) -> bool:
        """True: each rollout needs a process, since Inspect evaluates one task at a time."""
        return True

    def read_tasks(self, args: Mapping[str, Any]) -> Iterable[Any]:
        for number, sample in enumerate(self._load(args).dataset, start=1):
            fields = sample.model_dump(
                mode="json",
                include={"id", "input", "target", "choices", "metadata"},
                exclude_none=True,
            )
            yield {"id": number, **fields, **({"args": args} if args else {})}

    async def play(self, task: Any, llm: LLM, rollout: AttemptedRollout) -> Mapping[str, float]:
        inspect = self._inspect
        os.environ.setdefault("INSPECT_DISPLAY", "none")
        model = inspect.model.get_model(
            f"openai-api/agl/{llm.model}",
            base_url=llm.endpoint,
            api_key=llm.api_key or "none",
            memoize=False,
            strict_tools=False,
        )
        with tempfile.TemporaryDirectory(prefix="agl-inspect-") as logs:
            given = {"log_dir": logs, "max_retries": 0, **llm.sampling_parameters, **self.config}
            loaded = self._load(task.get("args", self.args))
            async with model:
                (log,) = await inspect.eval_async(loaded, model, sample_id=task["id"], **given)
            (sample,) = log.samples or [None]  # read from the file
        error = log.error if sample is None else sample.error
        if sample is None or error is not None:
            raise EpisodeError(
                error.message if error is not None else f"the evaluation ended as {log.status}"
            )
        number = inspect.scorer.value_to_float()
        rewards = dict[str, float]()
        for name, score in (sample.scores or {}).items():
            several = score.value if isinstance(score.value, dict) else {"": score.value}
            rewards |= {
                f"{name}.{key}" if key else name: number(value) for key, value in several.items()
            }
        return rewards

    def _load(self, args: Mapping[str, Any]) -> Any:
        loaded = self._inspect._eval.loader.load_tasks([self.name], dict(args))
        if len(loaded) != 1:
            raise ConfigError(
                f"{self.name} names {len(loaded)} tasks of Inspect; name one: file.py@task"
            )
        return loaded[0]

    @cached_property
    def _inspect(self) -> Any:
        return imported("inspect_ai", "a task of Inspect", "agent-lightning-next[inspect]")


@dataclass(eq=False, kw_only=True)
class OpenEnvServer(Environment):
    """A chat with the server at the URL `name`. A task is the arguments of `reset`: one of `limit`
    seeds, and `args`.

    The model's answer becomes the field `action` of an action. The model reads the field
    `observation` of an observation (None: all of it as JSON); `prompt` is the system message. An
    episode ends when the server says so, or after `max_turns`. Its reward is the sum of its steps'
    rewards. At most `sessions` are open at once in this process; servers allow one unless they say
    otherwise."""

    action: str = "message"
    observation: str | None = None
    prompt: str | None = None
    max_turns: int = 16
    sessions: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_settings(self, least={"max_turns": 1, "sessions": 1})
        if not self.name.startswith(("http://", "https://", "ws://", "wss://")):
            raise ConfigError(
                f"{self.name!r} is not a URL; start an image first: docker run -p 8000:8000 IMAGE"
            )

    def read_tasks(self, args: Mapping[str, Any]) -> Iterable[Any]:
        if self.limit is None:
            raise ConfigError(
                "an environment of OpenEnv has a task for every seed: give a limit, how many to "
                "take"
            )
        imported(*_OPENENV)
        return ({"seed": seed, **args} for seed in range(self.limit))

    async def play(self, task: Any, llm: LLM, rollout: AttemptedRollout) -> Mapping[str, float]:
        messages: list[dict[str, Any]] = (
            [{"role": "system", "content": self.prompt}] if self.prompt else []
        )
        chat: Any = openai_client(llm).chat.completions
        total = 0.0
        async with (
            _session_slots(self, asyncio.get_running_loop()),
            imported(*_OPENENV).GenericEnvClient(base_url=self.name) as session,
        ):
            result = await session.reset(**task)
            for _ in range(self.max_turns):
                if result.done:
                    break
                messages.append(
                    {"role": "user", "content": self._shown_observation(result.observation)}
                )
                answer = await chat.create(
                    model=llm.model, messages=messages, extra_body=llm.sampling_parameters
                )
                text = answer.choices[0].message.content or ""
                messages.append({"role": "assistant", "content": text})
                result = await session.step({self.action: text})
                if result.reward is not None:
                    total += float(result.reward)
                    emit_reward(float(result.reward), final=False)
        return {"reward": total}

    def _shown_observation(self, observation: Any) -> str:
        if self.observation is not None and self.observation not in observation:
            raise ConfigError(
                f"no field {self.observation!r} in an observation; it has {', '.join(observation)}"
            )
        seen = observation if self.observation is None else observation[self.observation]
        return seen if isinstance(seen, str) else json.dumps(seen)


@functools.cache
def _session_slots(
    environment: OpenEnvServer, loop: asyncio.AbstractEventLoop
) -> asyncio.Semaphore:
    return asyncio.Semaphore(environment.sessions)


@dataclass(eq=False, kw_only=True)
class HarborTasks(Environment):
    """The folder `name`; its folders with a `task.toml` are tasks, each an instruction, a container
    and a test.

    `harness`, a name of Harbor's or `module:Class`, solves them. `config` is Harbor's configuration
    of a trial (`environment`, …)."""

    harness: str = "mini-swe-agent"
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def read_tasks(self, args: Mapping[str, Any]) -> Iterable[Any]:
        folder = Path(self.name)
        if args:
            raise ConfigError(
                "tasks of Harbor are those of a folder and take no args; held_out is a share of "
                "them"
            )
        if not folder.is_dir():
            raise ConfigError(
                f"no folder {folder} (looked in {Path.cwd()}); harbor download brings datasets"
            )
        return ({"path": str(path.parent.resolve())} for path in sorted(folder.glob("*/task.toml")))

    async def play(self, task: Any, llm: LLM, rollout: AttemptedRollout) -> Mapping[str, float]:
        harbor = imported("harbor", "a task of Harbor", "agent-lightning-next[harbor]")
        own = self.config.get("agent", {})
        agent = {"name": self.harness, "model_name": f"openai/{llm.model}", **own}
        agent["env"] = agent_environment(
            llm, rollout.rollout_id, rollout.attempt.attempt_id, None, "none"
        ) | own.get("env", {})
        with tempfile.TemporaryDirectory(prefix="agl-harbor-") as kept:
            asked = {**self.config, "task": task, "agent": agent, "trials_dir": kept}
            trial = await harbor.Trial.create(harbor.TrialConfig.model_validate(asked))
            result = await trial.run()
        if failed := result.exception_info:
            raise EpisodeError(f"{failed.exception_type}: {failed.exception_message}")
        return (result.verifier_result and result.verifier_result.rewards) or {}


verifiers = VerifiersTaskset
inspect = InspectTask
openenv = OpenEnvServer
harbor = HarborTasks
HUBS = {"verifiers": verifiers, "inspect": inspect, "openenv": openenv, "harbor": harbor}
