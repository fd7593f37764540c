"""An agent's own process: runs one attempt after another for its runner. How the agent gets there,
and the messages between both: msgpack after its length, over a socket pair.

Spans go to the runner when they are recorded, so that they outlive this process. The agent's module
is imported with the environment of the first attempt. The process leads a session, so that it can
be killed with everything it started."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib.util
import multiprocessing.spawn
import os
import pickle
import queue
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Coroutine
from contextvars import copy_context
from pathlib import Path
from typing import Any, Final, Literal, NoReturn, cast

import msgspec

from agentlightning.errors import AgentLightningError, ConfigError
from agentlightning.runner.agent import LitAgent, is_async
from agentlightning.runner.clients import ClientPool, current_pool
from agentlightning.runner.environment import AgentResources
from agentlightning.runner.execution import (
    AgentResult,
    call_agent,
    call_blocking,
    guarded,
    record_result,
)
from agentlightning.runner.shared import process_state_restored, working_directory
from agentlightning.tracing.context import AttemptTracer, bind
from agentlightning.tracing.emit import exception_attributes, shown
from agentlightning.tracing.instrument import instrument_from_environment, tracer_class
from agentlightning.tracing.logs import AttemptLogs
from agentlightning.tracing.recorded import RecordedOperation, RecordedOperations
from agentlightning.types import AttemptedRollout, Attributes, NamedResources, Span

_LENGTH: Final = struct.Struct("!I")
_MAIN: Final = "__main__"
FAREWELL_SECONDS: Final = 2.0  # for what the agent's libraries do at the end of a process
_loading: list[str] = []  # of this process: the module whose import is under way


class Boot(msgspec.Struct, tag=True):
    """The first message to a process: the agent, as made by `packed`. If it is defined in the
    runner's main module, `main` is what `multiprocessing` needs to import that; `file` is the path
    of its module. `directory` is the working directory."""

    agent: bytes
    directory: str
    module: str
    file: str | None
    main: dict[str, str]


class Start(msgspec.Struct, tag=True):
    """Run the agent once, with these environment variables, and recorded results of operations."""

    rollout: AttemptedRollout
    resources: NamedResources
    environment: dict[str, str]
    recorded: list[RecordedOperation]


class Cancel(msgspec.Struct, tag=True):
    """Cancel the running agent, if it lets itself be cancelled."""


class Recorded(msgspec.Struct, tag=True):
    """The attempt recorded a span."""

    span: Span


class NotLoaded(msgspec.Struct, tag=True):
    """The agent cannot be imported; none of it has run."""

    reason: str


class Ended(msgspec.Struct, tag=True):
    """The agent ended. `result` is what it returned, as spans; `failure` the exception it raised;
    `left` whether it left something running that could be taken for the next attempt."""

    result: list[Span]
    failure: Attributes | None = None
    left: bool = False


_ORDERS: Final = msgspec.msgpack.Decoder(Boot | Start | Cancel)
_REPORTS: Final = msgspec.msgpack.Decoder(Recorded | NotLoaded | Ended)


def framed(message: msgspec.Struct) -> bytes:
    """A message after its length."""
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


async def read_report(reader: asyncio.StreamReader) -> Recorded | NotLoaded | Ended:
    """The next message of the agent's process. EOFError or ConnectionError at the end of the
    connection, `msgspec.MsgspecError` for a malformed message."""
    (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return _REPORTS.decode(await reader.readexactly(size))


class RunnerConnection:
    """The agent's end of the socket pair. Any thread may send; a process that the agent has forked
    sends nothing."""

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)
        self._socket = socket.socket(fileno=descriptor)
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._file = self._socket.makefile("rb")

    def receive(self) -> Boot | Start | Cancel | None:
        """Wait for the runner's next message; None if it has closed its end."""
        try:
            (size,) = _LENGTH.unpack(self._file.read(_LENGTH.size))
            return _ORDERS.decode(self._file.read(size))
        except (OSError, struct.error, msgspec.MsgspecError):  # the last two of what was cut off
            return None

    def send(self, message: msgspec.Struct) -> None:
        if os.getpid() == self._process:
            with self._lock:
                self._socket.sendall(framed(message))


def packed(agent: LitAgent[Any]) -> Boot:
    """An agent for another process: its name, if it is defined at the top of a module, or else its
    pickled state. ConfigError if it has neither."""
    module = str(agent.__module__)
    file = getattr(sys.modules.get(module), "__file__", None)
    how = (
        "Define it at the top level of a module, or name it: 'module:agent', 'file.py:agent'. Or "
        "let it take `llm` and make its client from that; or take isolation='none' if it calls no "
        "model"
    )
    try:
        pickled = pickle.dumps(agent)
    except Exception as error:  # noqa: BLE001 - a user's object may raise anything when it is pickled
        raise ConfigError(
            f"the agent cannot be brought into another process: {error}. {how}"
        ) from None
    main: dict[str, str] = {}
    if module == _MAIN:
        given = multiprocessing.spawn.get_preparation_data("agent")
        main = {
            name: value for name, value in given.items() if name.startswith("init_main") and value
        }
        if not main:
            raise ConfigError(
                "the agent is defined in an interactive session, where another process cannot "
                f"import it. {how}"
            )
    return Boot(pickled, working_directory(), module, file, main)


def unpacked(boot: Boot) -> LitAgent[Any]:
    """The agent; its module is imported here. Raises what the import raises."""
    _loading.append(boot.module)
    try:
        if boot.main:
            multiprocessing.spawn.prepare(boot.main)
        elif boot.file is not None and boot.module not in sys.modules:
            found = importlib.util.find_spec(boot.module)
            # a file that was loaded under a name of its own
            if found is None or found.origin != boot.file:
                spec = importlib.util.spec_from_file_location(boot.module, boot.file)
                assert spec is not None and spec.loader is not None
                sys.modules[boot.module] = module = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(module)
        agent = cast("LitAgent[Any]", pickle.loads(boot.agent))
    finally:
        _loading.clear()
    agent.check()
    return agent


def is_being_loaded() -> bool:
    """Whether this is an agent's process that is importing the agent, and must not start a run."""
    return bool(_loading)


# --- in the process -------------------------------------------------------------------------------

_PR_SET_CHILD_SUBREAPER: Final = 36
_POOLS: Final = (("concurrent", "futures", "thread.py"), ("anyio", "_backends", "_asyncio.py"))


def main(descriptor: int) -> None:
    """Serve the runner at the other end of a socket until it closes."""
    # Linux: when memory runs out it is this process that goes, not the runner
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    # Linux: what the agent's children leave behind is then seen as ours
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGINT, _interrupt)
    connection = RunnerConnection(descriptor)
    boot = connection.receive()
    start = connection.receive()
    if isinstance(boot, Boot) and isinstance(start, Start):
        with asyncio.Runner() as loop:
            runner = _AttemptRunner(connection, loop)
            # outside the loop: modules may run one of their own when they are imported
            if runner.load(boot, start):
                runner.serve(start)


def _interrupt(number: int, frame: object) -> NoReturn:
    """Interrupt the agent, as a grader does with late code; asyncio's handler, which it puts where
    Python's is, would cancel us."""
    raise KeyboardInterrupt


class _AttemptRunner:
    """Runs attempts in the main thread, where code may set alarms: async agents in the loop, sync
    ones outside it."""

    def __init__(self, connection: RunnerConnection, loop: asyncio.Runner) -> None:
        self._connection = connection
        self._make_tracer = tracer_class()
        self._agent: LitAgent[Any] | None = None
        self._logs = AttemptLogs()
        self._loop = loop
        self._starts: queue.SimpleQueue[Start | None] = queue.SimpleQueue()
        self._running: asyncio.Task[AgentResult] | Literal["sync"] | None = None
        self._variables: set[str] = set()
        loop.get_loop()  # it is made in this thread
        threading.Thread(target=self._listen, name="agentlightning-listener", daemon=True).start()

    def load(self, boot: Boot, start: Start) -> bool:
        """Import the agent in the environment of its first attempt; if that fails, report it to the
        runner."""
        self._set_environment(start)
        with contextlib.suppress(OSError):  # it has been deleted
            os.chdir(boot.directory)
        try:
            instrument_from_environment()
            self._agent = unpacked(boot)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a module does when it is imported
            kind = "" if isinstance(error, AgentLightningError) else f"{type(error).__name__}: "
            self._connection.send(NotLoaded(f"{kind}{shown(error)}"))
        return self._agent is not None

    def serve(self, first: Start) -> None:
        """Run the first attempt, and the following ones."""
        pool = ClientPool(self._loop.get_loop())
        current_pool.set(pool)
        start: Start | None = first
        with self._logs.installed():
            while start is not None:
                self._set_environment(start)
                with process_state_restored():
                    ended = self._attempt(start)
                self._connection.send(ended)
                start = self._starts.get()
        self._loop.run(pool.close())

    def _listen(self) -> None:
        """Read the runner's messages, even while the agent blocks the main thread. When the runner
        is gone, end the process."""
        while (order := self._connection.receive()) is not None:
            if isinstance(order, Start):
                self._starts.put(order)
            elif isinstance(order, Cancel):
                self._cancel()
        if self._running is None:
            self._starts.put(None)
            time.sleep(FAREWELL_SECONDS)
        os.killpg(0, signal.SIGKILL)

    def _cancel(self) -> None:
        """Cancel an async agent. A sync one cannot be: the runner hears that it ended, and kills
        this process."""
        running = self._running
        if isinstance(running, asyncio.Task):
            self._loop.get_loop().call_soon_threadsafe(running.cancel)
        elif running is not None:
            self._connection.send(
                Ended([], exception_attributes(asyncio.CancelledError()), left=True)
            )

    def _set_environment(self, start: Start) -> None:
        for name in self._variables - set(start.environment):
            os.environ.pop(name, None)
        self._variables = set(start.environment)
        os.environ.update(start.environment)

    def _call(self, start: Start) -> AgentResult:
        """Call the agent; the result is what it returned or raised."""
        assert self._agent is not None
        resources = AgentResources(start.resources)
        try:
            agent = self._agent.own_copy()
            in_loop = is_async(agent.entry_point(start.rollout.mode))
        except Exception as error:  # noqa: BLE001 - of a stranger's object
            return AgentResult(error=error)
        if in_loop:
            return self._loop.run(
                self._in_loop(call_agent(agent, start.rollout, resources)), context=copy_context()
            )
        self._running = "sync"
        return call_blocking(agent, start.rollout, resources)

    async def _in_loop(self, call: Coroutine[Any, Any, Any]) -> AgentResult:
        self._running = task = asyncio.create_task(guarded(call))
        await asyncio.wait({task})
        return AgentResult(error=asyncio.CancelledError()) if task.cancelled() else task.result()

    def _attempt(self, start: Start) -> Ended:
        ids = start.rollout.rollout_id, start.rollout.attempt.attempt_id
        tracer = self._make_tracer(*ids)
        tracer.forward(lambda span: self._connection.send(Recorded(span)))
        tracer.recorded = RecordedOperations(start.recorded)
        before = set(threading.enumerate())
        with bind(tracer), self._logs.open(tracer):
            returned = self._call(start)
        result = AttemptTracer(*ids)  # recorded by the runner, behind its hooks
        if returned.error is None:
            try:
                record_result(result, returned.value)
            except Exception as error:  # noqa: BLE001 - of a stranger's object
                returned = AgentResult(error=error)
        tracer.close()
        for stream in (sys.stdout, sys.stderr):
            # the agent may have closed it, or put anything in its place
            with contextlib.suppress(Exception):
                stream.flush()
        self._running = None
        failure = None if returned.error is None else exception_attributes(returned.error)
        return Ended(result.drain(), failure, _left_running(before, self._loop.get_loop()))


def _left_running(before: set[threading.Thread], loop: asyncio.AbstractEventLoop) -> bool:
    """Whether an attempt left a task, a thread or a process running."""
    if asyncio.all_tasks(loop):
        return True
    if any(not _is_idle(thread) for thread in set(threading.enumerate()) - before):
        return True
    # Linux; elsewhere processes go unseen
    for children in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # of a thread that has just ended
            if children.read_text().split():
                return True
    return False


def _is_idle(thread: threading.Thread) -> bool:
    """Whether it is a thread of a pool that is waiting for work."""
    frame = sys._current_frames().get(thread.ident or 0)  # pyright: ignore[reportPrivateUsage]
    if frame is None:
        return True  # it has ended
    innermost = frame
    while frame is not None and frame.f_code.co_filename in (queue.__file__, threading.__file__):
        frame = frame.f_back
    if frame is None or Path(frame.f_code.co_filename).parts[-3:] not in _POOLS:
        return False
    # A function in C that it runs, such as time.sleep, has no frame.
    return frame is not innermost or frame.f_code.co_name == "_worker"
