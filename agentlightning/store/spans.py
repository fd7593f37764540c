"""Spans on their way into the store, redacted and made into rows; and as rows, stored once each and
numbered within their attempt."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from agentlightning.errors import ConflictError, InvalidError, NotFoundError, OutdatedError
from agentlightning.store import codec, lifecycle
from agentlightning.store.attempts import (
    load_standing,
    load_with_sequence,
    save_standing,
    update_attempt,
)
from agentlightning.store.codec import SPAN_COLUMNS, SpanColumns
from agentlightning.store.database import Connection, Transaction
from agentlightning.store.prompts import Prepared, Prompts, SpanRow, WholePrompts
from agentlightning.store.redaction import Redact
from agentlightning.store.rollouts import note_reward, require_rollout
from agentlightning.types import UNATTRIBUTED, AttemptStatus, Span

_LARGEST_GIVEN: Final = 2**52  # the store numbers on from it, and there is room for an import
_INSERT: Final = (
    f"INSERT INTO spans (attempt, {SPAN_COLUMNS}) VALUES (?{', ?' * len(SpanColumns._fields)}) "
    "ON CONFLICT (attempt, span_id) DO NOTHING"
)


class Stored(NamedTuple):
    """The sequence id of a span, 0 if it was dropped; and the number of its attempt, None if it was
    stored before."""

    sequence_id: int
    attempt: int | None


_DROPPED: Final = Stored(0, None)

Observer: TypeAlias = Callable[[Sequence[Span]], None]
"""Gets the spans that were stored, in the event loop, perhaps twice."""
Write: TypeAlias = Callable[[list[SpanRow]], Awaitable[list[Stored]]]


class SpanWriter:
    """Stores spans by `write`, which takes rows and stores all or none, in this process's database
    or through the process that owns it. Remembers their prompts for those that go on from them."""

    def __init__(
        self,
        redact: Redact,
        write: Write,
        observer: Observer | None,
    ) -> None:
        self._redact = redact
        self._write = write
        self._observer = observer
        self._prompts = Prompts()

    async def store(self, spans: Sequence[Span], write: Write | None = None) -> list[int]:
        """The sequence id of each; 0 for a span that the redaction dropped. `write` is for these
        spans alone."""
        write = write or self._write
        try:
            prepared = await prepared_spans(spans, self._prompts, self._redact)
            stored = await write([entry.row for entry in prepared])
        except OutdatedError:  # the store no longer has what they go on from
            prepared = await prepared_spans(spans, self._prompts, self._redact, whole=True)
            stored = await write([entry.row for entry in prepared])
        for entry, (_, attempt) in zip(prepared, stored, strict=True):
            if entry.prompt is not None and attempt is not None:
                entry.prompt.attempt = attempt
                self._prompts.remember(entry.row, entry.prompt)
        if self._observer is not None:
            written = zip(prepared, stored, strict=True)
            self._observer(
                [
                    msgspec.structs.replace(entry.span, sequence_id=n)
                    for entry, (n, _) in written
                    if entry.span
                ]
            )
        return [number for number, _ in stored]


async def prepared_spans(
    spans: Sequence[Span], prompts: Prompts, redact: Redact, *, whole: bool = False
) -> list[Prepared]:
    """Redacted spans with their rows. Long spans are prepared in a thread."""
    if codec.larger(spans, codec.LARGE):
        return await asyncio.to_thread(prompts.prepare, spans, redact, whole=whole)
    return prompts.prepare(spans, redact, whole=whole)


def add_spans(tx: Transaction, rows: Sequence[SpanRow]) -> list[Stored]:
    """Store spans, all or none. OutdatedError if a span's base is not stored in its attempt."""
    by_attempt: dict[tuple[str, str], list[int]] = {}
    for index, row in enumerate(rows):
        by_attempt.setdefault((row.rollout_id, row.attempt_id), []).append(index)
    stored = [_DROPPED] * len(rows)
    for (rollout_id, attempt_id), indices in by_attempt.items():
        if rollout_id == attempt_id == UNATTRIBUTED:
            _lay_out_unattributed(tx)
        number, before, highest = load_with_sequence(tx.connection, rollout_id, attempt_id)
        new = set[str]()
        for index in indices:
            row = rows[index]
            columns = row.columns
            if columns is None:
                continue
            if columns.base is not None and row.base_attempt != number and columns.base not in new:
                raise OutdatedError(
                    f"the prompt that call {columns.span_id} goes on from is not stored"
                )
            if columns.sequence_id > _LARGEST_GIVEN:
                raise InvalidError(
                    f"the sequence_id of span {columns.span_id} is too large: give 1, 2 …, or 0 "
                    "for the next"
                )
            sequence_id = columns.sequence_id or highest + 1
            inserted = tx.connection.execute(
                _INSERT, (number, columns[0], sequence_id, *columns[2:])
            ).rowcount
            if not inserted:
                stored[index] = Stored(_stored_before(tx.connection, number, row, columns), None)
                continue
            new.add(columns.span_id)
            highest = max(highest, sequence_id)
            stored[index] = Stored(sequence_id, number)
            note_reward(tx.connection, rollout_id, before.sequence_id, row.reward, tx.now)
        save_standing(
            tx, number, before, lifecycle.record_activity(before, tx.now, tx.lease_seconds), highest
        )
        tx.changes.spans.append(rollout_id)
    return stored


def end_attempt(
    tx: Transaction, redact: Redact, rows: Sequence[SpanRow], status: AttemptStatus, **asked: Any
) -> list[Stored]:
    """Store the last spans of an attempt, and end it."""
    if status not in lifecycle.ENDS:
        ends = ", ".join(sorted(lifecycle.ENDS))
        raise InvalidError(f"an attempt does not end as {status!r}; give one of: {ends}")
    stored = add_spans(tx, rows)
    update_attempt(tx, redact, status=status, **asked)
    return stored


def _stored_before(connection: Connection, number: int, row: SpanRow, columns: SpanColumns) -> int:
    """The sequence id of the stored span with this id. ConflictError if another span has the place
    of a gateway's call, which must not be lost."""
    sequence_id, start_time = connection.execute(
        "SELECT sequence_id, start_time FROM spans WHERE attempt = ? AND span_id = ?",
        (number, columns.span_id),
    ).fetchone()
    if start_time != columns.start_time and row.call:
        raise ConflictError(
            f"the call {columns.span_id} of attempt {row.attempt_id} is not stored: its id is "
            "another span's"
        )
    return sequence_id


def _lay_out_unattributed(tx: Transaction) -> None:
    """The rollout for spans without an attempt. It has ended from the start, so that nothing
    changes it."""
    tx.connection.execute(
        "INSERT INTO rollouts (rollout_id, input, start_time, end_time, status, mode, config, "
        "metadata, attempts) VALUES (?, 'null', ?, ?, 'succeeded', 'val', '{}', '{}', 1) ON "
        "CONFLICT (rollout_id) DO NOTHING",
        (UNATTRIBUTED, tx.now, tx.now),
    )
    tx.connection.execute(
        "INSERT INTO attempts (attempt_id, rollout_id, sequence_id, start_time, end_time, status, "
        "metadata, last_activity, lease_expires, check_time, span_sequence) VALUES (?, ?, 1, ?, "
        "?, 'succeeded', '{}', ?, ?, ?, 0) ON CONFLICT (attempt_id) DO NOTHING",
        (UNATTRIBUTED, UNATTRIBUTED, *[tx.now] * 5),
    )


def get_next_span_sequence_id(tx: Transaction, rollout_id: str, attempt_id: str) -> int:
    number, _ = load_standing(tx.connection, rollout_id, attempt_id)
    (sequence_id,) = tx.connection.execute(
        "UPDATE attempts SET span_sequence = span_sequence + 1 WHERE number = ? RETURNING "
        "span_sequence",
        (number,),
    ).fetchone()
    return sequence_id


def query_spans(tx: Transaction, rollout_id: str, attempt_id: str | None) -> list[Span]:
    """Spans of one attempt (`latest`: the last one) or of all, by start time, then sequence id."""
    attempts: list[tuple[int, str]] = tx.connection.execute(
        "SELECT number, attempt_id FROM attempts WHERE rollout_id = ? ORDER BY sequence_id",
        (rollout_id,),
    ).fetchall()
    if not attempts:
        require_rollout(tx.connection, rollout_id)
    if attempt_id == "latest":
        attempts = attempts[-1:]
    elif attempt_id is not None:
        attempts = [attempt for attempt in attempts if attempt[1] == attempt_id]
        if not attempts:
            raise NotFoundError(f"there is no attempt {attempt_id!r} of a rollout {rollout_id!r}")
    spans: list[Span] = []
    for number, name in attempts:
        found = tx.connection.execute(
            f"SELECT {SPAN_COLUMNS} FROM spans WHERE attempt = ?", (number,)
        )
        rows = {row.span_id: row for row in map(SpanColumns._make, found)}
        prompts = WholePrompts(lambda _, span_id, rows=rows: rows[span_id])
        spans += [prompts.span(rollout_id, name, number, row) for row in rows.values()]
    return sorted(spans, key=lambda span: (span.start_time, span.sequence_id))
