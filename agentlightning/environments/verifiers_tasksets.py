"""Tasksets of verifiers (0.4, `verifiers.v1`): starts an episode and reads its traces. verifiers runs harness and
runtime.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from agentlightning.environments.base import Environment, EpisodeError
from agentlightning.errors import ConfigError, imported
from agentlightning.tracing.emit import emit_annotation
from agentlightning.types import LLM, AttemptedRollout


@dataclass(eq=False, kw_only=True)
class VerifiersTaskset(Environment):
    """The taskset `name`: an installed package, `owner/name` of the hub, or a file.

    `args` are its settings. `harness` plays it: by default the taskset's own, or else `null`, a chat with the task's
    tools that runs no code of the model. Other harnesses do run code: give them a `runtime` such as `docker` instead of
    a process on this machine. `config` is verifiers' own `env` block, for everything else."""

    harness: str | None = None
    runtime: str = "subprocess"
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def read_tasks(self, args: Mapping[str, Any]) -> Iterable[Any]:
        loaded = self._vf.load_taskset(self._config(args).taskset)
        if not loaded.bounded and self.limit is None:
            raise ConfigError(f"the taskset {self.name} never ends; give a limit, the number of tasks to take")
        return (task.data.model_dump(mode="json", include=task.data.model_fields_set) for task in loaded)

    async def play(self, task: Any, llm: LLM, rollout: AttemptedRollout) -> Mapping[str, float]:
        vf, env = self._vf, copy(self._env)  # a copy, since its servers are this episode's
        kind = type(env.taskset).task_type()
        typed = kind(kind.data_type().model_validate(task), env.config.taskset.task)
        key = f"AGL_API_KEY_{rollout.attempt.attempt_id}"  # a harness's process gets no variable named like a key
        os.environ[key] = llm.api_key or "none"
        try:
            client = vf.EvalClientConfig(base_url=llm.endpoint, api_key_var=key)
            sampling = vf.SamplingConfig(**llm.sampling_parameters)
            async with env.serving():
                context = vf.ModelContext(model=llm.model, client=client, sampling=sampling)
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
        vf, given = self._vf, dict(self.config)
        name = Path(self.name).stem if self.name.endswith(".py") else self.name
        given["taskset"] = {"id": name, **given.get("taskset", {}), **args}
        usual = vf.default_harness_id(name)
        harness = self.harness or ("null" if usual == "bash" else usual)
        for role, declared in vf.env_config_type(name, given.get("id", "")).model_fields.items():
            if isinstance(declared.default, vf.AgentConfig):
                own = declared.default.harness is not None and not self.harness
                chosen = {"runtime": {"type": self.runtime}, **({} if own else {"harness": {"id": harness}})}
                given[role] = {**chosen, **given.get(role, {})}
        return vf.resolve_env_config(given)


def _rewards(episode: Any) -> Mapping[str, float]:
    """The rewards of the trained roles, by name, or by role and name if there are several. Metrics become a span."""
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        raise EpisodeError(
            "; ".join(f"{error.type}: {error.message}" for error in errors) or "the episode did not finish"
        )
    traces = [trace for trace in episode.traces if trace.agent.trainable]
    rewards: dict[str, float] = {}
    metrics: dict[str, float] = {}
    for trace in traces:
        role = f"{trace.agent.name}." if len(traces) > 1 else ""
        rewards |= {f"{role}{name}": reward.value for name, reward in trace.rewards.items() if reward is not None}
        metrics |= {f"{role}{name}": value for name, value in trace.metrics.items() if value is not None}
    if metrics:
        emit_annotation({"metrics": metrics})
    total = sum(trace.reward for trace in traces) / max(1, len(traces))
    return rewards if list(rewards.values()) in ([], [total]) else {**rewards, "reward": total}
