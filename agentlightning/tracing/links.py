"""The link of a call: the earlier call of its attempt that it goes on from, and what they share.

    A1 S1 A2, two interleaved agents  →  A2 goes on from A1
    (1, 2) + (7, 8), then (1, 2, 9, 3, 4) with that answer  →  goes on from it, but tokens differ

A call goes on from the earlier call whose prompt and answer its prompt starts with, the longest. If
there is none, or another call goes on from that already, messages decide: they distinguish a call
that was meant to go on from a new start. Without messages, a prompt that starts with a
conversation's whole first prompt was meant to go on from it. Of very many calls only the latest are
compared with a call, so that time is linear.

The gateway records links (`agentlightning.call.continues`); those that it did not are found when
calls are read."""

from __future__ import annotations

import itertools
import unicodedata
from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from agentlightning import semconv
from agentlightning.tracing.dialects import (
    content_text,
    decoded,
    input_messages,
    items,
    joined,
    mapping,
    output_messages,
    text_of,
)
from agentlightning.types import Attributes, Link, Span

_COMPARED: Final = 100  # earlier calls
_LOOKED_FOR: Final = 256  # messages of one, from its answer back
_PIECE: Final = 2048  # characters or bytes

Links: TypeAlias = Mapping[str, tuple[Span, Link]]
"""The calls that others go on from, by the span ids of these, and what they share."""
_Message: TypeAlias = tuple[str, int]  # role, and hash of the normalised content


class _Prefix(NamedTuple):
    """A beginning of a text or of the bytes of ids: its length and hash."""

    length: int
    hash: int


_NEVER: Final = _Prefix(1 << 60, 0)


class _Prefixes:
    """The prefixes of a prompt with its answer, as text or as the bytes of ids. All of it is read
    once, and for each prefix asked for less than a piece again."""

    def __init__(self, prompt: Any, answer: Any) -> None:
        self._text = prompt + answer
        ends = range(_PIECE, len(self._text) + 1, _PIECE)
        pieces = (self._text[end - _PIECE : end] for end in ends)
        self._hashes = list(itertools.accumulate(pieces, _hash, initial=0))
        self.prompt = self._of(len(prompt))
        self.whole = self._of(len(self._text))

    def _of(self, length: int) -> _Prefix:
        pieces, rest = divmod(length, _PIECE)
        return _Prefix(length, _hash(self._hashes[pieces], self._text[length - rest : length]))

    def __contains__(self, prefix: _Prefix) -> bool:
        """Whether the prompt begins with it."""
        length = prefix.length
        return length <= self.prompt.length and self._of(length) == prefix


def _hash(before: int, more: object) -> int:
    return hash((before, more))


class _LinkedCall:
    """An earlier call, in numbers. `text` is the JSON of its messages without the closing bracket,
    `history` the messages with which a call that goes on from it starts, `hashes` those of the
    first 0, 1, 2 … of these, `root` the first call of its conversation."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.root = self
        self.anew = True
        self.continued = False
        self.asked: object = None
        self.messages: tuple[_Message, ...] = ()
        self.history: tuple[_Message, ...] = ()
        self.hashes = [0]
        self.text = _NEVER
        self.prompt = _NEVER
        self.tokens = _NEVER
        self.completion = _NEVER

    def with_more(self, messages: Iterable[Mapping[str, Any]]) -> tuple[_Message, ...]:
        """The messages with these, whose hashes are added."""
        more = tuple((str(one.get("role")), hash(words_of(one))) for one in messages)
        self.hashes += itertools.accumulate(more, _hash, initial=self.hashes.pop())
        return self.messages + more


class AttemptLinks:
    """Finds the links of one attempt's calls, which are given in call order."""

    def __init__(self) -> None:
        self._calls: deque[_LinkedCall] = deque(maxlen=_COMPARED)

    def add(self, span: Span, index: int) -> Link | None:
        """The link of the call with this index; None if it goes on from no earlier one."""
        call = _LinkedCall(index)
        self._read_messages(call, span)
        asked = call.hashes[-1]
        replies = output_messages(span.attributes)[:1]
        if call.messages and replies:
            call.history = call.with_more(replies)
        text = None
        prompt = text_of(span, semconv.CALL_PROMPT)
        if prompt is not None:
            text = _Prefixes(prompt, content_text(replies[0].get("content")) if replies else "")
            call.completion = text.whole if replies else _NEVER
        ids = _NOTHING
        if span.tokens is not None:
            choices = span.tokens.choices
            sampled = choices[0].token_ids.tobytes() if choices else b""
            ids = _Prefixes(span.tokens.prompt_token_ids.tobytes(), sampled)
            call.prompt = ids.prompt
            call.tokens = ids.whole if sampled else _NEVER
        call.asked = asked, text and text.prompt, call.prompt
        link = self._link(call, ids, text)
        call.anew = link is None
        self._calls.append(call)
        return link

    def _read_messages(self, call: _LinkedCall, span: Span) -> None:
        """Read the messages of a request; those that it repeats of an earlier one as they were
        written are known."""
        attributes = span.attributes
        text = (text_of(span, semconv.GEN_AI_INPUT_MESSAGES) or "").rstrip()
        prefixes = _Prefixes(text.removesuffix("]"), "")
        before = self._longest("text", prefixes)
        if before is not None:
            call.messages = before.messages
            call.hashes = before.hashes[: len(before.messages) + 1]
            rest = text[before.text.length :].lstrip().removeprefix(",")
            attributes = {**attributes, semconv.GEN_AI_INPUT_MESSAGES: f"[{rest}"}
        if before is None or before.text != prefixes.whole:
            call.messages = call.with_more(input_messages(attributes))
        if call.messages:
            call.text = prefixes.whole

    def _link(self, call: _LinkedCall, ids: _Prefixes, text: _Prefixes | None) -> Link | None:
        again = next((other for other in reversed(self._calls) if other.asked == call.asked), None)
        if again is not None:
            call.root = again.root
            if again.anew:
                return None
        parent = continued = self._longest("tokens", ids)
        agree = True
        if continued is None or continued.continued:
            intended = None if again is not None else self._intended(call, ids, text, continued)
            if intended is not None:
                known = intended.tokens is not _NEVER and call.prompt is not _NEVER
                agree = False if known and call.prompt != intended.prompt else None
                parent = intended
        if parent is None:
            return None
        call.root = parent.root
        parent.continued |= agree is not False
        return Link(call=parent.index, messages=_shared(parent, call), tokens=agree)

    def _longest(self, name: str, prefixes: _Prefixes) -> _LinkedCall | None:
        """The call with the longest of these that a prompt begins with; of equal ones the first
        that no call goes on from."""
        found = None
        best = _Prefix(0, 0)
        for other in reversed(self._calls):
            prefix: _Prefix = getattr(other, name)
            longer = prefix.length > best.length and prefix in prefixes
            if longer or (prefix == best and not other.continued):
                found = other
                best = prefix
                if best.length == prefixes.prompt.length:
                    break
        return found

    def _intended(
        self,
        call: _LinkedCall,
        ids: _Prefixes,
        text: _Prefixes | None,
        continued: _LinkedCall | None,
    ) -> _LinkedCall | None:
        """The call that this one was meant to go on from, if that is another than it continues."""
        if text is not None:
            glued = self._longest("completion", text)
            return None if glued is continued else glued
        others = [other for other in self._calls if other is not continued]
        if not call.messages:
            begun = (
                other
                for other in reversed(others)
                if (other if continued else other.root).prompt in ids
            )
            return next(begun, None)
        answers = {other.history[-1] for other in self._calls if other.history}
        places = {message: place for place, message in enumerate(call.messages)}
        if answers.isdisjoint(places) and all(role != "assistant" for role, _ in places):
            return None  # it has no answer
        found = None
        most = (0 if continued is None else len(continued.history), True, True)
        for other in reversed(others):
            if len(other.history) >= most[0]:
                rank = *_kept(other, call, places, answers), not other.continued
                if rank > most:
                    found = other
                    most = rank
        return found


def read_links(calls: Sequence[Span]) -> Links:
    """The links of one attempt's calls, in call order; those that are not recorded are found
    here."""
    calls = [
        call for call in calls if call.attributes.get(semconv.GEN_AI_OPERATION) != "embeddings"
    ]
    numbers = [call.attributes.get(semconv.CALL_INDEX) for call in calls]
    indices = [n if isinstance(n, int) else place for place, n in enumerate(numbers)]
    by_index = dict(zip(indices, calls, strict=True))
    recorded = all(semconv.CALL_CONTINUES in call.attributes for call in calls)
    attempt = AttemptLinks()
    links: dict[str, tuple[Span, Link]] = {}
    for index, call in zip(indices, calls, strict=True):
        link = None if recorded else attempt.add(call, index)
        if semconv.CALL_CONTINUES in call.attributes:
            link = _recorded(call.attributes)
        if link is not None and link.call < index and link.call in by_index:
            links[call.span_id] = by_index[link.call], link
    return links


def link_attributes(link: Link | None) -> Attributes:
    """The attributes in which a call's link is recorded."""
    if link is None:
        return {semconv.CALL_CONTINUES: -1}
    attributes: Attributes = {
        semconv.CALL_CONTINUES: link.call,
        semconv.CALL_SHARED_MESSAGES: link.messages,
    }
    if link.tokens is not None:
        attributes[semconv.CALL_TOKENS_AGREE] = link.tokens
    return attributes


def _recorded(attributes: Attributes) -> Link | None:
    index = attributes[semconv.CALL_CONTINUES]
    shared = attributes.get(semconv.CALL_SHARED_MESSAGES, 0)
    if not isinstance(index, int) or index < 0 or not isinstance(shared, int):
        return None
    agree = attributes.get(semconv.CALL_TOKENS_AGREE)
    return Link(call=index, messages=shared, tokens=agree if isinstance(agree, bool) else None)


def _shared(earlier: _LinkedCall, later: _LinkedCall) -> int:
    """The number of messages of an earlier call's history that a later call begins with."""
    places = range(min(len(earlier.history), len(later.messages)))
    return bisect_left(
        places, True, key=lambda place: earlier.hashes[place + 1] != later.hashes[place + 1]
    )


def _kept(
    earlier: _LinkedCall,
    later: _LinkedCall,
    places: Mapping[_Message, int],
    answers: Collection[_Message],
) -> tuple[int, bool]:
    """The number of messages of an earlier call's history (its answer last) that a later call,
    which has its messages at these `places`, repeats, and whether it repeats them all, unchanged.
    (0, False) if the later call does not go on from it. Messages in the middle are looked for among
    the latest, and not of a call that another goes on from.

        s u a  →  s u a t      (3, True)
        s u a  →  s u b t      (2, False): b replaces the answer
        s u a t b  →  s t b v  (3, False): u and a were left out, the answer b was kept
        s u a  →  s u          (0, False): repeats the question
        s u a  →  s v          (0, False): another conversation with the same start"""
    history = earlier.history
    same = _shared(earlier, later)
    if same == len(history):
        return same, True
    if not earlier.continued:
        kept = [
            message for message in history[same:][-_LOOKED_FOR:] if places.get(message, -1) >= same
        ]
        if any(message in answers and message[1] != _NO_WORDS for message in kept):
            return same + len(kept), False
    messages = later.messages
    replaced = len(history) - 1 == same < len(messages) and messages[same][0] == "assistant"
    return (same if replaced else 0), False


def words_of(message: Mapping[str, Any]) -> bytes:
    """The normalised content of a message: notation, white space, case and tool-call ids are
    ignored. Unknown notations are kept unchanged."""
    parts = message.get("content")
    calls = items(message.get("tool_calls"))
    if not all(isinstance(part, Mapping) for part in items(parts)) or not all(
        isinstance(mapping(call).get("function"), Mapping) for call in calls
    ):
        return msgspec.json.encode(message, order="sorted")
    content = parts or ""
    functions = [mapping(mapping(call)["function"]) for call in calls]
    named = [(function.get("name"), decoded(function.get("arguments"))) for function in functions]
    text = canonical(joined(content)) if isinstance(content, str | list) else content
    return msgspec.json.encode((text, named), order="sorted")


def canonical(text: str) -> str:
    """The text without differences in Unicode form, case and white space."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


_NOTHING: Final = _Prefixes(b"", b"")
_NO_WORDS: Final = hash(msgspec.json.encode(("", ())))
