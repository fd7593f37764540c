"""Pages of rollouts and of spans: filtered, sorted, counted, and gone on with from a cursor.

This module puts together what `filters` and `paging` make of a query; it does not know threads or HTTP.
"""

from __future__ import annotations

from typing import Any, Final

from agentlightning.store import calls, fields, filters, paging
from agentlightning.store.fields import Fields, Sql
from agentlightning.store.rollouts import LARGEST_PAGE, ROLLOUT_COLUMNS, check_page, rollout_from_row
from agentlightning.store.spans import SPAN_COLUMNS, span_from_row
from agentlightning.store.transaction import Transaction
from agentlightning.types import And, Condition, Filter, RolloutPage, SpanPage

_ROLLOUT: Final = ", ".join(f"rollouts.{name}" for name in ROLLOUT_COLUMNS.split(", "))
_SPAN: Final = "attempts.rollout_id, attempts.attempt_id, " + ", ".join(f"spans.{n}" for n in SPAN_COLUMNS.split(", "))


def query_rollouts(tx: Transaction, call: calls.QueryRollouts) -> RolloutPage:
    rows, total, next_cursor = _page(tx, call, fields.ROLLOUTS, _ROLLOUT)
    return RolloutPage(items=tuple(rollout_from_row(row) for row in rows), total=total, next_cursor=next_cursor)


def query_spans(tx: Transaction, call: calls.QuerySpans) -> SpanPage:
    rows, total, next_cursor = _page(tx, call, fields.SPANS, _SPAN)
    width = 2 + len(SPAN_COLUMNS.split(", "))
    items = tuple(span_from_row(row[0], row[1], row[2:width]) for row in rows)
    return SpanPage(items=items, total=total, next_cursor=next_cursor)


def in_project(where: Filter | None, project: str | None) -> Filter | None:
    """The filter, within one project."""
    if project is None:
        return where
    own = Condition("project", "eq", project)
    return own if where is None else And([own, where])


def _page(
    tx: Transaction, call: calls.QueryRollouts | calls.QuerySpans, of: Fields, columns: str
) -> tuple[list[Any], int | None, str | None]:
    """Rows, the count of all that match where it is asked for, and the cursor of what comes after them."""
    check_page(call.limit, call.offset)
    dialect = tx.connection.dialect
    wanted = in_project(call.where, call.project)
    matching = filters.where(wanted, of, dialect)
    total = None
    if call.with_total:
        count = f"SELECT count(*) FROM {of.tables} WHERE {matching.text}"
        (total,) = tx.connection.execute(count, matching.parameters).fetchone()
    order = paging.order(call.order, of, dialect)
    here = matching
    if call.cursor is not None:
        here = fields.put("{} AND {}", matching, paging.after(call.cursor, wanted, call.order, of, dialect))
    query = Sql(
        f"SELECT {columns}, {order.columns} FROM {of.tables} WHERE {here.text} ORDER BY {order.by} LIMIT ? OFFSET ?",
        [*order.parameters, *here.parameters, LARGEST_PAGE if call.limit is None else call.limit + 1, call.offset],
    )
    rows = tx.connection.execute(query.text, query.parameters).fetchall()
    if call.limit is None or len(rows) <= call.limit:
        return rows, total, None
    rows = rows[: call.limit]
    next_cursor = None if not rows else paging.encode_cursor(rows[-1][-order.width :], wanted, call.order, of)
    return rows, total, next_cursor
