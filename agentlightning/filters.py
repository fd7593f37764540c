"""Filters and orders of a store's rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from agentlightning.errors import InvalidError


class Filter(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Selects rows: a condition on one field, or `and`, `or`, `not` of other filters.

    `{"field": "status", "op": "in", "value": ["failed", "cancelled"]}`,
    `{"op": "and", "of": [...]}`. An empty `and` matches everything, an empty `or` nothing. In
    Python, write `Condition`, `And`, `Or` and `Not`. InvalidError if operands are missing or too
    many."""

    op: Literal["eq", "ne", "in", "contains", "lt", "le", "gt", "ge", "exists", "and", "or", "not"]
    field: str | None = None
    value: Any = None
    of: tuple[Filter, ...] = ()

    def __post_init__(self) -> None:
        if self.op in ("and", "or", "not"):
            if self.field is not None or self.value is not None:
                raise InvalidError(
                    f"a filter with op {self.op!r} takes `of`, neither `field` nor `value`"
                )
            if self.op == "not" and len(self.of) != 1:
                raise InvalidError(
                    f"a filter with op 'not' takes one filter in `of`, not {len(self.of)}"
                )
        elif self.field is None or self.of:
            raise InvalidError(
                f"a filter with op {self.op!r} takes `field` and `value`, and no `of`"
            )


def Condition(
    field: str,
    op: Literal["eq", "ne", "in", "contains", "lt", "le", "gt", "ge", "exists"],
    value: Any = None,
) -> Filter:
    """`Condition("metadata.score", "ge", 0.5)`"""
    return Filter(op=op, field=field, value=value)


def And(of: Sequence[Filter]) -> Filter:
    return Filter(op="and", of=tuple(of))


def Or(of: Sequence[Filter]) -> Filter:
    return Filter(op="or", of=tuple(of))


def Not(negated: Filter) -> Filter:
    return Filter(op="not", of=(negated,))


class Order(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One sort key. Rows that lack the field come `first` or `last` in either direction."""

    field: str
    descending: bool = False
    nulls: Literal["first", "last"] = "last"
