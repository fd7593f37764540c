"""An agent that answers, and in every fourth task then does to its process what the environment
names (`DEED`)."""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import decimal
import gc
import io
import locale
import logging
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

import numpy
import torch

import agentlightning as agl
from tests.agents import ask


def enter_workspace() -> None:
    os.chdir(tempfile.mkdtemp())


def enter_deleted_workspace() -> None:
    enter_workspace()
    shutil.rmtree(os.getcwd())


def drop_streams() -> None:
    sys.stdout = sys.stderr = None  # type: ignore[assignment]


def close_streams() -> None:
    sys.stdout.close()
    sys.stderr.close()


def clear_environment() -> None:
    os.environ.clear()
    os.environ["TMPDIR"] = "/nowhere"


def set_locale() -> None:
    locale.setlocale(locale.LC_ALL, "C")


def warnings_as_errors() -> None:
    warnings.simplefilter("error")


def silence_logging() -> None:
    logging.getLogger().handlers[:] = [logging.StreamHandler()]
    logging.disable(logging.CRITICAL)


def seed_random() -> None:
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


def set_decimal() -> None:
    decimal.DefaultContext.prec = 1
    decimal.setcontext(decimal.Context(prec=1, traps=[decimal.Inexact]))


def set_loop_policy() -> None:
    asyncio.set_event_loop_policy(asyncio.DefaultEventLoopPolicy())
    asyncio.set_event_loop(None)


def limit_recursion() -> None:
    sys.setrecursionlimit(150)


def use_up_threads() -> None:
    for _ in range(20):
        asyncio.get_running_loop().run_in_executor(None, time.sleep, 600)


def disable_gc() -> None:
    gc.disable()


def leave_thread() -> None:
    threading.Thread(target=time.sleep, args=(600,), name="left behind").start()


def end_process() -> NoReturn:
    os._exit(0)


def raise_interrupt() -> NoReturn:
    raise KeyboardInterrupt


def interrupt_itself() -> NoReturn:
    """As graders end late code."""
    threading.Timer(0.05, _thread.interrupt_main).start()
    while True:
        pass


def interrupt_others() -> None:
    threading.Timer(0.05, _thread.interrupt_main).start()


async def exits() -> None:
    sys.exit(0)


async def exit_in_task() -> None:
    await asyncio.create_task(exits())


def stop_loop() -> None:
    asyncio.get_running_loop().stop()


def cancel_all_tasks() -> None:
    for task in asyncio.all_tasks():
        task.cancel()


def close_descriptors() -> None:
    os.closerange(3, 256)


def set_umask() -> None:
    os.umask(0o777)


def handle_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.signal(signal.SIGINT, signal.SIG_IGN))


def ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def replace_executor() -> None:
    threads = ThreadPoolExecutor(1)
    threads.submit(time.sleep, 600)
    asyncio.get_running_loop().set_default_executor(threads)


def limit_descriptors() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (8, 8))


async def agent(task: dict, llm: agl.LLM) -> float:
    deed = globals()[_DEED]
    answer = await ask(task, llm)
    if task["index"] % 4:
        pass
    elif deed is redirect_streams:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            await asyncio.sleep(0.2 * random.random())
    elif (waiting := deed()) is not None:
        await waiting
    return sum(letter in "aeiou" for letter in answer) / max(1, len(answer))


def redirect_streams() -> None:
    """Side by side, in `agent`."""


_DEED = os.environ["DEED"]  # which a deed may clear
