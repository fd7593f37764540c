"""Pages of rollouts and of spans: filtered, sorted, counted, and gone on with from a cursor.

The order is total: after the sort keys asked for come those that tell any two rows apart. A cursor holds the sort keys
of the last row of a page, so that rows added or removed meanwhile neither repeat nor hide others. This module knows of
a filter only whether it has changed; it does not know threads or HTTP.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import msgspec

from agentlightning.errors import InvalidError
from agentlightning.store import calls, codec, fields, filters
from agentlightning.store.database import Dialect, take_rows
from agentlightning.store.fields import (
    Column,
    Fields,
    JsonPath,
    Kind,
    Sql,
    json_is_kind,
    json_source,
    json_value,
    place,
    put,
)
from agentlightning.store.rollouts import check_page
from agentlightning.store.spans import SPAN_COLUMNS
from agentlightning.store.tables import ROLLOUTS
from agentlightning.store.transaction import Transaction
from agentlightning.types import And, Condition, Filter, Order, RolloutPage, SpanPage

KeyType: TypeAlias = Literal["text", "integer", "real", "numeric"]

_ROLLOUT: Final = ", ".join(f"rollouts.{name}" for name in ROLLOUTS.fields)
_SPAN: Final = "attempts.rollout_id, attempts.attempt_id, " + ", ".join(f"spans.{n}" for n in SPAN_COLUMNS.split(", "))
_UNLIMITED: Final = 1 << 62  # where a database wants a number
_NONE: Final = Sql("FALSE", [])
_MOST_ORDERS: Final = 8
_DIGITS: Final = re.compile(r"-?[0-9]{1,400}(\.[0-9]{1,400})?([eE][-+]?[0-9]{1,3})?")
_cursor_decoder: Final = msgspec.json.Decoder(tuple[str, tuple[str | int | float | None, ...]])


def query_rollouts(tx: Transaction, call: calls.QueryRollouts) -> RolloutPage:
    rows, total, next_cursor = _page(tx, call, fields.ROLLOUTS, _ROLLOUT)
    return RolloutPage(items=tuple(map(ROLLOUTS.noun, rows)), total=total, next_cursor=next_cursor)


def query_spans(tx: Transaction, call: calls.QuerySpans) -> SpanPage:
    rows, total, next_cursor = _page(tx, call, fields.SPANS, _SPAN)
    width = 2 + len(SPAN_COLUMNS.split(", "))
    items = tuple(codec.span_from_columns(row[0], row[1], row[2:width]) for row in rows)
    return SpanPage(items=items, total=total, next_cursor=next_cursor)


def in_project(where: Filter | None, project: str | None) -> Filter | None:
    """The filter, within one project."""
    if project is None:
        return where
    own = Condition("project", "eq", project)
    return own if where is None else And([own, where])


def _page(
    tx: Transaction, call: calls.PageCall[Any], of: Fields, columns: str
) -> tuple[list[Any], int | None, str | None]:
    """Rows, the count of all that match where it is asked for, and the cursor of what comes after them."""
    check_page(call.limit, call.offset)
    dialect = tx.connection.dialect
    wanted = in_project(call.where, call.project)
    matching = filters.where(wanted, of, dialect)
    total = None
    if call.with_total:
        count = f"SELECT count(*) FROM {of.tables} WHERE {matching.text}"
        (total,) = tx.connection.execute(count, matching.parameters).fetchone()
    ordering = order(call.order, of, dialect)
    here = matching
    if call.cursor is not None:
        here = put("{} AND {}", matching, after(call.cursor, wanted, call.order, of, dialect))
    limit = _UNLIMITED if call.limit is None else call.limit + 1
    found = tx.connection.stream(
        f"SELECT {columns}, {ordering.columns} FROM {of.tables} WHERE {here.text} ORDER BY {ordering.by} "
        "LIMIT ? OFFSET ?",
        [*ordering.parameters, *here.parameters, limit, call.offset],
    )
    rows, whole = take_rows(found, math.inf if call.most_bytes is None else call.most_bytes)
    if whole and (call.limit is None or len(rows) <= call.limit):
        return rows, total, None
    rows = rows[: call.limit]
    next_cursor = None if not rows else encode_cursor(rows[-1][-ordering.width :], wanted, call.order, of)
    return rows, total, next_cursor


# --- sort orders -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Key:
    """One expression that rows are compared by. `numeric` is what PostgreSQL reads a JSON number as."""

    sql: Sql
    type: KeyType
    descending: bool = False


@dataclass(frozen=True)
class Ordering:
    """A total order of rows: append `columns` to what is selected, after the row's own columns, with `parameters`
    before those of the WHERE, and `by` to ORDER BY. The last `width` values of a row then make its cursor."""

    columns: str
    parameters: list[Any]
    by: str
    width: int


def order(orders: Sequence[Order], fields: Fields, dialect: Dialect) -> Ordering:
    """InvalidError names a field that does not exist or has no order, or that there are more than 8 keys."""
    keys = _keys(orders, fields, dialect)
    names = [f"key_{index}" for index in range(1, len(keys) + 1)]
    return Ordering(
        columns=", ".join(f"{key.sql.text} AS {name}" for key, name in zip(keys, names, strict=True)),
        parameters=[value for key in keys for value in key.sql.parameters],
        by=", ".join(f"{name} DESC" if key.descending else name for key, name in zip(keys, names, strict=True)),
        width=len(keys),
    )


def after(cursor: str, filter: Filter | None, orders: Sequence[Order], fields: Fields, dialect: Dialect) -> Sql:
    """The condition, beside that of the filter, that a row comes after the cursor's.

    InvalidError if the cursor is damaged, or was given out for another filter, other orders or other rows."""
    keys = _keys(orders, fields, dialect)
    values = decode_cursor(cursor, filter, orders, fields)
    if len(values) != len(keys) or not all(map(_fits, values, keys)):
        raise _damaged()
    # From the last key to the first, each around the ones after it: ((c > 3 AND b = 2 OR b > 2) AND a = 1 OR a > 1).
    # The inner one stands first because SQLite's parser has little room for what is still open.
    following = _NONE
    for key, value in zip(reversed(keys), reversed(values), strict=True):
        if value is None:  # a null comes among nulls only, by the keys after it
            following = put("({} AND {} IS NULL)", following, key.sql)
            continue
        beyond, same = _beside(key, "<" if key.descending else ">", value), _beside(key, "=", value)
        following = beyond if following is _NONE else put("({} AND {} OR {})", following, same, beyond)
    if values[0] is None:
        return following
    # Follows from the rest, but is what lets an index on the first key begin there.
    return put("({} AND {})", _beside(keys[0], "<=" if keys[0].descending else ">=", values[0]), following)


def _beside(key: _Key, symbol: str, value: str | int | float) -> Sql:
    mark = "?::numeric" if key.type == "numeric" else "?"
    return put(f"{{}} {symbol} {mark}", key.sql)._replace(parameters=[*key.sql.parameters, value])


# --- keys --------------------------------------------------------------------------------------------------------


def _keys(orders: Sequence[Order], fields: Fields, dialect: Dialect) -> list[_Key]:
    if len(orders) > _MOST_ORDERS:
        raise InvalidError(f"{len(orders)} sort keys are too many; give at most {_MOST_ORDERS}")
    keys: list[_Key] = []
    for one in orders:
        where = place(one.field, fields)
        if isinstance(where, Column):
            keys += _column_keys(where, one, dialect)
        elif isinstance(where, JsonPath) and not where.tags:
            keys += _path_keys(where, one, dialect)
        else:
            raise InvalidError(f"rows cannot be sorted by {one.field}; sort by a column or {fields.document}.KEY")
    for column in fields.unique:
        keys += _column_keys(column, Order(field=""), dialect)
    return keys


def _column_keys(column: Column, one: Order, dialect: Dialect) -> list[_Key]:
    keys: list[_Key] = []
    if column.nullable:
        missing = Sql(f"(CASE WHEN {column.sql} IS NULL THEN 1 ELSE 0 END)", [])
        keys.append(_Key(missing, "integer", one.nulls == "first"))
    if column.kind == "text":
        keys.append(_Key(_by_code_point(Sql(column.sql, []), dialect), "text", one.descending))
    else:
        keys.append(_Key(Sql(column.sql, []), "real" if column.kind == "real" else "integer", one.descending))
    return keys


def _path_keys(path: JsonPath, one: Order, dialect: Dialect) -> list[_Key]:
    """Booleans, then numbers, then texts, each in their order; what has none counts as missing."""
    source = json_source(path, dialect)

    def select(expression: str) -> Sql:
        return put("(SELECT {} FROM {})", Sql(expression, []), source)

    def of_kind(kind: Kind) -> str:
        return f"WHEN {json_is_kind(kind, 'v', dialect)} THEN {json_value(kind, 'v', dialect)}"

    ranks = " ".join(
        f"WHEN {json_is_kind(kind, 'v', dialect)} THEN {rank}"
        for rank, kind in enumerate(("boolean", "number", "text"))
    )
    missing = 3 if (one.nulls == "last") != one.descending else -1
    rank = put(f"COALESCE({{}}, {missing})", select(f"CASE {ranks} END"))
    number = select(f"CASE {of_kind('boolean')} {of_kind('number')} END")
    text = _by_code_point(select(f"CASE {of_kind('text')} END"), dialect)
    return [
        _Key(rank, "integer", one.descending),
        _Key(number, "real" if dialect == "sqlite" else "numeric", one.descending),
        _Key(text, "text", one.descending),
    ]


def _by_code_point(text: Sql, dialect: Dialect) -> Sql:
    return text if dialect == "sqlite" else put('({} COLLATE "C")', text)


# --- cursors -----------------------------------------------------------------------------------------------------


def encode_cursor(keys: Sequence[Any], filter: Filter | None, orders: Sequence[Order], fields: Fields) -> str:
    """The cursor of a row from its sort keys, the last `Ordering.width` values that were selected. Safe in a URL."""
    packed = msgspec.json.encode((_fingerprint(filter, orders, fields), list(keys)))
    return base64.urlsafe_b64encode(packed).decode().rstrip("=")


def decode_cursor(
    cursor: str, filter: Filter | None, orders: Sequence[Order], fields: Fields
) -> tuple[str | int | float | None, ...]:
    """The sort keys in a cursor. InvalidError if it is damaged or was not given out for this query."""
    try:
        packed = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars="-_", validate=True)
        fingerprint, keys = _cursor_decoder.decode(packed)
    except (binascii.Error, ValueError, msgspec.DecodeError):
        raise _damaged() from None
    if fingerprint != _fingerprint(filter, orders, fields):
        raise InvalidError("the cursor belongs to a query with another filter or order; begin again without a cursor")
    return keys


def _fingerprint(filter: Filter | None, orders: Sequence[Order], fields: Fields) -> str:
    try:
        query = msgspec.json.encode((fields.tables, filter, list(orders)))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidError(f"the filter cannot be written as JSON: {error}") from None
    return hashlib.blake2b(query, digest_size=12).hexdigest()


def _fits(value: str | int | float | None, key: _Key) -> bool:
    """Whether a database can be given this value for a key: nothing keeps a caller from making up a cursor."""
    match key.type:
        case "text":
            return value is None or isinstance(value, str)
        case "numeric":
            return value is None or (isinstance(value, str) and _DIGITS.fullmatch(value) is not None)
        case _:
            if isinstance(value, int):
                return -(2**63) <= value < 2**63
            return value is None or (isinstance(value, float) and math.isfinite(value))


def _damaged() -> InvalidError:
    return InvalidError("the cursor is damaged; give back the `next_cursor` of a page as it was, or begin again")
