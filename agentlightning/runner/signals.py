"""Ends a process that runs agents: signals, and agents that swallow their cancellation, block the event loop or their
thread, or end the process themselves.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from typing import Any, Final, NoReturn, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

LEFT_SECONDS: Final = 2.0  # for tasks that still run when all work is done
INTERRUPTED: Final = 130  # exit code
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
_THREADS: Final = "asyncio.to_thread"


def run_to_end(work: Coroutine[Any, Any, T], loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None) -> T:
    """Like `asyncio.run`, but abandons tasks and threads of `asyncio.to_thread` that go on when the work is done."""
    threads = ThreadPoolExecutor(thread_name_prefix=_THREADS)
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.get_loop().set_default_executor(threads)
        try:
            return runner.run(work)
        finally:
            runner.run(_leave())
            threads.shutdown(wait=False)


class _Beside:
    """An event loop in a thread of its own, for which another thread waits and receives Ctrl-C."""

    def __init__(self) -> None:
        self.stop: asyncio.Event | None = None  # of a job that can save what it has
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        self._times = 0

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        return await work

    def interrupt(self) -> None:
        """The first Ctrl-C stops the job, the second cancels it; KeyboardInterrupt at the third, if an agent blocks
        the loop."""
        self._times += 1
        if self._times > 2 or self._loop is None or self._task is None:
            raise KeyboardInterrupt
        stop = self.stop if self._times == 1 else None
        self._loop.call_soon_threadsafe(self._task.cancel if stop is None else stop.set)


_beside: Final[ContextVar[_Beside | None]] = ContextVar("agentlightning_beside", default=None)


def run_beside(work: Coroutine[Any, Any, T], loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None) -> T:
    """`run_to_end` in a thread of its own, for a caller in whose thread an event loop runs, as in a notebook.

    Blocks like `run_to_end`, and Ctrl-C (the notebook's stop button) does what it does there."""
    beside, answer, context = _Beside(), Future[T](), copy_context()
    context.run(_beside.set, beside)

    def run() -> None:
        try:
            answer.set_result(context.run(run_to_end, beside.run(work), loop_factory))
        except asyncio.CancelledError:
            answer.set_exception(KeyboardInterrupt())
        except BaseException as error:  # noqa: BLE001 - carried over to the thread that waits
            answer.set_exception(error)

    threading.Thread(target=run, name="agentlightning-loop", daemon=True).start()
    while True:
        try:
            return answer.result()
        except KeyboardInterrupt:
            if answer.done():
                raise
            beside.interrupt()


async def _leave() -> None:
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    deaf = (await asyncio.wait(left, timeout=LEFT_SECONDS))[1] if left else set[asyncio.Task[Any]]()
    for task in deaf:
        logger.warning("%r does not stop after it was cancelled and is abandoned", task.get_name())
        asyncio.tasks._unregister_task(task)  # pyright: ignore
        task._log_destroy_pending = False  # pyright: ignore
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))  # the loop waits for the one it has


def exit_with(code: int) -> NoReturn:
    """End the process, even if a thread of `asyncio.to_thread` goes on; after an interrupt, any thread. Another Ctrl-C
    then ends it at once: unloading libraries takes seconds."""
    if code == INTERRUPTED:
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(INTERRUPTED))
    left = [thread for thread in threading.enumerate() if not thread.daemon and thread is not threading.main_thread()]
    if code != INTERRUPTED:
        left = [thread for thread in left if thread.name.startswith(_THREADS)]
        for thread in left:  # they end once they are idle
            thread.join(LEFT_SECONDS / len(left))
        if any(thread.is_alive() for thread in left):
            atexit._run_exitfuncs()  # pyright: ignore
    if any(thread.is_alive() for thread in left):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def end_after(seconds: float) -> None:
    """End the process after so many seconds, whatever is running."""

    def end() -> None:
        os.write(2, b"an agent does not let the process end: it ends without it\n")
        os._exit(INTERRUPTED)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


@contextlib.contextmanager
def interrupted_at_once() -> Generator[None]:
    """Ctrl-C raises KeyboardInterrupt at once, where asyncio would wait for the event loop."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        if before is not None:  # of a program that this one is embedded in
            signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def handling_signals(
    received: Callable[[signal.Signals], object], at_once: Callable[[], object] | None = None
) -> Generator[None]:
    """Call `received` in the event loop at each SIGINT and SIGTERM, and `at_once` even while an agent blocks it."""
    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, received, number)
        if at_once is not None:
            signal.signal(number, lambda number, frame: at_once())  # beside the loop, which hears of it by a descriptor
    try:
        yield
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)


@contextlib.contextmanager
def stopping_at_interrupt(stop: asyncio.Event) -> Generator[None]:
    """The first Ctrl-C (or SIGTERM) sets `stop`, so that the job saves; the second raises KeyboardInterrupt, even in an
    agent that blocks the event loop."""
    loop, times = asyncio.get_running_loop(), itertools.count(1)
    beside = _beside.get()

    def at_once() -> None:
        if next(times) > 1:
            for task in asyncio.all_tasks(loop):  # so that no agent that has not begun blocks the loop again
                task.cancel()
            raise KeyboardInterrupt

    def interrupted(number: signal.Signals) -> None:
        stop.set()
        loop.remove_signal_handler(number)

    if beside is not None:
        beside.stop = stop
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with handling_signals(interrupted, at_once):
        yield


@contextlib.contextmanager
def on_signal(
    first: Callable[[], object],
    then: Callable[[], object] | None = None,
    at_once: Callable[[], object] | None = None,
) -> Generator[None]:
    """Call `first` at the first SIGINT or SIGTERM, then `then` at the next, or the default. `at_once` is called before
    `first`, even while an agent blocks the event loop."""
    actions = iter((first,))

    def received(number: signal.Signals) -> None:
        action = next(actions, then)  # the handler stays: the next signal may come at this very moment
        if then is None:
            for each in _SIGNALS:
                asyncio.get_running_loop().remove_signal_handler(each)
        if action is not None:
            action()

    with handling_signals(received, at_once):
        yield
