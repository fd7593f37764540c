"""A transaction on the database, and its changes that callers may be waiting for."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from agentlightning.store.database import Connection


class Changes(msgspec.Struct):
    """Changes that callers may be waiting for."""

    queued: int = 0  # rollouts
    finished: list[str] = []  # rollout ids
    groups: list[str] = []  # groups of which a member finished
    runs_with_groups: list[str] = []  # runs of which a group became complete
    touched: list[str] = []  # rollout ids that look different now
    spans: list[str] = []  # rollout ids that got spans
    removed: list[str] = []  # rollout ids that are no longer stored
    runs: list[str] = []  # runs that began, ended or measured something
    keys: bool = False  # a key was revoked
    deadline: float = math.inf  # the earliest clock that was set

    def set_deadline(self, when: float) -> None:
        self.deadline = min(self.deadline, when)

    def clear(self) -> None:
        """Forget the changes of a transaction that failed."""
        for name, value in msgspec.structs.asdict(Changes()).items():
            setattr(self, name, value)

    @classmethod
    def merged(cls, several: Iterable[Changes]) -> Changes:
        whole = cls()
        for changes in several:
            whole.queued += changes.queued
            for name in ("finished", "groups", "runs_with_groups", "touched", "spans", "removed", "runs"):
                getattr(whole, name).extend(getattr(changes, name))
            whole.keys = whole.keys or changes.keys
            whole.set_deadline(changes.deadline)
        return whole


@dataclass
class Transaction:
    """A transaction on the database at the time `now`."""

    connection: Connection
    now: float
    lease_seconds: float
    secret: bytes
    changes: Changes = field(default_factory=Changes)
