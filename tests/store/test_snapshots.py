"""Which rows are read once, and which again."""

from __future__ import annotations

import pytest

from agentlightning.store.snapshots import Row, Snapshots

pytestmark = pytest.mark.anyio


class Table:
    """Counts how often its one row is read."""

    def __init__(self, row: Row | None) -> None:
        self.row = row
        self.reads = 0

    async def read(self) -> Row | None:
        self.reads += 1
        return self.row


async def test_a_row_is_read_once_until_it_changes():
    table, snapshots = Table(("r", "an input", 1.0)), Snapshots()
    assert [await snapshots.get("r", table.read) for _ in range(3)] == [table.row] * 3
    assert table.reads == 1
    snapshots.forget(["r"])
    await snapshots.get("r", table.read)
    assert table.reads == 2


@pytest.mark.parametrize("row", [None, ("r", "x" * 100_000, 1.0)], ids=["none", "long"])
async def test_what_is_not_there_or_would_fill_the_memory_is_not_kept(row: Row | None):
    table, snapshots = Table(row), Snapshots()
    assert [await snapshots.get("r", table.read) for _ in range(3)] == [row] * 3
    assert table.reads == 3


async def test_a_row_that_changes_while_it_is_read_is_not_kept():
    table, snapshots = Table(("r", "old", 1.0)), Snapshots()

    async def read_while_it_changes() -> Row | None:
        row = await table.read()
        snapshots.forget(["r"])
        return row

    await snapshots.get("r", read_while_it_changes)
    table.row = ("r", "new", 1.0)
    assert await snapshots.get("r", table.read) == table.row
