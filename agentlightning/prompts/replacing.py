"""Puts a candidate's texts into the requests of a program, and says from what was replaced what the
program had sent.

Knows bodies and texts. Knows no gateway, no backends and no HTTP."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final, NamedTuple

import msgspec
from msgspec import Meta

from agentlightning import semconv
from agentlightning.prompts.components import Pattern, changed_components, fingerprint
from agentlightning.prompts.places import (
    FIELDS,
    PLACES,
    USER,
    Change,
    Kind,
    blocks,
    change_field,
    change_message,
)
from agentlightning.tracing.dialects import items, json_of, mapping, text_of
from agentlightning.types import Prompts, Span

_REMEMBERED: Final = 32 << 20  # bytes of fields and messages, for each candidate
_FAULTY: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_ITEMS: Final = msgspec.json.Decoder(Annotated[list[msgspec.Raw], Meta(max_length=100_000)])


class _Head(msgspec.Struct):
    """Of a message, as much as says whether the program wrote it."""

    role: str = USER


_HEAD: Final = msgspec.json.Decoder(_Head)


class Part(msgspec.Struct, frozen=True):
    """A component that was put into a text: where its new text begins, and how many characters each
    of its holes holds."""

    component: str
    fingerprint: str
    at: int
    holes: tuple[int, ...]


class Text(msgspec.Struct, frozen=True):
    """A text of a request, `length` characters long, in which components were replaced."""

    place: str
    length: int
    parts: tuple[Part, ...]


class Record(msgspec.Struct, frozen=True):
    """What a span says of what was replaced, in `agentlightning.call.replaced`."""

    resources_id: str
    texts: tuple[Text, ...]


class _Change(NamedTuple):
    """A text that was replaced, and its new form."""

    record: Text
    sent: str
    new: str


class _Unit(NamedTuple):
    """A field or message in which texts were replaced."""

    raw: msgspec.Raw
    changes: tuple[_Change, ...]


class Replaced:
    """A request with a candidate's texts in it. `body` is what goes on, `record` what the span says
    of it."""

    def __init__(
        self, fields: Mapping[str, msgspec.Raw], changes: Iterable[_Change], resources_id: str
    ) -> None:
        changes = tuple(changes)
        self.body = msgspec.json.encode(fields)
        record = Record(resources_id, tuple(change.record for change in changes))
        self.record = msgspec.json.encode(record).decode()
        self._sent = {(change.record.place, change.new): change.sent for change in changes}

    def as_sent(self, place: str, text: str) -> str:
        """The text that the program sent, for one that it may now be."""
        return self._sent.get((place, text), text)

    def field_as_sent(self, name: str, value: Any) -> Any:
        """A field of the request as the program sent it, for its decoded value; changes lists and
        objects in place."""
        return change_field(FIELDS[name], value, self.as_sent)


class Replacer:
    """Puts one candidate into requests. Fields and messages that came before are remembered by
    their bytes: a program repeats most of them in each call."""

    def __init__(self, prompts: Prompts, resources_id: str) -> None:
        self._resources_id = resources_id
        self._components: dict[str, list[_Component]] = {}
        for name in sorted(changed_components(prompts)):
            component = _Component(name, prompts)
            self._components.setdefault(component.place, []).append(component)
        for alike in self._components.values():
            alike.sort(key=lambda component: -component.sent.constant)
        self._kinds = {"tools" if place.startswith("tools.") else place for place in self._components}
        self._units: dict[Kind, dict[bytes, _Unit | None]] = {}
        self._size = 0
        self._changes: list[_Change] = []  # of the unit at hand

    def replaced(self, fields: Mapping[str, msgspec.Raw]) -> Replaced | None:
        """The request with these fields after replacing; None where none of the candidate's
        components is in it."""
        new = dict(fields)
        changes: list[_Change] = []
        for name, raw in fields.items():
            kind = FIELDS.get(name)
            if kind is None or (kind != "messages" and kind not in self._kinds):
                continue
            value = bytes(raw)
            if kind == "messages" and value[:1] == b"[":
                new[name] = self._messages(raw, changes)
            elif (unit := self._remembered(kind, value)) is not None:
                new[name] = unit.raw
                changes += unit.changes
        return Replaced(new, changes, self._resources_id) if changes else None

    def _messages(self, raw: msgspec.Raw, changes: list[_Change]) -> msgspec.Raw:
        try:
            found = _ITEMS.decode(raw)
        except _FAULTY:  # which the endpoint's reader says
            return raw
        before = len(changes)
        for index, message in enumerate(found):
            unit = self._remembered("messages", bytes(message))
            if unit is not None:
                found[index] = unit.raw
                changes += unit.changes
        return raw if len(changes) == before else msgspec.Raw(msgspec.json.encode(found))

    def _remembered(self, kind: Kind, value: bytes) -> _Unit | None:
        units = self._units.setdefault(kind, {})
        if value in units:
            return units[value]
        unit = self._unit(kind, value)
        self._size += len(value) + (0 if unit is None else len(bytes(unit.raw)))
        if self._size > _REMEMBERED:
            self._units = {}
            self._size = 0
        else:
            units[value] = unit
        return unit

    def _unit(self, kind: Kind, value: bytes) -> _Unit | None:
        self._changes = []
        try:
            if kind == "messages" and value[:1] == b"{":
                if PLACES.get(_HEAD.decode(value).role) not in self._kinds:
                    return None
                read = msgspec.json.decode(value)
                change_message(read, self._change)
            else:
                read = change_field(kind, msgspec.json.decode(value), self._change)
        except _FAULTY:
            return None
        if not self._changes:
            return None
        return _Unit(msgspec.Raw(msgspec.json.encode(read)), tuple(self._changes))

    def _change(self, place: str, text: str) -> str:
        components = self._components.get(place, ())
        if not components:
            return text
        new: list[str] = []
        parts: list[Part] = []
        at = 0
        for block in blocks(text) if place == USER else (text,):
            for component in components:
                holes = component.sent.match(block)
                if holes is not None:
                    parts.append(component.part(at, holes))
                    block = component.new.fill(holes)
                    break
            new.append(block)
            at += len(block)
        if not parts:
            return text
        joined = "".join(new)
        self._changes.append(_Change(Text(place, len(joined), tuple(parts)), text, joined))
        return joined


class _Component:
    """A component that a candidate changes."""

    def __init__(self, name: str, prompts: Prompts) -> None:
        text = prompts.components[name]
        self.name = name
        self.place = text.place
        self.sent = Pattern.of(text.sent)
        self.new = Pattern.of(text.text)
        self.fingerprint = fingerprint(text.place, text.sent)

    def part(self, at: int, holes: Iterable[str]) -> Part:
        return Part(self.name, self.fingerprint, at, tuple(map(len, holes)))


# --- reading it back ------------------------------------------------------------------------------


class Sent(NamedTuple):
    """What a program sent in a call: messages and tools as the span has them, with the program's
    own texts, and the other fields of the request."""

    messages: list[Any]
    tools: list[Any]
    request: dict[str, Any]


def as_sent(span: Span, candidates: Mapping[str, Prompts]) -> Sent:
    """What the program sent in a call, every text as it was, from what was replaced. `candidates`
    are by `resources_id`; KeyError if the span's is not among them.

    A text of the program's own that equals a new text at its place is taken for a replaced one."""
    record = record_of(span)
    change: Change = _unchanged
    if record is not None:
        change = _Restoring(record, candidates[record.resources_id])
    attributes = span.attributes
    request = mapping(json_of(attributes.get(semconv.CALL_REQUEST)))
    for name in FIELDS.keys() & request.keys():
        request[name] = change_field(FIELDS[name], request[name], change)
    messages = items(json_of(attributes.get(semconv.GEN_AI_INPUT_MESSAGES)))
    tools = items(json_of(attributes.get(semconv.GEN_AI_TOOL_DEFINITIONS)))
    return Sent(
        change_field("messages", messages, change), change_field("tools", tools, change), request
    )


def _unchanged(place: str, text: str) -> str:
    return text


class _Restoring:
    """Finds the program's text for one in which components were replaced."""

    def __init__(self, record: Record, prompts: Prompts) -> None:
        self._prompts = prompts
        self._texts: dict[tuple[str, int], list[Text]] = {}
        for text in record.texts:
            self._texts.setdefault((text.place, text.length), []).append(text)

    def __call__(self, place: str, text: str) -> str:
        for record in self._texts.get((place, len(text)), ()):
            restored = self._restored(record, text)
            if restored is not None:
                return restored
        return text

    def _restored(self, record: Text, text: str) -> str | None:
        found: list[str] = []
        at = 0
        for part in record.parts:
            component = self._prompts.components[part.component]
            new = Pattern.of(component.text)
            end = part.at + sum(map(len, new.segments)) + sum(part.holes)
            values = new.values(text[part.at : end], part.holes)
            if values is None:
                return None
            found += (text[at : part.at], Pattern.of(component.sent).fill(values))
            at = end
        rest = text[at:]
        return None if rest and record.place != USER else "".join([*found, rest])


def record_of(span: Span) -> Record | None:
    """What was replaced in a call; None if nothing was."""
    recorded = text_of(span, semconv.CALL_REPLACED)
    return None if recorded is None else msgspec.json.decode(recorded, type=Record)


def met_components(spans: Iterable[Span]) -> frozenset[str]:
    """The components that were replaced in any of these calls: a score of a candidate counts only
    if all that it changes are among them."""
    records = map(record_of, spans)
    return frozenset(
        part.component
        for record in records
        if record is not None
        for text in record.texts
        for part in text.parts
    )
