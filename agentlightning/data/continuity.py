"""Which call of an attempt goes on from which, and where one should and its tokens do not.

    A1 S1 A2 S2 A3, two agents by turns  →  A2 continues A1, A3 continues A2, S2 continues S1: two conversations
    (1, 2) + (7, 8), then (1, 2, 9, 3, 4) by the same agent, with the same answer in its messages  →  a break at 2

A prompt continues an earlier call if it begins with that call's prompt and answer. Only where none is found, or where
another call went on from there already, are messages read: they tell a call that was meant to go on (a break) from one
that begins anew. Without messages, a prompt that begins with all of a conversation's first prompt was meant to go on.
"""

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
from agentlightning.tracing.dialects import items, joined, json_of, mapping
from agentlightning.tracing.messages import content_text, input_messages, output_messages
from agentlightning.types import Attributes, Span

BreakKind: TypeAlias = Literal["retokenised", "edited history", "tools changed", "unknown"]

SUGGESTIONS: Final[Mapping[BreakKind, str]] = {
    "retokenised": "The text is the same, its tokens are not: serve the policy where token ids go in (the embedded "
    "engine, SGLang), use a chat template that keeps earlier answers whole, or train at level 'tree'.",
    "edited history": "Send earlier messages back as they were, with what is new at the end; cut the history rarely, "
    "or train at level 'tree'.",
    "tools changed": "Offer the same tools, in the same order, at each call of a conversation.",
    "unknown": "Record messages (--capture full): without them only tokens tell.",
}
"""What a user can do about each kind of break."""

_BEFORE: Final = 6  # tokens of a break that are shown
_AFTER: Final = 12

Message: TypeAlias = tuple[str, bytes]  # its role, and its words (`words_of`)


@dataclass(frozen=True)
class Break:
    """A call whose prompt should begin with the prompt and the answer of call `earlier`, and differs from token
    `position` on, which is `inside` that prompt or that answer. Calls are named by their index in the attempt.
    `before` are ids just before that place, `recorded` and `found` those of either side from there on."""

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
    """Of each transition the place of the one it continues (None for none) and the number of its conversation, from 0
    on; and the breaks, in call order. A call that breaks with another, or asks the same prompt again, is of the
    conversation of that one."""

    continues: tuple[int | None, ...]
    conversations: tuple[int, ...]
    breaks: tuple[Break, ...]


def continuity(transitions: Sequence[Transition], spans: Sequence[Span]) -> Continuity:
    """How the transitions of one attempt, in call order, go on from one another. The attempt's `spans`, in any order,
    are read for messages and tools."""
    attributes = {span.span_id: span.attributes for span in spans}
    calls: list[_Call] = []
    breaks: list[Break] = []
    conversations = 0
    for place, transition in enumerate(transitions):
        call = _Call(transition, attributes.get(transition.span_id, {}), place)
        parent = continued = _continued(call, calls)
        if calls and (continued is None or continued.goes_on):
            again = next((one for one in calls if np.array_equal(one.prompt, call.prompt)), None)
            meant = None if again else _meant(call, calls, continued)
            if meant is not None:
                breaks.append(_break(call, *meant))
            parent = continued or (meant[0] if meant else again)
        if continued is not None:
            call.continues, continued.goes_on = continued.place, True
        if parent is None:
            call.conversation, call.root = conversations, call
            conversations += 1
        else:
            call.conversation, call.root = parent.conversation, parent.root
        calls.append(call)
    return Continuity(
        tuple(call.continues for call in calls), tuple(call.conversation for call in calls), tuple(breaks)
    )


class _Call:
    """A transition, and what its span says, which is read when it is asked for."""

    root: _Call  # the first call of its conversation
    conversation: int

    def __init__(self, transition: Transition, attributes: Attributes, place: int) -> None:
        self.transition = transition
        self.place = place
        self.prompt, self.answer = transition.prompt_ids, transition.response_ids
        self.speaker = transition.agent, transition.model
        self.continues: int | None = None
        self.goes_on = False  # whether another call continues it
        self.tools = attributes.get(semconv.GEN_AI_TOOL_DEFINITIONS)
        text = attributes.get(semconv.CALL_PROMPT)
        self.text = text if isinstance(text, str) else None  # that was continued, of a call without messages
        self._attributes = attributes

    @cached_property
    def tokens(self) -> IntArray:
        return np.concatenate([self.prompt, self.answer])

    @cached_property
    def messages(self) -> list[Message]:
        """What was asked; empty where the span does not say."""
        return [(str(message.get("role")), words_of(message)) for message in input_messages(self._attributes)]

    @cached_property
    def history(self) -> list[Message]:
        """What a call that continues this one asks to begin with; empty where that is not known."""
        replies = [(str(one.get("role")), words_of(one)) for one in output_messages(self._attributes)[:1]]
        return [*self.messages, *replies] if self.messages and replies else []

    @property
    def continuation(self) -> str | None:
        """The text that was continued, with its answer; None of a chat."""
        replies = output_messages(self._attributes)
        return self.text + content_text(replies[0].get("content")) if self.text is not None and replies else None


def _continued(call: _Call, earlier: Sequence[_Call]) -> _Call | None:
    """The longest that the prompt begins with; of equals the last."""
    prompt, found = call.prompt, None
    for one in reversed(earlier):
        start, end = len(one.prompt), len(one.prompt) + len(one.answer)
        longer = found is None or end > len(found.prompt) + len(found.answer)
        # The answer first: where another stands there, the rest need not be read.
        if longer and end <= len(prompt) and np.array_equal(prompt[start:end], one.answer):
            found = one if np.array_equal(prompt[:start], one.prompt) else found
    return found


# --- what was meant -----------------------------------------------------------------------------------------------

_Meant: TypeAlias = tuple[_Call, BreakKind]


def _meant(call: _Call, earlier: Sequence[_Call], continued: _Call | None) -> _Meant | None:
    """The call that this one should continue and does not, and why not."""
    own = [one for one in earlier if one.speaker == call.speaker and one is not continued]
    if call.text is not None:
        glued = [one for one in own if (text := one.continuation) is not None and call.text.startswith(text)]
        return (max(glued, key=lambda one: len(one.text or "")), "retokenised") if glued else None
    if call.messages:
        answers = {one.history[-1] for one in earlier if one.history}
        least = len(continued.history) if continued else 0
        kept = [(*_kept(one.history, call.messages, answers), one.place, one) for one in own if one.history]
        count, whole, _, one = max(kept, default=(0, False, 0, None))
        return (one, "retokenised" if whole else "edited history") if one is not None and count > least else None
    shared = [(shared_length(one.tokens, call.prompt), one.place, one) for one in own]
    length, _, one = max(shared, default=(0, 0, None))
    begun = None if one is None else one.prompt if continued else one.root.prompt
    if one is None or begun is None or not len(begun) <= length < len(call.prompt):
        return None
    return one, "unknown"


def _kept(history: Sequence[Message], later: Sequence[Message], answers: set[Message]) -> tuple[int, bool]:
    """How many messages of an earlier call's history, with its answer at the end, a later call was sent, and whether
    all of them, unchanged. (0, False) where the later call does not go on from there.

        s u a  →  s u a t      (3, True)
        s u a  →  s u b t      (2, False): b stands where the answer was
        s u a t b  →  s t b v  (3, False): u and a were left out, the answer b was kept
        s u a  →  s u          (0, False): goes back and asks again
        s u a  →  s v          (0, False): another conversation that begins alike"""
    pairs = enumerate(zip(history, later, strict=False))
    same = next((place for place, (one, other) in pairs if one != other), min(len(history), len(later)))
    if same == len(history):
        return same, True
    rest = set(later[same:])
    kept = [message for message in history[same:] if message in rest]
    if any(message in answers and message[1] != _NOTHING_SAID for message in kept):
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


# --- words --------------------------------------------------------------------------------------------------------

_NOTHING_SAID: Final = msgspec.json.encode(("", ()))


def words_of(message: Mapping[str, Any]) -> bytes:
    """Names what a message says: notation, white space, case and ids of tool calls do not count. A message in no known
    notation is taken as it is."""
    parts, calls = message.get("content"), items(message.get("tool_calls"))
    if not all(isinstance(one, Mapping) for one in items(parts)) or not all(
        isinstance(mapping(call).get("function"), Mapping) for call in calls
    ):
        return msgspec.json.encode(message, order="sorted")
    content = message.get("content") or ""
    functions = [mapping(mapping(call)["function"]) for call in calls]
    named = [(function.get("name"), _arguments(function.get("arguments"))) for function in functions]
    said = canonical(joined(content)) if isinstance(content, str | list) else content
    return msgspec.json.encode((said, named), order="sorted")


def canonical(text: str) -> str:
    """What is left of a text when Unicode's forms, case and white space do not count."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _arguments(arguments: object) -> object:
    read = json_of(arguments) if isinstance(arguments, str) else arguments
    return read if isinstance(read, dict) else arguments
