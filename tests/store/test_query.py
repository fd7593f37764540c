"""Filters, sort orders and cursors on real databases, against what Python makes of the same
rows."""

from __future__ import annotations

import base64
import contextlib
import sqlite3
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentlightning.errors import InvalidError
from agentlightning.store import pages
from agentlightning.store.database import Transaction
from agentlightning.store.query import ROLLOUTS, SPANS, Fields, Query
from agentlightning.types import And, Condition, Filter, Not, Or, Order
from tests.store.query_model import (
    ROLLOUT_ROWS,
    ROWS,
    SPAN_ROWS,
    conditions,
    matches,
    ordered,
    random_filters,
    random_orders,
)

LAYOUT = """
CREATE TABLE rollouts (
    number BIGINT, rollout_id TEXT, input TEXT, start_time DOUBLE PRECISION, end_time DOUBLE PRECISION, status TEXT,
    mode TEXT, resources_id TEXT, run_id TEXT, group_id TEXT, group_index BIGINT, priority BIGINT,
    metadata TEXT
);
CREATE TABLE attempts (number BIGINT, attempt_id TEXT, rollout_id TEXT);
CREATE TABLE spans (
    attempt BIGINT, span_id TEXT, sequence_id BIGINT, trace_id TEXT, parent_id TEXT, name TEXT,
    start_time DOUBLE PRECISION, end_time DOUBLE PRECISION, status_code TEXT, attributes TEXT, prompt_token_ids {bytes}
)
"""


class Database:
    def __init__(self, dialect: Any, connection: Any) -> None:
        self.dialect = dialect
        self._connection = connection

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> Any:
        assert "%" not in sql
        return self._connection.execute(
            sql if self.dialect == "sqlite" else sql.replace("?", "%s"), parameters
        )

    def insert(self, table: str, values: dict[str, Any]) -> None:
        marks = ", ".join("?" * len(values))
        self.execute(
            f"INSERT INTO {table} ({', '.join(values)}) VALUES ({marks})", list(values.values())
        )

    def stream(self, sql: str, parameters: Sequence[Any] = ()) -> Iterator[Any]:
        yield from self.execute(sql, parameters).fetchall()

    def find(self, fields: Fields, filter: Filter | None) -> set[Any]:
        matching = Query(filter, fields, self)
        found = list(matching.rows(", ".join(column.sql for column in fields.unique)))
        assert len(found) == len(set(found)) == matching.count()
        return set(found)

    def page(
        self,
        fields: Fields,
        filter: Filter | None,
        orders: Sequence[Order],
        limit: int,
        cursor: str | None = None,
    ) -> tuple[list[Any], str | None]:
        """The rows of one page by what is unique of them, and the cursor of its last row."""
        asked = {
            "where": filter,
            "order": orders,
            "limit": limit,
            "offset": 0,
            "cursor": cursor,
            "with_total": False,
        }
        unique = ", ".join(column.sql for column in fields.unique)
        rows, _, more = pages._page(
            Transaction(self, 0.0, 30.0, b"a secret"), fields, unique, **asked
        )
        return [tuple(row) for row in rows], more


def fill(database: Database) -> None:
    for statement in LAYOUT.format(bytes="BLOB" if database.dialect == "sqlite" else "BYTEA").split(
        ";"
    ):
        database.execute(statement)
    for row in ROLLOUT_ROWS:
        columns = {name: value for name, value in row.named.items() if name != "group_end_time"}
        metadata = msgspec.json.encode(row.document).decode()
        database.insert("rollouts", {**columns, "metadata": metadata, "number": row.unique[0]})
    for attempt in range(20):
        rollout_id = ROLLOUT_ROWS[attempt // 2].named["rollout_id"]
        database.insert(
            "attempts", {"number": attempt, "attempt_id": f"at-{attempt}", "rollout_id": rollout_id}
        )
    elsewhere = ("rollout_id", "attempt_id", "run_id", "duration", "has_tokens")
    for row in SPAN_ROWS:
        columns = {name: value for name, value in row.named.items() if name not in elsewhere}
        attributes = msgspec.json.encode(row.document).decode()
        tokens = b"" if row.named["has_tokens"] else None
        database.insert(
            "spans",
            {
                **columns,
                "attempt": row.unique[0],
                "attributes": attributes,
                "prompt_token_ids": tokens,
            },
        )


@pytest.fixture(params=["sqlite", "postgres"])
def database(request) -> Iterator[Database]:
    if request.param == "sqlite":
        connection: Any = sqlite3.connect(":memory:", isolation_level=None)
    else:
        psycopg = pytest.importorskip("psycopg")
        connection = psycopg.connect(request.getfixturevalue("postgres_database"), autocommit=True)
    with contextlib.closing(connection):
        opened = Database(request.param, connection)
        fill(opened)
        yield opened


thorough = settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("fields", [ROLLOUTS, SPANS], ids=["rollouts", "spans"])
def test_a_filter_finds_the_rows_it_describes(database, fields):
    @thorough
    @given(random_filters(fields))
    def check(filter: Filter) -> None:
        assert database.find(fields, filter) == {
            row.unique for row in ROWS[fields.tables] if matches(row, filter)
        }

    check()


@pytest.mark.slow
@pytest.mark.parametrize("fields", [ROLLOUTS, SPANS], ids=["rollouts", "spans"])
def test_cursors_visit_every_row_once_and_in_order(database, fields):
    @thorough
    @given(st.none() | conditions(fields), random_orders(fields), st.sampled_from([3, 7, 30]))
    def check(filter: Filter | None, orders: list[Order], limit: int) -> None:
        wanted = [row for row in ROWS[fields.tables] if filter is None or matches(row, filter)]
        visited: list[Any] = []
        page, cursor = database.page(fields, filter, orders, limit)
        while page:
            visited += page
            if cursor is None:
                break
            page, cursor = database.page(fields, filter, orders, limit, cursor)
        assert visited == [row.unique for row in ordered(wanted, orders)]

    check()


@pytest.mark.parametrize(
    "text",
    [
        '{"op": "like", "field": "status", "value": "a"}',
        '{"op": "eq", "field": "status", "value": "a", "values": ["a"]}',
        '{"op": "eq", "value": "a"}',
        '{"op": "eq", "field": "status", "of": [{"op": "and"}]}',
        '{"op": "and", "field": "status"}',
        '{"op": "not", "of": []}',
        '{"field": "status", "value": "a"}',
    ],
)
def test_json_that_is_no_filter_is_refused(text):
    with pytest.raises((msgspec.ValidationError, InvalidError)):
        msgspec.json.decode(text, type=Filter)


def test_ten_thousand_values_fit_one_in(database):
    ids = [f"ro-{number}" for number in range(5, 10_000)]
    assert len(database.find(ROLLOUTS, Condition("rollout_id", "in", ids))) == len(ROLLOUT_ROWS) - 5
    numbers = [number + 0.5 for number in range(10_000)]
    assert database.find(ROLLOUTS, Condition("start_time", "in", numbers)) == {
        row.unique for row in ROLLOUT_ROWS if row.named["start_time"] == 1.5
    }


@pytest.mark.parametrize(
    "condition",
    [
        Condition("mode", "eq", "a"),
        Condition("metadata.nested.deep.x", "gt", 0.5),
        Condition("metadata.absent.a.b.c.d.e.f.g.h", "contains", "a"),
        Condition("tag", "in", ["a", "b"]),
    ],
    ids=lambda condition: condition.field,
)
def test_the_largest_filters_fit_every_database(database, condition):
    wanted = {row.unique for row in ROLLOUT_ROWS if matches(row, condition)}
    assert database.find(ROLLOUTS, And([condition] * 199)) == wanted
    deep = condition
    for level in range(9):
        deep = (And if level % 2 else Or)([condition, deep, condition])
    assert database.find(ROLLOUTS, deep) == wanted
    both = condition
    for level in range(6):
        both = (And if level % 2 else Or)([both, both])
    assert database.find(ROLLOUTS, both) == wanted


def test_a_filter_has_at_most_200_conditions_and_is_at_most_10_deep():
    with pytest.raises(InvalidError, match="at most 200 conditions"):
        Query(Or([Condition("mode", "eq", "a")] * 200), ROLLOUTS, NO_DATABASE)
    filter = Condition("mode", "ne", "a")
    for _ in range(9):
        filter = Not(filter)
    Query(filter, ROLLOUTS, NO_DATABASE)
    with pytest.raises(InvalidError, match="at most 10 deep"):
        Query(Not(filter), ROLLOUTS, NO_DATABASE)


def test_a_path_leads_to_the_key_of_that_name_or_else_inwards(database):
    for number, document in (
        (1001, {"a.b": 1, "a": {"b": 2}}),
        (1002, {"a": {"b": 2}}),
        (1003, {"a": 1}),
    ):
        metadata = msgspec.json.encode(document).decode()
        database.insert("rollouts", {"number": number, "metadata": metadata})
    for value, number in ((1, 1001), (2, 1002)):
        wanted = [Condition("metadata.a.b", "eq", value), Condition("number", "gt", 1000)]
        assert database.find(ROLLOUTS, And(wanted)) == {(number,)}


NO_DATABASE = Database("postgres", None)


def refuse(filter: Filter, hint: str) -> None:
    with pytest.raises(InvalidError, match=hint):
        Query(filter, ROLLOUTS, NO_DATABASE)


@pytest.mark.parametrize(
    ("field", "hint"),
    [
        ("statsu", "did you mean 'status'"),
        ("metadata", "did you mean 'metadata.KEY'"),
        ("attributes.x", "no field"),
        ("numbers", "did you mean 'number'"),
        ("status; DROP TABLE rollouts", "no field"),
        (None, "no field"),
        (7, "no field"),
    ],
)
def test_an_unknown_field_is_refused(field, hint):
    refuse(msgspec.structs.replace(Condition("x", "eq", 1), field=field or 7), hint)
    with pytest.raises(InvalidError, match=hint):
        NO_DATABASE.page(ROLLOUTS, None, [Order(field=field)], 1)


@pytest.mark.parametrize(
    "key", ["x' OR '1'='1", "x\"]') OR 1=1 --", "x) IS NULL OR (1=1", "$.x", "?", "%s", "{}"]
)
def test_a_key_never_becomes_sql(database, key):
    for fields, name in ((ROLLOUTS, f"metadata.{key}"), (SPANS, f"attributes.{key}")):
        assert database.find(fields, Condition(name, "exists")) == set()
        assert database.find(fields, Condition(name, "eq", key)) == set()


@pytest.mark.parametrize(
    ("condition", "hint"),
    [
        (("status", "eq", ["failed"]), "cannot be compared"),
        (("metadata.a", "eq", float("nan")), "finite"),
        (("metadata.a", "lt", 2**63), "64 bits"),
        (("metadata.a", "in", "abc"), "takes a list"),
        (("metadata.a", "in", ["a", None]), "text or number or boolean"),
        (("metadata.a", "exists", 1), "takes boolean or null"),
        (("metadata.a", "lt", None), "takes text or number"),
        (("metadata.a", "gt", True), "takes text or number"),
        (("status", "eq", 1), "takes text or null"),
        (("priority", "eq", True), "takes number or null"),
        (("priority", "contains", 1), "cannot be asked of a number"),
        (("input", "eq", "a"), "cannot be asked of a json"),
        (("tag", "lt", "a"), "cannot be asked of a tag"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused(condition, hint):
    refuse(Condition(*condition), hint)


@pytest.mark.parametrize("field", ["input", "tag", "metadata.score"])
def test_rows_are_not_sorted_by_what_has_no_order(field):
    with pytest.raises(
        InvalidError, match=r"cannot be sorted by .*; sort by one of rollout_id, status"
    ):
        NO_DATABASE.page(ROLLOUTS, None, [Order(field=field)], 1)


def test_a_cursor_of_another_query_is_refused(database):
    filter, orders = Condition("rollout_id", "exists"), [Order(field="start_time")]
    _, cursor = database.page(ROLLOUTS, filter, orders, 5)
    assert database.page(ROLLOUTS, filter, orders, 5, cursor)[0]
    others = [
        (ROLLOUTS, None, orders),
        (ROLLOUTS, Condition("rollout_id", "exists", False), orders),
        (ROLLOUTS, filter, []),
        (ROLLOUTS, filter, [Order(field="start_time", descending=True)]),
        (SPANS, filter, orders),
    ]
    for other in others:
        with pytest.raises(InvalidError, match="another filter or order"):
            database.page(*other, 5, cursor)


@pytest.mark.parametrize(
    "cursor", ["", "x", "é", "AAAA", "!!!!", "bnVsbA", "WyJhIixbXV0=", "a" * 1001]
)
def test_a_damaged_cursor_is_refused(cursor):
    with pytest.raises(InvalidError, match="cursor"):
        NO_DATABASE.page(ROLLOUTS, None, [], 5, cursor)


def test_a_cursor_that_was_made_up_is_refused(database):
    _, cursor = database.page(ROLLOUTS, None, [], 5)
    packed = base64.urlsafe_b64decode(cursor + "==")
    assert packed.endswith(b"[4]")
    with pytest.raises(InvalidError, match="damaged"):
        database.page(
            ROLLOUTS, None, [], 5, base64.urlsafe_b64encode(packed[:-3] + b"[7]").decode()
        )


def test_rows_that_come_and_go_meanwhile_neither_repeat_nor_hide_others(database):
    orders = [Order(field="end_time", descending=True)]
    wanted = [row.unique for row in ordered(ROLLOUT_ROWS, orders)]
    page, cursor = database.page(ROLLOUTS, None, orders, 10)
    database.execute("DELETE FROM rollouts WHERE number IN (?, ?)", [page[3][0], page[-1][0]])
    rest, _ = database.page(ROLLOUTS, None, orders, 1000, cursor)
    assert page + rest == wanted
