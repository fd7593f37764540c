"""A queue that no session can crowd the others out of.

Knows sessions and items, and not what is waited for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Items of sessions take turns: round-robin by session, first come first served within one.

    `a1 a2 a3 b1 c1` come out as `a1 b1 c1 a2 a3`."""

    def __init__(self) -> None:
        self._sessions: dict[Hashable, deque[T]] = {}  # whose turn is next comes first; none is empty
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, session: Hashable, item: T) -> None:
        self._sessions.setdefault(session, deque()).append(item)
        self._size += 1

    def pop(self, suits: Callable[[T], bool] = lambda item: True) -> T | None:
        """Take out the next item that suits; None where there is none."""
        for session, items in self._sessions.items():
            for item in items:
                if suits(item):
                    self.remove(session, item)
                    if items:
                        self._sessions[session] = self._sessions.pop(session)  # its next turn comes last
                    return item
        return None

    def remove(self, session: Hashable, item: T) -> None:
        """Take out an item that no longer waits; nothing happens if it is out already."""
        items = self._sessions.get(session)
        if items is not None and item in items:
            items.remove(item)
            self._size -= 1
            if not items:
                del self._sessions[session]
