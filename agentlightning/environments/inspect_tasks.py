"""Tasks of Inspect (`inspect_ai`), with their solver and scorers: each sample is a task.

Inspect evaluates one task at a time in a process and does not run on uvloop, so that each rollout needs a process. This
module knows how one sample is evaluated and what its log says.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from agentlightning.environments.base import Environment, EpisodeError, Played, found_in, imported, some
from agentlightning.errors import ConfigError
from agentlightning.types import LLM

_TOLD = {"id", "input", "target", "choices", "metadata"}


@dataclass(eq=False)
class InspectTask(Environment):
    """The task `name`: `file.py@task`, or `package/task` of an installed package.

    `args` are the task's own parameters, `options` those of `inspect_ai.eval` (`solver`, `sandbox`, …).
    `reward` names the score that is optimised, where it is not the first."""

    args: Mapping[str, Any] = field(default_factory=dict[str, Any], kw_only=True)
    options: Mapping[str, Any] = field(default_factory=dict[str, Any], kw_only=True)
    reward: str | None = field(default=None, kw_only=True)

    extra: ClassVar[str] = "inspect"

    def reads_environment(self) -> bool:
        """True, which gives each rollout a process."""
        return True

    def tasks(self, **settings: Any) -> list[Any]:
        samples = some(self._load(settings).dataset, self.limit, f"the Inspect task {self.name}")
        told = [sample.model_dump(mode="json", include=_TOLD, exclude_none=True) for sample in samples]
        other = {"args": settings} if settings else {}
        return [{"id": number, **task, **other} for number, task in enumerate(told, start=1)]

    async def play(self, task: Any, llm: LLM, attempt_id: str) -> Played:
        if type(asyncio.get_running_loop()).__module__.startswith("uvloop"):
            raise ConfigError("Inspect does not run on uvloop: leave isolation out, or say isolation='process'")
        inspect = imported("inspect_ai", self.extra)
        os.environ.setdefault("INSPECT_DISPLAY", "none")
        model = imported("inspect_ai.model", self.extra).get_model(
            f"openai-api/agl/{llm.model}", base_url=llm.endpoint, api_key=llm.api_key or "none", memoize=False,
            strict_tools=False,
        )  # fmt: skip
        with tempfile.TemporaryDirectory(prefix="agl-inspect-") as logs:
            given = {"log_dir": logs, "max_retries": 0, **llm.sampling_parameters, **self.options}
            loaded = self._load(task.get("args", {}))
            async with model:
                (log,) = await inspect.eval_async(loaded, model, sample_id=task["id"], **given)
            return self._read(log)  # whose samples are read from the file

    def _read(self, log: Any) -> Played:
        (sample,) = log.samples or [None]
        error = log.error if sample is None else sample.error
        if sample is None or error is not None:
            raise EpisodeError(error.message if error is not None else f"the evaluation ended as {log.status}")
        number = imported("inspect_ai.scorer", self.extra).value_to_float()
        rewards: dict[str, float] = {}
        for name, score in (sample.scores or {}).items():
            several = score.value if isinstance(score.value, dict) else {"": score.value}
            rewards |= {f"{name}.{key}" if key else name: number(value) for key, value in several.items()}
        chosen = self.reward or next(iter(rewards), None)
        if self.reward is not None and self.reward not in rewards:
            raise ConfigError(f"the task has no score {self.reward!r}; it has {', '.join(rewards) or 'none'}")
        metrics = {"messages": len(sample.messages), "seconds": sample.working_time}
        metrics["limit"] = sample.limit.type if sample.limit else None
        return Played(rewards, metrics, rewards[chosen] if chosen else None)

    def _load(self, settings: Mapping[str, Any]) -> Any:
        file, at, _ = self.name.rpartition("@")
        if at and not Path(file).is_file():
            raise ConfigError(f"no file {file} (looked in {Path.cwd()})")
        found_in(Path(file).parent)
        loader = imported("inspect_ai._eval.loader", self.extra)
        try:
            loaded = loader.load_tasks([self.name], {**self.args, **settings})
        except Exception as error:
            raise ConfigError(f"the Inspect task {self.name} cannot be loaded: {error}") from error
        if len(loaded) != 1:
            raise ConfigError(f"{self.name} names {len(loaded)} tasks of Inspect; name one: file.py@task")
        return loaded[0]
