"""Attempts in processes of their own: each process runs one at a time, and many one after the other.

A process is replaced after a crash, a kill, or enough attempts. It has a worker id and a key that stands for whatever
attempt that worker holds, so that a client which the agent's module makes once belongs to every attempt in turn. This
module knows processes and how an attempt is executed. Hooks run on this side, with the runner.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, get_args

import msgspec

from agentlightning.errors import AgentLightningError, ConfigError, nearest
from agentlightning.runner.agent import LitAgent
from agentlightning.runner.channel import (
    Boot,
    Cancel,
    Ended,
    Frames,
    NotLoaded,
    Recorded,
    Start,
    framed,
    is_being_loaded,
    packed,
)
from agentlightning.runner.command import CommandAgent
from agentlightning.runner.environment import agent_environment, current_server
from agentlightning.runner.execution import Execution
from agentlightning.runner.hooks import Hook
from agentlightning.runner.worker import FAREWELL_SECONDS
from agentlightning.semconv import EXCEPTION_MESSAGE, EXCEPTION_STACKTRACE, EXCEPTION_TYPE
from agentlightning.tracing.choice import TracerKind
from agentlightning.tracing.context import AttemptTracer
from agentlightning.tracing.logs import Excerpt, LogStream, record_log
from agentlightning.types import LLM, AttemptedRollout, Attributes, NamedResources, Span

if TYPE_CHECKING:
    from agentlightning.runner.runner import Runner

logger = logging.getLogger(__name__)

CANCEL_SECONDS: Final = 3.0  # for an agent that was cancelled; with those below less than a runner waits
TERMINATE_SECONDS: Final = 0.5  # between SIGTERM and SIGKILL
_LAST_WORDS_SECONDS: Final = 1.0  # for what a process that died has left in its socket
_PIPE_BYTES: Final = 65536

_Message = Ended | Recorded | NotLoaded


Isolation: TypeAlias = Literal["none", "process"]


class AgentProcessError(AgentLightningError):
    """The process of an agent ended before the agent did."""


class AgentRaisedError(AgentLightningError):
    """What an agent raised in its process. Each is of a class of its own, with the name of the agent's exception."""


class AgentNotLoadedError(ConfigError):
    """The agent cannot be imported in a process of its own."""


def usual_concurrency(isolation: Isolation) -> int:
    """How many rollouts a runner has at once if nobody says: of processes, one per core."""
    return os.cpu_count() or 1 if isolation == "process" else 64


def boot_of(agent: LitAgent[Any], isolation: Isolation, tracer: TracerKind, most: int | None) -> Boot | None:
    """The agent for other processes; None where it is to run in this one, and can. ConfigError where it cannot run."""
    if is_being_loaded():
        raise ConfigError(
            "this process only imports the main program for an agent defined there, and that starts a run of its own; "
            "put what starts it under `if __name__ == '__main__':`"
        )
    if isolation not in get_args(Isolation):
        raise ConfigError(f"isolation is {isolation!r}; {nearest(isolation, get_args(Isolation))}")
    if isolation == "none":
        agent.check()
        return None
    if most is not None and most < 1:
        raise ConfigError(f"max_attempts_per_process is {most}; give 1 or more, or None for no limit")
    if isinstance(agent, CommandAgent):
        raise ConfigError("a command runs in processes of its own anyway; leave isolation out")
    return packed(agent, tracer)


class ProcessExecution(Execution):
    """An attempt whose agent runs in `process`; all around the agent happens here."""

    def __init__(
        self,
        runner: Runner,
        agent: LitAgent[Any],
        hooks: tuple[Hook, ...],
        rollout: AttemptedRollout,
        tracer: AttemptTracer,
        process: AgentProcess,
    ) -> None:
        super().__init__(runner, agent, hooks, rollout, tracer)
        self._process = process

    async def _call_agent(self, resources: NamedResources) -> list[Span]:
        return await self._process.run(self._rollout, resources, self._tracer)


class AgentProcess:
    """A place for one attempt after the other, for `async with`; the process there starts with the first.

    `names` gives the worker ids and `key_of` the key of one. What a process may have left behind, in a session of its
    own, still has its key: the next gets another id. At most `most` attempts run in one process."""

    def __init__(
        self, boot: Boot, names: Iterator[str], key_of: Callable[[str], Awaitable[str]], most: int | None
    ) -> None:
        self._boot = boot
        self._names = names
        self._key_of = key_of
        self._most = most
        self.worker_id = next(names)
        self._warned = False
        self._worn = False
        self._key: str | None = None
        self._live: _Live | None = None

    async def run(self, rollout: AttemptedRollout, resources: NamedResources, tracer: AttemptTracer) -> list[Span]:
        """Run the agent and return its result as spans. AgentRaisedError if it raised, AgentProcessError if its process
        ended first, AgentNotLoadedError if it cannot be imported."""
        environment = await self._environment(rollout, resources)
        live = await self._process_with(environment)
        try:
            ended = await live.attempt(Start(rollout, resources, environment), tracer)
        except BaseException:  # cancelled, too
            live.record_output(tracer)
            await self._discard(live)
            raise
        live.record_output(tracer)
        if ended.left is not None and not self._warned:
            self._warned = True
            logger.warning("an attempt left %s running; processes of which this is true serve no other", ended.left)
        self._worn = ended.left is not None or live.attempts == self._most
        if ended.failure is not None:
            raise _raised(ended.failure)
        return ended.result

    async def __aenter__(self) -> AgentProcess:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close()

    async def renew(self) -> None:
        """End a process that has served long enough, or in which something runs that could be taken for the next
        attempt. To be called between attempts."""
        if self._worn:
            await self._close()
            self._rename()

    def _rename(self) -> None:
        self.worker_id, self._key = next(self._names), None

    async def _close(self) -> None:
        """End the process, giving its libraries time to say goodbye."""
        live, self._live, self._worn = self._live, None, False
        if live is not None:
            await live.close()

    async def _discard(self, live: _Live) -> None:
        self._live = None
        self._rename()
        await live.kill()

    async def _process_with(self, environment: Mapping[str, str]) -> _Live:
        """The process that is there, unless it died since, or clients made in it would call elsewhere."""
        fixed = {name: value for name, value in environment.items() if not name.startswith("AGL_")}
        if self._live is not None and (self._live.exited.done() or self._live.fixed != fixed):
            await self._close()
        if self._live is None:
            self._live = await _Live.start(self._boot, fixed)
        return self._live

    async def _environment(self, rollout: AttemptedRollout, resources: NamedResources) -> dict[str, str]:
        """Variables for the agent's libraries. A client is made once for many attempts: its URL names none of them, and
        its key is the worker's."""
        llms = {name: resource for name, resource in resources.items() if isinstance(resource, LLM)}
        llm = llms.get("llm") or (next(iter(llms.values())) if len(llms) == 1 else None)
        ids = rollout.rollout_id, rollout.attempt.attempt_id
        server = current_server.get()
        if llm is not None and llm.api_key == rollout.api_key:
            if self._key is None:
                self._key = await self._key_of(self.worker_id)
            root, _, _ = llm.endpoint.partition("/rollout/")
            server = server or root
            llm = msgspec.structs.replace(llm, endpoint=f"{root}/v1", api_key=self._key)
        variables = agent_environment(llm, *ids, server, rollout.api_key or "none", reward_key=rollout.reward_key)
        # An exporter would be made once too, and name the first attempt for good; the tracer takes the SDK's spans.
        return {name: value for name, value in variables.items() if not name.startswith("OTEL_")}


class _Live:
    """A process that runs."""

    def __init__(self, process: asyncio.subprocess.Process, fixed: Mapping[str, str], outputs: list[_Output]) -> None:
        self._process = process
        self.fixed = fixed
        self._outputs = outputs
        self.attempts = 0
        self.exited = asyncio.ensure_future(process.wait())
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter
        self._messages: Frames[_Message] = Frames(_Message)

    @classmethod
    async def start(cls, boot: Boot, fixed: Mapping[str, str]) -> _Live:
        ours, theirs = socket.socketpair()
        outputs = [_Output("stdout"), _Output("stderr")]
        begin = f"import sys; sys.path[:] = {sys.path!r}; from agentlightning.runner.worker import main; "
        environment = {name: value for name, value in os.environ.items() if name != "AGL_KEY"}  # it opens the store
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-u", "-X", "faulthandler", "-c", f"{begin}main({theirs.fileno()})"),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=outputs[0].write_end,
                stderr=outputs[1].write_end,
                env={**environment, **fixed},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
            live = cls(process, fixed, outputs)
            live._reader, live._writer = await asyncio.open_connection(sock=ours)
        except BaseException:  # cancelled, too: the process is gone or goes with the end of its socket
            ours.close()
            for output in outputs:
                output.close()
            raise
        finally:
            theirs.close()
            for output in outputs:
                os.close(output.write_end)
        live._writer.write(framed(boot))
        return live

    def record_output(self, tracer: AttemptTracer) -> None:
        """Record what the process has written since the last attempt as logs of this one."""
        for output in self._outputs:
            if text := output.taken():
                record_log(tracer, output.name, text)

    async def attempt(self, start: Start, tracer: AttemptTracer) -> Ended:
        """Run the agent once; when this is cancelled the agent is too, and has time to clean up."""
        self.attempts += 1
        hearing = asyncio.create_task(self._hear(tracer))
        try:
            self._writer.write(framed(start))
            await asyncio.wait({hearing, self.exited}, return_when=asyncio.FIRST_COMPLETED)
            if not hearing.done():
                self._signal(signal.SIGKILL)  # of what it has started: that may hold the socket open
            await asyncio.wait({hearing}, timeout=_LAST_WORDS_SECONDS)
            last = hearing.result() if hearing.done() else None
        except asyncio.CancelledError:
            self._writer.write(framed(Cancel()))
            await asyncio.wait({hearing, self.exited}, timeout=CANCEL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            raise
        finally:
            hearing.cancel()
        if isinstance(last, NotLoaded):
            raise AgentNotLoadedError(f"the agent cannot be run in a process of its own: {last.reason}")
        if isinstance(last, Ended):
            return last
        await asyncio.wait({self.exited}, timeout=_LAST_WORDS_SECONDS)
        raise AgentProcessError(_death(self._process.returncode))

    async def close(self) -> None:
        """Let the process end by itself; kill it and what it has started if that takes long."""
        self._writer.close()
        try:
            await asyncio.wait({self.exited}, timeout=FAREWELL_SECONDS)
        finally:
            await self.kill()

    async def kill(self) -> None:
        """End the process and all of its group: SIGTERM, and SIGKILL for whatever is left."""
        try:
            if not self.exited.done():
                self._signal(signal.SIGTERM)
                await asyncio.wait({self.exited}, timeout=TERMINATE_SECONDS)
        finally:
            self._signal(signal.SIGKILL)
            self._writer.close()
            for output in self._outputs:
                output.close()
        await asyncio.wait({self.exited})

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left; macOS says so of zombies
            os.killpg(self._process.pid, number)

    async def _hear(self, tracer: AttemptTracer) -> Ended | NotLoaded | None:
        """Take spans as they come, until the last message; None if there is none."""
        try:
            while isinstance(message := await self._messages.read_async(self._reader.readexactly), Recorded):
                tracer.adopt(message.span)
        except msgspec.MsgspecError:  # the agent has written to descriptors that are not its own
            return None
        return message


class _Output:
    """One of a process's streams: taken whenever there is some, so that a flood blocks nobody, and kept in part."""

    def __init__(self, name: LogStream) -> None:
        self.name: LogStream = name
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        self._excerpt = Excerpt()
        self._open = True
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._read_end, self._take)

    def taken(self) -> str:
        """What was written since the last time, with all that is in the pipe at this moment."""
        self._take()
        excerpt, self._excerpt = self._excerpt, Excerpt()
        return excerpt.text()

    def close(self) -> None:
        if self._open:
            self._open = False
            self._loop.remove_reader(self._read_end)
            os.close(self._read_end)

    def _take(self) -> None:
        if not self._open:
            return
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._read_end, _PIPE_BYTES)
            self._excerpt.write(data)
            if not data:
                self.close()


def _raised(failure: Attributes) -> AgentRaisedError:
    """The agent's exception again: its name, its text, and its traceback as the cause's."""
    module, _, name = str(failure[EXCEPTION_TYPE]).rpartition(".")
    kind = type(name, (AgentRaisedError,), {"__module__": module or "builtins", "__qualname__": name})
    error = kind(str(failure[EXCEPTION_MESSAGE]))
    error.__cause__ = AgentRaisedError(f"in the agent's process:\n\n{failure[EXCEPTION_STACKTRACE]}")
    return error


def _death(returncode: int | None) -> str:
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
