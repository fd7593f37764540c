"""Whatever a user has becomes a list of tasks, or a message that says what is wrong with it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow
import pyarrow.parquet
import pytest

from agentlightning.data.references import load_reference
from agentlightning.datasets.tasks import load_dataset
from agentlightning.errors import ConfigError

TASKS = [{"question": "1+1", "answer": 2}, {"question": "Où ?", "answer": 3}]


class HuggingFaceLike:
    """The part of `datasets.Dataset` that is looked at."""

    column_names = ("question", "answer")

    def __getitem__(self, index: int) -> dict[str, object]:
        return TASKS[index]


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "source",
    [TASKS, tuple(TASKS), (task for task in TASKS), pandas.DataFrame(TASKS), HuggingFaceLike()],
    ids=["list", "tuple", "generator", "frame", "Hugging Face"],
)
def test_objects_in_memory_become_tasks(source: object) -> None:
    assert load_dataset(source) == TASKS


ROWS = {  # as verl's, with a cell that is missing in the second row
    "prompt": [np.array([{"role": "user", "content": "1+1"}], dtype=object)] * 2,
    "reward_model": [{"ground_truth": np.array([2, 3]), "style": "rule"}] * 2,
    "score": [np.float32(0.5), math.nan],
    "at": [pandas.Timestamp("2026-01-01"), pandas.NaT],
    "note": ["x", pandas.NA],
}
PLAIN = {
    "prompt": [{"role": "user", "content": "1+1"}],
    "reward_model": {"ground_truth": [2, 3], "style": "rule"},
    "score": 0.5,
    "at": "2026-01-01T00:00:00",
    "note": "x",
}


@pytest.mark.parametrize("door", ["list", "frame", "arrow", "parquet", "jsonl"])
def test_values_of_numpy_and_missing_cells_become_plain_at_every_door(
    tmp_path: Path, door: str
) -> None:
    frame = pandas.DataFrame(ROWS)
    path = tmp_path / f"tasks.{door}"
    source: Any = frame
    if door == "list":
        source = [{name: cells[row] for name, cells in ROWS.items()} for row in (0, 1)]
    elif door == "arrow":
        source = pyarrow.Table.from_pandas(frame)
    elif door == "parquet":
        frame.to_parquet(path)
        source = path
    elif door == "jsonl":
        write(path, "\r\n".join(json.dumps(task) for task in load_dataset(frame)))
        source = path
    assert load_dataset(source) == [PLAIN, PLAIN | {"score": None, "at": None, "note": None}]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("name", ["tasks.jsonl", "tasks.json", "tasks.csv"])
def test_text_in_every_encoding_that_says_what_it_is(
    tmp_path: Path, name: str, encoding: str
) -> None:
    long = "é" * 200_000
    text = {"tasks.csv": f"a\r\n{long}\r\n", "tasks.json": json.dumps([{"a": long}])}.get(
        name, json.dumps({"a": long})
    )
    (tmp_path / name).write_bytes(text.encode(encoding))
    assert load_dataset(tmp_path / name) == [{"a": long}]


@pytest.mark.parametrize("source", ["tasks.csv", "tasks.jsonl", "frame", "tasks.parquet"])
def test_two_columns_of_one_name_are_refused(tmp_path: Path, source: str) -> None:
    table = pyarrow.table([[1], [2]], names=["a", "a"])
    if source == "tasks.parquet":
        pyarrow.parquet.write_table(table, tmp_path / source)
    else:
        write(tmp_path / source, "a,a\n1,2\n" if source == "tasks.csv" else '{"a": 1, "a": 2}')
    frame = pandas.DataFrame([[1, 2]], columns=["a", "a"])
    with pytest.raises(ConfigError, match="several columns called 'a'"):
        load_dataset(frame if source == "frame" else tmp_path / source)


def test_a_task_that_holds_itself_is_refused() -> None:
    task: list[Any] = []
    task.append(task)
    with pytest.raises(ConfigError, match="holds itself"):
        load_dataset([task])


def test_a_dataset_of_several_splits_asks_for_one_of_them() -> None:
    with pytest.raises(ConfigError, match=r"several splits \('train', 'test'\)"):
        load_dataset({"train": HuggingFaceLike(), "test": HuggingFaceLike()})


@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["plain", "with a byte order mark"])
@pytest.mark.parametrize(
    ("name", "text", "tasks"),
    [
        ("tasks.jsonl", "\n\n".join(json.dumps(task) for task in TASKS) + "\n", TASKS),
        ("tasks.json", json.dumps(TASKS), TASKS),
        ("tasks.csv", 'question,answer\n"1,1",2\n', [{"question": "1,1", "answer": "2"}]),
    ],
)
def test_a_file_becomes_tasks(
    tmp_path: Path, mark: str, name: str, text: str, tasks: list[Any]
) -> None:
    path = write(tmp_path / name, mark + text)
    assert load_dataset(str(path)) == load_dataset(path) == tasks


@pytest.mark.parametrize(
    ("text", "task"),
    [
        ('question;answer\n"1;1, or 2";3,5\n', {"question": "1;1, or 2", "answer": "3,5"}),
        ("question\tanswer\n1;1, or 2\t\n", {"question": "1;1, or 2", "answer": ""}),
        ('"a, b";c\n1;2\n', {"a, b": "1", "c": "2"}),
        ('"a;b",c\n1;1,2\n', {"a;b": "1;1", "c": "2"}),
        ('"a;b"\n1;1\n', {"a;b": "1;1"}),
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_the_columns_of_a_csv_are_separated_as_excel_does(
    tmp_path: Path, encoding: str, text: str, task: dict[str, str]
) -> None:
    (tmp_path / "tasks.csv").write_bytes(text.encode(encoding))
    assert load_dataset(tmp_path / "tasks.csv") == [task]


def test_parquet_keeps_types(tmp_path: Path) -> None:
    pandas.DataFrame(TASKS).to_parquet(tmp_path / "tasks.parquet")
    assert load_dataset(tmp_path / "tasks.parquet") == TASKS


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("tasks.jsonl", '{"a": 1}\n{"a": \n', r"tasks\.jsonl, line 2 is not JSON"),
        ("tasks.json", '{"a": 1}', "holds a JSON dict; expected an array"),
        ("tasks.json", "[1,", r"tasks\.json is not JSON"),
        ("tasks.csv", "a,b\n1\n", r"line 2: the row does not have the header's 2 columns"),
        ("tasks.csv", "a,b\n", "has no tasks"),
        ("tasks.jsonl", "", "has no tasks"),
        ("tasks.parquet", "PAR", "not a readable Parquet file"),
        ("tasks.jsonlines", "", "extension '.jsonlines'; did you mean '.jsonl'"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_the_reason(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_dataset(write(tmp_path / name, text))


def test_a_missing_file_and_a_file_of_another_encoding_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no dataset file .*absent\.json"):
        load_dataset(tmp_path / "absent.json")
    (tmp_path / "latin.jsonl").write_bytes('"é"\n'.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"not UTF-8 text.* 0xE9.* iconv -f WINDOWS-1252"):
        load_dataset(tmp_path / "latin.jsonl")


@pytest.mark.parametrize("source", [7, None, b"tasks", {"a": 1}, []], ids=repr)
def test_what_is_no_dataset_is_refused(source: object) -> None:
    with pytest.raises(ConfigError, match=r"is not a dataset|has no tasks"):
        load_dataset(source)


def test_a_reference_names_a_value_or_a_function_of_a_file_or_a_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "my_tasks.py", "VALUE = [1, 2]\ndef make():\n    return (n for n in VALUE)\n")
    assert load_dataset("my_tasks.py:VALUE") == [1, 2]
    assert load_dataset("my_tasks:make") == [1, 2]
    assert load_reference("my_tasks.py:make") is load_reference("my_tasks:make")


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("absent.py:tasks", "no file absent.py"),
        ("absent_module:tasks", "no module 'absent_module'"),
        (
            "broken.py:tasks",
            "importing broken.py failed: ZeroDivisionError|importing .*broken.py failed",
        ),
        (
            "needy:tasks",
            "importing needy failed: No module named 'absent_dependency'; install what it needs",
        ),
        ("json:dumpss", "json has no attribute 'dumpss'; did you mean 'dumps'"),
    ],
)
def test_a_reference_that_leads_nowhere_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "broken.py", "1 / 0\n")
    write(tmp_path / "needy.py", "import absent_dependency\n")
    with pytest.raises(ConfigError, match=message):
        load_reference(reference)


def test_a_file_named_like_a_standard_module_does_not_replace_it(tmp_path: Path) -> None:
    path = write(tmp_path / "statistics.py", "TASKS = [1]\n")
    assert load_dataset(f"{path}:TASKS") == [1]
    assert "mean" in vars(__import__("statistics"))


@pytest.mark.parametrize(
    "value", ["1" * 30, "1" * 5000, "Infinity", "[" * 300 + "]" * 300, "[" * 9000 + "]" * 9000]
)
def test_a_task_that_no_store_can_hold_is_refused_before_anything_starts(
    tmp_path: Path, value: str
) -> None:
    lines = write(tmp_path / "tasks.jsonl", f'{{"answer": 1}}\n{{"answer": {value}}}\n')
    with pytest.raises(
        ConfigError, match=r"task 2 of the dataset .*'answer'|line 2 cannot be read"
    ):
        load_dataset(lines)
    table = write(tmp_path / "tasks.csv", f"answer\n{value}\n")
    assert load_dataset(table) == [{"answer": value}]
