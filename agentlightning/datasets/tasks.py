"""Datasets: converts a list, a file, a DataFrame, a Hugging Face dataset or a reference to a list
of tasks.

Rows of tables become dicts. It does not look into tasks, shuffle or split.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from agentlightning.data.references import is_reference, load_reference
from agentlightning.datasets.hub import fetched_file, is_hub_name
from agentlightning.datasets.record_files import READERS, check_columns, plain, read_records
from agentlightning.errors import ConfigError, InvalidError
from agentlightning.rewards.reasoning_gym import reasoning_gym_tasks
from agentlightning.store.codec import to_json


def load_dataset(source: Any) -> list[Any]:
    """All tasks of `source`, in order.

    `source` is an iterable; a path to `.jsonl`, `.json`, `.csv` or `.parquet`, or such a file of
    the hub, `hf:ORG/NAME/FILE.jsonl`; a DataFrame of pandas or Polars or a table of Arrow; a
    Hugging Face `Dataset`; a generator `{"reasoning_gym": NAME, "seed": N, option: value}`; or a
    reference `module:attribute` or `file.py:attribute` to one of these, or to a function that
    returns one. Values are made plain (`records.plain`). ConfigError
    names the wrong file, line or type, and refuses a dataset without tasks and a task that a store
    cannot hold."""
    name = str(source) if isinstance(source, str | Path) else type(source).__name__
    if isinstance(source, str) and is_hub_name(source):
        source = fetched_file(source)
    elif isinstance(source, str) and is_reference(source):
        source = load_reference(source)
        source = source() if callable(source) else source
    found = read_records(Path(source)) if isinstance(source, str | Path) else _from_object(source)
    try:
        tasks = [plain(task) for task in found]
    except RecursionError:
        raise ConfigError(
            f"a task of the dataset {name} holds itself, or is nested too deep"
        ) from None
    if not tasks:
        raise ConfigError(f"the dataset {name} has no tasks; at least one is needed")
    try:
        for number, task in enumerate(tasks, start=1):
            to_json(task, f"task {number} of the dataset {name}")
    except InvalidError as error:
        raise ConfigError(str(error)) from None
    return tasks


def _from_object(source: Any) -> list[Any]:
    name = type(source).__name__
    # pandas
    if hasattr(source, "to_dict") and hasattr(source, "iloc") and hasattr(source, "columns"):
        check_columns(source.columns, f"the {name}")
        return [
            {str(key): value for key, value in row.items()} for row in source.to_dict("records")
        ]
    if hasattr(source, "to_dicts"):  # Polars, whose names differ
        return source.to_dicts()
    if hasattr(source, "to_pylist") and hasattr(source, "column_names"):  # Arrow
        check_columns(source.column_names, f"the {name}")
        return source.to_pylist()
    if (
        hasattr(source, "column_names")
        and hasattr(source, "__getitem__")
        and not isinstance(source, Mapping)
    ):
        return [dict(row) for row in source]  # a Hugging Face Dataset
    if (
        isinstance(source, Mapping)
        and source
        and all(hasattr(split, "column_names") for split in source.values())
    ):
        splits = ", ".join(repr(name) for name in source)
        raise ConfigError(
            f"the dataset has several splits ({splits}); pass one of them, such as dataset['train']"
        )
    if isinstance(source, Mapping) and "reasoning_gym" in source:
        return list(reasoning_gym_tasks(source))
    if isinstance(source, Iterable) and not isinstance(source, Mapping | bytes | bytearray):
        return list(source)
    raise ConfigError(
        f"a {name} is not a dataset; expected a list, a path to {', '.join(READERS)}, a "
        "DataFrame, a Hugging Face Dataset, {reasoning_gym: NAME} or a reference module:attribute"
    )
