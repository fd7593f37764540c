"""Agents whose grader sets an alarm, which only the main thread may."""

from __future__ import annotations

import signal
from typing import Any


def grade() -> float:
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.alarm(30)
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
    return 1.0


def strict(task: Any) -> float:
    return grade()


def swallows(task: Any) -> float:
    try:
        return grade()
    except Exception:  # noqa: BLE001 - as graders do
        return 0.0


async def in_loop(task: Any) -> float:
    return grade()
