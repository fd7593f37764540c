"""Tool calls in sampled text, in a listed set of formats, found while the text streams.

    hermes    text <tool_call>{"name": …, "arguments": {…}}</tool_call> …     (Qwen 2.5, Qwen 3, Hermes)
    llama3    [<|python_tag|>]{"name": …, "parameters": {…}}[; {…}]           (Llama 3.1 and later)

What is not exactly of that shape stays text: a repaired call would hide from training that it was malformed. Knows
text only, no tokens and no templates beyond telling which format one asks for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import msgspec

from agentlightning.gateway.chat.text import overlap


@dataclass(frozen=True)
class ToolCall:
    """A call as sampled: `arguments` is the JSON object, character for character."""

    name: str
    arguments: str


Part: TypeAlias = str | ToolCall


class ToolCallParser:
    """Splits one answer into text and tool calls; text that may belong to a call is held back until that is known. This
    one is for calls without tools: all is text."""

    def feed(self, text: str) -> list[Part]:
        """What became certain with `text`."""
        return [text] if text else []

    def finish(self) -> list[Part]:
        """What was still held back, at the answer's end."""
        return []


class MarkedParser(ToolCallParser):
    """Calls between `start` and `end`. White space around a call belongs to the format, not to the content."""

    def __init__(self, start: str, end: str, parse: Callable[[str], list[ToolCall] | None]) -> None:
        self._start, self._end, self._parse = start, end, parse
        self._space: list[str] = []  # before a call, perhaps
        self._block: list[str] | None = None  # what has come of a call, while one is open
        self._tail = ""  # the end of what was held back, which may begin the next marker
        self._found = False

    def feed(self, text: str) -> list[Part]:
        parts: list[Part] = []
        rest: str | None = text
        while rest is not None:
            rest = self._outside(rest, parts) if self._block is None else self._inside(self._block, rest, parts)
        return parts

    def finish(self) -> list[Part]:
        if self._block is not None:
            return ["".join([*self._space, self._start, *self._block])]
        held = "".join(self._space) + self._tail
        return [held] if held.strip() or (held and not self._found) else []

    def _outside(self, text: str, parts: list[Part]) -> str | None:
        """What comes behind the next `start`; None where more text is needed."""
        before, marker, after = (self._tail + text).partition(self._start)
        certain = len(before) - (0 if marker else overlap(before, self._start))
        content = before[:certain].rstrip()
        if content:
            parts.append("".join(self._space) + content)
            self._space = []
        self._space.append(before[len(content) : certain])
        self._tail = before[certain:]
        if not marker:
            return None
        self._block = []
        return after

    def _inside(self, block: list[str], text: str, parts: list[Part]) -> str | None:
        """What comes behind the next `end`; None where more text is needed. Looks at each character once."""
        block.append(text)
        seen = self._tail + text
        if self._end not in seen:
            self._tail = seen[1 - len(self._end) :]
            return None
        called, _, after = "".join(block).partition(self._end)
        calls = self._parse(called)
        parts += ["".join(self._space) + self._start + called + self._end] if calls is None else calls
        self._found = self._found or calls is not None
        self._space, self._block, self._tail = [], None, ""
        return after


class WholeAnswerParser(ToolCallParser):
    """Calls that are the whole answer: it begins with `{` or with `marker`, else it is text from the first word on."""

    def __init__(self, marker: str, parse: Callable[[str], list[ToolCall] | None]) -> None:
        self._marker, self._parse = marker, parse
        self._held: list[str] = []
        self._begin = ""  # of what is held, without white space, up to the marker's length
        self._is_text = False

    def feed(self, text: str) -> list[Part]:
        self._held.append(text)
        if len(self._begin) < len(self._marker):
            self._begin = (self._begin + text).lstrip()[: len(self._marker)]
        undecided = self._begin.startswith(("{", self._marker)) or self._marker.startswith(self._begin)
        return [] if undecided and not self._is_text else self._text()

    def finish(self) -> list[Part]:
        held = "".join(self._held)
        calls = self._parse(held.strip().removeprefix(self._marker)) if held else None
        return self._text() if calls is None else [*calls]

    def _text(self) -> list[Part]:
        self._is_text = True
        part, self._held = "".join(self._held), []
        return [part] if part else []


def detect_tool_format(template: str) -> str | None:
    """The format in which a chat template writes tool calls; None if it writes none, or if the format is not listed."""
    if any(foreign in template for foreign in _FOREIGN):
        return None
    if "<tool_call>" in template:
        return "hermes"
    return "llama3" if "<|python_tag|>" in template else None


# Marks of formats that use the same markers around something else than JSON calls.
_FOREIGN = ("<function=", "<arg_key>", "<|tool_calls_section_begin|>", "<｜tool▁calls▁begin｜>")


class _Call(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    arguments: msgspec.Raw


class _LlamaCall(msgspec.Struct, forbid_unknown_fields=True, rename={"arguments": "parameters"}):
    name: str
    arguments: msgspec.Raw
    type: str | None = None


def _hermes(text: str) -> list[ToolCall] | None:
    call = _decoded(text, _Call)
    return _calls([call]) if call else None


def _llama3(text: str) -> list[ToolCall] | None:
    decoder, position, found = json.JSONDecoder(), 0, list[_LlamaCall]()
    text = text.strip()
    while position < len(text):
        try:
            _, end = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            return None
        call = _decoded(text[position:end], _LlamaCall)
        rest = text[end:].lstrip()
        if call is None or (rest and not rest.startswith(";")):
            return None
        found.append(call)
        position = len(text) - len(rest.removeprefix(";").lstrip())
    return _calls(found) if found else None


def _calls(found: Sequence[_Call | _LlamaCall]) -> list[ToolCall] | None:
    """The calls, or None if the arguments of one are no JSON object."""
    calls: list[ToolCall] = []
    for call in found:
        arguments = bytes(call.arguments).decode()
        if not call.name or _decoded(arguments, dict[str, Any]) is None:
            return None
        calls.append(ToolCall(call.name, arguments))
    return calls


def _decoded(text: str, kind: Any) -> Any:
    """`text` as JSON of the given type, or None."""
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None


class ToolFormat(NamedTuple):
    """How calls are read, and how templates write them: what is `between` them, and in `front` of the arguments of each
    (with `NAME` for its name) and behind (`back`)."""

    parser: Callable[[], ToolCallParser]
    front: str
    back: str
    between: str

    def begin(self, name: str) -> str:
        """What comes in front of the arguments of a call of the tool `name`."""
        return self.front.replace("NAME", json.dumps(name, ensure_ascii=False))


TOOL_FORMATS = {
    "hermes": ToolFormat(
        lambda: MarkedParser("<tool_call>", "</tool_call>", _hermes),
        '<tool_call>\n{"name": NAME, "arguments": ',
        "}\n</tool_call>",
        "\n",
    ),
    "llama3": ToolFormat(
        lambda: WholeAnswerParser("<|python_tag|>", _llama3), '{"name": NAME, "parameters": ', "}", "; "
    ),
}
