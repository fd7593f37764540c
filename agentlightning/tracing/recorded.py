"""Operations that an earlier attempt ran: where its calls are walked again, their recorded results
are given instead of running them.

Each result is given once, equal operations in the order of the record. Which they are is said by
name and arguments."""

from __future__ import annotations

import json
import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from agentlightning.errors import ConflictError
from agentlightning.semconv import (
    OPERATION,
    OPERATION_INPUT,
    OPERATION_NAME,
    OPERATION_ONCE,
    OPERATION_RESULT,
    REDACTED,
)
from agentlightning.types import Attributes, Span

_LONGEST: Final = 1 << 20  # characters of a result that is recorded whole
_SCALARS: Final = frozenset({str, int, bool, type(None)})


class RecordedOperation(msgspec.Struct, frozen=True):
    """An operation that ended well. Its `result` is JSON, or None where it was not recorded
    whole."""

    key: str
    result: str | None


class RecordedOperations:
    """The results that are still to be given in an attempt."""

    def __init__(self, recorded: Iterable[RecordedOperation]) -> None:
        self._waiting = defaultdict[str, deque[RecordedOperation]](deque)
        for operation in recorded:
            self._waiting[operation.key].append(operation)

    def take(self, attributes: Attributes) -> tuple[Any] | None:
        """The result of the operation with these attributes, alone in a tuple; None if it is to
        run. ConflictError if it must not run again and its result is not known."""
        try:
            found = self._waiting[key_of(attributes)].popleft()
        except IndexError:
            return None
        if found.result is not None:
            return (json.loads(found.result),)
        if OPERATION_ONCE not in attributes:
            return None
        raise ConflictError(
            f"operation {attributes.get(OPERATION_NAME)!r} ran in the attempt that is walked "
            "again, must not run twice, and its result was not recorded whole: return JSON values "
            "of less than 1 MiB without secrets"
        )


def key_of(attributes: Attributes) -> str:
    """What identifies an operation: its name and arguments."""
    said = {
        name: value
        for name, value in attributes.items()
        if name == OPERATION_NAME or name.startswith(f"{OPERATION_INPUT}.")
    }
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
    `every` other that began before `until`."""
    found: list[RecordedOperation] = []
    for span in sorted(spans, key=lambda span: span.start_time):
        attributes: Mapping[str, Any] = span.attributes
        ran = span.name == OPERATION and span.status.status_code != "ERROR"
        if ran and (OPERATION_ONCE in attributes or (every and span.start_time < until)):
            result = str(attributes.get(OPERATION_RESULT, REDACTED))
            known = None if REDACTED in result else result
            found.append(RecordedOperation(key_of(span.attributes), known))
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
