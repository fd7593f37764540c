"""Ends a process that runs agents: signals, and agents that swallow their cancellation, block the
event loop or their thread, or end the process themselves.

Ctrl-C is told from an agent's KeyboardInterrupt by its origin: only a handler here raises
`Interrupted`, and only for a signal that came to the process. `_thread.interrupt_main`, by which
graders end late code, sends none."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import faulthandler
import itertools
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from typing import Any, Final, NoReturn, Self, TypeVar

from agentlightning.errors import AgentLightningError
from agentlightning.runner.shared import process_state_restored
from agentlightning.tracing.context import current_binding

logger = logging.getLogger(__name__)

T = TypeVar("T")

LEFT_SECONDS: Final = 2.0  # for tasks that still run when all work is done
THREADS_SECONDS: Final = 5.0  # for threads that still run when the process is about to end
INTERRUPTED: Final = 130  # exit code
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
_AGENTS_THREADS: Final = 1024
_end_process: Final = os._exit


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, by a signal that came to this process."""


class AgentEndedRunError(AgentLightningError):
    """An agent ended what is not its own."""


class _Threads(ThreadPoolExecutor):
    """The threads of `asyncio.to_thread`. Agents have others than we do, so that those that block
    keep nothing of ours waiting."""

    def __init__(self) -> None:
        super().__init__()
        self._agents = ThreadPoolExecutor(_AGENTS_THREADS)

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        if current_binding() is None:
            return super().submit(fn, *args, **kwargs)
        return self._agents.submit(fn, *args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait, cancel_futures=cancel_futures)
        self._agents.shutdown(wait, cancel_futures=cancel_futures)


def run_to_end(
    work: Coroutine[Any, Any, T],
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> T:
    """Like `asyncio.run`, but abandons tasks and threads of `asyncio.to_thread` that go on when the
    work is done, and goes on if a task of an agent raises KeyboardInterrupt or SystemExit, or stops
    the event loop.

    AgentEndedRunError if an agent has cancelled all tasks."""
    threads = _Threads()
    signals_before = _Handler.signals_seen
    with process_state_restored(), asyncio.Runner(loop_factory=loop_factory) as runner:
        loop = runner.get_loop()
        loop.set_default_executor(threads)
        task = loop.create_task(work)
        try:
            while True:
                try:
                    return runner.run(_result_of(task))
                except (KeyboardInterrupt, SystemExit, RuntimeError) as error:
                    of_loop = str(error).startswith("Event loop stopped")
                    ours = isinstance(error, RuntimeError) and not of_loop
                    if task.done() or is_interrupt(error) or ours:
                        raise
                    logger.warning("an agent ended the event loop (%r), which goes on", error)
        except asyncio.CancelledError:
            if _Handler.signals_seen > signals_before:
                raise
            raise AgentEndedRunError(
                "all tasks of this process were cancelled, as an agent does that cancels "
                "asyncio.all_tasks(). isolation='process' gives it an event loop of its own"
            ) from None
        finally:
            runner.run(_abandon_tasks())
            threads.shutdown(wait=False)


async def _result_of(task: asyncio.Task[T]) -> T:
    return await task


def is_interrupt(error: BaseException) -> bool:
    """Whether it is Ctrl-C: raised by our handler or, where that is not installed, by any."""
    if isinstance(error, Interrupted):
        return True
    ours = isinstance(signal.getsignal(signal.SIGINT), _Handler)
    return isinstance(error, KeyboardInterrupt) and not ours and _in_main_thread()


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


class _Handler:
    """Calls `received` for each SIGINT and SIGTERM that comes to this process, between two steps of
    the main thread.

    `_thread.interrupt_main` calls Python's handler alone: that raises KeyboardInterrupt in an agent
    which the main thread runs, and does nothing elsewhere. The handler of `faulthandler`, in C,
    writes to a pipe for signals only."""

    signals_seen = 0

    def __init__(self, received: Callable[[signal.Signals], object]) -> None:
        self.is_open = True
        self._received = received
        self._pipe = list(os.pipe())
        self._before = {number: signal.getsignal(number) for number in _SIGNALS}

    def __enter__(self) -> Self:
        for end in self._pipe:
            os.set_blocking(end, False)
        for number in _SIGNALS:
            signal.signal(number, self)
        self.listen()
        return self

    def listen(self) -> None:
        """Have signals written to the pipe. Who replaces this handler and puts it back, as web
        servers do, has taken that of `faulthandler` away."""
        for number in _SIGNALS:
            if signal.getsignal(number) is self:
                faulthandler.unregister(number)
                faulthandler.register(number, self._pipe[1], all_threads=False, chain=True)

    def __exit__(self, *_: object) -> None:
        self.is_open = False
        self._give_back()
        listen_again()
        while self._pipe:
            with contextlib.suppress(OSError):  # closed by an agent
                os.close(self._pipe.pop())

    def _give_back(self) -> None:
        """Put the handlers from before in place of this one. One that has ended since, as they do
        in any order, or that a web server puts back later, is passed over."""
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            while isinstance(handler, _Handler) and not handler.is_open:
                faulthandler.unregister(number)
                handler = handler._before[number]
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def __call__(self, number: int, frame: object) -> None:
        if not self.is_open:
            self._pass_on(signal.Signals(number))
            return
        if self._has_signal():
            _Handler.signals_seen += 1
            self._received(signal.Signals(number))
            return
        self.listen()  # the next comes, if this was a signal
        if current_binding() is not None:
            raise KeyboardInterrupt
        logger.warning(
            "an agent called _thread.interrupt_main, which reaches no agent outside the main "
            "thread, or has replaced the handler of Ctrl-C. isolation='process' gives it the main "
            "thread"
        )

    def _pass_on(self, number: signal.Signals) -> None:
        """Have the handler from before, or the default, handle it."""
        before = self._before[number]
        if callable(before):
            before(number, None)
        elif before != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def _has_signal(self) -> bool:
        try:
            return bool(os.read(self._pipe[0], 2**16))
        except BlockingIOError:
            return False
        except OSError:  # closed by an agent
            return True


def listen_again() -> None:
    """Listen to signals as before an agent that may have replaced their handler for a while."""
    handler = signal.getsignal(signal.SIGINT)
    if isinstance(handler, _Handler) and handler.is_open:
        handler.listen()


class _LoopThread:
    """An event loop in a thread of its own, for which another thread waits and receives Ctrl-C."""

    def __init__(self) -> None:
        self.stop: asyncio.Event | None = None  # of a job that can save what it has
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        self._times = 0

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        return await work

    def interrupt(self) -> None:
        """The first Ctrl-C stops the job, the second cancels it; KeyboardInterrupt at the third, if
        an agent blocks the loop."""
        self._times += 1
        if self._times > 2 or self._loop is None or self._task is None:
            raise KeyboardInterrupt
        stop = self.stop if self._times == 1 else None
        self._loop.call_soon_threadsafe(self._task.cancel if stop is None else stop.set)


_loop_thread: Final[ContextVar[_LoopThread | None]] = ContextVar(
    "agentlightning_beside", default=None
)


def run_in_loop_thread(
    work: Coroutine[Any, Any, T],
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> T:
    """`run_to_end` in a thread of its own, for a caller in whose thread an event loop runs, as in a
    notebook.

    Blocks like `run_to_end`, and Ctrl-C (the notebook's stop button) does what it does there."""
    loop_thread = _LoopThread()
    answer = Future[T]()
    context = copy_context()
    context.run(_loop_thread.set, loop_thread)

    def run() -> None:
        try:
            answer.set_result(context.run(run_to_end, loop_thread.run(work), loop_factory))
        except asyncio.CancelledError:
            answer.set_exception(KeyboardInterrupt())
        except BaseException as error:  # noqa: BLE001 - carried over to the thread that waits
            answer.set_exception(error)

    threading.Thread(target=run, name="agentlightning-loop", daemon=True).start()
    with interrupted_at_once():
        while True:
            try:
                return answer.result()
            except KeyboardInterrupt:
                if answer.done():
                    raise
                loop_thread.interrupt()


async def _abandon_tasks() -> None:
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    deaf = (await asyncio.wait(left, timeout=LEFT_SECONDS))[1] if left else set[asyncio.Task[Any]]()
    for task in deaf:
        logger.warning("%r does not stop after it was cancelled and is abandoned", task.get_name())
        asyncio.tasks._unregister_task(task)  # pyright: ignore
        task._log_destroy_pending = False  # pyright: ignore
    # the loop waits for the one it has
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))


def exit_with(code: int) -> NoReturn:
    """End the process, even if a thread that an agent has left goes on; after an interrupt at once.
    Another Ctrl-C then does not wait either: unloading libraries takes seconds."""
    if code == INTERRUPTED:
        signal.signal(signal.SIGINT, lambda number, frame: _end_process(INTERRUPTED))
        if _threads_left():
            _end_now(code)
    threading.Thread(target=_end_if_threads_remain, args=(code,), daemon=True).start()
    sys.exit(code)


def _end_if_threads_remain(code: int) -> None:
    """End the process if a thread keeps it alive; what it does to end itself goes on."""
    time.sleep(THREADS_SECONDS)
    if left := _threads_left():
        names = ", ".join(repr(thread.name) for thread in left[:5])
        _write_to_stderr(f"{len(left)} threads of agents still run and are abandoned: {names}")
        atexit._run_exitfuncs()  # pyright: ignore
        _end_now(code)


def _threads_left() -> list[threading.Thread]:
    return [
        thread
        for thread in threading.enumerate()
        if not thread.daemon and thread is not threading.main_thread()
    ]


def _write_to_stderr(words: str) -> None:
    with contextlib.suppress(OSError):  # closed by an agent
        os.write(2, f"{words}\n".encode())


def _end_now(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # an agent may have put anything there
            stream.flush()
    _end_process(code)


@contextlib.contextmanager
def exits_refused() -> Generator[None]:
    """In the block, `os._exit` ends the agent that calls it, or the thread, and not this process
    with its exit code. Processes that are forked end as ever."""
    process = os.getpid()

    def refuse(status: int) -> NoReturn:
        if os.getpid() != process:
            _end_process(status)
        logger.warning(
            "an agent called os._exit(%r), which would have ended all; only the agent ends", status
        )
        raise SystemExit(status)

    before = os._exit
    os._exit = refuse
    try:
        yield
    finally:
        os._exit = before


def end_after(seconds: float) -> None:
    """End the process after so many seconds, whatever is running."""

    def end() -> None:
        _write_to_stderr("an agent does not let the process end: it ends without it")
        _end_process(INTERRUPTED)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


@contextlib.contextmanager
def interrupted_at_once() -> Generator[None]:
    """Ctrl-C raises `Interrupted` at once, where asyncio would wait for the event loop."""

    def interrupt(number: signal.Signals) -> NoReturn:
        raise Interrupted

    with _Handler(interrupt) if _in_main_thread() else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def handling_signals(
    received: Callable[[signal.Signals], object], at_once: Callable[[], object] | None = None
) -> Generator[contextlib.AbstractContextManager[Any]]:
    """Call `received` in the event loop at each SIGINT and SIGTERM, and `at_once` even while an
    agent blocks it. To leave the yielded context is to handle no more."""
    loop = asyncio.get_running_loop()

    def come(number: signal.Signals) -> None:
        loop.call_soon_threadsafe(received, number)
        if at_once is not None:
            at_once()

    with _Handler(come) as handler:
        yield handler


@contextlib.contextmanager
def stopping_at_interrupt(stop: asyncio.Event) -> Generator[None]:
    """The first Ctrl-C (or SIGTERM) sets `stop`, so that the job saves; the second raises
    `Interrupted`, even in an agent that blocks the event loop."""
    loop = asyncio.get_running_loop()
    times = itertools.count(1)
    loop_thread = _loop_thread.get()

    def at_once() -> None:
        if next(times) > 1:
            # so that no agent that has not begun blocks the loop again
            for task in asyncio.all_tasks(loop):
                task.cancel()
            raise Interrupted

    if loop_thread is not None:
        loop_thread.stop = stop
    if not _in_main_thread():
        yield
        return
    with handling_signals(lambda number: stop.set(), at_once):
        yield


@contextlib.contextmanager
def on_signal(
    first: Callable[[], object],
    then: Callable[[], object] | None = None,
    at_once: Callable[[], object] | None = None,
) -> Generator[None]:
    """Call `first` at the first SIGINT or SIGTERM, then `then` at the next, or the default.
    `at_once` is called before `first`, even while an agent blocks the event loop."""
    actions = iter((first,))

    def received(number: signal.Signals) -> None:
        # the handler stays: the next signal may come at this very moment
        action = next(actions, then)
        if then is None:
            handler.__exit__(None, None, None)
        if action is not None:
            action()

    with handling_signals(received, at_once) as handler:
        yield
