"""Tasksets of verifiers (0.4, `verifiers.v1`), played by any of its harnesses, each model call through our gateway.

This module knows how an episode is asked for and what its traces say. What a harness or a runtime is, verifiers knows.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Final

from agentlightning.environments.base import Environment, EpisodeError, Played, found_in, imported, some
from agentlightning.errors import ConfigError
from agentlightning.types import LLM

_SERVED: Final = 512  # episodes by the same servers, which keep a client for each


@dataclass(eq=False)
class VerifiersTaskset(Environment):
    """The taskset `name`: an installed package, `owner/name` of the hub, or a file.

    `taskset` are its settings. `harness` plays it: by default the one that the taskset brings, else `null`, a chat with
    the task's tools that runs no code of the model's; others do, so give them a `runtime` such as `docker` instead of a
    process on this machine. `config` is verifiers' own `env` block, for all else."""

    taskset: Mapping[str, Any] = field(default_factory=dict[str, Any], kw_only=True)
    harness: str | Mapping[str, Any] | None = field(default=None, kw_only=True)
    runtime: str | Mapping[str, Any] = field(default="subprocess", kw_only=True)
    config: Mapping[str, Any] = field(default_factory=dict[str, Any], kw_only=True)

    extra: ClassVar[str] = "verifiers"

    def tasks(self, **settings: Any) -> list[Any]:
        loaded = self._vf.load_taskset(self._config(settings).taskset)
        if not loaded.bounded and self.limit is None:
            raise ConfigError(f"the taskset {self.name} never ends; give a limit, the number of tasks to take")
        return [_as_json(task.data) for task in some(loaded, self.limit, f"the taskset {self.name}")]

    async def play(self, task: Any, llm: LLM, attempt_id: str) -> Played:
        vf, kind = self._vf, type(self._env.taskset).task_type()
        told = kind(kind.data_type().model_validate(task), self._env.config.taskset.task)
        key = f"AGL_API_KEY_{attempt_id}"  # the harness's process gets no variable whose name has API_KEY in it
        os.environ[key] = llm.api_key or "none"
        try:
            client = vf.EvalClientConfig(base_url=llm.endpoint, api_key_var=key)
            sampling = vf.SamplingConfig(**llm.sampling_parameters)
            async with self._serving():
                context = vf.ModelContext(model=llm.model, client=client, sampling=sampling)
                return _read(await self._env.run_episode(told, context))
        finally:
            del os.environ[key]

    @cached_property
    def _vf(self) -> Any:
        found_in(Path(self.name).parent if self.name.endswith(".py") else ".")
        return imported("verifiers.v1", self.extra)

    @cached_property
    def _env(self) -> Any:
        return self._vf.load_environment(self._config({}))

    def _config(self, settings: Mapping[str, Any]) -> Any:
        """verifiers' configuration: what the user gave, and for every role what runs on any machine."""
        vf, given = self._vf, dict(self.config)
        name = Path(self.name).stem if self.name.endswith(".py") else self.name
        given["taskset"] = {"id": name, **self.taskset, **given.get("taskset", {}), **settings}
        try:
            usual = vf.default_harness_id(name)
            harness = self.harness or ("null" if usual == "bash" else usual)
            for role, declared in vf.env_config_type(name, given.get("id", "")).model_fields.items():
                if isinstance(declared.default, vf.AgentConfig):
                    chosen = {"runtime": _typed("type", self.runtime)}
                    if self.harness or declared.default.harness is None:
                        chosen["harness"] = _typed("id", harness)
                    given[role] = {**chosen, **given.get(role, {})}
            return vf.resolve_env_config(given)
        except (ModuleNotFoundError, AttributeError, TypeError, ValueError) as error:
            raise ConfigError(f"the taskset {self.name} of verifiers cannot be used: {error}") from error

    @asynccontextmanager
    async def _serving(self) -> AsyncGenerator[None]:
        """The servers that episodes share: started for the first, closed when nobody plays."""
        served: _Servers | None = self.__dict__.get("_servers")
        if served is None or served.left == 0 or served.closing.is_set():
            served = self.__dict__["_servers"] = _Servers(self._env)
        async with served.used():
            yield


class _Servers:
    """verifiers' servers, opened and closed by one task. `left` episodes may still begin."""

    def __init__(self, env: Any) -> None:
        self.left = _SERVED
        self.closing = asyncio.Event()
        self._playing = 0
        self._open: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._serve(env), context=contextvars.Context())  # nobody's attempt

    @asynccontextmanager
    async def used(self) -> AsyncGenerator[None]:
        self.left -= 1
        self._playing += 1
        try:
            await asyncio.shield(self._open)
            yield
        finally:
            self._playing -= 1
            if not self._playing:
                self.closing.set()
                await asyncio.shield(self._task)

    async def _serve(self, env: Any) -> None:
        try:
            async with env.serving():
                self._open.set_result(None)
                await self.closing.wait()
        except Exception as error:
            if self._open.done():
                raise
            self._open.set_exception(error)


def _typed(key: str, value: str | Mapping[str, Any]) -> dict[str, Any]:
    return {key: value} if isinstance(value, str) else dict(value)


def _as_json(data: Any) -> dict[str, Any]:
    """A task's data without the fields that have their defaults."""
    fields = type(data).model_fields
    said = {name for name, one in fields.items() if getattr(data, name) != one.get_default(call_default_factory=True)}
    return data.model_dump(mode="json", include=said)


def _read(episode: Any) -> Played:
    """Rewards and metrics of the roles that are trained, by name; by role and name where these are several."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok:
        raise EpisodeError("; ".join(f"{one.type}: {one.message}" for one in errors) or "the episode did not finish")
    traces = [trace for trace in episode.traces if trace.agent.trainable]
    rewards: dict[str, float] = {}
    metrics: dict[str, float | None] = {}
    for trace in traces:
        role = f"{trace.agent.name}." if len(traces) > 1 else ""
        rewards |= {f"{role}{name}": one.value for name, one in trace.rewards.items() if one is not None}
        metrics |= {f"{role}{name}": value for name, value in trace.metrics.items()}
    return Played(rewards, metrics, sum(trace.reward for trace in traces) / max(1, len(traces)) if rewards else None)
