"""Operations that an earlier attempt ran: where its calls are walked again, their recorded results
are given instead of running them.

Each result is given once, equal operations in the order of the record. Which they are is said by
name and arguments."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, Final

import msgspec

from agentlightning.errors import NotRecordedError
from agentlightning.semconv import (
    CALL_INDEX,
    OPERATION,
    OPERATION_INPUT,
    OPERATION_MCP,
    OPERATION_NAME,
    OPERATION_ONCE,
    OPERATION_RESULT,
    REDACTED,
)
from agentlightning.tracing.rewards import is_reward_span
from agentlightning.types import Attributes, Span

_ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+")  # in the text of an object
_LONGEST: Final = 1 << 20  # characters of a result that is recorded whole
_SCALARS: Final = frozenset({str, int, bool, type(None)})


class RecordedOperation(msgspec.Struct, frozen=True):
    """An operation that ended well. Its `result` is JSON, or None where it was not recorded whole.
    It enclosed the spans `within`, and `rewards` were given there. `once`: it must not run twice.
    """

    span_id: str
    name: str
    key: str
    result: str | None
    within: list[str]
    rewards: list[Attributes]
    once: bool = False

    @property
    def value(self) -> Any:
        return json.loads(self.result or "null")


class RecordedOperations:
    """The results that are still to be given in an attempt."""

    def __init__(self, recorded: Iterable[RecordedOperation]) -> None:
        self._waiting = defaultdict[str, deque[RecordedOperation]](deque)
        self._unknown = set[str]()
        self._given = set[str]()  # ids of spans within what was given
        for operation in recorded:
            self._waiting[operation.key].append(operation)
            if operation.once and operation.result is None:
                self._unknown.add(operation.name)

    def take(self, attributes: Attributes) -> RecordedOperation | None:
        """The recorded operation with these attributes; None if it is to run. NotRecordedError if
        it must not run again and its result is not known, nor, perhaps, its arguments."""
        name = str(attributes.get(OPERATION_NAME))
        if OPERATION_ONCE in attributes and name in self._unknown:
            raise NotRecordedError(
                f"operation {name!r} ran in the attempt that is walked again, must not run twice, "
                "and was not recorded whole: return JSON values of less than 1 MiB, without "
                "secrets and anything else that is redacted, and call no models inside"
            )
        waiting = self._waiting[key_of(attributes)]
        with suppress(IndexError):
            while (found := waiting.popleft()).span_id in self._given:
                pass
            if found.result is not None:
                self._given.update(found.within)
                return found
        return None


def key_of(attributes: Attributes) -> str:
    """What identifies an operation: its name, arguments and MCP server, but not the object whose
    method it is, nor where objects are in memory."""
    said = {
        name: _ADDRESS.sub("", str(value)) if isinstance(value, str) else value
        for name, value in attributes.items()
        if name in (OPERATION_NAME, OPERATION_MCP) or name.startswith(f"{OPERATION_INPUT}.")
    }
    if OPERATION_MCP not in attributes:
        said.pop(f"{OPERATION_INPUT}.self", None)
    return json.dumps(said, sort_keys=True)


def whole(value: Any) -> str | None:
    """A result as JSON from which exactly this value is read; None if there is none, or if it is
    too long."""
    try:
        text = json.dumps(value) if _plain(value) else None
    except RecursionError:
        return None
    return text if text is not None and len(text) <= _LONGEST else None


def _plain(value: Any) -> bool:
    if type(value) is dict:
        return all(type(name) is str and _plain(inner) for name, inner in value.items())
    if type(value) is list:
        return all(map(_plain, value))
    return type(value) in _SCALARS or (type(value) is float and math.isfinite(value))


def read_operations(
    spans: Sequence[Span], *, every: bool, until: float = math.inf
) -> list[RecordedOperation]:
    """The operations of an attempt that ended well, by start: those that must not run twice, and
    `every` other that began before `until` and called no models, whose calls are to be made
    again."""
    above = {span.span_id: span.parent_id for span in spans}
    inside = defaultdict[str, list[Span]](list)
    for span in spans:
        outer = span.parent_id
        while outer in above and span not in inside[outer]:
            inside[outer].append(span)
            outer = above[outer]
    found: list[RecordedOperation] = []
    for span in sorted(spans, key=lambda span: span.start_time):
        attributes = span.attributes
        within = inside[span.span_id]
        calls = any(CALL_INDEX in inner.attributes for inner in within)
        ran = span.name == OPERATION and span.status.status_code != "ERROR"
        replayed = every and span.start_time < until and not calls
        if ran and (OPERATION_ONCE in attributes or replayed):
            result = str(attributes.get(OPERATION_RESULT, REDACTED))
            found.append(
                RecordedOperation(
                    span.span_id,
                    str(attributes.get(OPERATION_NAME)),
                    key_of(attributes),
                    None if REDACTED in result or calls else result,
                    [inner.span_id for inner in within],
                    [inner.attributes for inner in within if is_reward_span(inner)],
                    OPERATION_ONCE in attributes,
                )
            )
    return found


def fullest(attempts: Iterable[Sequence[RecordedOperation]]) -> list[RecordedOperation]:
    """The operations of attempts that walked the same way, each one once: those of a kind are taken
    from the attempt that has most of them."""
    chosen: dict[str, list[RecordedOperation]] = {}
    for operations in attempts:
        by_key: dict[str, list[RecordedOperation]] = {}
        for operation in operations:
            by_key.setdefault(operation.key, []).append(operation)
        for key, alike in by_key.items():
            if len(alike) >= len(chosen.get(key, ())):
                chosen[key] = alike
    return [operation for alike in chosen.values() for operation in alike]
