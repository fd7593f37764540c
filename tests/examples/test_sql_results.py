"""Queries are as good as what they return, and the predicted one can do no harm."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest

from agentlightning.errors import ConfigError, InvalidError
from tests.examples.loading import load_example

rewards = load_example("text_to_sql", "sql_results").sql_results

GOLD = "SELECT name, age FROM people"


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "a folder?#%" / "people.sqlite"
    path.parent.mkdir()
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE people (name TEXT, age INTEGER, weight REAL)")
    connection.executemany(
        "INSERT INTO people VALUES (?, ?, ?)", [("Ann", 3, 0.1), ("Bo", 5, 0.2), ("Ann", 3, None)]
    )
    connection.commit()
    connection.close()
    return path


@pytest.mark.parametrize(
    ("prediction", "gold", "equal"),
    [
        ("select age as a, name from people", "SELECT age, name FROM people", 1.0),
        ("SELECT age, name FROM people", GOLD, 0.0),  # the order of columns matters
        (f"{GOLD} ORDER BY age DESC", GOLD, 1.0),  # the order of rows does not, unless asked for
        (f"{GOLD} ORDER BY age DESC", f"{GOLD} ORDER BY age", 0.0),
        ("SELECT DISTINCT name, age FROM people", GOLD, 0.0),  # how often a row occurs matters
        (
            f"{GOLD} ORDER BY age DESC",
            "SELECT * FROM (SELECT name, age FROM people ORDER BY age)",
            1.0,
        ),
        ("SELECT 3.0", "SELECT MIN(age) FROM people", 1.0),
        ("SELECT 12345678902", "SELECT 12345678901", 0.0),
        ("WITH p AS (SELECT * FROM people) SELECT name, age FROM p; -- done", GOLD, 1.0),
        ("SELECT name FROM people WHERE age > 99", "SELECT age FROM people WHERE age < 0", 1.0),
    ],
)
def test_what_equal_means(database: Path, prediction: str, gold: str, equal: float) -> None:
    assert rewards.sql_result_equal(prediction, gold, database) == equal


@pytest.mark.parametrize(
    ("prediction", "gold", "equal"),
    [
        ("SELECT age, name FROM people", GOLD, 1.0),
        ("SELECT age, name FROM people ORDER BY name", f"{GOLD} ORDER BY name", 1.0),
        ("SELECT age, name FROM people ORDER BY name DESC", f"{GOLD} ORDER BY name", 0.0),
        # each column by itself is right, and rows are not
        (
            "SELECT column2, column1 FROM (VALUES (1, 4), (2, 3))",
            "SELECT * FROM (VALUES (3, 1), (4, 2))",
            0.0,
        ),
        # nothing has no columns
        ("SELECT age, name FROM people WHERE age > 9", "SELECT 1 WHERE 1 > 2", 1.0),
    ],
)
def test_columns_may_come_in_any_one_order_where_that_is_said(
    database: Path, prediction: str, gold: str, equal: float
) -> None:
    assert rewards.sql_result_equal(prediction, gold, database, any_column_order=True) == equal


ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT {} FROM n"
LONG = "SELECT {}(hex(zeroblob(4900000)), hex(zeroblob(2450000)) || '1'{})"  # cannot be interrupted


@pytest.mark.parametrize(
    ("prediction", "options"),
    [
        (ENDLESS.format("COUNT(*)"), {"timeout": 0.1}),
        (ENDLESS.format("zeroblob(90000)"), {"timeout": 60}),  # would not fit into memory
        (LONG.format("instr", ""), {"timeout": 0.1}),
        (LONG.format("replace", ", ''"), {"timeout": 0.1}),
        (f"{GOLD} UNION ALL {GOLD}", {"row_limit": 3}),
    ],
)
def test_a_prediction_without_end_is_stopped(database: Path, prediction: str, options: Any) -> None:
    started = time.monotonic()
    assert rewards.sql_result_equal(prediction, GOLD, database, **options) == 0.0
    assert time.monotonic() - started < 20


def test_a_right_query_that_fails_is_an_error_of_the_data(database: Path) -> None:
    with pytest.raises(InvalidError, match="no such column: nobody"):
        rewards.sql_result_equal(GOLD, "SELECT nobody FROM people", database)
    with pytest.raises(InvalidError, match="more than 2 rows"):
        rewards.sql_result_equal(GOLD, GOLD, database, row_limit=2)
    with pytest.raises(ConfigError, match="no database"):
        rewards.sql_result_equal(GOLD, GOLD, database.parent / "absent.sqlite")
