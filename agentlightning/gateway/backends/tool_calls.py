"""Parts of an answer's tool calls, as servers send them, keyed: each part says whose it is.

server                       sends                                               is read as
OpenAI, vLLM                 index, and in the first part id and name            the same
Ollama, Gemini's imitation   every call at index 0, each with an id of its own   0, 1, 2 …
several                      no index; the id in every part; no id at all   by id, else the last
"""

from __future__ import annotations

from typing import Any

import msgspec

from agentlightning.gateway.request import is_object
from agentlightning.tracing.dialects import items, mapping


class _Begun:
    """A call of which a part has come. `known_as` is the server's id for it; None where it gave
    none."""

    def __init__(self, position: int, known_as: str | None) -> None:
        self.position = position
        self.known_as = known_as
        self.name = ""
        self.arguments: list[str] = []

    def complete(self) -> bool:
        """Whether the arguments are an object already, which more text would spoil."""
        return is_object("".join(self.arguments))


class ToolCallParts:
    """The tool calls of one choice. `prefix` begins the ids of calls that have none."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._calls: list[_Begun] = []
        self._by_index: dict[int, _Begun] = {}
        self._by_id: dict[str, _Begun] = {}

    def read(self, value: Any, *, whole: bool) -> list[dict[str, Any]]:
        """The parts with `index`, `function.name` and `function.arguments` (`custom.name` and
        `custom.input` of a custom tool) as texts; the first part of each call has its `id`. In a
        `whole` answer every item is a call."""
        listed: list[Any] = [value] if isinstance(value, dict) else items(value)
        return [self._part(part, whole=whole) for part in map(mapping, listed) if part]

    def _part(self, part: dict[str, Any], *, whole: bool) -> dict[str, Any]:
        kind = "custom" if part.get("type") == "custom" or "custom" in part else "function"
        content = "input" if kind == "custom" else "arguments"
        function = mapping(part.get(kind))
        name = function.get("name")
        name = name if isinstance(name, str) else ""
        arguments = _text(function.get(content))
        index = part.get("index")
        id = part.get("id")
        index = index if isinstance(index, int) else None
        id = str(id) if isinstance(id, str | int) and id != "" else None
        call = None if whole else self._of(index, id, name)
        begins = call is None
        if call is None:
            call = self._begin(index, id)
        said = function | {content: arguments}
        if name and name != call.name:
            said["name"] = name
            call.name += name
        else:
            said.pop("name", None)  # some repeat it in each part
        if arguments:
            call.arguments.append(arguments)
        keyed = {key: value for key, value in part.items() if key != "id" and value is not None}
        keyed |= {"index": call.position, kind: said}
        return keyed | {"id": self._id(call), "type": kind} if begins else keyed

    def _of(self, index: int | None, id: str | None, name: str) -> _Begun | None:
        """The call that a part goes on with; None where it begins one."""
        last = self._calls[-1] if self._calls else None
        there = last if index is None else self._by_index.get(index)
        named = self._by_id.get(id) if id is not None else None
        if named is not None and (index is None or named is there or not name):
            return named
        if there is None or not name:  # a part without a name begins nothing where a call is open
            return there
        if id is not None and there.known_as is not None:
            return None  # another id: another call
        return None if there.complete() else there

    def _begin(self, index: int | None, id: str | None) -> _Begun:
        call = _Begun(len(self._calls), None if id in self._by_id else id)
        self._calls.append(call)
        if index is not None:
            self._by_index[index] = call
        if call.known_as is not None:
            self._by_id[call.known_as] = call
        return call

    def _id(self, call: _Begun) -> str:
        """The server's; one of our own where it gave none, or one that another call has."""
        return call.known_as or f"call_{self._prefix}_{call.position}"


def _text(arguments: Any) -> str:
    """The arguments as JSON text; an object is what the text would have been of."""
    if arguments is None or isinstance(arguments, str):
        return arguments or ""
    return msgspec.json.encode(arguments).decode()
