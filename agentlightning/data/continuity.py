"""Which call of an attempt continues which, and where a call should continue another but its tokens
differ.

    A1 S1 A2 S2 A3, two interleaved agents  →  A2 continues A1, A3 A2, and S2 S1: two conversations
    (1, 2) + (7, 8), then (1, 2, 9, 3, 4), with the same answer in its messages  →  a break at 2

A prompt continues an earlier call if it starts with that call's prompt and answer. If there is no
such call, or another call continues it already, messages decide: they distinguish a call that was
meant to continue (a break) from a new start. Without messages, a prompt that starts with a
conversation's whole first prompt was meant to continue it. Of very many calls only the latest are
compared with a call, so that time is linear."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Literal, TypeAlias

import msgspec
import numpy as np

from agentlightning import semconv
from agentlightning.data.forest import shared_length
from agentlightning.data.transitions import IntArray, Transition
from agentlightning.tracing.dialects import (
    content_text,
    input_messages,
    items,
    joined,
    json_of,
    mapping,
    output_messages,
)
from agentlightning.types import Attributes, Span

BreakKind: TypeAlias = Literal["retokenised", "edited history", "tools changed", "unknown"]

SUGGESTIONS: Final[Mapping[BreakKind, str]] = {
    "retokenised": (
        "The text is the same, its tokens are not: serve the policy where token ids go in (the "
        "embedded engine, SGLang), use a chat template that keeps earlier answers whole, or train "
        "at level 'tree'."
    ),
    "edited history": (
        "Send earlier messages back as they were, with what is new at the end; cut the history "
        "rarely, or train at level 'tree'."
    ),
    "tools changed": "Offer the same tools, in the same order, at each call of a conversation.",
    "unknown": "Record messages (--capture full): without them only tokens tell.",
}
"""What you can do about each kind of break."""

_COMPARED: Final = 100  # earlier calls
_BEFORE: Final = 6  # tokens shown of a break
_AFTER: Final = 12

Message: TypeAlias = tuple[str, bytes]  # role and normalised content (`words_of`)


@dataclass(frozen=True)
class Break:
    """A call whose prompt should start with the prompt and answer of call `earlier`, but differs
    from token `position` on, `inside` that prompt or answer. Calls are identified by their index in
    the attempt. `before` are the ids just before that position; `recorded` and `found` are the
    earlier and the new ids from there on."""

    agent: str | None
    call_index: int
    earlier: int
    position: int
    inside: Literal["prompt", "answer"]
    kind: BreakKind
    before: tuple[int, ...]
    recorded: tuple[int, ...]
    found: tuple[int, ...]

    @property
    def suggestion(self) -> str:
        return SUGGESTIONS[self.kind]


@dataclass(frozen=True)
class Continuity:
    """For each transition, the position of the transition it continues (or None) and the number of
    its conversation, from 0; and the breaks, in call order. A call that breaks with another, or
    repeats its prompt, belongs to the same conversation."""

    continues: tuple[int | None, ...]
    conversations: tuple[int, ...]
    breaks: tuple[Break, ...]


def continuity(transitions: Sequence[Transition], spans: Sequence[Span]) -> Continuity:
    """How the transitions of one attempt, in call order, continue each other. `spans` are the
    attempt's, in any order; messages and tools are read from them."""
    attributes = {span.span_id: span.attributes for span in spans}
    calls: list[_Call] = []
    breaks: list[Break] = []
    conversations = 0
    for place, transition in enumerate(transitions):
        call = _Call(transition, attributes.get(transition.span_id, {}), place)
        latest = calls[-_COMPARED:]
        parent = continued = _continued(call, latest)
        if latest and (continued is None or continued.has_next):
            again = next(
                (other for other in latest if np.array_equal(other.prompt, call.prompt)), None
            )
            intended = None if again else _intended(call, latest, continued)
            if intended is not None:
                breaks.append(_break(call, *intended))
            parent = continued or (intended[0] if intended else again)
        if continued is not None:
            call.continues = continued.place
            continued.has_next = True
        if parent is None:
            call.conversation = conversations
            call.root = call
            conversations += 1
        else:
            call.conversation = parent.conversation
            call.root = parent.root
        calls.append(call)
    return Continuity(
        tuple(call.continues for call in calls),
        tuple(call.conversation for call in calls),
        tuple(breaks),
    )


class _Call:
    """A transition and the content of its span, read on demand."""

    root: _Call  # the first call of its conversation
    conversation: int

    def __init__(self, transition: Transition, attributes: Attributes, place: int) -> None:
        self.transition = transition
        self.place = place
        self.prompt = transition.prompt_ids
        self.answer = transition.response_ids
        self.speaker = transition.agent, transition.model
        self.continues: int | None = None
        self.has_next = False  # whether another call continues it
        self.tools = attributes.get(semconv.GEN_AI_TOOL_DEFINITIONS)
        text = attributes.get(semconv.CALL_PROMPT)
        # the prompt of a completion call, which has no messages
        self.text = text if isinstance(text, str) else None
        self._attributes = attributes

    @cached_property
    def tokens(self) -> IntArray:
        return np.concatenate([self.prompt, self.answer])

    @cached_property
    def messages(self) -> list[Message]:
        """The request's messages; empty if not recorded."""
        return [
            (str(message.get("role")), words_of(message))
            for message in input_messages(self._attributes)
        ]

    @cached_property
    def history(self) -> list[Message]:
        """The messages with which a continuing call's request starts; empty if unknown."""
        replies = [
            (str(reply.get("role")), words_of(reply))
            for reply in output_messages(self._attributes)[:1]
        ]
        return [*self.messages, *replies] if self.messages and replies else []

    @property
    def continuation(self) -> str | None:
        """The prompt of a completion call and its answer; None for a chat."""
        replies = output_messages(self._attributes)
        return (
            self.text + content_text(replies[0].get("content"))
            if self.text is not None and replies
            else None
        )


def _continued(call: _Call, earlier: Sequence[_Call]) -> _Call | None:
    """The call with the longest prefix of this prompt; if several are equal, the last."""
    prompt = call.prompt
    found = None
    for other in reversed(earlier):
        start = len(other.prompt)
        end = len(other.prompt) + len(other.answer)
        longer = found is None or end > len(found.prompt) + len(found.answer)
        # Compare the answer first: if it differs, the rest need not be read.
        if longer and end <= len(prompt) and np.array_equal(prompt[start:end], other.answer):
            found = other if np.array_equal(prompt[:start], other.prompt) else found
    return found


_Intended: TypeAlias = tuple[_Call, BreakKind]


def _intended(call: _Call, earlier: Sequence[_Call], continued: _Call | None) -> _Intended | None:
    """The call that this call should continue but does not, and the reason."""
    own = [other for other in earlier if other.speaker == call.speaker and other is not continued]
    if call.text is not None:
        glued = [
            other
            for other in own
            if (text := other.continuation) is not None and call.text.startswith(text)
        ]
        return (
            (max(glued, key=lambda other: len(other.text or "")), "retokenised") if glued else None
        )
    if call.messages:
        answers = {other.history[-1] for other in earlier if other.history}
        least = len(continued.history) if continued else 0
        kept = [
            (*_kept(other.history, call.messages, answers), other.place, other)
            for other in own
            if other.history
        ]
        count, whole, _, parent = max(kept, default=(0, False, 0, None))
        return (
            (parent, "retokenised" if whole else "edited history")
            if parent is not None and count > least
            else None
        )
    shared = [(shared_length(other.tokens, call.prompt), other.place, other) for other in own]
    length, _, parent = max(shared, default=(0, 0, None))
    start = None if parent is None else parent.prompt if continued else parent.root.prompt
    if parent is None or start is None or not len(start) <= length < len(call.prompt):
        return None
    return parent, "unknown"


def _kept(
    history: Sequence[Message], later: Sequence[Message], answers: set[Message]
) -> tuple[int, bool]:
    """How many messages of an earlier call's history (its answer last) a later call repeats, and
    whether it repeats them all, unchanged. (0, False) if the later call does not continue it.

        s u a  →  s u a t      (3, True)
        s u a  →  s u b t      (2, False): b replaces the answer
        s u a t b  →  s t b v  (3, False): u and a were left out, the answer b was kept
        s u a  →  s u          (0, False): repeats the question
        s u a  →  s v          (0, False): another conversation with the same start"""
    pairs = enumerate(zip(history, later, strict=False))
    same = next((place for place, (old, new) in pairs if old != new), min(len(history), len(later)))
    if same == len(history):
        return same, True
    rest = set(later[same:])
    kept = [message for message in history[same:] if message in rest]
    if any(message in answers and message[1] != _NO_WORDS for message in kept):
        return same + len(kept), False
    replaced = same == len(history) - 1 and same < len(later) and later[same][0] == "assistant"
    return (same if replaced else 0), False


def _break(call: _Call, earlier: _Call, kind: BreakKind) -> Break:
    position = shared_length(earlier.tokens, call.prompt)
    inside = "prompt" if position < len(earlier.prompt) else "answer"
    if kind != "edited history" and inside == "prompt" and call.tools != earlier.tools:
        kind = "tools changed"
    return Break(
        agent=call.transition.agent,
        call_index=call.transition.call_index,
        earlier=earlier.transition.call_index,
        position=position,
        inside=inside,
        kind=kind,
        before=tuple(call.prompt[max(0, position - _BEFORE) : position].tolist()),
        recorded=tuple(earlier.tokens[position : position + _AFTER].tolist()),
        found=tuple(call.prompt[position : position + _AFTER].tolist()),
    )


_NO_WORDS: Final = msgspec.json.encode(("", ()))


def words_of(message: Mapping[str, Any]) -> bytes:
    """The normalised content of a message: notation, white space, case and tool-call ids are
    ignored. Unknown notations are kept unchanged."""
    parts = message.get("content")
    calls = items(message.get("tool_calls"))
    if not all(isinstance(part, Mapping) for part in items(parts)) or not all(
        isinstance(mapping(call).get("function"), Mapping) for call in calls
    ):
        return msgspec.json.encode(message, order="sorted")
    content = message.get("content") or ""
    functions = [mapping(mapping(call)["function"]) for call in calls]
    named = [
        (function.get("name"), _arguments(function.get("arguments"))) for function in functions
    ]
    text = canonical(joined(content)) if isinstance(content, str | list) else content
    return msgspec.json.encode((text, named), order="sorted")


def canonical(text: str) -> str:
    """The text without differences in Unicode form, case and white space."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _arguments(arguments: object) -> object:
    read = json_of(arguments) if isinstance(arguments, str) else arguments
    return read if isinstance(read, dict) else arguments
