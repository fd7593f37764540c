"""Filters as the condition of a WHERE, in SQLite and in PostgreSQL.

A condition is true or false, never unknown: `ne` is exactly not `eq`. A field is missing if its column is NULL, or if
its path leads nowhere or to null; `eq` null asks for that, `exists` for the contrary. Values of different types are
never equal and not comparable. Text is ordered by code points. This module knows what a condition means; where a field
is found is the business of `fields`, and it does not know connections or rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import msgspec

from agentlightning.errors import InvalidError, nearest
from agentlightning.store.database import Dialect
from agentlightning.store.fields import (
    FIND,
    Column,
    Fields,
    JsonPath,
    JsonText,
    Kind,
    Place,
    Sql,
    check_text,
    json_elements,
    json_is_kind,
    json_is_null,
    json_source,
    json_value,
    place,
    put,
)
from agentlightning.types import Filter

Test: TypeAlias = Callable[[str], Sql]
"""What is asked of one value, given the SQL of that value."""

TRUE: Final = Sql("TRUE", [])
FALSE: Final = Sql("FALSE", [])

_SYMBOLS: Final = {"lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_OPS: Final = ("eq", "ne", "in", "contains", "exists", *_SYMBOLS, "and", "or", "not")
_TAKES: Final[Mapping[str, Kind]] = {"text": "text", "integer": "number", "real": "number", "boolean": "boolean"}
_DEEPEST: Final = 20
_MOST_CONDITIONS: Final = 1000
_LONGEST_CHAIN: Final = 32
_LONGEST_SQL: Final = 900_000  # SQLite refuses a million


def where(filter: Filter | None, fields: Fields, dialect: Dialect) -> Sql:
    """The condition of a WHERE; without a filter, TRUE.

    InvalidError names an unknown field or op, a value that the field or op does not take, or that the filter is deeper
    than 20 or has more than 1000 conditions."""
    if filter is None:
        return TRUE
    _check_size(filter)
    made = _translated(filter, False, fields, dialect)
    if len(made.text) > _LONGEST_SQL:
        raise InvalidError(f"the filter comes to {len(made.text)} characters of SQL; ask for less at once")
    return made


def _check_size(filter: Filter) -> None:
    level, depth, count = [filter], 0, 0
    while level:
        depth += 1
        count += len(level)
        if depth > _DEEPEST or count > _MOST_CONDITIONS:
            raise InvalidError(
                f"the filter is too large: at most {_MOST_CONDITIONS} conditions, nested at most {_DEEPEST} deep"
            )
        level = [inner for one in level for inner in one.of]


def _translated(filter: Filter, negated: bool, fields: Fields, dialect: Dialect) -> Sql:
    """A negation is carried inwards to the conditions, where it costs no nesting."""
    if filter.op not in _OPS:
        raise InvalidError(f"there is no op {_shown(filter.op)}; {nearest(str(filter.op), _OPS)}")
    if filter.op == "not":
        return _translated(filter.of[0], not negated, fields, dialect)
    if filter.op in ("and", "or"):
        # The deepest comes first, where it fills SQLite's small parser stack with nothing but opening parentheses.
        inner = sorted(filter.of, key=_depth, reverse=True)
        parts = [_translated(one, negated, fields, dialect) for one in inner]
        return _all(parts) if (filter.op == "and") != negated else _any(parts)
    made = _condition(filter, place(filter.field, fields), dialect)
    return _not(made) if negated else made


def _depth(filter: Filter) -> int:
    return 1 + max(map(_depth, filter.of), default=0)


def _all(parts: Sequence[Sql]) -> Sql:
    return _chain(parts, " AND ") if parts else TRUE


def _any(parts: Sequence[Sql]) -> Sql:
    return _chain(parts, " OR ") if parts else FALSE


def _chain(parts: Sequence[Sql], word: str) -> Sql:
    """All parts with a word between them, in chains of 32: SQLite counts each link of a chain as nested once more."""
    while len(parts) > 1:
        chunks = [parts[start : start + _LONGEST_CHAIN] for start in range(0, len(parts), _LONGEST_CHAIN)]
        parts = [put(f"({word.join(['{}'] * len(chunk))})", *chunk) for chunk in chunks]
    return parts[0]


def _not(condition: Sql) -> Sql:
    return put("(NOT {})", condition)


def _condition(filter: Filter, where: Place, dialect: Dialect) -> Sql:
    name, op, value = str(filter.field), filter.op, filter.value
    if isinstance(where, JsonText):
        return _text_contains(where.sql, name, op, value, dialect)
    subject = _OnColumn(name, where, dialect) if isinstance(where, Column) else _OnPath(name, where, dialect)
    if op == "exists":
        if value is not None and not isinstance(value, bool):
            raise InvalidError(f"`exists` on {name} takes true, false or nothing, not {_shown(value)}")
        return _not(subject.present()) if value is False else subject.present()
    if op == "in":
        if not isinstance(value, list | tuple):
            raise InvalidError(f"`in` on {name} takes a list of values, not {_shown(value)}")
        return _one_of(subject, value)
    if op in ("eq", "ne"):
        equal = _one_of(subject, [value])
        return equal if op == "eq" else _not(equal)
    kind = _kind(value, name)
    if kind is None:
        raise InvalidError(f"`{op}` on {name} takes a value, not null; `exists` asks whether there is one")
    if op == "contains":
        return subject.contains(kind, value)
    if kind == "boolean":
        raise InvalidError(f"`{op}` on {name} takes a number or text, not {_shown(value)}")
    return subject.compares(kind, _compares(kind, _SYMBOLS[op], value, dialect))


def _one_of(subject: _OnColumn | _OnPath, values: Sequence[Any]) -> Sql:
    by_kind: dict[Kind | None, list[Any]] = {}
    for value in values:
        by_kind.setdefault(_kind(value, subject.name), []).append(value)
    parts = [
        _not(subject.present()) if kind is None else subject.equals(kind, _is_any(kind, some, subject.dialect))
        for kind, some in by_kind.items()
    ]
    return _any(parts)


def _text_contains(column: str, name: str, op: str, value: Any, dialect: Dialect) -> Sql:
    """The JSON text holds `value` as it is, or as it is written inside a JSON string."""
    if op != "contains" or _kind(value, name) != "text":
        raise InvalidError(f"{name} can only be asked whether it contains a text, not `{op}` {_shown(value)}")
    spellings = dict.fromkeys((value, msgspec.json.encode(value)[1:-1].decode()))
    return _any([_contains(spelling, dialect)(column) for spelling in spellings])


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


def _kind(value: Any, name: str) -> Kind | None:
    """What a value is compared with; None for null. InvalidError if nothing can be compared with it."""
    if value is None:
        return None
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return "number"
    if isinstance(value, float) and math.isfinite(value):
        return "number"
    if isinstance(value, str):
        check_text(value, f"a value for {name}")
        return "text"
    raise InvalidError(
        f"{_shown(value)} cannot be compared with {name}; give text, a finite number of at most 64 bits, a boolean "
        "or null"
    )


# --- what is asked of one value ----------------------------------------------------------------------------------


def _is_any(kind: Kind, values: Sequence[Any], dialect: Dialect) -> Test:
    """Equal to one of several values, all of one kind."""
    if len(values) == 1:
        return _compares(kind, "=", values[0], dialect)
    if dialect == "sqlite":
        plain = [int(value) for value in values] if kind == "boolean" else values
        text = msgspec.json.encode(plain).decode()
        return lambda sql: Sql(f"({sql} IN (SELECT value FROM json_each(?)))", [text])
    if kind == "text":
        return lambda sql: Sql(f"({sql} = ANY(?::text[]))", [list(values)])
    return lambda sql: Sql(f"({sql} = ANY(?::numeric[]))", [[repr(+value) for value in values]])


def _compares(kind: Kind, symbol: str, value: Any, dialect: Dialect) -> Test:
    if kind == "text":
        # The order of the database's language would be another on every machine.
        collation = ' COLLATE "C"' if dialect == "postgres" and symbol != "=" else ""
        return lambda sql: Sql(f"({sql}{collation} {symbol} ?)", [value])
    if dialect == "postgres":
        # As digits: a double would be rounded to 15 of them on its way to numeric.
        return lambda sql: Sql(f"({sql} {symbol} ?::numeric)", [repr(+value)])
    return lambda sql: Sql(f"({sql} {symbol} ?)", [+value])


def _contains(text: str, dialect: Dialect) -> Test:
    find = FIND[dialect]
    return lambda sql: Sql(f"({find}({sql}, ?) > 0)", [text])


# --- columns and paths -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _OnColumn:
    name: str
    column: Column
    dialect: Dialect

    def present(self) -> Sql:
        return Sql(f"({self.column.sql} IS NOT NULL)", []) if self.column.nullable else TRUE

    def equals(self, kind: Kind, test: Test) -> Sql:
        takes = _TAKES[self.column.kind]
        if kind != takes:
            raise InvalidError(f"{self.name} is a {takes}; it cannot be compared with a {kind}")
        made = test(self.column.sql)
        # The second half lets an index be used; the first makes the whole false, not unknown.
        return put("({} AND {})", self.present(), made) if self.column.nullable else made

    compares = equals

    def contains(self, kind: Kind, value: Any) -> Sql:
        if kind != "text":
            raise InvalidError(f"{self.name} cannot contain {_shown(value)}; give a text")
        return self.equals(kind, _contains(value, self.dialect))


@dataclass(frozen=True)
class _OnPath:
    name: str
    path: JsonPath
    dialect: Dialect

    def present(self) -> Sql:
        if self.path.tags:
            return self._holds("text", lambda sql: TRUE)
        return self._selected(Sql(f"NOT ({json_is_null(self.dialect)})", []))

    def equals(self, kind: Kind, test: Test) -> Sql:
        if not self.path.tags:
            return self._is(kind, test)
        if kind != "text":
            raise InvalidError(f"{self.name} is a text; it cannot be compared with a {kind}")
        return self._holds(kind, test)

    def compares(self, kind: Kind, test: Test) -> Sql:
        if self.path.tags:
            raise InvalidError(f"{self.name} takes eq, ne, in and exists, not a comparison")
        return self._is(kind, test)

    def contains(self, kind: Kind, value: Any) -> Sql:
        """A part of a text, or an element of a list."""
        element = _is_any(kind, [value], self.dialect)
        if self.path.tags:
            return self.equals(kind, element)
        member = self._member(kind, element)
        if kind == "text":
            part = _if_kind(kind, "v", _contains(value, self.dialect), self.dialect)
            member = put("({} OR {})", part, member)
        return self._selected(member)

    def _is(self, kind: Kind, test: Test) -> Sql:
        return self._selected(_if_kind(kind, "v", test, self.dialect))

    def _holds(self, kind: Kind, test: Test) -> Sql:
        return self._selected(self._member(kind, test))

    def _member(self, kind: Kind, test: Test) -> Sql:
        matches = _if_kind(kind, "e", test, self.dialect)
        return put(f"EXISTS (SELECT 1 FROM {json_elements(self.dialect)} WHERE {{}})", matches)

    def _selected(self, test: Sql) -> Sql:
        return put("COALESCE((SELECT {} FROM {}), FALSE)", test, json_source(self.path, self.dialect))


def _if_kind(kind: Kind, row: str, test: Test, dialect: Dialect) -> Sql:
    return put(
        f"CASE WHEN {json_is_kind(kind, row, dialect)} THEN {{}} ELSE FALSE END", test(json_value(kind, row, dialect))
    )
