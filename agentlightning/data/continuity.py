"""Which call of an attempt goes on from which, and where one should and its tokens do not.

    A1 S1 A2 S2 A3, two agents by turns  →  A2 continues A1, A3 continues A2, S2 continues S1: two conversations
    (1, 2) + (7, 8), then (1, 2, 9, 3, 4) by the same agent, with the same answer in its messages  →  a break at 2

A prompt continues an earlier call if it begins with that call's prompt and answer. Only where none is found, or where
another call went on from there already, are messages read: they tell a call that was meant to go on (a break) from one
that begins anew. Without messages, a prompt that begins with all of a conversation's first prompt was meant to go on.

Knows transitions and what their spans say of messages and tools. Does not know rewards or how sequences are packed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import numpy as np

from agentlightning import semconv
from agentlightning.data.forest import shared_length
from agentlightning.data.histories import Change, Said, common_length, relation
from agentlightning.data.transitions import IntArray, Transition
from agentlightning.tracing.messages import input_messages, output_messages, text_of
from agentlightning.types import Attributes, Span

if TYPE_CHECKING:
    from agentlightning.data.drift_kinds import Classifier, Kind

    BreakKind: TypeAlias = (
        Kind | Literal["string concatenation", "edited history", "truncated history", "tools changed", "unknown"]
    )

SUGGESTIONS: Final[Mapping[BreakKind, str]] = {
    "split": "Serve the policy where token ids go in (the embedded engine, SGLang): answers are repeated in their ids.",
    "special token": "Send answers back as they came, and let special tokens end answers, not stand in them.",
    "turn boundary": "Send answers back with the white space they have, and end turns as the chat template does.",
    "tool call": "Teach the policy to write tool calls as the chat template does, which writes their JSON anew.",
    "normalisation": "Send answers back byte by byte: something between changed Unicode's forms, case or white space.",
    "template": "Use a chat template that keeps earlier answers whole, their thinking too, or train at level 'tree'.",
    "string concatenation": "Send the token ids of prompt and answer as the next prompt, or use chat completions.",
    "edited history": "Send earlier messages back as they were; put what is new into a message at the end.",
    "truncated history": "Cut the history rarely and much rather than at each call, or train at level 'tree'.",
    "tools changed": "Offer the same tools, in the same order, at each call of a conversation.",
    "unknown": "Record messages (--capture full) and name the model's tokenizer: both are needed to tell the reason.",
}
"""What a user can do about each kind of break."""

_BEFORE: Final = 6  # tokens of a break that are shown
_AFTER: Final = 12
_MARGIN: Final = 64  # tokens around a break that tell its kind


@dataclass(frozen=True)
class Break:
    """A call whose prompt should begin with the prompt and the answer of call `earlier`, and is other from token
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


def continuity(
    transitions: Sequence[Transition], spans: Sequence[Span], classifier: Classifier | None = None
) -> Continuity:
    """How the transitions of one attempt, in call order, go on from one another.

    Args:
        spans: the attempt's, in any order, for what they say of messages and tools.
        classifier: tells kinds that only texts tell; without one these are `unknown`."""
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
                breaks.append(_break(call, *meant, classifier))
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
        self._attributes = attributes

    @cached_property
    def tokens(self) -> IntArray:
        return np.concatenate([self.prompt, self.answer])

    @cached_property
    def messages(self) -> list[Said]:
        """What was asked; empty where the span does not say."""
        return [Said.of(message) for message in input_messages(self._attributes)]

    @cached_property
    def reply(self) -> dict[str, Any] | None:
        return next(iter(output_messages(self._attributes)), None)

    @cached_property
    def history(self) -> list[Said]:
        """What a call that continues this one asks to begin with; empty where that is not known."""
        return [*self.messages, Said.of(self.reply)] if self.messages and self.reply else []

    @property
    def text(self) -> str | None:
        """The text that was continued, of a call without messages."""
        text = self._attributes.get(semconv.CALL_PROMPT)
        return text if isinstance(text, str) else None

    @property
    def tools(self) -> object:
        """The JSON that offered tools; None without any."""
        return self._attributes.get(semconv.GEN_AI_TOOL_DEFINITIONS)


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

_Meant: TypeAlias = tuple[_Call, Change | None]  # None: only tokens tell


def _meant(call: _Call, earlier: Sequence[_Call], continued: _Call | None) -> _Meant | None:
    """The call that this one should continue and does not, and what the agent did to the history."""
    own = [one for one in earlier if one.speaker == call.speaker and one is not continued]
    if call.messages:
        return _meant_by_messages(call, own, earlier, continued)
    if call.text is not None:
        return _meant_by_text(call, call.text, own)
    shared = [(shared_length(one.tokens, call.prompt), one.place, one) for one in own]
    length, _, one = max(shared, default=(0, 0, None))
    begun = None if one is None else one.prompt if continued else one.root.prompt
    if one is None or begun is None or not len(begun) <= length < len(call.prompt):
        return None
    return one, None


def _meant_by_messages(
    call: _Call, own: Sequence[_Call], earlier: Sequence[_Call], continued: _Call | None
) -> _Meant | None:
    answers = {one.history[-1] for one in earlier if one.history}
    least = len(continued.history) if continued else 0
    found: list[tuple[int, bool, int, _Call, Change]] = []
    for one in own:
        related = relation(one.history, call.messages, answers) if one.history else None
        if related is not None and related.kept > least:
            found.append((related.kept, related.change == "none", one.place, one, related.change))
    return max(found)[3:] if found else None


def _meant_by_text(call: _Call, text: str, own: Sequence[_Call]) -> _Meant | None:
    found: list[tuple[int, int, _Call, Change]] = []
    for one in own:
        if one.text is not None and one.reply is not None and (answer := text_of(one.reply)):
            kept = common_length(one.text + answer, text) - len(one.text)
            if 2 * kept > len(answer):
                found.append(
                    (len(one.text) + kept, one.place, one, "none" if kept == len(answer) else "edited history")
                )
    return max(found)[2:] if found else None


# --- what broke ---------------------------------------------------------------------------------------------------


def _break(call: _Call, earlier: _Call, change: Change | None, classifier: Classifier | None) -> Break:
    position = shared_length(earlier.tokens, call.prompt)
    inside = "prompt" if position < len(earlier.prompt) else "answer"
    if change is not None and change != "none":
        kind = change
    elif call.text is not None:
        kind = "string concatenation"
    elif inside == "prompt" and call.tools != earlier.tools:
        kind = "tools changed"
    else:
        kind = "unknown" if classifier is None else _told(call, earlier, position, classifier)
        if change is None and kind == "template":  # or the agent edited its history: messages would tell
            kind = "unknown"
    return Break(
        agent=call.transition.agent,
        call_index=call.transition.call_index,
        earlier=earlier.transition.call_index,
        position=position,
        inside=inside,
        kind=kind,
        before=_ids(call.prompt[max(0, position - _BEFORE) : position]),
        recorded=_ids(earlier.tokens[position : position + _AFTER]),
        found=_ids(call.prompt[position : position + _AFTER]),
    )


def _told(call: _Call, earlier: _Call, position: int, classifier: Classifier) -> Kind:
    """By the texts around the first difference: what comes long before or after it does not count."""
    start = max(0, min(position, len(earlier.prompt)) - _MARGIN)
    stop = position + 4 * (len(earlier.tokens) - position) + _MARGIN
    calls_tools = bool(earlier.reply and earlier.reply.get("tool_calls"))
    prompt, later = earlier.prompt[start:], call.prompt[start:stop]
    return classifier.of_history(_ids(prompt), _ids(earlier.answer), _ids(later), calls_tools).kind


def _ids(ids: IntArray) -> tuple[int, ...]:
    return tuple(ids.tolist())
