"""The text-to-SQL team: what a right query is, questions about real tables, a folder of Spider, and
the agent by itself."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.examples.endpoint import scripted
from tests.examples.loading import EXAMPLES, load_example
from tests.examples.training import save_llama, steps_of, train
from tests.frameworks.world import bin_of

example = load_example("text_to_sql", "tasks", "spider", "grading")
tasks, grading = example.tasks, example.grading

GOLD = "SELECT name, age FROM singer WHERE age > 40"
SINGERS = {
    "first": [(1, "Ann", 30), (2, "Bob", 41), (3, "Bob", 41), (4, "Cy", 50)],
    "second": [(1, "Dan", 40), (2, "Eve", 60), (3, "Fay", 45), (4, "Gus", 20)],
}

DOUBLED = [
    f"t{number} AS (SELECT * FROM t{number - 1} UNION ALL SELECT * FROM t{number - 1})"
    for number in range(1, 30)
]
ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)"
CROSSED = ", ".join(f"singer {name}" for name in "abcdefghijklmnop")  # 4 ** 16 rows


@pytest.fixture
def singers(tmp_path: Path) -> list[str]:
    """Two instances of one database; in the first nobody is between 30 and 41."""
    paths: list[str] = []
    for name, rows in SINGERS.items():
        paths.append(str(tmp_path / f"{name}.sqlite"))
        with closing(sqlite3.connect(paths[-1])) as connection:
            connection.execute("CREATE TABLE singer (id, name, age)")
            connection.executemany("INSERT INTO singer VALUES (?, ?, ?)", rows)
            connection.commit()
    return paths


@pytest.mark.parametrize(
    ("query", "gold", "reward"),
    [
        ("select s.name as n, s.age from singer s where not s.age <= 40;", GOLD, 1.0),
        ("SELECT age, name FROM singer WHERE age > 40", GOLD, 1.0),  # columns in any order
        # the same on the first instance, by chance
        ("SELECT name, age FROM singer WHERE age > 35", GOLD, 0.0),
        ("SELECT 'Bob', 41", GOLD, 0.0),
    ],
)
def test_a_query_is_right_if_it_returns_the_same_on_every_instance(
    singers: list[str], query: str, gold: str, reward: float
) -> None:
    assert grading.grade({"gold": gold, "databases": singers}, query) == reward


@pytest.mark.parametrize(
    "query",
    [
        f"{GOLD}; DELETE FROM singer",
        "UPDATE singer SET age = 0 RETURNING name, age",
        "ATTACH DATABASE 'stolen.sqlite' AS stolen",
        "VACUUM INTO 'copy.sqlite'",
        "SELECT load_extension('evil')",
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i, i FROM n",
        f"-- {GOLD}",
        f"SELECT '{GOLD}'",
        f"```sql\n{GOLD}\n```",  # taken off by the agent, not by the grader
    ],
)
def test_tricks_are_worth_nothing_and_change_nothing(
    singers: list[str], query: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(grading, "SECONDS", 0.2)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert grading.grade({"gold": GOLD, "databases": singers}, query) == 0.0
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.fixture(scope="module")
def team() -> Iterator[SimpleNamespace]:
    """The example's modules that need packages of its own environment, and those packages."""
    packages = next((bin_of("experiments").parent / "lib").glob("python*/site-packages"))
    sys.path.append(str(packages))
    yield load_example("text_to_sql", "agent", "demonstrations")
    sys.path.remove(str(packages))


@pytest.fixture(scope="module")
def databases(team: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("databases")


def test_right_queries_are_right_and_hardly_any_other_is(databases: Path) -> None:
    """The wrong ones are those of other tasks on the same database, with other senses of their
    parts, and without their filter."""
    heldout = tasks.heldout_tasks(90, databases)
    assert all(grading.grade(task, task["gold"]) == 1.0 for task in heldout)
    others = [
        (task, other["gold"])
        for task in heldout
        for other in heldout
        if task["schema"] == other["schema"] and task["kind"] == other["kind"]
    ]
    swapped = [(task, task["gold"].replace(" > ", " < ")) for task in heldout]
    wrong = [(task, query) for task, query in others + swapped if query != task["gold"]]
    assert len(wrong) > 400
    assert sum(grading.grade(task, query) for task, query in wrong) < 0.02 * len(wrong)


def test_patterns_are_held_out_and_their_parts_are_not(team: SimpleNamespace) -> None:
    known = tasks.patterns(held_out=False)
    held_out = tasks.patterns(held_out=True)
    assert len(held_out) > 40
    assert not {one.name for one in known} & {one.name for one in held_out}
    for part in tasks.PARTS:
        assert {getattr(one, part) for one in held_out} <= {getattr(one, part) for one in known}


def test_demonstrations_are_of_training_patterns(team: SimpleNamespace, databases: Path) -> None:
    """None has a query of a held-out pattern, right or wrong in its senses."""
    shown = team.demonstrations.demonstrations(300, 1, databases)
    spoken = {one["messages"][-1]["content"] for one in shown}
    asked = {task["gold"] for task in tasks.heldout_tasks(300, databases)}
    assert {"correct", "wrong"} < spoken
    assert not spoken & asked
    for role in ("writer", "rewriter"):
        said = [
            one["messages"][-1]["content"]
            for one in shown
            if f"You are the {role}." in one["messages"][0]["content"]
        ]
        for frame in ("count(*) from", "count(distinct", "avg(", "group by", "having", "limit 1"):
            assert any(frame in query for query in said), f"the {role} never says {frame}"


@pytest.fixture
def spider(tmp_path: Path) -> Path:
    """A folder as Spider's zip file has it, with one database of two instances."""
    folder = tmp_path / "spider"
    place = folder / "database" / "concert_singer"
    place.mkdir(parents=True)
    for name in ("concert_singer", "concert_singer_1"):
        with closing(sqlite3.connect(place / f"{name}.sqlite")) as connection:
            connection.execute("CREATE TABLE singer (Singer_ID INT, Name TEXT)")
            connection.execute("INSERT INTO singer VALUES (1, ?)", (name,))
            connection.commit()
    described = {
        "db_id": "concert_singer",
        "table_names_original": ["singer", "concert"],
        "column_names_original": [
            [-1, "*"],
            [0, "Singer_ID"],
            [0, "Name"],
            [1, "Year"],
            [1, "Singer_ID"],
        ],
        "foreign_keys": [[4, 1]],
    }
    (folder / "tables.json").write_text(json.dumps([described]))
    question = {
        "db_id": "concert_singer",
        "question": "Who sings?",
        "query": "SELECT Name FROM singer",
    }
    for split in ("train_spider", "dev"):
        (folder / f"{split}.json").write_text(json.dumps([question]))
    return folder


def test_a_folder_of_spider_becomes_tasks(spider: Path) -> None:
    (task,) = example.spider.load_spider(spider, "dev")
    assert task["schema"] == (
        "singer(Singer_ID, Name)\nconcert(Year, Singer_ID)\nconcert.Singer_ID = singer.Singer_ID"
    )
    assert [Path(path).name for path in task["databases"]] == [
        "concert_singer.sqlite",
        "concert_singer_1.sqlite",
    ]
    assert grading.grade(task, "select name from singer") == 1.0
    assert grading.grade(task, "select 'concert_singer'") == 0.0


@pytest.mark.parametrize(
    ("query", "result"),
    [
        ("DROP TABLE singer", "error: not authorized"),
        ("DELETE FROM singer", "error: not authorized"),
        ("ATTACH DATABASE 'stolen.sqlite' AS stolen", "error: not authorized"),
        ("PRAGMA user_version = 7", "error: not authorized"),
        ("PRAGMA writable_schema = ON", "error: not authorized"),
        ("SELECT 1; DROP TABLE singer", "error: You can only execute one statement at a time."),
        ("SELECT printf('%.*c', 1000000000, 'x')", "error: not authorized to use function: printf"),
        (
            "SELECT fts3_tokenizer('simple')",
            "error: not authorized to use function: fts3_tokenizer",
        ),
        (f"WITH {', '.join(DOUBLED)} SELECT * FROM t29", "error: query string is too large"),
        (f"{ENDLESS} SELECT count(*) FROM n", "error: interrupted"),
        (f"{ENDLESS} SELECT i FROM n", "1; 2; 3"),
        (f"SELECT count(*) FROM {CROSSED}", "error: interrupted"),
        (f"SELECT a.age FROM {CROSSED}", "30; 30; 30"),
    ],
)
def test_a_bad_query_is_answered_soon_and_harms_nothing(
    team: SimpleNamespace,
    singers: list[str],
    query: str,
    result: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(team.agent, "QUERY_SECONDS", 0.2)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    began = time.monotonic()
    assert team.agent.execute(query, singers[0]) == result
    assert time.monotonic() - began < 2
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_locked_or_broken_database_is_an_error(
    team: SimpleNamespace, singers: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(team.agent, "QUERY_SECONDS", 0.2)
    with closing(sqlite3.connect(singers[0])) as connection:
        connection.execute("BEGIN EXCLUSIVE")
        assert team.agent.execute(GOLD, singers[0]) == "error: database is locked"
    assert team.agent.execute(GOLD, singers[0]) == "Bob, 41; Bob, 41; Cy, 50"
    absent = str(tmp_path / "absent.sqlite")
    assert team.agent.execute(GOLD, absent) == "error: unable to open database file"


def ask(url: str, database: str) -> str:
    """What the agent prints, run as a program where LangGraph is."""
    packages = next((bin_of("frameworks").parent / "lib").glob("python*/site-packages"))
    environment = {
        **os.environ,
        "PYTHONPATH": str(packages),
        "OPENAI_BASE_URL": url,
        "OPENAI_API_KEY": "any",
    }
    command = [sys.executable, "agent.py", database, "Who is above 40?"]
    done = subprocess.run(
        command,
        cwd=EXAMPLES / "text_to_sql",
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_team_gives_up_after_three_queries_and_harms_nothing(singers: list[str]) -> None:
    before = Path(singers[0]).read_bytes()
    answers = ("DELETE FROM singer", "it deletes", "nonsense", "no SQL", "SELECT age FROM singer")
    with scripted(*({"content": text} for text in answers), conversations=False) as (url, requests):
        assert ask(url, singers[0]) == "SELECT age FROM singer\n30; 41; 41\n"
    asked = [request["messages"][-1]["content"] for request in requests]
    assert asked[1] == "Who is above 40?\nDELETE FROM singer\nerror: not authorized"
    assert asked[2] == f"{asked[1]}\nit deletes"
    assert asked[3].splitlines()[1:] == ["nonsense", 'error: near "nonsense": syntax error']
    assert len(asked) == 5
    assert Path(singers[0]).read_bytes() == before


@pytest.mark.slow
def test_a_model_from_a_folder_is_trained_on_spider_and_broken_tasks_fail_by_name(
    spider: Path, tmp_path: Path
) -> None:
    """Of three tasks one has a broken database, and one a right query that is wrong."""
    broken = spider / "database" / "broken" / "broken.sqlite"
    broken.parent.mkdir()
    broken.write_bytes(b"not a database at all")
    (described,) = json.loads((spider / "tables.json").read_text())
    (spider / "tables.json").write_text(json.dumps([described, described | {"db_id": "broken"}]))
    (good,) = json.loads((spider / "dev.json").read_text())
    bad = [good | {"db_id": "broken"}, good | {"query": "SELECT nobody FROM singer"}]
    (spider / "train_spider.json").write_text(json.dumps([good, *bad]))
    model = save_llama(
        tmp_path / "llama",
        [described["db_id"], good["question"], good["query"], "You are the writer."],
    )
    options = (
        "--model",
        model,
        "--spider",
        spider,
        "--set",
        "tasks_per_step=3",
        "--set",
        "dtype=float32",
    )
    done = train("text_to_sql", "--out", tmp_path / "out", *options)
    assert done.returncode == 0, done.stderr
    for reason in (
        "InvalidError: the right query fails on",
        "broken.sqlite: file is not a database",
        "column: nobody",
    ):
        assert reason in done.stderr
    (step,) = steps_of(tmp_path / "out" / "run")
    assert (step["rollouts"], step["unrewarded"]) == (6, 4)
    assert list((tmp_path / "out" / "run" / "checkpoints").glob("*/writer/adapter_config.json"))
