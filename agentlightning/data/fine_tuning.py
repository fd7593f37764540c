"""What a line of a fine-tuning file must be: OpenAI's chat format with tools (Azure's too), and its pairs to prefer.

Knows the format, and not where lines come from. What a host counts in tokens, or finds in an image, it does not check.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec

from agentlightning.tracing.dialects import json_of

FEWEST_LINES: Final = 10  # that OpenAI and Azure take
MOST_BYTES: Final = 512_000_000
_MOST_TOOLS: Final = 128
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"  # which Azure asks for, and JSON does not know

_Name: TypeAlias = Annotated[str, msgspec.Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
_Id: TypeAlias = Annotated[str, msgspec.Meta(min_length=1)]


# --- the format --------------------------------------------------------------------------------------------------


class _Strict(msgspec.Struct, forbid_unknown_fields=True):
    """Hosts refuse what they do not know."""


class _Text(_Strict, tag_field="type", tag="text"):
    text: str


class _Url(_Strict):
    url: _Id
    detail: Literal["auto", "low", "high"] = "auto"


class _Image(_Strict, tag_field="type", tag="image_url"):
    image_url: _Url


class _CalledFunction(_Strict):
    name: _Name
    arguments: str


class _ToolCall(_Strict):
    id: _Id
    type: Literal["function"]
    function: _CalledFunction


class _System(_Strict, tag_field="role", tag="system"):
    content: str | list[_Text]
    name: str | None = None


class _Developer(_System, tag_field="role", tag="developer"):
    """The same, by another name."""


class _User(_Strict, tag_field="role", tag="user"):
    content: str | list[_Text | _Image]
    name: str | None = None


class _Assistant(_Strict, tag_field="role", tag="assistant"):
    content: str | list[_Text] | None = None
    tool_calls: list[_ToolCall] | None = None
    refusal: str | None = None
    name: str | None = None
    weight: Literal[0, 1] = 1


class _ToolResult(_Strict, tag_field="role", tag="tool"):
    content: str | list[_Text]
    tool_call_id: _Id
    name: str | None = None


class _Parameters(msgspec.Struct):
    """A JSON Schema of an object; other keys than these may be anything."""

    type: Literal["object"] = "object"
    properties: dict[str, dict[str, Any] | bool] = {}
    required: list[str] = []


class _Function(_Strict):
    name: _Name
    description: str | None = None
    parameters: _Parameters | None = None
    strict: bool | None = None


class _Tool(_Strict):
    type: Literal["function"]
    function: _Function


_Message: TypeAlias = _System | _Developer | _User | _Assistant | _ToolResult


class _Input(_Strict):
    messages: Annotated[list[_Message], msgspec.Meta(min_length=1)]
    tools: Annotated[list[_Tool], msgspec.Meta(max_length=_MOST_TOOLS)] = []
    parallel_tool_calls: bool | None = None


_Answer: TypeAlias = Annotated[list[_Assistant], msgspec.Meta(min_length=1, max_length=1)]


class _Pair(_Strict):
    input: _Input
    preferred_output: _Answer
    non_preferred_output: _Answer


# --- one line ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """What keeps a line from being fine-tuned on, as in `conversations with …`, and where in the line that is."""

    what: str
    where: str = ""

    def __str__(self) -> str:
        return f"{self.what}, at {self.where}" if self.where else self.what


def line_problem(line: Any) -> Problem | None:
    """What is wrong with a line of JSON, a conversation or a pair; None where nothing is."""
    pair = isinstance(line, Mapping) and "input" in line
    try:
        read = msgspec.convert(line, _Pair if pair else _Input)
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(" - at `$")
        return Problem(f"what the format does not have ({message[0].lower()}{message[1:]})", place.strip("`."))
    if isinstance(read, _Input):
        wrong = _conversation_problem(read.messages, read.tools)
        learned = any(one.weight for one in read.messages if isinstance(one, _Assistant))
        return wrong or (None if learned else Problem("no answer of the assistant's that has weight"))
    sides = ((name, getattr(read, name)) for name in ("preferred_output", "non_preferred_output"))
    problems = ((name, _conversation_problem([*read.input.messages, *side], read.input.tools)) for name, side in sides)
    return next((Problem(f"{found.what} ({name})", found.where) for name, found in problems if found), None)


def _conversation_problem(messages: Sequence[_Message], tools: Sequence[_Tool]) -> Problem | None:
    for index, tool in enumerate(tools):
        if (schema := tool.function.parameters) and (unknown := set(schema.required) - schema.properties.keys()):
            return Problem(f"a tool that requires {sorted(unknown)[0]!r}, which it does not have", f"tools[{index}]")
    names = {tool.function.name for tool in tools}
    unanswered: set[str] = set()
    for index, message in enumerate(messages):
        if (what := _message_problem(message, unanswered, names)) is not None:
            return Problem(what, f"messages[{index}]")
        if isinstance(message, _ToolResult):
            unanswered.discard(message.tool_call_id)
        elif isinstance(message, _Assistant):
            unanswered |= {call.id for call in message.tool_calls or ()}
    last = messages[-1]
    return None if isinstance(last, _Assistant) else Problem("a last message that is not the assistant's")


def _message_problem(message: _Message, unanswered: set[str], tools: set[str]) -> str | None:
    """What is wrong with a message where these tool calls wait for their results; without `tools` any may be called."""
    if isinstance(message, _ToolResult):
        return None if message.tool_call_id in unanswered else "a tool result that answers no call"
    if unanswered:
        return "a tool call that was not answered"
    if not isinstance(message, _Assistant):
        return None
    calls = message.tool_calls or []
    if not message.content and not calls and not message.refusal:
        return "an assistant's message that is empty"
    if len({call.id for call in calls}) < len(calls):
        return "two tool calls of one id"
    if any(not isinstance(json_of(call.function.arguments), dict) for call in calls):
        return "a tool call whose arguments are no JSON object"
    if tools and any(call.function.name not in tools for call in calls):
        return "a call of a tool that was not offered"
    return None


# --- a file ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """What is wrong with a line (from 1), or, where it is None, with the file."""

    line: int | None
    problem: Problem


def file_problems(lines: Iterable[bytes]) -> Iterator[Finding]:
    """What is wrong with a file, line by line in order, then with the whole of it."""
    count, size, first = 0, 0, None
    for count, text in enumerate(lines, start=1):
        size += len(text)
        problem, kind = _read_line(text.removeprefix(_BYTE_ORDER_MARK) if count == 1 else text)
        first = first or kind
        if problem is None and kind != first:
            problem = Problem(f"{kind} in a file that began with {first}")
        if problem is not None:
            yield Finding(count, problem)
    if count < FEWEST_LINES:
        yield Finding(None, Problem(f"{count} lines; OpenAI and Azure take no fewer than {FEWEST_LINES}"))
    if size > MOST_BYTES:
        yield Finding(None, Problem(f"{size / 1e6:g} MB; OpenAI and Azure take no more than {MOST_BYTES / 1e6:g}"))


def _read_line(text: bytes) -> tuple[Problem | None, str | None]:
    if not text.strip():
        return Problem("nothing but white space"), None
    try:
        line = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return Problem(f"no JSON: {error}"), None
    kind = "a pair to prefer" if isinstance(line, Mapping) and "input" in line else "a conversation"
    return line_problem(line), kind
