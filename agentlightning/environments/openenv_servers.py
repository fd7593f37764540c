"""Environments of OpenEnv servers: sessions, observations and rewards per step. You start the servers."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from agentlightning.environments.base import Environment
from agentlightning.errors import ConfigError, check_settings, imported
from agentlightning.runner.clients import openai_client
from agentlightning.tracing.emit import emit_reward
from agentlightning.types import LLM, AttemptedRollout

_OPENENV: Final = ("openenv.core", "an environment of OpenEnv", "agent-lightning-next[openenv]")


@dataclass(eq=False, kw_only=True)
class OpenEnvServer(Environment):
    """A chat with the server at the URL `name`. A task is the arguments of `reset`: one of `limit` seeds, and `args`.

    The model's answer becomes the field `action` of an action. The model reads the field `observation` of an
    observation (None: all of it as JSON); `prompt` is the system message. An episode ends when the server says so, or
    after `max_turns`. Its reward is the sum of its steps' rewards. At most `sessions` are open at once in this process;
    servers allow one unless they say otherwise."""

    action: str = "message"
    observation: str | None = None
    prompt: str | None = None
    max_turns: int = 16
    sessions: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_settings(self, least={"max_turns": 1, "sessions": 1})
        if not self.name.startswith(("http://", "https://", "ws://", "wss://")):
            raise ConfigError(f"{self.name!r} is not a URL; start an image first: docker run -p 8000:8000 IMAGE")

    def read_tasks(self, args: Mapping[str, Any]) -> Iterable[Any]:
        if self.limit is None:
            raise ConfigError("an environment of OpenEnv has a task for every seed: give a limit, how many to take")
        imported(*_OPENENV)
        return ({"seed": seed, **args} for seed in range(self.limit))

    async def play(self, task: Any, llm: LLM, rollout: AttemptedRollout) -> Mapping[str, float]:
        messages: list[dict[str, Any]] = [{"role": "system", "content": self.prompt}] if self.prompt else []
        chat: Any = openai_client(llm).chat.completions
        total = 0.0
        async with (
            _free(self, asyncio.get_running_loop()),
            imported(*_OPENENV).GenericEnvClient(base_url=self.name) as session,
        ):
            result = await session.reset(**task)
            for _ in range(self.max_turns):
                if result.done:
                    break
                messages.append({"role": "user", "content": self._seen(result.observation)})
                answer = await chat.create(model=llm.model, messages=messages, extra_body=llm.sampling_parameters)
                text = answer.choices[0].message.content or ""
                messages.append({"role": "assistant", "content": text})
                result = await session.step({self.action: text})
                if result.reward is not None:
                    total += float(result.reward)
                    emit_reward(float(result.reward), final=False)
        return {"reward": total}

    def _seen(self, observation: Any) -> str:
        if self.observation is not None and self.observation not in observation:
            raise ConfigError(f"no field {self.observation!r} in an observation; it has {', '.join(observation)}")
        seen = observation if self.observation is None else observation[self.observation]
        return seen if isinstance(seen, str) else json.dumps(seen)


@functools.cache
def _free(environment: OpenEnvServer, loop: asyncio.AbstractEventLoop) -> asyncio.Semaphore:
    return asyncio.Semaphore(environment.sessions)
