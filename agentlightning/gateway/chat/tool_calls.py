"""Tool calls in sampled text, in a listed set of formats, found while the text streams.

    hermes    text <tool_call>{"name": …, "arguments": {…}}</tool_call> …     (Qwen 2.5, Qwen 3, Hermes)
    llama3    [<|python_tag|>]{"name": …, "parameters": {…}}                  (Llama 3.1 and later, one call)

What is not exactly of that shape stays text: a repaired call would hide from training that it was malformed. Knows
text only, no tokens and no templates beyond telling which format one asks for.
"""

from __future__ import annotations

import json
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


_START, _END, _PYTHON = "<tool_call>", "</tool_call>", "<|python_tag|>"


class HermesParser(ToolCallParser):
    """Calls between `<tool_call>` and `</tool_call>`. White space around a call belongs to the format, not to the
    content."""

    def __init__(self) -> None:
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
            return ["".join([*self._space, _START, *self._block])]
        held = "".join(self._space) + self._tail
        return [held] if held.strip() or (held and not self._found) else []

    def _outside(self, text: str, parts: list[Part]) -> str | None:
        """What comes behind the next `start`; None where more text is needed."""
        before, marker, after = (self._tail + text).partition(_START)
        certain = len(before) - (0 if marker else overlap(before, _START))
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
        if _END not in seen:
            self._tail = seen[1 - len(_END) :]
            return None
        called, _, after = "".join(block).partition(_END)
        call = _call_of(_Call, called)
        parts.append(call or "".join(self._space) + _START + called + _END)
        self._found = self._found or call is not None
        self._space, self._block, self._tail = [], None, ""
        return after


class LlamaParser(ToolCallParser):
    """A call that is the whole answer: it begins with `{` or the marker, else it is text from the first word on."""

    def __init__(self) -> None:
        self._held: list[str] = []
        self._begin = ""  # of what is held, without white space, up to the marker's length
        self._is_text = False

    def feed(self, text: str) -> list[Part]:
        self._held.append(text)
        if len(self._begin) < len(_PYTHON):
            self._begin = (self._begin + text).lstrip()[: len(_PYTHON)]
        undecided = self._begin.startswith(("{", _PYTHON)) or _PYTHON.startswith(self._begin)
        return [] if undecided and not self._is_text else self._text()

    def finish(self) -> list[Part]:
        held = "".join(self._held)
        call = _call_of(_LlamaCall, held.strip().removeprefix(_PYTHON)) if held else None
        return self._text() if call is None else [call]

    def _text(self) -> list[Part]:
        self._is_text = True
        part, self._held = "".join(self._held), []
        return [part] if part else []


def detect_tool_format(template: str) -> str | None:
    """The format in which a chat template writes tool calls; None if it writes none, or if the format is not listed."""
    if any(foreign in template for foreign in _FOREIGN):
        return None
    if _START in template:
        return "hermes"
    return "llama3" if _PYTHON in template else None


# Marks of formats that use the same markers around something else than JSON calls.
_FOREIGN = ("<function=", "<arg_key>", "<|tool_calls_section_begin|>", "<｜tool▁calls▁begin｜>")


class _Call(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    arguments: msgspec.Raw


class _LlamaCall(msgspec.Struct, forbid_unknown_fields=True, rename={"arguments": "parameters"}):
    name: str
    arguments: msgspec.Raw
    type: str | None = None


def _call_of(kind: type[_Call | _LlamaCall], text: str) -> ToolCall | None:
    """The call, or None if it is malformed or its arguments are no JSON object."""
    call = _decoded(text, kind)
    if call is None or not call.name or _decoded(call.arguments, dict[str, Any]) is None:
        return None
    return ToolCall(call.name, bytes(call.arguments).decode())


def _decoded(text: str | msgspec.Raw, kind: Any) -> Any:
    """`text` as JSON of the given type, or None."""
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None


class ToolFormat(NamedTuple):
    """How calls are read, and how templates write them: in `front` of the arguments of each (with `NAME` for its name)
    and behind (`back`), and `between` several; empty where there may be one alone."""

    parser: type[ToolCallParser]
    front: str
    back: str
    between: str = ""

    def begin(self, name: str) -> str:
        """What comes in front of the arguments of a call of the tool `name`."""
        return self.front.replace("NAME", json.dumps(name, ensure_ascii=False))


TOOL_FORMATS = {
    "hermes": ToolFormat(HermesParser, f'{_START}\n{{"name": NAME, "arguments": ', f"}}\n{_END}", "\n"),
    "llama3": ToolFormat(LlamaParser, '{"name": NAME, "parameters": ', "}"),
}
