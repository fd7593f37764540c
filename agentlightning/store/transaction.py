"""One operation's view of the database, and what it changed that somebody may be waiting for."""

from __future__ import annotations

import math
import sqlite3
from dataclasses import dataclass, field


@dataclass
class Changes:
    """What one operation changed that somebody may be waiting for."""

    queued: bool = False
    finished: list[str] = field(default_factory=list[str])  # rollout ids
    runs_with_groups: list[str] = field(default_factory=list[str])  # runs of which a group became complete
    touched: list[str] = field(default_factory=list[str])  # rollout ids that look different now
    deadline: float = math.inf  # the earliest clock that was set


@dataclass
class Transaction:
    """One operation's view of the database; `now` is the time it happens at."""

    connection: sqlite3.Connection
    now: float
    lease_seconds: float
    changes: Changes
