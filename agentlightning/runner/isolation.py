"""Runs attempts in other processes: each process runs one at a time, and many in turn.

A process is replaced after a crash, a kill, or enough attempts. It has a worker id, and a key for
the attempt that this worker holds, so that a client made once by the agent's module belongs to each
attempt in turn. Hooks run on this side, with the runner."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, get_args

import msgspec

from agentlightning.errors import AgentLightningError, ConfigError, nearest
from agentlightning.runner import agent_process
from agentlightning.runner.agent import LitAgent
from agentlightning.runner.agent_process import FAREWELL_SECONDS
from agentlightning.runner.command import CommandAgent, Executable, Output
from agentlightning.runner.environment import (
    agent_environment,
    current_server,
    inherited_environment,
)
from agentlightning.runner.main_thread import needs_process
from agentlightning.semconv import EXCEPTION_MESSAGE, EXCEPTION_STACKTRACE, EXCEPTION_TYPE
from agentlightning.tracing.context import AttemptTracer
from agentlightning.tracing.logs import record_log
from agentlightning.tracing.recorded import RecordedOperation
from agentlightning.types import LLM, AttemptedRollout, Attributes, NamedResources, Span

# for an agent that was cancelled; with those below less than a runner waits
CANCEL_SECONDS: Final = 3.0
TERMINATE_SECONDS: Final = 0.5  # between SIGTERM and SIGKILL
_DRAIN_SECONDS: Final = 1.0  # for what a process that died has left in its socket

ATTEMPTS_PER_PROCESS: Final = 100  # what leaks is freed then

Isolation: TypeAlias = Literal["auto", "none", "process"]


class AgentProcessError(AgentLightningError):
    """The agent's process ended before the agent."""


class AgentRaisedError(AgentLightningError):
    """The agent raised in its process. Each is of its own class, named like the agent's
    exception."""


class AgentNotLoadedError(ConfigError):
    """The agent cannot be imported in a process of its own."""


def resolve_isolation(
    agent: LitAgent[Any], isolation: Isolation, *, served: bool = True
) -> Isolation:
    """Where `auto` runs an agent: in a process if a model is `served` and the agent can find it
    only in the environment, if its module changes what all rollouts of a process share (the working
    directory), or if it is a plain function whose module handles signals, which only a main thread
    can. ConfigError for an agent that cannot be loaded."""
    if isolation != "auto":
        return isolation
    if served and agent.reads_environment():
        return "process"
    if not isinstance(agent, CommandAgent) and needs_process(agent) and _can_be_packed(agent):
        return "process"
    return "none" if served else "auto"


def _can_be_packed(agent: LitAgent[Any]) -> bool:
    try:
        agent_process.packed(agent)
    except ConfigError:
        return False
    return True


def usual_concurrency(isolation: Isolation) -> int:
    """The default number of rollouts at once of a runner; one per core with processes."""
    return os.cpu_count() or 1 if isolation == "process" else 64


def boot_of(agent: LitAgent[Any], isolation: Isolation) -> agent_process.Boot | None:
    """The agent for other processes; None if it runs in this one. ConfigError if it cannot run
    there."""
    if agent_process.is_being_loaded():
        raise ConfigError(
            "this process only imports the main program for an agent defined there, and that "
            "starts a run of its own; put what starts it under `if __name__ == '__main__':`"
        )
    if isolation not in get_args(Isolation):
        raise ConfigError(f"isolation is {isolation!r}; {nearest(isolation, get_args(Isolation))}")
    if isolation != "process":
        agent.check()
        return None
    if isinstance(agent, CommandAgent):
        raise ConfigError("a command already runs in its own process; omit isolation")
    return agent_process.packed(agent)


@dataclass
class AgentProcess:
    """Runs one attempt after another until `aclose`; its process starts with the first.

    `names` gives worker ids, `key_of` the key of one. A process may leave others in sessions of
    their own, which still have its key, so the next process gets another id."""

    boot: agent_process.Boot
    names: Iterator[str]
    key_of: Callable[[str], Awaitable[str]]
    _needs_renewal: bool = False
    _running: _RunningProcess | None = None

    def __post_init__(self) -> None:
        self._take_new_id()

    async def run(
        self,
        rollout: AttemptedRollout,
        resources: NamedResources,
        tracer: AttemptTracer,
        recorded: list[RecordedOperation],
    ) -> list[Span]:
        """Run the agent and return its result as spans. AgentRaisedError if it raised,
        AgentProcessError if its process ended first, AgentNotLoadedError if it cannot be
        imported."""
        environment = await self._environment(rollout, resources)
        running = await self._process_with(environment)
        try:
            ended = await running.attempt(
                agent_process.Start(rollout, resources, environment, recorded), tracer
            )
        except BaseException:  # cancelled, too
            self._running = None
            self._take_new_id()
            await running.kill()
            raise
        finally:
            running.record_output(tracer)
        self._needs_renewal = ended.left or running.attempts == ATTEMPTS_PER_PROCESS
        if ended.failure is not None:
            raise _agent_error(ended.failure)
        return ended.result

    async def renew(self) -> None:
        """End a process that has run enough attempts, or in which something still runs that could
        be taken for the next attempt. Call it between attempts."""
        if self._needs_renewal:
            await self.aclose()
            self._take_new_id()

    async def aclose(self) -> None:
        """End the process; its libraries get time to clean up."""
        running = self._running
        self._running = None
        self._needs_renewal = False
        if running is not None:
            await running.close()

    def _take_new_id(self) -> None:
        self.worker_id = next(self.names)
        self._key: str | None = None

    async def _process_with(self, environment: Mapping[str, str]) -> _RunningProcess:
        """The running process, unless it has died or its clients would call elsewhere."""
        fixed = {name: value for name, value in environment.items() if not name.startswith("AGL_")}
        if self._running is not None and (
            self._running.program.exited.done() or self._running.fixed != fixed
        ):
            await self.aclose()
        if self._running is None:
            self._running = await _RunningProcess.start(self.boot, fixed)
        return self._running

    async def _environment(
        self, rollout: AttemptedRollout, resources: NamedResources
    ) -> dict[str, str]:
        """Variables for the agent's libraries. A client is created once for many attempts: its URL
        names none of them, and its key is the worker's."""
        llms = {name: resource for name, resource in resources.items() if isinstance(resource, LLM)}
        llm = llms.get("llm") or (next(iter(llms.values())) if len(llms) == 1 else None)
        ids = rollout.rollout_id, rollout.attempt.attempt_id
        server = current_server.get()
        if llm is not None and llm.gateway:
            if self._key is None:
                self._key = await self.key_of(self.worker_id)
            root, _, _ = llm.endpoint.partition("/rollout/")
            server = server or root
            llm = msgspec.structs.replace(llm, endpoint=f"{root}/v1", api_key=self._key)
        variables = agent_environment(
            llm, *ids, server, rollout.api_key or "none", reward_key=rollout.reward_key
        )
        # An exporter would be made once too, and name the first attempt for good; the tracer takes
        # the SDK's spans.
        return {name: value for name, value in variables.items() if not name.startswith("OTEL_")}


@dataclass
class _RunningProcess:
    """A running process, and the runner's end of the connection to it."""

    program: Executable
    fixed: Mapping[str, str]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    attempts: int = 0

    @classmethod
    async def start(cls, boot: agent_process.Boot, fixed: Mapping[str, str]) -> _RunningProcess:
        ours, theirs = socket.socketpair()
        begin = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            "from agentlightning.runner.agent_process import main; "
        )
        with theirs:
            reader, writer = await asyncio.open_connection(sock=ours)
            try:
                program = await Executable.start(
                    (
                        sys.executable,
                        "-u",
                        "-X",
                        "faulthandler",
                        "-c",
                        f"{begin}main({theirs.fileno()})",
                    ),
                    (Output("stdout"), Output("stderr")),
                    stdin=asyncio.subprocess.DEVNULL,
                    env={**inherited_environment(), **fixed},
                    pass_fds=(theirs.fileno(),),
                )
            except BaseException:  # cancelled, too
                writer.close()
                raise
        writer.write(agent_process.framed(boot))
        return cls(program, fixed, reader, writer)

    def record_output(self, tracer: AttemptTracer) -> None:
        """Record what the process has written since the last attempt as logs of this one."""
        for output in self.program.outputs:
            taken = output.taken()
            record_log(tracer, output.name, taken.text(), taken.times)

    async def attempt(
        self, start: agent_process.Start, tracer: AttemptTracer
    ) -> agent_process.Ended:
        """Run the agent once; when this is cancelled the agent is too, and has time to clean up."""
        self.attempts += 1
        exited = self.program.exited
        receiving = asyncio.create_task(self._receive_spans(tracer))
        try:
            self.writer.write(agent_process.framed(start))
            await asyncio.wait({receiving, exited}, return_when=asyncio.FIRST_COMPLETED)
            if not receiving.done():
                # of what it has started: that may hold the socket open
                self.program.signal(signal.SIGKILL)
            await asyncio.wait({receiving}, timeout=_DRAIN_SECONDS)
            last = receiving.result() if receiving.done() else None
        except asyncio.CancelledError:
            self.writer.write(agent_process.framed(agent_process.Cancel()))
            await asyncio.wait(
                {receiving, exited}, timeout=CANCEL_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
            raise
        finally:
            receiving.cancel()
        if isinstance(last, agent_process.NotLoaded):
            raise AgentNotLoadedError(
                f"the agent cannot be run in a process of its own: {last.reason}"
            )
        if isinstance(last, agent_process.Ended):
            return last
        await asyncio.wait({exited}, timeout=_DRAIN_SECONDS)
        raise AgentProcessError(_exit_reason(exited.result() if exited.done() else None))

    async def close(self) -> None:
        """Let the process end by itself; kill it and what it has started if that takes long."""
        self.writer.close()
        try:
            await asyncio.wait({self.program.exited}, timeout=FAREWELL_SECONDS)
        finally:
            await self.kill()

    async def kill(self) -> None:
        """End the process and all of its group."""
        try:
            await self.program.end(TERMINATE_SECONDS)
        finally:
            self.writer.close()

    async def _receive_spans(
        self, tracer: AttemptTracer
    ) -> agent_process.Ended | agent_process.NotLoaded | None:
        """Take spans as they come, until the last message; None if there is none."""
        try:
            while isinstance(
                message := await agent_process.read_report(self.reader), agent_process.Recorded
            ):
                tracer.adopt(message.span)
        except (EOFError, ConnectionError, msgspec.MsgspecError):
            # gone; or the agent wrote to what is not its own
            return None
        return message


def _agent_error(failure: Attributes) -> AgentRaisedError:
    """The agent's exception: its name, its text, and its traceback as the cause."""
    module, _, name = str(failure[EXCEPTION_TYPE]).rpartition(".")
    kind = type(
        name, (AgentRaisedError,), {"__module__": module or "builtins", "__qualname__": name}
    )
    error = kind(str(failure[EXCEPTION_MESSAGE]))
    error.__cause__ = AgentRaisedError(
        f"in the agent's process:\n\n{failure[EXCEPTION_STACKTRACE]}"
    )
    return error


def _exit_reason(returncode: int | None) -> str:
    if returncode is None:
        return "the agent closed or wrote over its process's connection to the runner"
    if returncode >= 0:
        return f"the agent's process ended with exit code {returncode} before the agent did"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = f"signal {-returncode}"
    hint = ", as happens when memory runs out" if name == "SIGKILL" else ""
    return f"the agent's process was killed by {name}{hint}"
