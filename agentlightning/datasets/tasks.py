"""Datasets: converts a list, a file, a DataFrame, a Hugging Face dataset or a reference to a list of tasks.

Rows of tables become dicts. It does not look into tasks, shuffle or split; pandas and pyarrow are imported only for
formats that need them.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from agentlightning.data.references import is_reference, load_reference
from agentlightning.datasets.hub import fetched_file, is_hub_name
from agentlightning.errors import ConfigError, InvalidError, imported, nearest
from agentlightning.store.codec import to_json


def load_dataset(source: Any) -> list[Any]:
    """All tasks of `source`, in order.

    `source` is an iterable; a path to `.jsonl`, `.json`, `.csv` or `.parquet`, or such a file of the hub,
    `hf:ORG/NAME/FILE.jsonl`; a pandas DataFrame; a Hugging Face `Dataset`; or a reference `module:attribute` or
    `file.py:attribute` to one of these, or to a function that returns one. ConfigError names the wrong file, line or
    type, and refuses a dataset without tasks and a task that a store cannot hold."""
    name = str(source) if isinstance(source, str | Path) else type(source).__name__
    if isinstance(source, str) and is_hub_name(source):
        source = fetched_file(source)
    elif isinstance(source, str) and is_reference(source):
        source = load_reference(source)
        source = source() if callable(source) else source
    tasks = _read_file(Path(source)) if isinstance(source, str | Path) else _from_object(source)
    if not tasks:
        raise ConfigError(f"the dataset {name} has no tasks; at least one is needed")
    try:
        for number, task in enumerate(tasks, start=1):
            to_json(task, f"task {number} of the dataset {name}")
    except InvalidError as error:
        raise ConfigError(str(error)) from None
    return tasks


def _from_object(source: Any) -> list[Any]:
    if hasattr(source, "to_dict") and hasattr(source, "iloc"):  # a pandas DataFrame
        return [{str(key): value for key, value in row.items()} for row in source.to_dict("records")]
    if hasattr(source, "column_names") and hasattr(source, "__getitem__") and not isinstance(source, Mapping):
        return [dict(row) for row in source]  # a Hugging Face Dataset
    if isinstance(source, Mapping) and source and all(hasattr(split, "column_names") for split in source.values()):
        splits = ", ".join(repr(name) for name in source)
        raise ConfigError(f"the dataset has several splits ({splits}); pass one of them, such as dataset['train']")
    if isinstance(source, Iterable) and not isinstance(source, Mapping | bytes | bytearray):
        return list(source)
    raise ConfigError(
        f"a {type(source).__name__} is not a dataset; expected a list, a path to {', '.join(_READERS)}, a DataFrame, "
        "a Hugging Face Dataset or a reference module:attribute"
    )


def _read_file(path: Path) -> list[Any]:
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(
            f"cannot read {path} as a dataset: extension {path.suffix!r}; {nearest(path.suffix, _READERS)}"
        )
    if not path.is_file():
        raise ConfigError(f"no dataset file {path} (looked in {Path.cwd()})")
    try:
        return reader(path)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8") from error


def _read_jsonl(path: Path) -> list[Any]:
    tasks: list[Any] = []
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                tasks.append(_parse_json(line, f"{path}, line {number}"))
    return tasks


def _read_json(path: Path) -> list[Any]:
    tasks = _parse_json(path.read_text(encoding="utf-8-sig"), str(path))
    if not isinstance(tasks, list):
        raise ConfigError(f"{path} holds a JSON {type(tasks).__name__}; expected an array with one task per element")
    return tasks


def _parse_json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where} is not JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} cannot be read: {error}") from None


def _read_csv(path: Path) -> list[Any]:
    """One dict per row; all values are strings."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file)
        tasks: list[Any] = []
        for row in rows:
            if None in row or None in row.values():
                columns = len(rows.fieldnames or ())
                raise ConfigError(f"{path}, line {rows.line_num}: the row does not have the header's {columns} columns")
            tasks.append(row)
    return tasks


def _read_parquet(path: Path) -> list[Any]:
    parquet = imported("pyarrow.parquet", f"reading {path}", "agent-lightning-next[datasets]")
    import pyarrow

    try:
        return parquet.read_table(path).to_pylist()
    except pyarrow.ArrowException as error:
        raise ConfigError(f"{path} is not a readable Parquet file: {error}") from error


_READERS = {".jsonl": _read_jsonl, ".json": _read_json, ".csv": _read_csv, ".parquet": _read_parquet}
