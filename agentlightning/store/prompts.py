"""Prompts that go on from an earlier call's of the same attempt: of them only what is new is
stored.

    call 1   [system, user]                     stored whole
    call 2   [system, user, assistant, tool]    its base is call 1; stored: `, assistant, tool]`

A row names its base and how much of each of the base's texts, and of its token ids, it begins with.
A base goes when its attempt goes, and with it all that repeat it, so that nothing need be counted.
This module knows spans and their columns; it does not know transactions."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from agentlightning import semconv
from agentlightning.store import codec
from agentlightning.store.codec import SPAN_COLUMNS, SpanColumns
from agentlightning.store.database import Connection
from agentlightning.store.redaction import Redact
from agentlightning.store.rollouts import FinalReward, final_reward
from agentlightning.types import Span

REPEATED: Final = (
    *(semconv.GEN_AI_INPUT_MESSAGES, semconv.GEN_AI_TOOL_DEFINITIONS),
    *(semconv.CALL_PROMPT, semconv.CALL_REQUEST),
)
"""The attributes of calls that are stored in part."""
_IDS: Final = ""  # in place of an attribute's name
_LEAST: Final = 256  # characters, or bytes, of a part that are worth a reference
_LONGEST_CHAIN: Final = 256  # from a row to the row that is stored whole
_BRANCHES: Final = 4  # of an attempt, each of which may go on
_REMEMBERED: Final = 1 << 26  # bytes

_Part: TypeAlias = str | bytes
_counts: Final = msgspec.json.Decoder(dict[str, int])
_encode: Final = msgspec.json.Encoder().encode


class Prompt:
    """The prompt of a call: long texts by the name of their attribute, and token ids as bytes.
    `base` is what it repeats, if anything, and `goes_on` says whether that is all of it but what
    closes its messages. `chain` counts the rows that it takes to read it; `attempt` is the number
    of the attempt that it is stored in, None before."""

    __slots__ = ("attempt", "base", "chain", "goes_on", "index", "parts", "size", "span_id")

    def __init__(self, span: Span, parts: Mapping[str, _Part]) -> None:
        self.span_id = span.span_id
        self.index = span.attributes.get(semconv.CALL_INDEX)
        self.parts = parts
        self.size = sum(map(sys.getsizeof, parts.values()))
        self.base: str | None = None
        self.goes_on = False
        self.chain = 0
        self.attempt: int | None = None


class SpanRow(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The stored form of a span; no columns if the redaction dropped it. Columns with a base hold
    no more of the prompt than what is new, and `base_attempt` is the number of the attempt that the
    base is stored in; None if the base is an earlier row of the same write."""

    rollout_id: str
    attempt_id: str
    columns: SpanColumns | None
    base_attempt: int | None = None
    reward: FinalReward | None = None
    call: bool = False


class Prepared(NamedTuple):
    """A span as it may be written, None if it is dropped; its row, and the prompt that later rows
    may go on from."""

    span: Span | None
    row: SpanRow
    prompt: Prompt | None = None


class Prompts:
    """The last prompts of attempts, those of the longest silent attempts forgotten first. What is
    forgotten is stored whole by the next call."""

    def __init__(self) -> None:
        self._of: OrderedDict[tuple[str, str], tuple[Prompt, ...]] = OrderedDict()
        self._size = 0

    def of(self, row: SpanRow | Span) -> tuple[Prompt, ...]:
        return self._of.get((row.rollout_id, row.attempt_id), ())

    def remember(self, row: SpanRow, prompt: Prompt) -> None:
        """The base is forgotten where the prompt goes on from all of it."""
        key = (row.rollout_id, row.attempt_id)
        kept = [*self._of.pop(key, ()), prompt]
        self._size += prompt.size
        gone = [
            earlier for earlier in kept if prompt.goes_on and earlier.span_id == prompt.base
        ] or kept[:-_BRANCHES]
        for earlier in gone:
            kept.remove(earlier)
            self._size -= earlier.size
        self._of[key] = tuple(kept)
        while self._size > _REMEMBERED:
            self._size -= sum(earlier.size for earlier in self._of.popitem(last=False)[1])

    def prepare(self, spans: Sequence[Span], redact: Redact, *, whole: bool) -> list[Prepared]:
        """Spans with their rows. A base is a prompt remembered here, or that of an earlier span in
        `spans`; there is none if rows are to be `whole`."""
        prepared: list[Prepared] = []
        among = Prompts()
        for given in spans:
            span = redact(given)
            if span is None:
                entry = Prepared(None, SpanRow(given.rollout_id, given.attempt_id, None))
            elif semconv.CALL_ENDPOINT not in span.attributes:
                entry = Prepared(span, _row_of(span, codec.span_columns(span)))
            else:
                entry = _prepared(span, () if whole else (*self.of(span), *among.of(span)))
                if entry.prompt is not None and len(spans) > 1:
                    among.remember(entry.row, entry.prompt)
            prepared.append(entry)
        return prepared


def _row_of(span: Span, columns: SpanColumns, base: Prompt | None = None) -> SpanRow:
    reward = final_reward(span.attributes, span.start_time)
    number = None if base is None else base.attempt
    return SpanRow(
        span.rollout_id,
        span.attempt_id,
        columns,
        number,
        reward,
        semconv.CALL_ENDPOINT in span.attributes,
    )


def _prepared(span: Span, known: Sequence[Prompt]) -> Prepared:
    parts: dict[str, _Part] = {}
    for name in REPEATED:
        text = span.attributes.get(name)
        if isinstance(text, str) and len(text) >= _LEAST:
            parts[name] = text
    if span.tokens is not None:
        parts[_IDS] = span.tokens.prompt_token_ids.tobytes()
    if not parts:
        return Prepared(span, _row_of(span, codec.span_columns(span)))
    prompt = Prompt(span, parts)
    base = _base(span, known)
    repeated = {} if base is None else _repeated(parts, base.parts)
    if base is not None and repeated:
        prompt.base = base.span_id
        prompt.chain = base.chain + 1
        prompt.goes_on = all(
            repeated.get(name, 0) >= len(part) - 1 for name, part in base.parts.items()
        )
    columns = _new_columns(span, parts, prompt.base, repeated)
    return Prepared(span, _row_of(span, columns, base if repeated else None), prompt)


def _base(span: Span, known: Sequence[Prompt]) -> Prompt | None:
    """The prompt of the call that this one goes on from, or else of the latest call."""
    call = span.attributes.get(semconv.CALL_CONTINUES)
    base = next((prompt for prompt in known if prompt.index == call), known[-1] if known else None)
    return None if base is None or base.chain >= _LONGEST_CHAIN else base


def _new_columns(
    span: Span, parts: Mapping[str, _Part], base: str | None, repeated: Mapping[str, int]
) -> SpanColumns:
    """The columns of a span without what it repeats of its base."""
    ids = parts.get(_IDS)
    counts = None
    if base is not None:
        new = {name: parts[name][count:] for name, count in repeated.items()}
        ids = new.pop(_IDS, ids)
        span = msgspec.structs.replace(span, attributes={**span.attributes, **new})  # pyright: ignore[reportArgumentType]
        counts = _encode(repeated).decode()
    return codec.span_columns(span, ids, base, counts)  # pyright: ignore[reportArgumentType]


def _repeated(parts: Mapping[str, _Part], base: Mapping[str, _Part]) -> dict[str, int]:
    """The lengths of the parts of a base that a prompt begins with, where it is worth a
    reference."""
    counts: dict[str, int] = {}
    for name, part in base.items():
        if name in parts:
            count = shared_length(part, parts[name])
            if count >= _LEAST:
                counts[name] = count - count % codec.ID_SIZE if name == _IDS else count
    return counts


def shared_length(first: _Part, second: _Part) -> int:
    """The number of characters, or bytes, that two texts begin with alike; compared in ever longer
    pieces, then in halves."""
    most = min(len(first), len(second))
    same = 0
    step = 4096
    if first == second:
        return most
    while same < most and first[same : same + step] == second[same : same + step]:
        same = same + step
        step = 2 * step
    same, end = min(same, most), min(same + step, most)
    while same < end:
        middle = (same + end + 1) // 2
        if first[same:middle] == second[same:middle]:
            same = middle
        else:
            end = middle - 1
    return same


class _Row(NamedTuple):
    """The parts of a prompt in a row: its own parts, and how much of each part of its base comes
    before them."""

    base: str | None
    repeated: Mapping[str, int]
    own: Mapping[str, _Part]


class WholePrompts:
    """The prompts of rows that have a base. `look_up` is given an attempt's number and the id of a
    span of it, and returns that span's columns. What was read once is not read again."""

    def __init__(self, look_up: Callable[[int, str], SpanColumns]) -> None:
        self._look_up = look_up
        self._rows: dict[tuple[int, str], _Row] = {}
        self._whole: dict[tuple[int, str], Mapping[str, _Part]] = {}

    @classmethod
    def stored(cls, connection: Connection) -> WholePrompts:
        """Those of a store's rows, looked up one by one."""
        sql = f"SELECT {SPAN_COLUMNS} FROM spans WHERE attempt = ? AND span_id = ?"
        return cls(
            lambda attempt, span_id: SpanColumns._make(
                connection.execute(sql, (attempt, span_id)).fetchone()
            )
        )

    def span(self, rollout_id: str, attempt_id: str, attempt: int, columns: SpanColumns) -> Span:
        """The span of a row."""
        if columns.base is None:
            return codec.span_from_columns(rollout_id, attempt_id, columns)
        parts = dict(self.parts(attempt, columns))
        ids: Any = parts.pop(_IDS, columns.prompt_token_ids)
        span = codec.span_from_columns(
            rollout_id, attempt_id, columns._replace(prompt_token_ids=ids)
        )
        return msgspec.structs.replace(span, attributes={**span.attributes, **parts})  # pyright: ignore[reportArgumentType]

    def parts(self, attempt: int, columns: SpanColumns) -> Mapping[str, _Part]:
        """The texts and token ids of a row's prompt."""
        row = self._rows[attempt, columns.span_id] = _row(columns)
        pieces = {name: [part] for name, part in row.own.items()}  # from the last to the first
        wanted = row.repeated
        while row.base is not None:
            key = (attempt, row.base)
            whole = self._whole.get(key)
            if whole is not None:
                row = _Row(None, {}, whole)
            else:
                if key not in self._rows:
                    self._rows[key] = _row(self._look_up(*key))
                row = self._rows[key]
            for name, count in wanted.items():
                pieces[name].append(row.own[name][: max(0, count - row.repeated.get(name, 0))])
            wanted = {
                name: min(count, row.repeated[name])
                for name, count in wanted.items()
                if name in row.repeated
            }
        found = {name: _joined(several[::-1]) for name, several in pieces.items()}
        self._whole[attempt, columns.span_id] = found
        return found


def _row(columns: SpanColumns) -> _Row:
    attributes = codec.from_json(columns.attributes)
    own: dict[str, _Part] = {
        name: attributes[name] for name in REPEATED if isinstance(attributes.get(name), str)
    }
    if columns.prompt_token_ids is not None:
        own[_IDS] = columns.prompt_token_ids
    return _Row(columns.base, repeated_counts(columns.repeated), own)


def repeated_counts(repeated: str | None) -> Mapping[str, int]:
    """The numbers of characters and bytes of its base that a row begins with, of each part."""
    return _counts.decode(repeated) if repeated else {}


def _joined(pieces: Sequence[Any]) -> _Part:
    return pieces[0][:0].join(pieces)
