"""Tasks of Harbor: starts a trial and reads its result. Harbor runs containers and harnesses."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentlightning.environments.base import Environment, EpisodeError
from agentlightning.errors import ConfigError, imported
from agentlightning.runner.environment import agent_environment
from agentlightning.types import LLM, AttemptedRollout


@dataclass(eq=False, kw_only=True)
class HarborTasks(Environment):
    """The folder `name`; its folders with a `task.toml` are tasks, each an instruction, a container and a test.

    `harness`, a name of Harbor's or `module:Class`, solves them. `config` is Harbor's configuration of a trial
    (`environment`, …)."""

    harness: str = "mini-swe-agent"
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def read_tasks(self, args: Mapping[str, Any]) -> Iterable[Any]:
        folder = Path(self.name)
        if args:
            raise ConfigError("tasks of Harbor are those of a folder and take no args; held_out is a share of them")
        if not folder.is_dir():
            raise ConfigError(f"no folder {folder} (looked in {Path.cwd()}); harbor download brings datasets")
        return ({"path": str(path.parent.resolve())} for path in sorted(folder.glob("*/task.toml")))

    async def play(self, task: Any, llm: LLM, rollout: AttemptedRollout) -> Mapping[str, float]:
        harbor = imported("harbor", "a task of Harbor", "agent-lightning-next[harbor]")
        variables = agent_environment(llm, rollout.rollout_id, rollout.attempt.attempt_id, None, "none")
        own = self.config.get("agent", {})
        agent = {"name": self.harness, "model_name": f"openai/{llm.model}", **own}
        agent["env"] = {**variables, **own.get("env", {})}
        with tempfile.TemporaryDirectory(prefix="agl-harbor-") as kept:
            asked = {**self.config, "task": task, "agent": agent, "trials_dir": kept}
            trial = await harbor.Trial.create(harbor.TrialConfig.model_validate(asked))
            result = await trial.run()
        if failed := result.exception_info:
            raise EpisodeError(f"{failed.exception_type}: {failed.exception_message}")
        return (result.verifier_result and result.verifier_result.rewards) or {}
