"""Puts a candidate's texts into the requests of a program, and says from what was replaced what the
program had sent.

Knows bodies and texts. Knows no gateway, no backends and no HTTP."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Annotated, Any, Final, NamedTuple

import msgspec

from agentlightning import semconv
from agentlightning.prompts.components import Pattern, changed_components, fingerprint
from agentlightning.prompts.places import (
    FIELDS,
    PLACES,
    USER,
    Kind,
    blocks,
    change_field,
)
from agentlightning.tracing.dialects import items, json_of, mapping, text_of
from agentlightning.types import PromptCandidate, PromptText, Span

REPEATED: Final = ("instructions", "tools")
"""The fields of a response that repeat texts of its request."""
_REMEMBERED: Final = 128  # fields and messages, for each candidate
_LARGEST: Final = 1 << 18  # bytes of one that is remembered
_ITEMS: Final = msgspec.json.Decoder(Annotated[list[msgspec.Raw], msgspec.Meta(max_length=100_000)])


class _Head(msgspec.Struct):
    """Of a message, as much as says whether the program wrote it."""

    role: str = USER


_HEAD: Final = msgspec.json.Decoder(_Head)


class Part(msgspec.Struct, frozen=True):
    """A component that was put into a text: from where to where, and so of each of its holes, in
    characters."""

    component: str
    fingerprint: str
    begin: int
    end: int
    holes: list[tuple[int, int]]


class Text(msgspec.Struct, frozen=True):
    """A text of a request in which components were replaced, by its place and fingerprint."""

    place: str
    fingerprint: str
    parts: list[Part]


class Record(msgspec.Struct, frozen=True):
    """What a span says of what was replaced, in `agentlightning.call.replaced`."""

    resources_id: str
    texts: list[Text]


class _Unit(NamedTuple):
    """A field or message after replacing, its records, and the program's texts by (place, new
    text)."""

    raw: msgspec.Raw
    texts: list[Text]
    sent: dict[tuple[str, str], str]


class Replaced:
    """A request with a candidate's texts in it. `body` is what goes on, `record` what the span says
    of it."""

    def __init__(self, body: bytes, units: Iterable[_Unit], resources_id: str) -> None:
        self.body = body
        self._sent: dict[tuple[str, str], str] = {}
        texts: list[Text] = []
        for unit in units:
            texts += unit.texts
            self._sent |= unit.sent
        self.record = msgspec.json.encode(Record(resources_id, texts)).decode()

    def as_sent(self, place: str, text: str) -> str:
        """The text that the program sent, for one of the request."""
        return self._sent.get((place, text), text)

    def repeated(self, response: dict[str, Any]) -> dict[str, Any]:
        """A response of OpenAI's that repeats the request, in the program's own words."""
        own = dict(response)
        for name in REPEATED:
            value = msgspec.json.decode(msgspec.json.encode(response.get(name)))
            if value:
                own[name] = change_field(FIELDS[name], value, self.as_sent)
        return own


class Replacer:
    """Puts one candidate into requests. Fields and messages that came before are known by their
    bytes: a program repeats most of them in each call."""

    def __init__(self, prompts: PromptCandidate, resources_id: str) -> None:
        self._resources_id = resources_id
        self._components: dict[str, list[_Component]] = {}
        for name in sorted(changed_components(prompts)):
            component = _Component(name, prompts.components[name])
            self._components.setdefault(component.place, []).append(component)
        for several in self._components.values():
            several.sort(key=lambda component: -component.sent.constant)
        self._kinds = {place.partition(".")[0] for place in self._components}
        self._remembered = lru_cache(_REMEMBERED)(self._unit)

    def replaced(self, fields: Mapping[str, msgspec.Raw]) -> Replaced | None:
        """The request of these fields after replacing; None where no text of the candidate's is in
        it. DecodeError for what is no request."""
        new = dict(fields)
        units: list[_Unit] = []
        for name, raw in fields.items():
            kind = FIELDS.get(name)
            before = len(units)
            if kind == "messages" and bytes(raw)[:1] == b"[":
                messages = [self._message(message, units) for message in _ITEMS.decode(raw)]
                if len(units) > before:
                    new[name] = msgspec.Raw(msgspec.json.encode(messages))
            elif kind == "messages" or kind in self._kinds:
                new[name] = self._replaced(kind, raw, units)
        return Replaced(msgspec.json.encode(new), units, self._resources_id) if units else None

    def _message(self, raw: msgspec.Raw, units: list[_Unit]) -> msgspec.Raw:
        if PLACES.get(_HEAD.decode(raw).role) not in self._kinds:
            return raw
        return self._replaced("messages", raw, units)

    def _replaced(self, kind: Kind, raw: msgspec.Raw, units: list[_Unit]) -> msgspec.Raw:
        value = bytes(raw)
        unit = (self._remembered if len(value) <= _LARGEST else self._unit)(kind, value)
        if unit is None:
            return raw
        units.append(unit)
        return unit.raw

    def _unit(self, kind: Kind, value: bytes) -> _Unit | None:
        texts: list[Text] = []
        sent: dict[tuple[str, str], str] = {}

        def change(place: str, text: str) -> str:
            new = self._changed(place, text, texts)
            if new != text:
                sent[place, new] = text
            return new

        read = change_field(kind, msgspec.json.decode(value), change)
        return _Unit(msgspec.Raw(msgspec.json.encode(read)), texts, sent) if texts else None

    def _changed(self, place: str, text: str, texts: list[Text]) -> str:
        """The text after replacing; what was is added to `texts`."""
        new: list[str] = []
        length = 0
        parts: list[Part] = []
        components = self._components.get(place, [])
        for block in blocks(text) if place == USER and components else (text,):
            found = next(filter(None, (each.put(block, length) for each in components)), None)
            if found is not None:
                block = found[0]
                parts.append(found[1])
            new.append(block)
            length += len(block)
        if not parts:
            return text
        changed = "".join(new)
        texts.append(Text(place, fingerprint(place, changed), parts))
        return changed


class _Component:
    """A component that a candidate changes."""

    def __init__(self, name: str, text: PromptText) -> None:
        self.name = name
        self.place = text.place
        self.sent = Pattern.of(text.sent)
        self._new = Pattern.of(text.text)
        self._fingerprint = fingerprint(text.place, text.sent)

    def put(self, block: str, begin: int) -> tuple[str, Part] | None:
        """The new text for a block that is this component, and its record."""
        values = self.sent.match(block)
        if values is None:
            return None
        holes: list[tuple[int, int]] = []
        at = begin
        for value, segment in zip(values, self._new.segments, strict=False):
            at += len(segment)
            holes.append((at, at + len(value)))
            at += len(value)
        new = self._new.fill(values)
        return new, Part(self.name, self._fingerprint, begin, begin + len(new), holes)


# --- reading it back ------------------------------------------------------------------------------


class Sent(NamedTuple):
    """What a program sent in a call: messages and tools as the span has them, with the program's
    own texts, and the other fields of the request."""

    messages: list[Any]
    tools: list[Any]
    request: dict[str, Any]


def as_sent(span: Span, candidates: Mapping[str, PromptCandidate]) -> Sent:
    """What the program sent in a call, every text as it was, from what was replaced. `candidates`
    are by `resources_id`; KeyError if the span's is not among them.

    A text of the program's own that equals a new text at its place is taken for a replaced one."""
    record = record_of(span) or Record("", [])
    prompts = candidates[record.resources_id] if record.texts else PromptCandidate(components={})

    replaced = {each.fingerprint: each for each in record.texts}

    def change(place: str, text: str) -> str:
        found = replaced.get(fingerprint(place, text)) if replaced else None
        return text if found is None else _restored(found, text, prompts)

    attributes = span.attributes
    request = mapping(json_of(attributes.get(semconv.CALL_REQUEST)))
    messages = items(json_of(attributes.get(semconv.GEN_AI_INPUT_MESSAGES)))
    tools = items(json_of(attributes.get(semconv.GEN_AI_TOOL_DEFINITIONS)))
    change_field("messages", messages, change)
    change_field("tools", tools, change)
    for name in FIELDS.keys() & request.keys():
        request[name] = change_field(FIELDS[name], request[name], change)
    return Sent(messages, tools, request)


def _restored(record: Text, text: str, prompts: PromptCandidate) -> str:
    own = ""
    at = 0
    for part in record.parts:
        sent = Pattern.of(prompts.components[part.component].sent)
        own += text[at : part.begin] + sent.fill([text[begin:end] for begin, end in part.holes])
        at = part.end
    return own + text[at:]


def record_of(span: Span) -> Record | None:
    """What was replaced in a call; None if nothing was."""
    recorded = text_of(span, semconv.CALL_REPLACED)
    return None if recorded is None else msgspec.json.decode(recorded, type=Record)


def met_components(spans: Iterable[Span]) -> frozenset[str]:
    """The components that were replaced in any of these calls: a score of a candidate counts only
    if all that it changes are among them."""
    texts = (text for span in spans if (record := record_of(span)) for text in record.texts)
    return frozenset(part.component for text in texts for part in text.parts)
