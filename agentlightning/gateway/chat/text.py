"""An answer's text while it streams: made of token ids, cut at stop strings, and split into
reasoning, text and tool calls. Each is given out as soon as it is certain, in whole characters.
Tool calls are found in a listed set of formats:

    hermes    text <tool_call>{"name": …, "arguments": {…}}</tool_call> … (Qwen 2.5, Qwen 3, Hermes)
    llama3    [<|python_tag|>]{"name": …, "parameters": {…}}         (Llama 3.1 and later, one call)

What is not exactly of that shape stays text: a repaired call would hide from training that it was
malformed. Knows tokenizers and text, and no templates beyond telling which format one asks for."""

from __future__ import annotations

import codecs
import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec
from tokenizers.decoders import DecodeStream

from agentlightning.data.token_bytes import TokenBytes

BEGIN: Final = "<think>"
END: Final = "</think>"


class Detokenizer:
    """The visible text of one answer, incrementally: `add` returns what became certain, `flush` the
    rest.

    A character whose bytes are split over tokens comes with its last byte; bytes that are no UTF-8
    become U+FFFD."""

    def __init__(
        self, token_bytes: TokenBytes, *, keep_markers: bool, shown: Collection[int] = ()
    ) -> None:
        self._token_bytes = token_bytes
        self._hidden = (
            token_bytes.hidden_ids if keep_markers else token_bytes.special_ids
        ).difference(shown)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        # Where text depends on context:
        self._stream = DecodeStream()
        self._ids: list[int] = []
        self._given = 0  # characters of their text

    def add(self, token_id: int) -> str:
        if token_id in self._hidden:
            return ""
        if self._token_bytes.exact:
            return self._decoder.decode(self._token_bytes[token_id])
        self._ids.append(token_id)
        try:
            text = self._stream.step(self._token_bytes.tokenizer, token_id) or ""
        except Exception:  # noqa: BLE001 - all that it raises, of bytes that are no UTF-8
            self._stream = DecodeStream(ids=[token_id])
            text = self._token_bytes.text(self._ids)[self._given :]
        self._given += len(text)
        return text

    def flush(self) -> str:
        if self._token_bytes.exact:
            return self._decoder.decode(b"", final=True)
        return self._token_bytes.text(self._ids)[self._given :]


class StopStrings:
    """Cuts a text at the first of `stops`; holds back what may be the beginning of one."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """The text that is certain; `matched` is set when a stop string was reached and the text is
        cut before it."""
        if not self._stops:
            return text
        held = self._held + text
        places = [(held.find(stop), stop) for stop in self._stops if stop in held]
        if places:
            place, self.matched = min(places)
            self._held = ""
            return held[:place]
        keep = max(overlap(held, stop) for stop in self._stops)
        certain = len(held) - keep
        self._held = held[certain:]
        return held[:certain]

    def finish(self) -> str:
        held = self._held
        self._held = ""
        return held


def overlap(text: str, stop: str) -> int:
    """The number of characters at the end of `text` that may be the beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0


class Reasoning:
    """Splits `<think>reasoning</think>` off the beginning of a text, with the line breaks behind
    it; `begun` says that the prompt ends with the mark already."""

    def __init__(self, *, begun: bool) -> None:
        # what is looked for; None where only the answer is left
        self._mark: str | None = END if begun else BEGIN
        self._held = ""

    def feed(self, text: str, *, last: bool = False) -> tuple[str, str]:
        """The parts of (reasoning, answer) that are certain now."""
        if self._mark is None and not self._held:
            return "", text
        held = self._held + text
        self._held = ""
        if self._mark == BEGIN:
            begun = held.lstrip()
            if begun.startswith(BEGIN):
                self._mark = END
                held = begun.removeprefix(BEGIN)
            elif BEGIN.startswith(begun) and not last:
                self._held = held
                return "", ""
            else:
                self._mark = None
                return "", held
        reasoning = ""
        if self._mark == END:
            reasoning, found, held = held.partition(END)
            if not found:
                keep = 0 if last else overlap(reasoning, END)
                certain = len(reasoning) - keep
                self._held = reasoning[certain:]
                return reasoning[:certain], ""
            self._mark = None
            held = "\n" + held
        answer = held.lstrip("\n")
        self._held = "" if answer or last else "\n"  # more line breaks may come
        return reasoning, answer


@dataclass(frozen=True)
class ToolCall:
    """A call as sampled: `arguments` is the JSON object, character for character."""

    name: str
    arguments: str


Part: TypeAlias = str | ToolCall


class ToolCallParser:
    """Splits one answer into text and tool calls; text that may belong to a call is held back until
    that is known. This one is for calls without tools: all is text."""

    def feed(self, text: str) -> list[Part]:
        """The parts that became certain with `text`."""
        return [text] if text else []

    def finish(self) -> list[Part]:
        """The parts that were still held back, at the answer's end."""
        return []


_START = "<tool_call>"
_END = "</tool_call>"
_PYTHON = "<|python_tag|>"


class HermesParser(ToolCallParser):
    """Calls between `<tool_call>` and `</tool_call>`. White space around a call belongs to the
    format, not to the content."""

    def __init__(self) -> None:
        self._space: list[str] = []  # before a call, perhaps
        self._block: list[str] | None = None  # what has come of a call, while one is open
        self._tail = ""  # the end of what was held back, which may begin the next marker
        self._found = False

    def feed(self, text: str) -> list[Part]:
        parts: list[Part] = []
        rest: str | None = text
        while rest is not None:
            rest = (
                self._outside(rest, parts)
                if self._block is None
                else self._inside(self._block, rest, parts)
            )
        return parts

    def finish(self) -> list[Part]:
        if self._block is not None:
            return ["".join([*self._space, _START, *self._block])]
        held = "".join(self._space) + self._tail
        return [held] if held.strip() or (held and not self._found) else []

    def _outside(self, text: str, parts: list[Part]) -> str | None:
        """The text behind the next `start`; None where more text is needed."""
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
        """The text behind the next `end`; None where more text is needed. Looks at each character
        once."""
        block.append(text)
        seen = self._tail + text
        if _END not in seen:
            self._tail = seen[1 - len(_END) :]
            return None
        called, _, after = "".join(block).partition(_END)
        call = _call_of(_Call, called)
        parts.append(call or "".join(self._space) + _START + called + _END)
        self._found = self._found or call is not None
        self._space = []
        self._block = None
        self._tail = ""
        return after


class LlamaParser(ToolCallParser):
    """A call that is the whole answer: it begins with `{` or the marker, else it is text from the
    first word on."""

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
        part = "".join(self._held)
        self._held = []
        return [part] if part else []


def detect_tool_format(template: str) -> str | None:
    """The format in which a chat template writes tool calls; None if it writes none, or if the
    format is not listed."""
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
    """The format in which calls are read and templates write them: in `front` of the arguments of
    each (with `NAME` for its name) and behind (`back`), and `between` several; empty where there
    may be one alone."""

    parser: type[ToolCallParser]
    front: str
    back: str
    between: str = ""

    def begin(self, name: str) -> str:
        """The text in front of the arguments of a call of the tool `name`."""
        return self.front.replace("NAME", json.dumps(name, ensure_ascii=False))


TOOL_FORMATS = {
    "hermes": ToolFormat(
        HermesParser, f'{_START}\n{{"name": NAME, "arguments": ', f"}}\n{_END}", "\n"
    ),
    "llama3": ToolFormat(LlamaParser, '{"name": NAME, "parameters": ', "}"),
}
