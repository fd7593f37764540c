"""Prompts that go on from an earlier call's of the same attempt: of them only what is new is stored.

    call 1   [system, user]                     stored whole
    call 2   [system, user, assistant, tool]    its base is call 1; of it is stored `, assistant, tool]`

A row names its base and how much of each of the base's texts, and of its token ids, it begins with. A base goes when
its attempt goes, and with it all that repeat it, so that nothing need be counted. This module knows spans and their
columns; it does not know transactions.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from agentlightning import semconv
from agentlightning.store import codec
from agentlightning.store.codec import SPAN_COLUMNS, SpanColumns
from agentlightning.store.database import Connection
from agentlightning.types import Span

REPEATED: Final = (
    *(semconv.GEN_AI_INPUT_MESSAGES, semconv.GEN_AI_TOOL_DEFINITIONS),
    *(semconv.CALL_PROMPT, semconv.CALL_REQUEST),
)
"""The attributes of calls that are stored in part."""
_IDS: Final = ""  # in place of an attribute's name
_LEAST: Final = 512  # characters and bytes that are worth a reference
_LONGEST_CHAIN: Final = 256  # from a row to the one that is stored whole
_BRANCHES: Final = 4  # of an attempt, each of which may go on
_REMEMBERED: Final = 1 << 26  # characters and bytes

_Part: TypeAlias = str | bytes
_counts: Final = msgspec.json.Decoder(dict[str, int])


# --- writing -----------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Prompt:
    """What a call was asked: texts by the name of their attribute, and token ids as bytes. `chain` counts the rows that
    it takes to read it; `attempt` is the number of the attempt that it is stored in, None as long as it is not."""

    span_id: str
    parts: Mapping[str, _Part]
    chain: int = 0
    attempt: int | None = None

    @property
    def size(self) -> int:
        return sum(map(len, self.parts.values()))


class Prepared(NamedTuple):
    """A span as it may be written, with its columns; none of both where it is dropped. With a `base`, the columns hold
    no more of the `prompt` than what is new."""

    span: Span | None
    columns: SpanColumns | None
    prompt: Prompt | None = None
    base: Prompt | None = None


class Prompts:
    """The last prompts of attempts, those of the longest silent attempts forgotten first. What is forgotten is stored
    whole by the next call."""

    def __init__(self) -> None:
        self._of: OrderedDict[tuple[str, str], tuple[Prompt, ...]] = OrderedDict()
        self._size = 0

    def of(self, span: Span) -> Sequence[Prompt]:
        return self._of.get((span.rollout_id, span.attempt_id), ())

    def remember(self, span: Span, prompt: Prompt, base: Prompt | None) -> None:
        """The base is forgotten where the prompt goes on from all of it."""
        key = (span.rollout_id, span.attempt_id)
        before = self._of.pop(key, ())
        kept = (*(one for one in before if one is not base or not _goes_on(prompt, one)), prompt)[-_BRANCHES:]
        self._of[key] = kept
        self._size += sum(one.size for one in kept) - sum(one.size for one in before)
        while self._size > _REMEMBERED and len(self._of) > 1:
            self._size -= sum(one.size for one in self._of.popitem(last=False)[1])

    def prepare(self, spans: Iterable[Span | None]) -> list[Prepared]:
        """Spans with their columns. A base is one of the prompts here, or that of an earlier one of these spans."""
        prepared: list[Prepared] = []
        among = Prompts()
        for span in spans:
            one = Prepared(None, None) if span is None else _prepared(span, (*self.of(span), *among.of(span)))
            if one.span is not None and one.prompt is not None:
                among.remember(one.span, one.prompt, one.base)
            prepared.append(one)
        return prepared


def _prepared(span: Span, known: Sequence[Prompt]) -> Prepared:
    if semconv.CALL_ENDPOINT not in span.attributes:
        return Prepared(span, codec.span_columns(span))
    parts: dict[str, _Part] = {
        name: text for name in REPEATED if isinstance(text := span.attributes.get(name), str) and text
    }
    if span.tokens is not None:
        parts[_IDS] = codec.packed_ids(span.tokens.prompt_token_ids)
    prompt = Prompt(span.span_id, parts)
    if prompt.size < _LEAST:
        return Prepared(span, codec.span_columns(span))
    found = ((_repeated(prompt, one), one) for one in known if one.chain < _LONGEST_CHAIN)
    repeated, base = max(found, key=lambda one: sum(one[0].values()), default=({}, None))
    if base is None or sum(repeated.values()) < _LEAST:
        return Prepared(span, codec.span_columns(span), prompt)
    prompt.chain = base.chain + 1
    return Prepared(span, _new_columns(span, parts, base.span_id, repeated), prompt, base)


def _new_columns(span: Span, parts: Mapping[str, _Part], base: str, repeated: Mapping[str, int]) -> SpanColumns:
    """The columns of a span without what it repeats of its base."""
    new: dict[str, Any] = {name: part[repeated.get(name, 0) :] for name, part in parts.items()}
    ids = new.pop(_IDS, None)
    tokens = None if span.tokens is None else msgspec.structs.replace(span.tokens, prompt_token_ids=())
    rest = msgspec.structs.replace(span, attributes={**span.attributes, **new}, tokens=tokens)
    counts = msgspec.json.encode(repeated).decode()
    return codec.span_columns(rest)._replace(prompt_token_ids=ids, base=base, repeated=counts)


def _goes_on(prompt: Prompt, base: Prompt) -> bool:
    """Whether nothing of the base is missing in the prompt but what closes its messages."""
    repeated = _repeated(prompt, base)
    return all(repeated.get(name, 0) >= len(part) - 1 for name, part in base.parts.items())


def _repeated(prompt: Prompt, base: Prompt) -> dict[str, int]:
    """How much of each part of the base the prompt begins with."""
    both = ((name, base.parts[name], part) for name, part in prompt.parts.items() if name in base.parts)
    counts = {name: shared_length(one, other) for name, one, other in both}
    if _IDS in counts:
        counts[_IDS] -= counts[_IDS] % codec.ID_SIZE
    return {name: count for name, count in counts.items() if count}


def shared_length(one: _Part, other: _Part) -> int:
    """How many characters, or bytes, two texts begin with alike; compared in ever longer pieces, then in halves."""
    most, same, step = min(len(one), len(other)), 0, 1024
    while same < most and one[same : same + step] == other[same : same + step]:
        same, step = same + step, 2 * step
    same, end = min(same, most), min(same + step, most)
    while same < end:
        middle = (same + end + 1) // 2
        if one[same:middle] == other[same:middle]:
            same = middle
        else:
            end = middle - 1
    return same


# --- reading -----------------------------------------------------------------------------------------------------


class _Row(NamedTuple):
    """What a row has of its prompt: its own parts, and how much of each part of its base comes before them."""

    base: str | None
    repeated: Mapping[str, int]
    own: Mapping[str, _Part]


class WholePrompts:
    """The prompts of rows that have a base. `look_up` is given an attempt's number and the id of a span of it, and
    returns that span's columns. What was read once is not read again."""

    def __init__(self, look_up: Callable[[int, str], SpanColumns]) -> None:
        self._look_up = look_up
        self._rows: dict[tuple[int, str], _Row] = {}
        self._whole: dict[tuple[int, str], Mapping[str, _Part]] = {}

    @classmethod
    def stored(cls, connection: Connection) -> WholePrompts:
        """Those of a store's rows, looked up one by one."""
        one = f"SELECT {SPAN_COLUMNS} FROM spans WHERE attempt = ? AND span_id = ?"
        return cls(lambda attempt, span_id: SpanColumns._make(connection.execute(one, (attempt, span_id)).fetchone()))

    def span(self, rollout_id: str, attempt_id: str, attempt: int, columns: SpanColumns) -> Span:
        """The span of a row."""
        if columns.base is None:
            return codec.span_from_columns(rollout_id, attempt_id, columns)
        parts = dict(self.parts(attempt, columns))
        ids: Any = parts.pop(_IDS, columns.prompt_token_ids)
        span = codec.span_from_columns(rollout_id, attempt_id, columns._replace(prompt_token_ids=ids))
        return msgspec.structs.replace(span, attributes={**span.attributes, **parts})  # pyright: ignore[reportArgumentType]

    def texts(self, attempt: int, span_id: str) -> Mapping[str, str]:
        """The texts of a prompt, by the names of their attributes."""
        parts = self.parts(attempt, self._look_up(attempt, span_id))
        return {name: part for name, part in parts.items() if isinstance(part, str)}

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
            wanted = {name: min(count, row.repeated[name]) for name, count in wanted.items() if name in row.repeated}
        found = {name: _joined(several[::-1]) for name, several in pieces.items()}
        self._whole[attempt, columns.span_id] = found
        return found


def _row(columns: SpanColumns) -> _Row:
    attributes = codec.from_json(columns.attributes)
    own: dict[str, _Part] = {name: attributes[name] for name in REPEATED if name in attributes}
    if columns.prompt_token_ids is not None:
        own[_IDS] = columns.prompt_token_ids
    return _Row(columns.base, repeated_counts(columns.repeated), own)


def repeated_counts(repeated: str | None) -> Mapping[str, int]:
    """How many characters and bytes of its base a row begins with, of each part."""
    return _counts.decode(repeated) if repeated else {}


def _joined(pieces: Sequence[Any]) -> _Part:
    return pieces[0][:0].join(pieces)
