"""The fields of rollouts and spans that queries may name, and how each database reads them.

Names are looked up here and values only ever travel as parameters (`?`), so that nothing a caller wrote becomes SQL.
This module does not know conditions, sort orders or connections.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import msgspec

from agentlightning.errors import InvalidError, nearest
from agentlightning.store.database import Dialect

Kind: TypeAlias = Literal["text", "number", "boolean"]

FIND: Final[Mapping[Dialect, str]] = {"sqlite": "instr", "postgres": "strpos"}

_LONGEST_PATH: Final = 10
_KEY: Final = re.compile(r'("(?:[^"\\]|\\.)*"|[^."][^.]*)(\.|$)', re.DOTALL)


class Sql(NamedTuple):
    """SQL and the parameters of its `?`, in order."""

    text: str
    parameters: list[Any]


def put(template: str, *parts: Sql) -> Sql:
    """The template with its `{}` filled: `put("NOT ({})", Sql("a = ?", [1]))` → `Sql("NOT (a = ?)", [1])`."""
    return Sql(template.format(*(part.text for part in parts)), [value for part in parts for value in part.parameters])


# --- fields ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Column:
    """A column, or an expression of columns. A boolean is 1 or 0."""

    sql: str
    kind: Literal["text", "integer", "real", "boolean"] = "text"
    nullable: bool = False


@dataclass(frozen=True)
class JsonText:
    """A column of JSON, searched as the text it is."""

    sql: str


@dataclass(frozen=True)
class JsonPath:
    """A value inside a column that holds a JSON object. `tags`: a list of which only the texts in it are asked for."""

    column: str
    keys: tuple[str, ...]
    tags: bool = False


Place: TypeAlias = Column | JsonText | JsonPath


@dataclass(frozen=True)
class Fields:
    """What can be asked of the rows of `tables`. `document` is the prefix of names inside a JSON column; `unique`
    tells any two rows apart and is their natural order."""

    tables: str
    named: Mapping[str, Place]
    document: str
    document_column: str
    document_keys: Callable[[str], tuple[str, ...]]
    unique: tuple[Column, ...]


def _dotted(path: str) -> tuple[str, ...]:
    """`a."b.c".d` → `("a", "b.c", "d")`; what is quoted is written as in JSON."""
    keys: list[str] = []
    position, more = 0, True
    while more:
        match = _KEY.match(path, position)
        if match is None:
            raise InvalidError(
                f"metadata.{path} is not a path: write keys with dots between them, and quote one that is empty, holds "
                'a dot or begins with a quote, such as metadata."a.b".c'
            )
        key = match[1]
        try:
            keys.append(msgspec.json.decode(key, type=str) if key.startswith('"') else key)
        except msgspec.DecodeError:
            raise InvalidError(f"{key} in metadata.{path} is not a quoted key; escape it as JSON does") from None
        position, more = match.end(), match[2] == "."
    return tuple(keys)


def _whole(name: str) -> tuple[str, ...]:
    return (name,)


_GROUP_END: Final = (  # when the last of the group ended, nothing while one has not
    "(CASE WHEN rollouts.group_id IS NULL THEN rollouts.end_time ELSE "
    "(SELECT CASE WHEN count(*) = count(member.end_time) THEN max(member.end_time) END "
    "FROM rollouts AS member WHERE member.group_id = rollouts.group_id) END)"
)

ROLLOUTS: Final = Fields(
    tables="rollouts",
    named={
        "rollout_id": Column("rollouts.rollout_id"),
        "status": Column("rollouts.status"),
        "mode": Column("rollouts.mode"),
        "resources_id": Column("rollouts.resources_id", nullable=True),
        "run_id": Column("rollouts.run_id", nullable=True),
        "group_id": Column("rollouts.group_id", nullable=True),
        "group_index": Column("rollouts.group_index", "integer", nullable=True),
        "project": Column("rollouts.project"),
        "priority": Column("rollouts.priority", "integer"),
        "number": Column("rollouts.number", "integer"),
        "reward": Column("rollouts.reward", "real", nullable=True),
        "error": Column("rollouts.error", nullable=True),
        "start_time": Column("rollouts.start_time", "real"),
        "end_time": Column("rollouts.end_time", "real", nullable=True),
        "group_end_time": Column(_GROUP_END, "real", nullable=True),
        "input": JsonText("rollouts.input"),
        "tag": JsonPath("rollouts.metadata", ("tags",), tags=True),
    },
    document="metadata",
    document_column="rollouts.metadata",
    document_keys=_dotted,
    unique=(Column("rollouts.number", "integer"),),
)

SPANS: Final = Fields(
    tables=(
        "spans JOIN attempts ON attempts.number = spans.attempt "
        "JOIN rollouts ON rollouts.rollout_id = attempts.rollout_id"
    ),
    named={
        "rollout_id": Column("attempts.rollout_id"),
        "attempt_id": Column("attempts.attempt_id"),
        "span_id": Column("spans.span_id"),
        "trace_id": Column("spans.trace_id"),
        "parent_id": Column("spans.parent_id", nullable=True),
        "name": Column("spans.name"),
        "start_time": Column("spans.start_time", "real"),
        "end_time": Column("spans.end_time", "real"),
        "duration": Column("(spans.end_time - spans.start_time)", "real"),
        "status_code": Column("spans.status_code"),
        "sequence_id": Column("spans.sequence_id", "integer"),
        "has_tokens": Column("(CASE WHEN spans.prompt_token_ids IS NULL THEN 0 ELSE 1 END)", "boolean"),
        "project": Column("rollouts.project"),
        "run_id": Column("rollouts.run_id", nullable=True),
    },
    document="attributes",
    document_column="spans.attributes",
    document_keys=_whole,
    unique=(
        Column("spans.attempt", "integer"),
        Column("spans.sequence_id", "integer"),
        Column("spans.span_id"),
    ),
)


def place(name: object, fields: Fields) -> Place:
    """Where a field is. InvalidError, with a hint, if there is none of that name."""
    shown = str(name)[:100]
    if isinstance(name, str):
        if name in fields.named:
            return fields.named[name]
        prefix, dot, rest = name.partition(".")
        if prefix == fields.document and dot and rest:
            keys = fields.document_keys(rest)
            if len(keys) > _LONGEST_PATH:
                raise InvalidError(f"the path {shown} has {len(keys)} keys; at most {_LONGEST_PATH} can be asked for")
            for key in keys:
                check_text(key, f"the path {shown}")
            return JsonPath(fields.document_column, keys)
    raise InvalidError(f"there is no field {shown!r}; {nearest(shown, [*fields.named, f'{fields.document}.KEY'])}")


def check_text(text: str, what: str) -> None:
    """InvalidError if a database cannot be given the text."""
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise InvalidError(f"{what} holds a NUL or half a surrogate pair, which no database can be asked for")


# --- JSON --------------------------------------------------------------------------------------------------------

_IS_KIND: Final[Mapping[Dialect, Mapping[Kind, str]]] = {
    "sqlite": {
        "text": "{row}.type = 'text'",
        "number": "{row}.type IN ('integer', 'real')",
        "boolean": "{row}.type IN ('true', 'false')",
    },
    "postgres": {
        "text": "json_typeof({row}.value) = 'string'",
        "number": "json_typeof({row}.value) = 'number'",
        "boolean": "json_typeof({row}.value) = 'boolean'",
    },
}


def json_source(path: JsonPath, dialect: Dialect) -> Sql:
    """What comes after FROM to get the value at a path as a row `v`, or none: `json_each(metadata) AS v WHERE …`."""
    document = _readable(path.column, dialect)
    if dialect == "postgres":
        steps = " -> ?::text" * len(path.keys)
        # OFFSET keeps the planner from reading the document once for each mention of the value.
        return Sql(f"(SELECT {document}::json{steps} AS value OFFSET 0) AS v", list(path.keys))
    # Key by key, as SQLite's own paths have no way to write a key that holds a quote; side by side, as its parser has
    # little room for nesting.
    rows = [*(f"v{depth}" for depth in range(1, len(path.keys))), "v"]
    documents = [document] + [f"CASE {row}.type WHEN 'object' THEN {row}.value ELSE '{{}}' END" for row in rows[:-1]]
    sources = ", ".join(f"json_each({inner}) AS {row}" for inner, row in zip(documents, rows, strict=True))
    return Sql(f"{sources} WHERE {' AND '.join(f'{row}.key = ?' for row in rows)}", list(path.keys))


def json_elements(dialect: Dialect) -> str:
    """What comes after FROM to get the elements of `v`, where it is a list, as rows `e`."""
    if dialect == "sqlite":
        return "json_each(CASE v.type WHEN 'array' THEN v.value ELSE '[]' END) AS e"
    return "json_array_elements(CASE json_typeof(v.value) WHEN 'array' THEN v.value ELSE '[]' END) AS e"


def json_is_null(dialect: Dialect) -> str:
    return "v.type = 'null'" if dialect == "sqlite" else "COALESCE(json_typeof(v.value), 'null') = 'null'"


def json_is_kind(kind: Kind, row: str, dialect: Dialect) -> str:
    return _IS_KIND[dialect][kind].format(row=row)


def json_value(kind: Kind, row: str, dialect: Dialect) -> str:
    """The value of a row that is of this kind; a boolean as 1 or 0."""
    if dialect == "sqlite":
        return f"({row}.type = 'true')" if kind == "boolean" else f"{row}.value"
    text = f"({row}.value #>> '{{}}')"
    return {"text": text, "number": f"{text}::numeric", "boolean": f"({text} = 'true')::int"}[kind]


def _readable(column: str, dialect: Dialect) -> str:
    """The JSON text with every escaped NUL replaced by U+FFFD: PostgreSQL reads no document that holds one, and SQLite
    ends the text there. JSON text holds no character 1, which stands for an escaped backslash meanwhile."""
    mark = "char(1)" if dialect == "sqlite" else "chr(1)"
    find = FIND[dialect]
    marked = rf"replace({column}, '\\', {mark})"
    return (
        rf"(CASE WHEN {find}({column}, '\u0000') = 0 THEN {column} "
        rf"ELSE replace(replace({marked}, '\u0000', '\ufffd'), {mark}, '\\') END)"
    )
