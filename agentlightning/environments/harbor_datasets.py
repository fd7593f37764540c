"""Tasks of Harbor: folders with an instruction, a container and a test, solved by any harness that Harbor installs.

This module knows how a trial is asked for and what its result says. Containers and harnesses are Harbor's.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from agentlightning.environments.base import Environment, EpisodeError, Played, imported, some
from agentlightning.errors import ConfigError
from agentlightning.runner.environment import agent_environment
from agentlightning.types import LLM


@dataclass(eq=False)
class HarborTasks(Environment):
    """The folder `name`, whose folders with a `task.toml` are tasks.

    `agent` is a harness by its name or Harbor's own `agent` block, `environment` where it runs, likewise. `reward`
    names the one that is optimised, where it is neither `reward` nor the first."""

    agent: str | Mapping[str, Any] = field(default="mini-swe-agent", kw_only=True)
    environment: str | Mapping[str, Any] = field(default="docker", kw_only=True)
    reward: str | None = field(default=None, kw_only=True)

    extra: ClassVar[str] = "harbor"

    def tasks(self, **settings: Any) -> list[Any]:
        folder = Path(settings.get("name", self.name))
        if not folder.is_dir():
            raise ConfigError(
                f"no folder {folder} with tasks (looked in {Path.cwd()}); harbor download brings datasets"
            )
        found = sorted(one.parent for one in folder.glob("*/task.toml"))
        return some(({"path": str(one.resolve())} for one in found), self.limit, f"the folder {folder}")

    async def play(self, task: Any, llm: LLM, attempt_id: str) -> Played:
        trials, configs = imported("harbor.trial.trial", self.extra), imported("harbor.models.trial.config", self.extra)
        variables = agent_environment(llm, "", attempt_id, None, "none")
        agent: dict[str, Any] = {"name": self.agent} if isinstance(self.agent, str) else dict(self.agent)
        agent = {"model_name": f"openai/{llm.model}", **agent, "env": {**variables, **agent.get("env", {})}}
        place = {"type": self.environment} if isinstance(self.environment, str) else dict(self.environment)
        with tempfile.TemporaryDirectory(prefix="agl-harbor-") as kept:
            asked = {"task": task, "agent": agent, "environment": place, "trials_dir": kept}
            trial = await trials.Trial.create(configs.TrialConfig.model_validate(asked))
            result = await trial.run()
        if result.exception_info is not None:
            raise EpisodeError(f"{result.exception_info.exception_type}: {result.exception_info.exception_message}")
        rewards = dict((result.verifier_result and result.verifier_result.rewards) or {})
        chosen = self.reward or ("reward" if "reward" in rewards else next(iter(rewards), None))
        if chosen is None or chosen not in rewards:
            raise EpisodeError(f"the verifier gave no reward {chosen or ''}; it gave {', '.join(rewards) or 'none'}")
        return Played(rewards, reward=float(rewards[chosen]))
