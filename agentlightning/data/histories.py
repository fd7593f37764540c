"""What an agent made of a conversation: whether a call's messages go on from those of an earlier call, and how.

Messages are compared by their words: notation, white space, case and ids of tool calls do not count. Knows messages
alone. It does not know tokens or spans.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any, Final, Literal, TypeAlias

import msgspec

from agentlightning.tracing.dialects import items, json_of, mapping

Change: TypeAlias = Literal["none", "edited history", "truncated history"]

_NOTHING_SAID: Final = msgspec.json.encode(("", ()))


def words_of(message: Mapping[str, Any]) -> bytes:
    """Names what a message says, whichever of several notations a framework sends it in. One that is written in none of
    them is taken as it is."""
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


def joined(content: object) -> str:
    """The text of a message's content, which is a text or parts of which some have one."""
    texts = [mapping(part).get("text") for part in items(content)]
    return content if isinstance(content, str) else "".join(text for text in texts if isinstance(text, str))


def canonical(text: str) -> str:
    """What is left of a text when Unicode's forms, case and white space do not count."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _arguments(arguments: object) -> object:
    read = json_of(arguments) if isinstance(arguments, str) else arguments
    return read if isinstance(read, dict) else arguments


# --- two calls ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Said:
    """One message: who said it, and its words."""

    role: str
    words: bytes

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> Said:
        return cls(str(message.get("role")), words_of(message))


@dataclass(frozen=True)
class Relation:
    """How one call's messages go on from another's: with what change, and how many messages were kept."""

    change: Change
    kept: int


def relation(earlier: Sequence[Said], later: Sequence[Said], answers: Set[Said]) -> Relation | None:
    """How `later`, the messages of a call, go on from `earlier`, those of a call before with its answer at the end;
    None where they do not. `answers` are all that this attempt's calls were answered.

        s u a  →  s u a t      none
        s u a  →  s u b t      edited: b stands where the answer was
        s u a t b  →  s t b v  truncated: u and a were left out, the answer b was kept
        s u a  →  s u          goes back and asks again: not from here
        s u a  →  s v          another conversation that begins alike"""
    same = common_length(earlier, later)
    if same == len(earlier):
        return Relation("none", same)
    blocks = SequenceMatcher(None, earlier[same:], later[same:], autojunk=False).get_matching_blocks()
    blocks = [block for block in blocks if block.size]
    kept = [message for block in blocks for message in later[same + block.b : same + block.b + block.size]]
    if any(message in answers and message.words != _NOTHING_SAID for message in kept):
        # Where fewer messages stand before the first that was kept than stood there, some were left out.
        left_out = blocks[0].a > blocks[0].b
        return Relation("truncated history" if left_out else "edited history", same + len(kept))
    if same == len(earlier) - 1 and same < len(later) and later[same].role == "assistant":
        return Relation("edited history", same)
    return None


def common_length(one: Sequence[object], other: Sequence[object]) -> int:
    """How many messages, or characters, the two begin with in common."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (left, right) in pairs if left != right), min(len(one), len(other)))
