"""Pages of the rows that a filter finds, in an order that a cursor continues.

The order is total: after the requested columns come those that tell any two rows apart. A cursor
holds the sort keys of a page's last row, so that rows added or deleted meanwhile neither repeat nor
hide others. It is signed: only a cursor of the same query is accepted."""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from agentlightning.errors import InvalidError
from agentlightning.store import tables
from agentlightning.store.codec import SpanColumns
from agentlightning.store.database import Dialect, Transaction, take_rows
from agentlightning.store.prompts import WholePrompts, repeated_counts
from agentlightning.store.query import ROLLOUTS, SPANS, Column, Fields, Query
from agentlightning.store.rollouts import MOST_BYTES, check_page
from agentlightning.types import Filter, Order, RolloutPage, SpanPage

_MOST_ORDERS: Final = 8


_SIGNATURE: Final = 16  # bytes


_ROLLOUT: Final = ", ".join(f"rollouts.{name}" for name in tables.ROLLOUTS.fields)


_SPAN: Final = ", ".join(
    [
        "attempts.rollout_id",
        "attempts.attempt_id",
        "spans.attempt",
        *(f"spans.{name}" for name in SpanColumns._fields),
    ]
)


_REPEATED: Final = 2 + len(SpanColumns._fields)  # its place among them


def page_rollouts(tx: Transaction, **asked: Any) -> RolloutPage:
    rows, total, next_cursor = _page(tx, ROLLOUTS, _ROLLOUT, **asked)
    return RolloutPage(
        items=tuple(map(tables.ROLLOUTS.noun, rows)), total=total, next_cursor=next_cursor
    )


def page_spans(tx: Transaction, **asked: Any) -> SpanPage:
    rows, total, next_cursor = _page(tx, SPANS, _SPAN, further=_repeated, **asked)
    prompts = WholePrompts.stored(tx.connection)
    items = tuple(prompts.span(row[0], row[1], row[2], SpanColumns._make(row[3:])) for row in rows)
    return SpanPage(items=items, total=total, next_cursor=next_cursor)


def _repeated(row: Sequence[Any]) -> int:
    """The part of its base that a row's span repeats."""
    counts = row[_REPEATED]
    return sum(repeated_counts(counts).values()) if counts else 0


def _page(
    tx: Transaction,
    of: Fields,
    columns: str,
    where: Filter | None,
    order: Sequence[Order],
    limit: int | None,
    offset: int,
    cursor: str | None,
    with_total: bool,
    further: Callable[[Any], int] = lambda row: 0,
) -> tuple[list[Any], int | None, str | None]:
    """These columns of a page's rows, the count of all matches if requested, and the cursor of the
    next page. A row counts as `further` bytes. InvalidError names a wrong field or order."""
    check_page(limit, offset)
    matching = Query(where, of, tx.connection)
    total = matching.count() if with_total else None
    keys = _keys(order, of, tx.connection.dialect)
    query = msgspec.json.encode((of.tables, where, order))
    rest, parameters = (
        ("", []) if cursor is None else _after(keys, _keys_of(query, cursor, tx.secret))
    )
    names = [f"key_{index}" for index in range(1, len(keys) + 1)]
    by = ", ".join(
        f"{name} DESC" if key.descending else name for key, name in zip(keys, names, strict=True)
    )
    selected = ", ".join(
        (columns, *(f"{key.sql} AS {name}" for key, name in zip(keys, names, strict=True)))
    )
    most = None if limit is None else limit + 1
    found = matching.rows(selected, f"{rest} ORDER BY {by}", parameters, skip=offset, most=most)
    taken, whole = take_rows(found, MOST_BYTES, further)
    rows = [row[: -len(keys)] for row in taken[:limit]]
    if not rows or (whole and len(taken) == len(rows)):
        return rows, total, None
    return rows, total, _cursor(query, taken[len(rows) - 1][-len(keys) :], tx.secret)


class _Key(NamedTuple):
    sql: str
    descending: bool


def _keys(orders: Sequence[Order], of: Fields, dialect: Dialect) -> list[_Key]:
    if len(orders) > _MOST_ORDERS:
        raise InvalidError(f"{len(orders)} sort keys are too many; give at most {_MOST_ORDERS}")
    keys: list[_Key] = []
    for order in orders:
        if of.kind(order.field) not in ("text", "number", "boolean"):
            sortable = ", ".join(
                name for name, column in of.columns.items() if column.kind != "json"
            )
            raise InvalidError(f"rows cannot be sorted by {order.field}; sort by one of {sortable}")
        column = of.columns[order.field]
        if column.nullable:
            keys.append(
                _Key(f"(CASE WHEN {column.sql} IS NULL THEN 1 ELSE 0 END)", order.nulls == "first")
            )
        keys.append(_key(column, order.descending, dialect))
    return [*keys, *(_key(column, False, dialect) for column in of.unique)]


def _key(column: Column, descending: bool, dialect: Dialect) -> _Key:
    by_code_point = column.kind == "text" and dialect == "postgres"
    return _Key(f'({column.sql} COLLATE "C")' if by_code_point else column.sql, descending)


def _after(keys: Sequence[_Key], values: Sequence[Any]) -> tuple[str, list[Any]]:
    """The condition that a row comes after these sort keys, and its parameters."""
    # From the last key to the first, each around the ones after it: ((c > 3 AND b = 2 OR b > 2) AND
    # a = 1 OR a > 1). The inner one stands first because SQLite's parser has little room for what
    # is still open.
    following = "FALSE"
    parameters = list[Any]()
    for (sql, descending), value in zip(reversed(keys), reversed(values), strict=True):
        if value is None:  # a null comes among nulls only, by the keys after it
            following = f"({following} AND {sql} IS NULL)"
        else:
            following = f"({following} AND {sql} = ? OR {sql} {'<' if descending else '>'} ?)"
            parameters += (value, value)
    # follows from the rest, but is what lets an index on the first key begin there
    if values[0] is not None:
        following = f"{following} AND {keys[0].sql} {'<=' if keys[0].descending else '>='} ?"
        parameters.append(values[0])
    return f" AND {following}", parameters


def _cursor(query: bytes, keys: Sequence[Any], secret: bytes) -> str:
    """The cursor of a row with these sort keys, safe in a URL."""
    packed = msgspec.json.encode(list(keys))
    return base64.urlsafe_b64encode(_signature(query, packed, secret) + packed).decode().rstrip("=")


def _keys_of(query: bytes, cursor: str, secret: bytes) -> list[Any]:
    """The sort keys of a cursor. InvalidError if it is damaged or of another query."""
    try:
        given = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4))
    except ValueError:
        given = b""
    packed = given[_SIGNATURE:]
    if not hmac.compare_digest(given[:_SIGNATURE], _signature(query, packed, secret)):
        raise InvalidError(
            "the cursor is damaged, or of a query with another filter or order; give back the "
            "`next_cursor` of a page as it was, or begin again without a cursor"
        )
    return msgspec.json.decode(packed)


def _signature(query: bytes, packed: bytes, secret: bytes) -> bytes:
    return hashlib.blake2b(query + packed, key=secret[:64], digest_size=_SIGNATURE).digest()
