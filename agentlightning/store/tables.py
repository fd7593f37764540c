"""Nouns as rows: a column per field with its name; JSON text for open or nested fields.

This module converts nouns and rows. It does not know what they mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Generic, TypeVar, get_type_hints

import msgspec

from agentlightning.store import codec
from agentlightning.store.database import Connection, Cursor
from agentlightning.types import ApiKey, Attempt, Noun, ResourcesUpdate, Rollout, Run

N = TypeVar("N", bound=Noun)


class Table(Generic[N]):
    """The table of a kind of nouns. The fields in `json` are JSON text, those in `words` are words in a text. It may
    have further columns. `what` is the noun's name in errors."""

    def __init__(
        self, name: str, noun: type[N], what: str, *, json: Sequence[str] = (), words: Sequence[str] = ()
    ) -> None:
        self.fields = noun.__struct_fields__
        self.columns = ", ".join(self.fields)
        self._name = name
        self._noun = noun
        self._what = what
        self._words = words
        types = get_type_hints(noun)
        self._json = {field: msgspec.json.Decoder(types[field]).decode for field in json}

    def insert(self, connection: Connection, noun: N, end: str = "", **further: Any) -> Cursor:
        """Insert a noun with `further` columns; `end` is the statement's end."""
        values = msgspec.structs.asdict(noun) | further
        for field in self._json:
            values[field] = codec.to_json(values[field], f"the {field} of {self._what}")
        for field in self._words:
            values[field] = " ".join(values[field])
        for field, value in values.items():
            if isinstance(value, str):
                values[field] = codec.text(value)
            elif isinstance(value, float):
                codec.check_finite(value, f"the {field} of {self._what}")
        marks = ", ".join("?" * len(values))
        return connection.execute(
            f"INSERT INTO {self._name} ({', '.join(values)}) VALUES ({marks}) {end}", tuple(values.values())
        )

    def noun(self, row: Sequence[Any]) -> N:
        """The noun of a row that begins with `columns`."""
        values = dict(zip(self.fields, row, strict=False))
        for field, decode in self._json.items():
            values[field] = decode(values[field])
        for field in self._words:
            values[field] = tuple(values[field].split())
        return self._noun(**values)

    def all(self, connection: Connection, rest: str = "", values: Sequence[Any] = ()) -> list[N]:
        """The nouns of `SELECT … FROM the table` with this `rest`."""
        rows = connection.execute(f"SELECT {self.columns} FROM {self._name} {rest}", values)
        return [self.noun(row) for row in rows]

    def one(self, connection: Connection, rest: str, *values: Any) -> N | None:
        """The first of them, or None."""
        row = connection.execute(f"SELECT {self.columns} FROM {self._name} {rest}", values).fetchone()
        return None if row is None else self.noun(row)


ROLLOUTS: Final = Table("rollouts", Rollout, "the rollout", json=["input", "config", "metadata"])
ATTEMPTS: Final = Table("attempts", Attempt, "the attempt", json=["metadata"])
RESOURCES: Final = Table("resources", ResourcesUpdate, "the update", json=["resources", "metadata"])
RUNS: Final = Table("runs", Run, "the run", json=["manifest"])
KEYS: Final = Table("api_keys", ApiKey, "the key", words=["scopes"])
