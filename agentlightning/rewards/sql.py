"""Two SQL queries compared by what they return from a SQLite database: execution accuracy, as in Spider.

Names of columns do not matter, their order does unless `any_column_order` says otherwise. Rows are compared as a
multiset, or in order where the right query ends in an ORDER BY of its own (one inside parentheses does not count).
Whole numbers equal decimals, and decimals are compared to ten significant digits. The predicted query comes from a
model and is not trusted: it can only read this one database, for a limited time, with limited memory.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from agentlightning.errors import ConfigError, InvalidError

if TYPE_CHECKING:
    import sqlite3

Row = tuple[Any, ...]

CHECK_EVERY = 1000  # steps of SQLite's virtual machine between two looks at the clock
MAX_VALUE_BYTES = 10_000_000
MAX_RESULT_BYTES = 100_000_000
MAX_PATTERN = 200  # characters of a LIKE pattern, whose matching cannot be interrupted
_QUOTED = re.compile(r"'(?:[^']|'')*'|\"[^\"]*\"|`[^`]*`|\[[^\]]*\]|--[^\n]*|/\*.*?\*/", re.DOTALL)
_PARENTHESES = re.compile(r"\([^()]*\)")


def sql_result_equal(
    prediction_sql: str,
    gold_sql: str,
    database: str | Path,
    *,
    timeout: float = 5.0,
    row_limit: int = 100_000,
    any_column_order: bool = False,
) -> float:
    """1.0 where both queries return the same rows of the SQLite file `database`, else 0.0. `any_column_order` is what
    Spider's test suites allow: the columns of the predicted query may be in any one order.

    A predicted query that is malformed, writes, takes longer than `timeout` seconds or returns more than `row_limit`
    rows or 100 MB is worth 0.0. The same of the right query is an InvalidError; a missing database is a ConfigError."""
    path = Path(database)
    if not path.is_file():
        raise ConfigError(f"no database {path}; give the path of a SQLite file")
    right = _rows(gold_sql, path, timeout, row_limit)
    if isinstance(right, str):
        raise InvalidError(f"the right query fails on {path}: {right}. Correct the task: {gold_sql!r:.500}")
    given = _rows(prediction_sql, path, timeout, row_limit)
    if isinstance(given, str):
        return 0.0
    ordered = has_order(gold_sql)
    if any_column_order and given and right:
        return float(len(given[0]) == len(right[0]) and _same_somehow(_turned(given), _turned(right), ordered))
    return float(_same(given, right, ordered))


def _same(given: Sequence[Row], right: Sequence[Row], ordered: bool) -> bool:
    return given == right if ordered else Counter(given) == Counter(right)


def _same_somehow(given: Sequence[Row], right: Sequence[Row], ordered: bool, chosen: tuple[int, ...] = ()) -> bool:
    """Whether some order of the columns `given` that begins with those `chosen` makes their rows those of `right`.

    Each column is only tried where it goes together with those before it, which leaves few orders to try."""
    if len(chosen) == len(right):
        return True
    wanted = _turned(right[: len(chosen) + 1])
    return any(
        _same(_turned([given[index] for index in (*chosen, tried)]), wanted, ordered)
        and _same_somehow(given, right, ordered, (*chosen, tried))
        for tried in range(len(given))
        if tried not in chosen
    )


def _turned(table: Sequence[Row]) -> list[Row]:
    """Its columns, if these are its rows."""
    return list(zip(*table, strict=True))


def has_order(sql: str) -> bool:
    """Whether the rows of `sql` come in an order that it asks for, outside all parentheses, quotes and comments."""
    bare, previous = _QUOTED.sub(" ", sql), None
    while bare != previous:
        bare, previous = _PARENTHESES.sub(" ", bare), bare
    return re.search(r"\border\s+by\b", bare, re.IGNORECASE) is not None


def _rows(sql: str, database: Path, timeout: float, row_limit: int) -> list[Row] | str:
    """What `sql` returns, or why it returns nothing that could be compared."""
    import sqlite3  # here, so that agents that need no SQL do not load it

    connection = sqlite3.connect(f"file:{quote(str(database.resolve()))}?mode=ro", uri=True)
    try:
        _confine(connection, sqlite3, timeout)
        cursor = connection.execute(sql)
        rows, size = list[Row](), 0
        for row in cursor:
            rows.append(row)
            size += sum(len(value) for value in row if isinstance(value, str | bytes))
            if len(rows) > row_limit or size > MAX_RESULT_BYTES:
                return f"it returns more than {row_limit} rows or {MAX_RESULT_BYTES} bytes"
    except (sqlite3.Error, sqlite3.Warning, ValueError, MemoryError) as error:
        return str(error) or type(error).__name__
    finally:
        connection.close()
    if cursor.description is None:
        return "it is no query"
    return [tuple(map(_comparable, row)) for row in rows]


def _confine(connection: sqlite3.Connection, sqlite3: Any, timeout: float) -> None:
    """Reading only, of this database only, until the time is up."""
    allowed = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE)
    deadline = time.monotonic() + timeout
    connection.set_progress_handler(lambda: time.monotonic() > deadline, CHECK_EVERY)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, MAX_PATTERN)
    connection.set_authorizer(
        lambda action, *_: sqlite3.SQLITE_OK if action in allowed else sqlite3.SQLITE_DENY  # pyright: ignore
    )
    connection.text_factory = _decoded


def _decoded(raw: bytes) -> str:
    return raw.decode(errors="replace")


def _comparable(value: Any) -> Any:
    return float(f"{value:.10g}") if isinstance(value, float) else value
