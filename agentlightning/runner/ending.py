"""The end of a process that runs agents: it waits for no agent that swallows its cancellation, blocks the event loop or
its thread, and somebody says so where an agent ends the process itself.

Knows event loops, threads and signals; it does not know what runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NoReturn, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

LEFT_SECONDS: Final = 2.0  # for tasks that still run when all work is done
INTERRUPTED: Final = 130  # exit code
_DIED: Final = (
    "agl has ended without a word: an agent in its process called os._exit or crashed it, or it was killed (out of "
    "memory, SIGKILL). With --isolation process an agent ends only its own process"
)


def run_to_end(work: Coroutine[Any, Any, T], loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None) -> T:
    """`asyncio.run`, but that tasks which go on when the work is done, and threads of `asyncio.to_thread`, are left."""
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        try:
            return runner.run(work)
        finally:
            runner.run(_leave())


async def _leave() -> None:
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    deaf = (await asyncio.wait(left, timeout=LEFT_SECONDS))[1] if left else set[asyncio.Task[Any]]()
    for task in deaf:
        logger.warning("%r goes on after it was cancelled and is left behind", task.get_name())
        asyncio.tasks._unregister_task(task)  # pyright: ignore
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))  # the loop waits for the one it has


def exit_with(code: int) -> NoReturn:
    """End the process; after an interrupt also where an agent's thread goes on."""
    if code == INTERRUPTED and any(
        not one.daemon for one in threading.enumerate() if one is not threading.main_thread()
    ):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


@contextlib.contextmanager
def watched() -> Generator[Callable[[float], None]]:
    """Within the block somebody says so if this process ends unasked. The function given ends it after so many seconds,
    whatever runs then."""
    read, write = os.pipe()
    script = 'read -r said || printf "%s\\n" "$1" >&2'  # the end of this process closes the pipe
    with open(read) as ours:
        watcher = subprocess.Popen(("sh", "-c", script, "sh", _DIED), stdin=ours, start_new_session=True)

    def end() -> None:
        os.write(write, b"ended\n")
        os.write(2, b"an agent does not let the process end: it ends without it\n")
        os._exit(INTERRUPTED)

    def end_after(seconds: float) -> None:
        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()
        timers.append(timer)

    timers: list[threading.Timer] = []
    try:
        yield end_after
    finally:
        for timer in timers:
            timer.cancel()
        os.write(write, b"ended\n")
        os.close(write)
        watcher.wait()
