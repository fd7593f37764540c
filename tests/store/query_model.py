"""Rollouts and spans with awkward values in them, random queries, and what Python makes of the ones
by the others."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from hypothesis import strategies as st

from agentlightning.store.query import ROLLOUTS, SPANS, Fields
from agentlightning.types import And, Condition, Filter, Not, Or, Order

AWKWARD = [
    "",
    "a",
    "ab",
    "B",
    "é",
    "😀",
    "\uffff",
    "1",
    "true",
    "null",
    "[]",
    "50%_?",
    "%s",
    "{0}",
    "it's",
    'say "hi"',
    "a\nb",
    "back\\slash",
    "\\u0000",
]
NUMBERS = [0, 1, -1, 1.0, 2.5, -0.5, 0.30000000000000004, 0.3, 1e22, 2**62, 2**62 + 1, -(2**63)]
SCALARS = [None, True, False, *NUMBERS, *AWKWARD]
STORED = [*SCALARS, "a\0b", "\\\0", [], ["a", 1, None], [True, "50%_?", "a\0b", ["a"]], {"a": 1}]
KEYS = [
    "score",
    "a.b",
    "0",
    "-1",
    'qu"ote',
    "back\\slash",
    "ключ",
    "it's",
    "?%s{}",
    "tags",
    "$",
    "#",
]

PATHS: list[tuple[str, ...]] = [(key,) for key in KEYS]
PATHS += [("nested", key) for key in KEYS] + [
    ("absent", *"abcdefgh"),
    ("nested", "deep", "x"),
    ("absent",),
    ("nested",),
]

TEXTS = ["a", "b", "B", "é", "it's", "50%_?"]
OPTIONAL_TEXTS = [None, *TEXTS]
TIMES = [0.0, 1.5, 2.0, 1e9, 1760000000.123456]


class Row(NamedTuple):
    """The fields of a row by name, and its place in the natural order."""

    named: dict[str, Any]
    document: dict[str, Any]
    unique: tuple[Any, ...]


def document(draw: random.Random) -> dict[str, Any]:
    made = {key: draw.choice(STORED) for key in draw.sample(KEYS, 5)}
    if draw.random() < 0.7:
        made["nested"] = {key: draw.choice(STORED) for key in draw.sample(KEYS, 4)} | {
            "deep": {"x": draw.random()}
        }
    if draw.random() < 0.5:
        made["tags"] = draw.sample([*TEXTS, 1, None, "true"], 3)
    if draw.random() < 0.2:
        made["nul\0key"] = "\0"
    return made


def rollout_rows() -> list[Row]:
    draw = random.Random(1)
    rows: list[Row] = []
    for number in range(80):
        named = {
            "rollout_id": f"ro-{number}",
            "status": draw.choice(["failed", "succeeded", "running"]),
            "mode": draw.choice(TEXTS),
            "group_index": draw.choice([None, 0, 1, 2]),
            "priority": draw.choice([-5, 0, 3]),
            "start_time": draw.choice(TIMES),
            "end_time": draw.choice([None, *TIMES]),
            "input": json.dumps(draw.choice(STORED), ensure_ascii=False, separators=(",", ":")),
        }
        named |= {
            name: draw.choice(OPTIONAL_TEXTS) for name in ("resources_id", "run_id", "group_id")
        }
        rows.append(Row(named, document(draw), (number,)))
    for row in rows:
        name = row.named["group_id"]
        group = [row] if name is None else [one for one in rows if one.named["group_id"] == name]
        ends = [one.named["end_time"] for one in group]
        row.named["group_end_time"] = None if None in ends else max(ends)
    return rows


def span_rows(rollouts: Sequence[Row]) -> list[Row]:
    draw = random.Random(2)
    rows: list[Row] = []
    for number in range(80):
        attempt = draw.randrange(20)
        rollout = rollouts[attempt // 2].named
        start = draw.choice(TIMES)
        named = {
            "rollout_id": rollout["rollout_id"],
            "attempt_id": f"at-{attempt}",
            "span_id": f"span-{number}",
            "sequence_id": draw.randrange(3),
            "start_time": start,
            "end_time": start + draw.choice([0.0, 0.25, 3.0]),
            "has_tokens": draw.random() < 0.5,
            "run_id": rollout["run_id"],
            "parent_id": draw.choice(OPTIONAL_TEXTS),
        }
        named["duration"] = named["end_time"] - named["start_time"]
        named |= {name: draw.choice(TEXTS) for name in ("trace_id", "name", "status_code")}
        unique = (attempt, named["sequence_id"], named["span_id"])
        rows.append(Row(named, document(draw), unique))
    return rows


ROLLOUT_ROWS = rollout_rows()
SPAN_ROWS = span_rows(ROLLOUT_ROWS)
ROWS = {ROLLOUTS.tables: ROLLOUT_ROWS, SPANS.tables: SPAN_ROWS}


def value_of(row: Row, field: str) -> Any:
    if field in row.named:
        return row.named[field]
    prefix, _, rest = field.partition(".")
    value: Any = row.document
    for key in (
        [rest] if prefix == "attributes" else next(keys for keys in PATHS if ".".join(keys) == rest)
    ):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def kind(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    return "number" if isinstance(value, int | float) else type(value).__name__


def equal(stored: Any, value: Any) -> bool:
    return kind(stored) == kind(value) and stored == value


def matches(row: Row, filter: Filter) -> bool:
    op, value = filter.op, filter.value
    if op in ("and", "or"):
        return (all if op == "and" else any)(matches(row, one) for one in filter.of)
    if op == "not":
        return not matches(row, filter.of[0])
    assert filter.field is not None
    if filter.field == "tag":
        tags = row.document.get("tags")
        return tag_matches(
            [tag for tag in tags if isinstance(tag, str)] if isinstance(tags, list) else [], filter
        )
    stored = value_of(row, filter.field)
    match op:
        case "eq" | "ne":
            return equal(stored, value) == (op == "eq")
        case "in":
            return any(equal(stored, one) for one in value)
        case "exists":
            return (stored is not None) == (value is not False)
        case "contains":
            if filter.field == "input":
                return value in stored or msgspec.json.encode(value)[1:-1].decode() in stored
            if isinstance(stored, list):
                return any(equal(item, value) for item in stored)
            return isinstance(stored, str) and isinstance(value, str) and value in stored
        case _:
            if kind(stored) != kind(value):
                return False
            return {
                "lt": stored < value,
                "le": stored <= value,
                "gt": stored > value,
                "ge": stored >= value,
            }[op]


def tag_matches(tags: list[str], filter: Filter) -> bool:
    match filter.op:
        case "in":
            return any(tag in tags for tag in filter.value)
        case "exists":
            return bool(tags) == (filter.value is not False)
        case op:
            return (filter.value in tags) == (op != "ne")


def ordered(rows: Sequence[Row], orders: Sequence[Order]) -> list[Row]:
    def compare(one: Row, other: Row) -> int:
        for order in orders:
            left, right = (value_of(row, order.field) for row in (one, other))
            if (left is None) != (right is None):
                return 1 if (left is None) == (order.nulls == "last") else -1
            if left is not None and right is not None and left != right:
                return 1 if (left > right) != order.descending else -1
        return 1 if one.unique > other.unique else -1

    return sorted(rows, key=functools.cmp_to_key(compare))


_exists = st.tuples(st.just("exists"), st.sampled_from([None, True, False]))
_compare = st.sampled_from(["lt", "le", "gt", "ge"])
_equal = st.sampled_from(["eq", "ne"])


def conditions(fields: Fields) -> st.SearchStrategy[Filter]:
    samples = {
        name: {row.named[name] for row in ROWS[fields.tables]} - {None}
        for name in ROWS[fields.tables][0].named
    }
    strategies: list[st.SearchStrategy[Filter]] = []
    for name, values in samples.items():
        if name == "input":
            strategies.append(
                st.builds(Condition, st.just(name), st.just("contains"), st.sampled_from(AWKWARD))
            )
            continue
        value = st.sampled_from(sorted(values))
        asked = [
            st.tuples(_equal, value | st.none()),
            st.tuples(st.just("in"), st.lists(value, max_size=4)),
            _exists,
        ]
        if name != "has_tokens":
            asked.append(st.tuples(_compare, value))
        if isinstance(min(values), str):
            asked.append(
                st.tuples(st.just("contains"), value | st.sampled_from(["", "-1", "%", "_"]))
            )
        strategies.append(
            st.builds(lambda name, asked: Condition(name, *asked), st.just(name), st.one_of(asked))
        )
    inside = st.one_of(
        st.tuples(_equal, st.sampled_from(SCALARS)),
        st.tuples(st.just("in"), st.lists(st.sampled_from(SCALARS[1:]), max_size=4)),
        _exists,
        st.tuples(_compare, st.sampled_from([*NUMBERS, *AWKWARD])),
        st.tuples(st.just("contains"), st.sampled_from(SCALARS[1:])),
    )
    strategies += [
        st.builds(lambda name, asked: Condition(name, *asked), paths(fields), inside)
    ] * 6
    if fields is ROLLOUTS:
        tag = st.sampled_from(AWKWARD + TEXTS)
        tagged = st.one_of(st.tuples(_equal, tag), st.tuples(st.just("in"), st.lists(tag)), _exists)
        strategies.append(st.builds(lambda asked: Condition("tag", *asked), tagged))
    return st.one_of(strategies)


def paths(fields: Fields) -> st.SearchStrategy[str]:
    if fields is SPANS:
        return st.sampled_from([f"attributes.{key}" for key in KEYS])
    return st.sampled_from([f"metadata.{'.'.join(keys)}" for keys in PATHS])


def random_filters(fields: Fields) -> st.SearchStrategy[Filter]:
    return st.recursive(
        conditions(fields),
        lambda inner: st.one_of(
            st.builds(And, st.lists(inner, max_size=4)),
            st.builds(Or, st.lists(inner, max_size=4)),
            st.builds(Not, inner),
        ),
        max_leaves=6,
    )


def random_orders(fields: Fields) -> st.SearchStrategy[list[Order]]:
    names = sorted(set(ROWS[fields.tables][0].named) - {"input"})
    field = st.sampled_from(names)
    nulls = st.sampled_from(["first", "last"])
    return st.lists(
        st.builds(Order, field=field, descending=st.booleans(), nulls=nulls), max_size=4
    )
