"""Texts that vary from run to run without meaning to: dates, uuids, durations, names of temporary
folders. They are found, named where two requests differ in nothing else, and replaced by those of a
record."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from agentlightning.gateway.recordings import digest, plain_values
from agentlightning.types import Varying

_MONTH: Final = r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*+\.?"
_CLOCK: Final = (
    r"\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d++)?)?(?: ?[ap]m\b)?(?: ?(?:z|utc|[+-]\d{2}:?\d{2})\b)?"
)
_PATTERNS: Final[dict[Varying, re.Pattern[str]]] = {
    "uuids": re.compile(
        r"(?i)\b[0-9a-f]{8}-?[0-9a-f]{4}-?[0-9a-f]{4}-?[0-9a-f]{4}-?[0-9a-f]{12}\b"
    ),
    "dates": re.compile(
        rf"(?i)\b(?:(?:mon|tue|wed|thu|fri|sat|sun)[a-z]*+,? )?"
        rf"(?:\d{{4}}[-/]\d{{2}}[-/]\d{{2}}|\d{{1,2}}[./]\d{{1,2}}[./]\d{{4}}"
        rf"|{_MONTH} \d{{1,2}},? \d{{4}}|\d{{1,2}}\.? {_MONTH} \d{{4}})(?:[ t]{_CLOCK})?"
        rf"|\b{_CLOCK}|\b1[5-9]\d{{8}}(?:\.\d++)?\b"
    ),
    "durations": re.compile(
        r"(?i)\b\d++(?:\.\d++)? ?(?:[mµμn]?s|secs?|(?:milli)?seconds?|mins?|minutes?|h|hours?)\b"
    ),
    # of Python's tempfile, and of mktemp
    "folders": re.compile(r"(?<=/)tmp(?:[a-z0-9_]{8}|\.[a-zA-Z0-9]{10})\b"),
}


def masked(value: Any, varying: Iterable[Varying]) -> Any:
    """A JSON value with a name in place of each text that varies: `at 12:03` → `at <dates>`."""
    text = msgspec.json.encode(value, order="sorted").decode()
    for name in varying:
        text = _PATTERNS[name].sub(f"<{name}>", text)
    return text


def named(here: Any, recorded: Any) -> list[Varying]:
    """The kinds of varying texts in which alone two values differ; empty if they differ
    otherwise."""
    kinds = list(_PATTERNS)
    if masked(here, kinds) != masked(recorded, kinds):
        return []
    return [
        kind
        for kind in kinds
        if masked(here, others := [other for other in kinds if other != kind])
        != masked(recorded, others)
    ]


class RecordedBeginnings:
    """The messages that recorded calls begin with, which replace those of calls that differ in
    varying texts alone."""

    def __init__(self, varying: Sequence[Varying], calls: Iterable[list[dict[str, Any]]]) -> None:
        self._varying = varying
        self._next: dict[bytes, dict[str, Any]] = {}  # by all up to it
        for messages in calls:
            for state, message in zip(self._states(messages), messages, strict=True):
                self._next.setdefault(state, message)

    def _states(self, messages: list[dict[str, Any]]) -> list[bytes]:
        states: list[bytes] = []
        state = b""
        for message in plain_values(messages):
            state = digest([state.hex(), masked(message, self._varying)])
            states.append(state)
        return states

    def sent(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages as they are sent: up to where they differ, as they were recorded."""
        begun: list[dict[str, Any]] = []
        for state in self._states(messages):
            if state not in self._next:
                break
            begun.append(self._next[state])
        return [*begun, *messages[len(begun) :]]
