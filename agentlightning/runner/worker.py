"""An agent's own process: runs one attempt after another for its runner.

Spans go to the runner when they are recorded, so that they outlive this process. The agent's module is imported with
the environment of the first attempt. The process leads a session, so that it can be killed with everything it started.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import queue
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final

from agentlightning.errors import AgentLightningError
from agentlightning.runner.agent import LitAgent
from agentlightning.runner.channel import (
    FAREWELL_SECONDS,
    Boot,
    Cancel,
    Connection,
    Ended,
    NotLoaded,
    Recorded,
    Start,
    unpacked,
)
from agentlightning.runner.clients import ClientPool, current_pool
from agentlightning.runner.environment import AgentResources
from agentlightning.runner.execution import AGENT_THREAD, Answer, call_agent, guarded, record_result
from agentlightning.tracing.context import AttemptTracer, bind
from agentlightning.tracing.emit import exception_attributes
from agentlightning.tracing.instrument import instrument_from_environment, tracer_class
from agentlightning.tracing.logs import AttemptLogs

_PR_SET_CHILD_SUBREAPER: Final = 36
_POOLS: Final = (("concurrent", "futures", "thread.py"), ("anyio", "_backends", "_asyncio.py"))


def main(descriptor: int) -> None:
    """Serve the runner at the other end of a socket until it closes."""
    with contextlib.suppress(OSError):  # Linux: when memory runs out it is this process that goes, not the runner
        Path("/proc/self/oom_score_adj").write_text("1000")
    with contextlib.suppress(AttributeError):  # Linux: what the agent's children leave behind is then seen as ours
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    connection = Connection(descriptor)
    boot, start = connection.receive(), connection.receive()
    if isinstance(boot, Boot) and isinstance(start, Start):
        with asyncio.Runner() as loop:
            worker = _Worker(connection, loop.get_loop())
            if worker.load(boot, start):  # outside the loop: modules may run one of their own when they are imported
                loop.run(worker.serve(start))


class _Worker:
    def __init__(self, connection: Connection, loop: asyncio.AbstractEventLoop) -> None:
        self._connection = connection
        self._make_tracer = tracer_class()
        self._agent: LitAgent[Any] | None = None
        self._logs = AttemptLogs()
        self._loop = loop
        self._starts: asyncio.Queue[Start | None] = asyncio.Queue()
        self._running: asyncio.Task[Answer] | None = None
        self._variables: set[str] = set()
        threading.Thread(target=self._listen, name="agentlightning-listener", daemon=True).start()

    def load(self, boot: Boot, start: Start) -> bool:
        """Import the agent in the environment of its first attempt; if that fails, report it to the runner."""
        self._set_environment(start)
        try:
            instrument_from_environment()
            self._agent = unpacked(boot)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a module does when it is imported
            reason = str(error) if isinstance(error, AgentLightningError) else f"{type(error).__name__}: {error}"
            self._connection.send(NotLoaded(reason))
        return self._agent is not None

    async def serve(self, first: Start) -> None:
        """Run the first attempt, and the following ones."""
        pool = ClientPool()
        current_pool.set(pool)
        start: Start | None = first
        with self._logs.installed():
            while start is not None:
                self._set_environment(start)
                self._connection.send(await self._attempt(start))
                start = await self._starts.get()
        await pool.close()

    def _listen(self) -> None:
        """Read the runner's messages, even while the agent blocks the loop. When the runner is gone, end the
        process."""
        while (order := self._connection.receive()) is not None:
            if isinstance(order, Start):
                self._loop.call_soon_threadsafe(self._starts.put_nowait, order)
            elif isinstance(order, Cancel):
                self._loop.call_soon_threadsafe(self._cancel)
        if self._running is None:
            self._loop.call_soon_threadsafe(self._starts.put_nowait, None)
            time.sleep(FAREWELL_SECONDS)
        os.killpg(0, signal.SIGKILL)

    def _cancel(self) -> None:
        if self._running is not None:
            self._running.cancel()

    def _set_environment(self, start: Start) -> None:
        for name in self._variables - set(start.environment):
            os.environ.pop(name, None)
        self._variables = set(start.environment)
        os.environ.update(start.environment)

    async def _call(self, start: Start) -> Any:
        assert self._agent is not None
        return await call_agent(self._agent.own_copy(), start.rollout, AgentResources(start.resources))

    async def _attempt(self, start: Start) -> Ended:
        ids = start.rollout.rollout_id, start.rollout.attempt.attempt_id
        tracer = self._make_tracer(*ids)
        tracer.forward(lambda span: self._connection.send(Recorded(span)))
        before = set(threading.enumerate())
        with bind(tracer), self._logs.open(tracer):
            self._running = asyncio.create_task(guarded(self._call(start)))
            await asyncio.wait({self._running})
            cancelled = self._running.cancelled()
            answer = Answer(error=asyncio.CancelledError()) if cancelled else self._running.result()
        result = AttemptTracer(*ids)  # recorded by the runner, behind its hooks
        if answer.error is None:
            try:
                with bind(result):
                    record_result(result, answer.value)
            except Exception as error:  # noqa: BLE001 - of a stranger's object
                answer = Answer(error=error)
        tracer.close()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # the agent may have closed it, or put anything in its place
                stream.flush()
        self._running = None
        failure = None if answer.error is None else exception_attributes(answer.error)
        return Ended(result.drain(), failure, _left_running(before))


def _left_running(before: set[threading.Thread]) -> bool:
    """Whether an attempt left a task, a thread or a process running."""
    if asyncio.all_tasks() - {asyncio.current_task()}:
        return True
    if any(thread.name != AGENT_THREAD and not _is_idle(thread) for thread in set(threading.enumerate()) - before):
        return True
    for children in Path("/proc/self/task").glob("*/children"):  # Linux; elsewhere processes go unseen
        with contextlib.suppress(OSError):  # of a thread that has just ended
            if children.read_text().split():
                return True
    return False


def _is_idle(thread: threading.Thread) -> bool:
    """Whether it is a thread of a pool that is waiting for work."""
    frame = sys._current_frames().get(thread.ident or 0)  # pyright: ignore[reportPrivateUsage]
    if frame is None:
        return True  # it has ended
    while frame is not None and frame.f_code.co_filename in (queue.__file__, threading.__file__):
        frame = frame.f_back
    return frame is not None and Path(frame.f_code.co_filename).parts[-3:] in _POOLS
