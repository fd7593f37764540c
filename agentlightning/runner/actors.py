"""Runners as actors of Ray, each an `agl runner` process on whichever machine of the cluster has a core to spare.

An actor is that process's keeper and no more: when it dies, the runner sees the end of its stdin, drains and ends.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from agentlightning.errors import ConfigError
from agentlightning.runner.pool import ENDED, LEAVING_SECONDS, RUNNING

_MAIN: Final = """import os, signal, threading
def follow():
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)
threading.Thread(target=follow, daemon=True).start()
from agentlightning.cli.main import main; main()"""


class Keeper:
    """An actor. The key is in its process's environment alone. That has a session of its own, so that neither Ray nor a
    Ctrl-C before a terminal ends it in the middle of a rollout."""

    def __init__(self, arguments: Sequence[str], key: str | None, directory: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _MAIN, "runner", *arguments],
            env={**os.environ, "AGL_KEY": key or ""},
            cwd=directory if os.path.isdir(directory) else None,  # on another machine: that of Ray's working_dir
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def wait(self) -> int:
        return self._process.wait()

    def drain(self) -> None:
        self._process.terminate()


class RayActors:
    """`Machines` of the cluster at RAY_ADDRESS, or this machine alone."""

    def __init__(self, key: str | None, drain: float) -> None:
        self._ray: Any = importlib.import_module("ray")
        try:
            self._ray.init(logging_level="WARNING")
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ConfigError(f"no Ray cluster can be joined (RAY_ADDRESS): {error}") from None
        self._keeper = self._ray.remote(num_cpus=1, max_concurrency=2, scheduling_strategy="SPREAD")(Keeper)
        self._key, self._drain = key, drain
        self._actors: dict[str, tuple[Any, asyncio.Task[str]]] = {}

    async def start(self, name: str, arguments: Sequence[str]) -> None:
        actor = self._keeper.remote(arguments, self._key, os.getcwd())
        self._actors[name] = actor, asyncio.create_task(self._outcome(actor))

    async def _outcome(self, actor: Any) -> str:
        try:
            code: int = await actor.wait.remote()
        except self._ray.exceptions.RayError as error:
            return str(error).partition("\n")[0]
        finally:
            self._ray.kill(actor)  # and gives its core back
        return ENDED if code in (0, 130) else f"exit code {code}"

    async def runners(self) -> Mapping[str, str]:
        return {name: task.result() if task.done() else RUNNING for name, (_, task) in self._actors.items()}

    async def drain(self) -> None:
        for actor, _ in self._actors.values():
            actor.drain.remote()

    async def close(self) -> None:
        try:
            if outcomes := [task for _, task in self._actors.values()]:
                await asyncio.wait(outcomes, timeout=self._drain + LEAVING_SECONDS)
        finally:
            self._ray.shutdown()
