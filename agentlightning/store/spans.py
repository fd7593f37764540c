"""Spans as rows: stored once each, numbered within their attempt, read by rollout or across rollouts.

This module does not know threads, event loops or HTTP, nor what a span means.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from agentlightning.errors import ConflictError, InvalidError, NotFoundError
from agentlightning.semconv import CALL_ENDPOINT
from agentlightning.store import codec, lifecycle
from agentlightning.store.attempts import load_standing, load_with_sequence, save_standing
from agentlightning.store.codec import SPAN_COLUMNS, SpanColumns
from agentlightning.store.database import Connection
from agentlightning.store.outcomes import note_reward
from agentlightning.store.prompts import Prepared, WholePrompts
from agentlightning.store.rollouts import require_rollout
from agentlightning.store.transaction import Transaction
from agentlightning.types import UNATTRIBUTED, Span

_LARGEST_GIVEN: Final = 2**52  # the store numbers on from it, and there is room for an import
_INSERT: Final = (
    f"INSERT INTO spans (attempt, {SPAN_COLUMNS}) VALUES (?{', ?' * len(SpanColumns._fields)}) "
    "ON CONFLICT (attempt, span_id) DO NOTHING"
)


def add_spans(tx: Transaction, spans: Sequence[Span], prepared: Sequence[Prepared]) -> list[int]:
    """Store prepared spans, all or none. Returns the sequence id of each; 0 for a dropped one."""
    by_attempt: dict[tuple[str, str], list[int]] = {}
    for index, span in enumerate(spans):
        by_attempt.setdefault((span.rollout_id, span.attempt_id), []).append(index)
    stored = [0] * len(spans)
    for (rollout_id, attempt_id), indices in by_attempt.items():
        if rollout_id == attempt_id == UNATTRIBUTED:
            _lay_out_unattributed(tx)
        number, before, highest = load_with_sequence(tx.connection, rollout_id, attempt_id)
        for index in indices:
            one = prepared[index]
            row = one.columns
            if row is None:
                continue
            if one.base is not None and one.span is not None and one.base.attempt != number:
                row = codec.span_columns(one.span)  # what it goes on from is not stored here
            if row.sequence_id > _LARGEST_GIVEN:
                raise InvalidError(
                    f"the sequence_id of span {row.span_id} is too large: give 1, 2 …, or 0 for the next"
                )
            sequence_id = row.sequence_id or highest + 1
            inserted = tx.connection.execute(_INSERT, (number, row[0], sequence_id, *row[2:])).rowcount
            if one.prompt is not None:
                one.prompt.attempt = number if inserted else None
            if not inserted:
                stored[index] = _stored_before(tx.connection, number, row, spans[index])
                continue
            highest = max(highest, sequence_id)
            stored[index] = sequence_id
            span = spans[index]
            note_reward(tx.connection, rollout_id, before.sequence_id, span.attributes, span.start_time)
        save_standing(tx, number, before, lifecycle.hear(before, tx.now, tx.lease_seconds), highest)
        tx.changes.spans.append(rollout_id)
    return stored


def _stored_before(connection: Connection, number: int, row: SpanColumns, span: Span) -> int:
    """The sequence id of the stored span with this id. ConflictError if another span has the place of a gateway's call,
    which must not be lost."""
    sequence_id, start_time = connection.execute(
        "SELECT sequence_id, start_time FROM spans WHERE attempt = ? AND span_id = ?", (number, row.span_id)
    ).fetchone()
    if start_time != row.start_time and CALL_ENDPOINT in span.attributes:
        raise ConflictError(
            f"the call {row.span_id} of attempt {span.attempt_id} is not stored: its id is another span's"
        )
    return sequence_id


def _lay_out_unattributed(tx: Transaction) -> None:
    """The rollout for spans without an attempt. It has ended from the start, so that nothing changes it."""
    tx.connection.execute(
        "INSERT INTO rollouts (rollout_id, input, start_time, end_time, status, mode, config, metadata, attempts) "
        "VALUES (?, 'null', ?, ?, 'succeeded', 'val', '{}', '{}', 1) ON CONFLICT (rollout_id) DO NOTHING",
        (UNATTRIBUTED, tx.now, tx.now),
    )
    tx.connection.execute(
        "INSERT INTO attempts (attempt_id, rollout_id, sequence_id, start_time, end_time, status, metadata, "
        "last_activity, lease_expires, check_time, span_sequence) "
        "VALUES (?, ?, 1, ?, ?, 'succeeded', '{}', ?, ?, ?, 0) ON CONFLICT (attempt_id) DO NOTHING",
        (UNATTRIBUTED, UNATTRIBUTED, *[tx.now] * 5),
    )


def get_next_span_sequence_id(tx: Transaction, rollout_id: str, attempt_id: str) -> int:
    number, _ = load_standing(tx.connection, rollout_id, attempt_id)
    (sequence_id,) = tx.connection.execute(
        "UPDATE attempts SET span_sequence = span_sequence + 1 WHERE number = ? RETURNING span_sequence", (number,)
    ).fetchone()
    return sequence_id


def query_spans(tx: Transaction, rollout_id: str, attempt_id: str | None) -> list[Span]:
    """Spans of one attempt (`latest`: the last one) or of all, by start time, then sequence id."""
    attempts: list[tuple[int, str]] = tx.connection.execute(
        "SELECT number, attempt_id FROM attempts WHERE rollout_id = ? ORDER BY sequence_id", (rollout_id,)
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
        found = tx.connection.execute(f"SELECT {SPAN_COLUMNS} FROM spans WHERE attempt = ?", (number,))
        rows = {row.span_id: row for row in map(SpanColumns._make, found)}
        prompts = WholePrompts(lambda _, span_id, rows=rows: rows[span_id])
        spans += [prompts.span(rollout_id, name, number, row) for row in rows.values()]
    return sorted(spans, key=lambda span: (span.start_time, span.sequence_id))
