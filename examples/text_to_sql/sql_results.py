"""Two SQL queries compared by what they return from a SQLite database: execution accuracy, as in
Spider.

Names of columns do not matter, their order does unless `any_column_order` says otherwise. Rows are
compared as a multiset, or in order where the right query ends in an ORDER BY of its own (one inside
parentheses does not count). Whole numbers equal decimals, and decimals are compared to ten
significant digits. The predicted query comes from a model and is not trusted: it can only read this
one database, for a limited time, with limited memory."""

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
Column = tuple[Any, ...]

CHECK_EVERY = 100  # steps of SQLite's virtual machine between two looks at the clock
# A step is not interrupted, and instr, replace, trim and LIKE take the product of two lengths.
MAX_VALUE_BYTES = 100_000
MAX_PATTERN = 200  # characters, of LIKE
MAX_QUERY = 1000  # characters
# They pad for as long as they are told to, or show an address of the process.
DENIED = ("printf", "format", "fts3_tokenizer")
MAX_RESULT_BYTES = 100_000_000
MEMORY_OF_VALUE = 32  # bytes, besides those of a text
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
    """1.0 where both queries return the same rows of the SQLite file `database`, else 0.0.
    `any_column_order` is what Spider's test suites allow: the columns of the predicted query may be
    in any one order.

    A predicted query that is malformed, writes, takes longer than `timeout` seconds, returns more
    than `row_limit` rows or 100 MB, or has to do with a value of more than 100,000 bytes is worth
    0.0. The same of the right query is an InvalidError; a missing database is a ConfigError."""
    path = Path(database)
    if not path.is_file():
        raise ConfigError(f"no database {path}; give the path of a SQLite file")
    right = _rows(gold_sql, path, timeout, row_limit)
    if isinstance(right, str):
        raise InvalidError(
            f"the right query fails on {path}: {right}. Correct the task: {gold_sql!r:.500}"
        )
    given = _rows(prediction_sql, path, timeout, row_limit)
    if isinstance(given, str):
        return 0.0
    ordered = has_order(gold_sql)
    if any_column_order and given and right:
        return float(
            _same_somehow(list(zip(*given, strict=True)), list(zip(*right, strict=True)), ordered)
        )
    return float(given == right if ordered else Counter(given) == Counter(right))


def _same_somehow(given: Sequence[Column], right: Sequence[Column], ordered: bool) -> bool:
    """Whether some order of the columns `given` makes their rows those of `right`."""
    if ordered:
        return Counter(given) == Counter(right)
    return Counter(map(_values, given)) == Counter(map(_values, right)) and _fit([], given, right)


def _values(column: Column) -> frozenset[tuple[Any, int]]:
    """What is in a column, how often, in whatever order."""
    return frozenset(Counter(column).items())


def _fit(chosen: list[Column], others: Sequence[Column], right: Sequence[Column]) -> bool:
    """Whether the rows of `right` are those of the columns `chosen` and, after them, of `others` in
    some order.

    A column is tried only where it goes together with those chosen, and of equal ones only the
    first."""
    if not others:
        return True
    wanted = Counter(zip(*right[: len(chosen) + 1], strict=True))
    tried: set[Column] = set()
    for index, column in enumerate(others):
        if column not in tried and Counter(zip(*chosen, column, strict=True)) == wanted:
            if _fit([*chosen, column], [*others[:index], *others[index + 1 :]], right):
                return True
            tried.add(column)
    return False


def has_order(sql: str) -> bool:
    """Whether the rows of `sql` come in an order that it asks for, outside all parentheses, quotes
    and comments."""
    bare, previous = _QUOTED.sub(" ", sql), None
    while bare != previous:
        bare, previous = _PARENTHESES.sub(" ", bare), bare
    return re.search(r"\border\s+by\b", bare, re.IGNORECASE) is not None


def _rows(sql: str, database: Path, timeout: float, row_limit: int) -> list[Row] | str:
    """What `sql` returns, or why it returns nothing that could be compared."""
    import sqlite3  # here, so that agents that need no SQL do not load it

    uri = f"file:{quote(str(database.resolve()))}?mode=ro"
    connection = sqlite3.connect(uri, uri=True, timeout=timeout)
    try:
        _confine(connection, sqlite3, timeout)
        cursor = connection.execute(sql)
        rows, size = list[Row](), 0
        for row in cursor:
            rows.append(row)
            size += sum(
                MEMORY_OF_VALUE + (len(value) if isinstance(value, str | bytes) else 0)
                for value in row
            )
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
    allowed = (
        sqlite3.SQLITE_SELECT,
        sqlite3.SQLITE_READ,
        sqlite3.SQLITE_FUNCTION,
        sqlite3.SQLITE_RECURSIVE,
    )
    deadline = time.monotonic() + timeout
    connection.set_progress_handler(lambda: time.monotonic() > deadline, CHECK_EVERY)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, MAX_PATTERN)
    connection.setlimit(sqlite3.SQLITE_LIMIT_SQL_LENGTH, MAX_QUERY)

    def authorized(action: int, _: str | None, function: str | None, *__: str | None) -> int:
        denied = action not in allowed or function in DENIED
        return sqlite3.SQLITE_DENY if denied else sqlite3.SQLITE_OK

    connection.set_authorizer(authorized)
    connection.text_factory = _decoded


def _decoded(raw: bytes) -> str:
    return raw.decode(errors="replace")


def _comparable(value: Any) -> Any:
    return float(f"{value:.10g}") if isinstance(value, float) and not value.is_integer() else value
