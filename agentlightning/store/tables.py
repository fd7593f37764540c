"""Nouns as rows: a column for each field, of the same name; what is open, or has fields of its own, as JSON text.

This module knows how a noun becomes a row and a row a noun. It does not know which rows there are, nor what they mean.
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
    """The table of nouns of one kind, of which the fields `json` are JSON text and the fields `words` are words in a
    text. It may have further columns, which are in no noun. `what` names one of the nouns in errors."""

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
        """Write a noun, with `further` columns; `end` is what the statement ends with."""
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
        """The nouns that `SELECT … FROM the table` with this `rest` gives."""
        rows = connection.execute(f"SELECT {self.columns} FROM {self._name} {rest}", values)
        return [self.noun(row) for row in rows]

    def one(self, connection: Connection, rest: str, *values: Any) -> N | None:
        """The first of them, None if there is none."""
        row = connection.execute(f"SELECT {self.columns} FROM {self._name} {rest}", values).fetchone()
        return None if row is None else self.noun(row)


ROLLOUTS: Final = Table("rollouts", Rollout, "the rollout", json=["input", "config", "metadata"])
ATTEMPTS: Final = Table("attempts", Attempt, "the attempt", json=["metadata"])
RESOURCES: Final = Table("resources", ResourcesUpdate, "the update", json=["resources", "metadata"])
RUNS: Final = Table("runs", Run, "the run", json=["manifest"])
KEYS: Final = Table("api_keys", ApiKey, "the key", words=["scopes"])
