"""Filters of rollouts and spans.

Conditions on columns are SQL. Those on JSON paths are decided in Python, on the rows that the SQL
leaves, alike in both databases. A condition is true or false, never unknown: `ne` is exactly not
`eq`. A field is missing if its column is NULL, or its path leads nowhere or to null; `eq` null
matches that, `exists` the opposite. Values of different types are never equal, and not comparable.
Text is ordered by code points. Names are looked up and values are always parameters, so nothing of
a caller becomes SQL."""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import msgspec

from agentlightning.errors import InvalidError, nearest
from agentlightning.store.database import FIND, Connection
from agentlightning.store.prompts import REPEATED
from agentlightning.types import And, Filter, Not, Or

Kind: TypeAlias = Literal["text", "number", "boolean", "null"]

_COMPARED: Final = {"lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge}
_SYMBOLS: Final = {"eq": "=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_TAKES: Final[Mapping[str, Sequence[Kind]]] = {
    "eq": ("text", "number", "boolean", "null"),
    "ne": ("text", "number", "boolean", "null"),
    "in": ("text", "number", "boolean"),
    "contains": ("text", "number", "boolean"),
    **dict.fromkeys(_COMPARED, ("text", "number")),
    "exists": ("boolean", "null"),
}
UNLIMITED: Final = 1 << 62  # where a database wants a number
_DEEPEST: Final = 10
_MOST_CONDITIONS: Final = 200
_TAG: Final = "tag"  # each text in the list `metadata["tags"]`


@dataclass(frozen=True)
class Column:
    """A column, or an expression of columns. A boolean is 1 or 0; `json` is searched as text."""

    sql: str
    kind: Literal["text", "number", "boolean", "json"] = "text"
    nullable: bool = False


@dataclass(frozen=True)
class Fields:
    """The fields of the rows of `tables`. `document` is the prefix of names inside a column's JSON
    object; `unique` tells any two rows apart and is their natural order."""

    tables: str
    columns: Mapping[str, Column]
    document: str
    document_column: str
    unique: tuple[Column, ...]

    def kind(self, name: object) -> Literal["text", "number", "boolean", "json", "tag", "path"]:
        """The kind of a field. InvalidError, with a hint, if there is none."""
        text = str(name)
        shown = str(name)[:100]
        prefix, _, path = text.partition(".")
        if text in self.columns:
            return self.columns[text].kind
        if text == _TAG and self is ROLLOUTS:
            return "tag"
        if path in REPEATED:
            raise InvalidError(
                f"{shown} is stored in part and cannot be searched; search the `input` of rollouts"
            )
        if prefix == self.document and path:
            return "path"
        raise InvalidError(
            f"there is no field {shown!r}; "
            f"{nearest(shown, [*self.columns, f'{self.document}.KEY'])}"
        )


_GROUP_END: Final = (  # when the last of the group ended, nothing while one has not
    "(CASE WHEN rollouts.group_id IS NULL THEN rollouts.end_time ELSE "
    "(SELECT CASE WHEN count(*) = count(member.end_time) THEN max(member.end_time) END "
    "FROM rollouts AS member WHERE member.group_id = rollouts.group_id) END)"
)

ROLLOUTS: Final = Fields(
    tables="rollouts",
    columns={
        "rollout_id": Column("rollouts.rollout_id"),
        "status": Column("rollouts.status"),
        "mode": Column("rollouts.mode"),
        "resources_id": Column("rollouts.resources_id", nullable=True),
        "run_id": Column("rollouts.run_id", nullable=True),
        "group_id": Column("rollouts.group_id", nullable=True),
        "group_index": Column("rollouts.group_index", "number", nullable=True),
        "source_id": Column("rollouts.source_id", nullable=True),
        "priority": Column("rollouts.priority", "number"),
        "number": Column("rollouts.number", "number"),
        "reward": Column("rollouts.reward", "number", nullable=True),
        "error": Column("rollouts.error", nullable=True),
        "start_time": Column("rollouts.start_time", "number"),
        "end_time": Column("rollouts.end_time", "number", nullable=True),
        "group_end_time": Column(_GROUP_END, "number", nullable=True),
        "input": Column("rollouts.input", "json"),
    },
    document="metadata",
    document_column="rollouts.metadata",
    unique=(Column("rollouts.number", "number"),),
)

SPANS: Final = Fields(
    tables=(
        "spans JOIN attempts ON attempts.number = spans.attempt "
        "JOIN rollouts ON rollouts.rollout_id = attempts.rollout_id"
    ),
    columns={
        "rollout_id": Column("attempts.rollout_id"),
        "attempt_id": Column("attempts.attempt_id"),
        "span_id": Column("spans.span_id"),
        "trace_id": Column("spans.trace_id"),
        "parent_id": Column("spans.parent_id", nullable=True),
        "name": Column("spans.name"),
        "start_time": Column("spans.start_time", "number"),
        "end_time": Column("spans.end_time", "number"),
        "duration": Column("(spans.end_time - spans.start_time)", "number"),
        "status_code": Column("spans.status_code"),
        "sequence_id": Column("spans.sequence_id", "number"),
        "has_tokens": Column(
            "(CASE WHEN spans.prompt_token_ids IS NULL THEN 0 ELSE 1 END)", "boolean"
        ),
        "run_id": Column("rollouts.run_id", nullable=True),
    },
    document="attributes",
    document_column="spans.attributes",
    unique=(
        Column("spans.attempt", "number"),
        Column("spans.sequence_id", "number"),
        Column("spans.span_id"),
    ),
)


def _conditions(filter: Filter) -> list[Filter]:
    """Every condition in a filter. InvalidError if it is too large."""
    level = [filter]
    depth = 0
    count = 0
    found = list[Filter]()
    while level:
        depth = depth + 1
        count = count + len(level)
        if depth > _DEEPEST or count > _MOST_CONDITIONS:
            raise InvalidError(
                f"the filter is too large: at most {_MOST_CONDITIONS} conditions, nested at most "
                f"{_DEEPEST} deep"
            )
        found += [inner for inner in level if inner.op not in ("and", "or", "not")]
        level = [inner for outer in level for inner in outer.of]
    return found


def _check(asked: Filter, of: Fields) -> None:
    """InvalidError unless the field takes this condition."""
    op = asked.op
    name = asked.field
    value = asked.value
    if op not in _TAKES:
        raise InvalidError(
            f"there is no op {_shown(op)}; {nearest(str(op), [*_TAKES, 'and', 'or', 'not'])}"
        )
    kind = of.kind(name)
    if op == "in" and not isinstance(value, list | tuple):
        raise InvalidError(f"`in` on {name} takes a list of values, not {_shown(value)}")
    takes = _takes(op, kind)
    for item in value if op == "in" else [value]:
        if _kind(item, name) not in takes:
            expected = (
                f"it takes {' or '.join(takes)}" if takes else f"that cannot be asked of a {kind}"
            )
            raise InvalidError(f"`{op}` on {name} was given {_shown(item)}; {expected}")


def _takes(op: str, kind: str) -> Sequence[Kind]:
    """The kinds of values that an op takes on a field of a kind."""
    if kind == "path" or (op == "exists" and kind != "json"):
        return _TAKES[op]
    if op == "contains":
        return ["text"] if kind in ("text", "json") else []
    if kind == "json" or (kind in ("tag", "boolean") and op in _COMPARED):
        return []
    return [
        value_kind
        for value_kind in _TAKES[op]
        if value_kind in ("text" if kind == "tag" else kind, "null")
    ]


def _kind(value: Any, name: object) -> Kind:
    """The kind of a value. InvalidError if nothing can be compared with it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if (isinstance(value, int) and -(2**63) <= value < 2**63) or (
        isinstance(value, float) and math.isfinite(value)
    ):
        return "number"
    if isinstance(value, str):
        return "text"
    raise InvalidError(
        f"{_shown(value)} cannot be compared with {name}; give text, a finite number of at most "
        "64 bits, a boolean or null"
    )


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


def _plainer(asked: Filter, of: Fields) -> Filter:
    """The same filter without `ne` and `exists`, and with texts as they are and as JSON writes
    them."""
    if asked.field is None:
        return msgspec.structs.replace(asked, of=tuple(_plainer(inner, of) for inner in asked.of))
    if asked.op == "ne":
        return Not(msgspec.structs.replace(asked, op="eq"))
    if asked.op == "exists":
        missing = msgspec.structs.replace(asked, op="eq", value=None)
        return missing if asked.value is False else Not(missing)
    if of.kind(asked.field) == "json":
        return Or(
            [
                msgspec.structs.replace(asked, value=text)
                for text in {asked.value, _in_json(asked.value)}
            ]
        )
    return asked


class Query:
    """The rows `of` some tables that match a filter. If it names paths, `_sql` may select more than
    match, and `_matches` decides by the values of `_read`.

    InvalidError names an unknown field or op, or a value that they do not take. A filter may have
    200 conditions, 10 deep."""

    def __init__(self, where: Filter | None, of: Fields, connection: Connection) -> None:
        self._of = of
        self._connection = connection
        where = And([]) if where is None else where
        conditions = _conditions(where)
        for condition in conditions:
            _check(condition, of)
        self._where = _plainer(where, of)
        self._parameters: list[Any] = []
        self._sql = self._condition(self._where)
        names = dict.fromkeys(str(condition.field) for condition in conditions)
        self._paths = [name for name in names if name not in of.columns]
        self._named = [name for name in names if name in of.columns]
        self._read = (
            [*(of.columns[name].sql for name in self._named), of.document_column]
            if self._paths
            else []
        )

    def count(self) -> int:
        """The number of rows that match."""
        if self._paths:
            return sum(1 for _ in self.rows("1"))
        sql = f"SELECT count(*) FROM {self._of.tables} WHERE {self._sql}"
        return self._connection.execute(sql, self._parameters).fetchone()[0]

    def rows(
        self,
        columns: str,
        rest: str = "",
        parameters: Sequence[Any] = (),
        *,
        skip: int = 0,
        most: int | None = None,
    ) -> Generator[Any]:
        """These columns of the rows, after those skipped, up to a number. `rest` is SQL after the
        filter, ` AND …` with its parameters, and ` ORDER BY …`."""
        selected = ", ".join((columns, *self._read))
        bounds = (UNLIMITED if most is None else most, skip) if not self._paths else (UNLIMITED, 0)
        found = self._connection.stream(
            f"SELECT {selected} FROM {self._of.tables} WHERE {self._sql}{rest} LIMIT ? OFFSET ?",
            (*self._parameters, *parameters, *bounds),
        )
        with contextlib.closing(found):  # pyright: ignore[reportArgumentType] - both databases' can be closed
            if not self._paths:
                yield from found
                return
            width = -len(self._read)
            matching = (row[:width] for row in found if self._matches(row[width:]))
            yield from itertools.islice(matching, skip, None if most is None else skip + most)

    def _condition(self, asked: Filter) -> str:
        match asked.op:
            case "and" | "or":
                parts = [self._condition(inner) for inner in asked.of] or [
                    "TRUE" if asked.op == "and" else "FALSE"
                ]
                return f"({f' {asked.op} '.join(parts)})"
            case "not":
                if not self._on_columns(asked):
                    return "TRUE"  # what may match a path may also match its negation
                return f"(NOT {self._condition(asked.of[0])})"
            case op:
                column = self._of.columns.get(str(asked.field))
                return (
                    self._may_hold(asked)
                    if column is None
                    else self._column(op, asked.value, column)
                )

    def _on_columns(self, asked: Filter) -> bool:
        return (
            all(map(self._on_columns, asked.of))
            if asked.field is None
            else asked.field in self._of.columns
        )

    def _column(self, op: str, value: Any, column: Column) -> str:
        if op == "eq" and value is None:
            return f"({column.sql} IS NULL)"
        if op == "contains":
            self._parameters.append(value)
            made = f"{FIND[self._connection.dialect]}({column.sql}, ?) > 0"
        elif op == "in":
            made = f"{column.sql} {self._among(value)}" if value else "FALSE"
        else:
            # The order of the database's language would be another on every machine.
            collation = (
                ' COLLATE "C"'
                if self._connection.dialect == "postgres" and isinstance(value, str)
                else ""
            )
            self._parameters.append(int(value) if isinstance(value, bool) else value)
            made = f"{column.sql}{collation if op != 'eq' else ''} {_SYMBOLS[op]} ?"
        # The second half lets an index be used; the first makes the whole false, not unknown.
        return f"({column.sql} IS NOT NULL AND {made})" if column.nullable else f"({made})"

    def _among(self, values: Sequence[Any]) -> str:
        plain = [int(value) if isinstance(value, bool) else value for value in values]
        if self._connection.dialect == "sqlite":
            self._parameters.append(msgspec.json.encode(plain).decode())
            return "IN (SELECT value FROM json_each(?))"
        kind = "bigint" if isinstance(plain[0], int) else "text"
        if any(isinstance(value, float) for value in plain):
            kind = "float8"
            plain = [float(value) for value in plain]
        self._parameters.append(plain)
        return f"= ANY(?::{kind}[])"

    def _may_hold(self, asked: Filter) -> str:
        """A text that is in every matching document, so that most others need not be read."""
        if asked.op not in ("eq", "contains") or not isinstance(asked.value, str):
            return "TRUE"
        self._parameters.append(_in_json(asked.value))
        return f"({FIND[self._connection.dialect]}({self._of.document_column}, ?) > 0)"

    def _matches(self, row: Sequence[Any]) -> bool:
        document = msgspec.json.decode(row[-1])
        values = {name: _candidates(document, name) for name in self._paths}
        for name, value in zip(self._named, row[:-1], strict=True):
            values[name] = [bool(value) if self._of.columns[name].kind == "boolean" else value]
        return self._holds(self._where, values)

    def _holds(self, asked: Filter, values: Mapping[str, Sequence[Any]]) -> bool:
        match asked.op:
            case "and":
                return all(self._holds(inner, values) for inner in asked.of)
            case "or":
                return any(self._holds(inner, values) for inner in asked.of)
            case "not":
                return not self._holds(asked.of[0], values)
            case op:
                return any(_fits(value, op, asked.value) for value in values[str(asked.field)])


def _in_json(text: str) -> str:
    return msgspec.json.encode(text)[1:-1].decode()


def _fits(value: Any, op: str, wanted: Any) -> bool:
    match op:
        case "eq":
            return _same(value, wanted)
        case "in":
            return any(_same(value, item) for item in wanted)
        case "contains" if isinstance(value, list):
            return any(_same(item, wanted) for item in value)
        case "contains":
            return isinstance(value, str) and isinstance(wanted, str) and wanted in value
        case _:
            comparable = isinstance(value, str if isinstance(wanted, str) else int | float)
            return comparable and not isinstance(value, bool) and _COMPARED[op](value, wanted)


def _same(value: Any, wanted: Any) -> bool:
    return value == wanted and isinstance(value, bool) == isinstance(wanted, bool)


def _candidates(document: Any, name: str) -> Sequence[Any]:
    """The value at a path, None for nothing; of tags, each. `metadata.a.b` is the value of the key
    `a.b`, or else of `b` inside `a`."""
    if name == _TAG:
        tags = document.get("tags")
        return (
            [tag for tag in tags if isinstance(tag, str)] or [None]
            if isinstance(tags, list)
            else [None]
        )
    path = name.partition(".")[2]
    while isinstance(document, dict):
        if path in document:
            return [document[path]]
        key, _, path = path.partition(".")
        document = document.get(key)
    return [None]
