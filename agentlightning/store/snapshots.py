"""Rows read again and again, kept until a commit changes them.

The gateway asks for an attempt and its rollout at every call. This module knows which row may still be kept; it does
not know what is in it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final, TypeAlias

Row: TypeAlias = tuple[Any, ...]

_KEPT: Final = 4096
_LONGEST: Final = 32_768  # characters: the inputs of rollouts may be of any length, and memory is not


class Snapshots:
    """Up to 4096 rows by key, none of them long, as of the last commit that the event loop was told of. For one event
    loop."""

    def __init__(self) -> None:
        self._rows: dict[str, Row | object] = {}

    async def get(self, key: str, read: Callable[[], Awaitable[Row | None]]) -> Row | None:
        """The row that is kept, or else what `read` returns, which is kept unless it changed while it was read."""
        kept = self._rows.get(key)
        if isinstance(kept, tuple):
            return kept
        # `forget` removes the marker: a row that was read before a change is then not kept behind it.
        marker = self._rows[key] = object()
        row = await read()
        if self._rows.get(key) is marker:
            if row is None or sum(len(value) for value in row if isinstance(value, str)) > _LONGEST:
                del self._rows[key]
            else:
                self._rows[key] = row
        while len(self._rows) > _KEPT:
            del self._rows[next(iter(self._rows))]
        return row

    def forget(self, keys: Iterable[str]) -> None:
        """These rows have changed."""
        for key in keys:
            self._rows.pop(key, None)

    def forget_all(self) -> None:
        """Any row may have changed."""
        self._rows.clear()
