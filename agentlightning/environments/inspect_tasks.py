"""Tasks of Inspect (`inspect_ai`) with their solver and scorers: evaluates one sample and reads its log.

Inspect evaluates one task at a time per process, so each rollout has a process.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from agentlightning.environments.base import Environment, EpisodeError
from agentlightning.errors import ConfigError, imported
from agentlightning.types import LLM, AttemptedRollout

_FIELDS = {"id", "input", "target", "choices", "metadata"}


@dataclass(eq=False, kw_only=True)
class InspectTask(Environment):
    """The task `name`: `file.py@task`, or `package/task` of an installed package.

    `args` are the task's parameters, `config` the settings of `inspect_ai.eval` (`solver`, `sandbox`, …)."""

    config: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def reads_environment(self) -> bool:
        """True: each rollout needs a process."""
        return True

    def read_tasks(self, args: Mapping[str, Any]) -> Iterable[Any]:
        for number, sample in enumerate(self._load(args).dataset, start=1):
            fields = sample.model_dump(mode="json", include=_FIELDS, exclude_none=True)
            yield {"id": number, **fields, **({"args": args} if args else {})}

    async def play(self, task: Any, llm: LLM, rollout: AttemptedRollout) -> Mapping[str, float]:
        inspect = self._inspect
        os.environ.setdefault("INSPECT_DISPLAY", "none")
        model = inspect.model.get_model(
            f"openai-api/agl/{llm.model}", base_url=llm.endpoint, api_key=llm.api_key or "none", memoize=False,
            strict_tools=False,
        )  # fmt: skip
        with tempfile.TemporaryDirectory(prefix="agl-inspect-") as logs:
            given = {"log_dir": logs, "max_retries": 0, **llm.sampling_parameters, **self.config}
            loaded = self._load(task.get("args", self.args))
            async with model:
                (log,) = await inspect.eval_async(loaded, model, sample_id=task["id"], **given)
            (sample,) = log.samples or [None]  # read from the file
        error = log.error if sample is None else sample.error
        if sample is None or error is not None:
            raise EpisodeError(error.message if error is not None else f"the evaluation ended as {log.status}")
        number = inspect.scorer.value_to_float()
        rewards: dict[str, float] = {}
        for name, score in (sample.scores or {}).items():
            several = score.value if isinstance(score.value, dict) else {"": score.value}
            rewards |= {f"{name}.{key}" if key else name: number(value) for key, value in several.items()}
        return rewards

    def _load(self, args: Mapping[str, Any]) -> Any:
        loaded = self._inspect._eval.loader.load_tasks([self.name], dict(args))
        if len(loaded) != 1:
            raise ConfigError(f"{self.name} names {len(loaded)} tasks of Inspect; name one: file.py@task")
        return loaded[0]

    @cached_property
    def _inspect(self) -> Any:
        return imported("inspect_ai", "a task of Inspect", "agent-lightning-next[inspect]")
