"""Reads records (tasks, demonstrations, spans) from files, in every text encoding that says what it
is, and as plain values.

| file | a record |
|---|---|
| `.jsonl` | a line of JSON |
| `.json` | an element of an array |
| `.csv` | a row, as a dict of texts; columns end at commas, semicolons or tabs |
| `.parquet` | a row, as a dict |

It does not know what records mean; pyarrow is imported only for Parquet files.
"""

from __future__ import annotations

import codecs
import csv
import datetime
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

from agentlightning.errors import ConfigError, imported, nearest

_PLAIN: Final = (str, int, bool, type(None))
_MISSING: Final = ("NAType", "NaTType")  # of pandas
_LONGEST_CELL: Final = 2**31 - 1  # characters of a CSV cell; Python's own limit is 131,072
_MARKS: Final = (  # that of UTF-32 begins with that of UTF-16
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


def read_records(path: Path) -> list[Any]:
    """The records of a file, in order. ConfigError names the file, the line and what is wrong."""
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(
            f"cannot read {path} as a dataset: extension {path.suffix!r}; "
            f"{nearest(path.suffix, READERS)}"
        )
    if not path.is_file():
        raise ConfigError(f"no dataset file {path} (looked in {Path.cwd()})")
    try:
        return reader(path)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(not_text(path, error)) from None


def encoding_of(path: Path) -> str:
    """The encoding of a text file: by its byte order mark, or by the zero bytes of UTF-16 without
    one; else UTF-8."""
    with path.open("rb") as file:
        start = file.read(4)
    for mark, encoding in _MARKS:
        if start.startswith(mark):
            return encoding
    zeros = [byte == 0 for byte in start]
    if zeros == [False, True, False, True]:
        return "utf-16-le"
    return "utf-16-be" if zeros == [True, False, True, False] else "utf-8"


def not_text(path: Path, error: UnicodeDecodeError) -> str:
    """Why a file is no text, and what to do."""
    if error.encoding not in ("utf-8", "utf_8_sig", "utf-8-sig"):
        return (
            f"{path} is not {error.encoding} text, which its first bytes announce: {error.reason}"
        )
    byte = error.object[error.start]
    return (
        f"{path} is not UTF-8 text: its byte {error.start} is 0x{byte:02X}. If it is Latin-1 or "
        f"Windows-1252, convert it: iconv -f WINDOWS-1252 -t UTF-8 {path.name}"
    )


def plain(value: Any) -> Any:
    """A value of NumPy, pandas or torch, and all that it holds, as JSON has it: arrays are lists,
    times are texts, and what is missing (NaN, NaT, NA) is None. Anything else stays."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, float):
        return float(value) if value == value else None
    if type(value).__name__ in _MISSING:
        return None
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        return {plain(key): plain(item) for key, item in items}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return [plain(item) for item in cast("Sequence[Any]", value)]
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    if hasattr(value, "dtype") and hasattr(value, "ndim"):
        return _of_array(value)
    return str.__str__(value) if isinstance(value, str) else value


def _of_array(value: Any) -> Any:
    if value.ndim:
        return [plain(item) for item in value]
    if getattr(value.dtype, "kind", "") in "Mm":  # times, of which `item` makes numbers
        return None if str(value) == "NaT" else str(value)
    return plain(value.item())


def check_columns(names: Iterable[Any], what: str) -> None:
    """ConfigError if a table has two columns of one name: only one of them would reach a task."""
    double = [str(name) for name, times in Counter(names).items() if times > 1]
    if double:
        raise ConfigError(
            f"{what} has several columns called {double[0]!r}; rename them, or leave out all but "
            "one"
        )


def _read_jsonl(path: Path) -> list[Any]:
    records: list[Any] = []
    with path.open(encoding=encoding_of(path)) as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                records.append(_parse_json(line, f"{path}, line {number}"))
    return records


def _read_json(path: Path) -> list[Any]:
    records = _parse_json(path.read_text(encoding=encoding_of(path)), str(path))
    if not isinstance(records, list):
        raise ConfigError(
            f"{path} holds a JSON {type(records).__name__}; expected an array with one task per "
            "element"
        )
    return cast("list[Any]", records)


def _parse_json(text: str, where: str) -> Any:
    def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            check_columns((name for name, _ in pairs), where)
        return found

    try:
        return json.loads(text, object_pairs_hook=object_of)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where} is not JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} cannot be read: {error}") from None


def _read_csv(path: Path) -> list[Any]:
    """One dict per row; all values are texts."""
    usual = csv.field_size_limit(_LONGEST_CELL)
    try:
        with path.open(encoding=encoding_of(path), newline="") as file:
            rows = csv.DictReader(file, delimiter=_separator(file.readline()))
            file.seek(0)
            check_columns(rows.fieldnames or (), str(path))
            return [_whole(row, rows, path) for row in rows]
    except csv.Error as error:
        raise ConfigError(f"{path} is not a CSV file: {error}") from None
    finally:
        csv.field_size_limit(usual)


def _separator(header: str) -> str:
    """The character between columns: a comma, or where the header has none outside quotes, what
    Excel writes: a semicolon in countries whose decimals have commas, a tab in UTF-16."""
    bare = re.sub('"[^"]*"', "", header)
    return next((separator for separator in ",;\t" if separator in bare), ",")


def _whole(row: dict[Any, Any], rows: csv.DictReader[str], path: Path) -> dict[Any, Any]:
    if None in row or None in row.values():
        columns = len(rows.fieldnames or ())
        raise ConfigError(
            f"{path}, line {rows.line_num}: the row does not have the header's {columns} columns"
        )
    return row


def _read_parquet(path: Path) -> list[Any]:
    parquet = imported("pyarrow.parquet", f"reading {path}", "agent-lightning-next[datasets]")
    import pyarrow

    try:
        check_columns(parquet.read_schema(path).names, str(path))
        return parquet.read_table(path).to_pylist()
    except pyarrow.ArrowException as error:
        raise ConfigError(f"{path} is not a readable Parquet file: {error}") from error


READERS: Final = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
"""By the extension of a file's name."""
