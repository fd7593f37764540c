"""Environments that servers of OpenEnv hold: a chat in which each answer is an action, and each observation a message.

This module knows sessions, observations and rewards of steps. Servers and their images are started by others.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from agentlightning.environments.base import Environment, Played, imported, some
from agentlightning.errors import ConfigError
from agentlightning.runner.clients import openai_client
from agentlightning.tracing.emit import emit_reward
from agentlightning.types import LLM


@dataclass(eq=False)
class OpenEnvServer(Environment):
    """The server at the URL `name`. A task is what `reset` is called with: those of `resets`, else `limit` seeds.

    The model's answer becomes the field `action` of an action; `observation` names the field of an observation that the
    model reads (None: all of it as JSON); `prompt` is the system message. An episode ends when the server says so, or
    after `max_turns`; its reward is the sum of its steps'. At most `sessions` are open at once in this process:
    servers allow one unless they say otherwise."""

    action: str = field(default="message", kw_only=True)
    observation: str | None = field(default=None, kw_only=True)
    prompt: str | None = field(default=None, kw_only=True)
    resets: Sequence[Mapping[str, Any]] = field(default=(), kw_only=True)
    max_turns: int = field(default=16, kw_only=True)
    sessions: int = field(default=1, kw_only=True)

    extra: ClassVar[str] = "openenv"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.name.startswith(("http://", "https://", "ws://", "wss://")):
            raise ConfigError(
                f"{self.name!r} is no URL of a server of OpenEnv; start an image first: docker run -p 8000:8000 IMAGE"
            )
        if self.sessions < 1 or self.max_turns < 1:
            raise ConfigError(f"sessions is {self.sessions} and max_turns {self.max_turns}; each must be at least 1")

    def tasks(self, **settings: Any) -> list[Any]:
        if not self.resets and self.limit is None:
            raise ConfigError("an environment of OpenEnv has no end of tasks: give a limit, how many seeds, or resets")
        given = map(dict[str, Any], self.resets) if self.resets else ({"seed": seed} for seed in range(self.limit or 0))
        return some(({**reset, **settings} for reset in given), self.limit, f"the environment {self.name}")

    async def play(self, task: Any, llm: LLM, attempt_id: str) -> Played:
        kind = imported("openenv.core", self.extra).GenericEnvClient
        messages: list[dict[str, Any]] = [{"role": "system", "content": self.prompt}] if self.prompt else []
        client, total, turns = openai_client(llm), 0.0, 0
        async with self._free, kind(base_url=self.name) as session:
            result = await session.reset(**task)
            while not result.done and turns < self.max_turns:
                messages.append({"role": "user", "content": self._seen(result.observation)})
                asked: Any = {"model": llm.model, "messages": messages, "extra_body": llm.sampling_parameters}
                answer = await client.chat.completions.create(**asked)
                said = answer.choices[0].message.content or ""
                messages.append({"role": "assistant", "content": said})
                result = await session.step({self.action: said})
                turns += 1
                if result.reward is not None:
                    total += float(result.reward)
                    emit_reward(float(result.reward), final=False)
        return Played({"reward": total}, {"turns": turns, "done": bool(result.done)})

    @cached_property
    def _free(self) -> asyncio.Semaphore:
        return asyncio.Semaphore(self.sessions)

    def _seen(self, observation: Any) -> str:
        if self.observation is None:
            return json.dumps(observation)
        if self.observation not in observation:
            raise ConfigError(f"no field {self.observation!r} in an observation; it has {', '.join(observation)}")
        seen = observation[self.observation]
        return seen if isinstance(seen, str) else json.dumps(seen)
