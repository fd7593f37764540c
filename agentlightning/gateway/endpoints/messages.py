"""Anthropic's messages: requests of that protocol in the form of chat completions, and answers in
its own.

    system "S", user "U"                        →  system "S", user "U"
    assistant [thinking T, text A, tool_use t]
        →  assistant "A", reasoning_content T, tool_calls [t]
    user [text U, tool_result t]                →  tool (t), user "U"

Knows the wire format. No backends, no rollouts, no HTTP server.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from agentlightning.errors import BackendError
from agentlightning.gateway.answer import Answer
from agentlightning.gateway.backend import Delta, Started, Usage
from agentlightning.gateway.endpoints.base import (
    SHOWN,
    BlockWriter,
    Endpoint,
    arguments_of,
    cached_and_thought,
    chat_of,
    content_of,
    error_kind,
    server_sent,
)
from agentlightning.gateway.endpoints.kinds import KINDS
from agentlightning.gateway.request import (
    CHAT_ONLY,
    FILES_NOT_KEPT,
    MANY,
    SAMPLING_TYPES,
    SHAPING_FIELDS,
    SOME,
    CallRefused,
    CallRequest,
    Fields,
    attached,
    converted,
    decoded,
    function,
    function_call,
    image,
    json_schema,
    require_question,
    rest_json,
    sampling_fields,
    text_part,
    unsupported,
)

_PARTS: Final = KINDS["messages"]["parts"]
_TOOLS: Final = KINDS["messages"]["tools"]
_DATE: Final = re.compile(r"_\d{8}$")  # behind the kind of a tool of Anthropic's
_Raws: TypeAlias = Annotated[list[msgspec.Raw], MANY]


class _Source(msgspec.Struct, frozen=True):
    type: Literal["base64", "url", "text", "content"]
    media_type: str = ""
    data: str = ""
    url: str = ""
    content: str | _Raws = ""


class _Typed(msgspec.Struct, frozen=True):
    type: str
    text: Any = None


class _Block(msgspec.Struct, frozen=True):
    """A block of a kind that is read."""

    text: str | None = None
    source: _Source | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, msgspec.Raw] | None = None
    tool_use_id: str | None = None
    content: str | _Raws | None = None
    is_error: bool | None = None
    title: str | None = None
    context: str | None = None
    tool_name: str | None = None


class _SearchResult(msgspec.Struct, frozen=True):
    title: str
    source: str
    content: _Raws


_TYPED: Final = msgspec.json.Decoder(_Typed)
_BLOCK: Final = msgspec.json.Decoder(_Block)
_SEARCH_RESULT: Final = msgspec.json.Decoder(_SearchResult)


class _Message(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: str | _Raws


class _Tool(msgspec.Struct):
    name: str = ""
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class _ToolChoice(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class _Format(msgspec.Struct):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class _OutputConfig(msgspec.Struct):
    format: _Format | None = None


class _ThinkingConfig(msgspec.Struct):
    type: str


# Read, and without effect: they change nothing about what is answered.
_NEUTRAL: Final = ("metadata", "service_tier", "cache_control", "diagnostics", "user_profile_id")
_DROPPED: Final = ("context_management", "fallbacks", "speed")  # hints to Anthropic's own servers
_ONLY_THERE: Final = frozenset({"container", "mcp_servers", "compaction", "inference_geo"})
# Upon this error Anthropic's SDKs send the whole conversation with every call instead.
_NO_THREADS: Final = "thread_unsupported_request"
_Share: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
_FIELDS = Fields(
    {
        **{
            name: SAMPLING_TYPES[name]
            for name in ("model", "max_tokens", "stream", "seed", *SHAPING_FIELDS)
        },
        "messages": Annotated[list[_Message], MANY],
        "system": str | _Raws,
        "tools": Annotated[list[_Tool], SOME],
        "tool_choice": _ToolChoice,
        "temperature": _Share,
        "top_p": _Share,
        "top_k": Annotated[int, Meta(ge=0, lt=2**31)],
        "stop_sequences": Annotated[list[str], Meta(max_length=100)],
        "thinking": _ThinkingConfig,
        "output_config": dict[str, Any],
        "output_format": _Format,
        **dict.fromkeys((*_NEUTRAL, *_DROPPED), Any),
    },
    refused=CHAT_ONLY | _ONLY_THERE,
)


class Messages(Endpoint):
    """`POST /v1/messages`."""

    path = "messages"
    id_prefix = "msg_"
    _required: tuple[str, ...] = ("model", "max_tokens", "messages")

    def read(self, body: bytes) -> CallRequest:
        values, extra, raw = _FIELDS.read(body, *self._required)
        if "thread" in extra:
            raise CallRefused(
                "thread is not supported: send all messages", code=_NO_THREADS, param="thread"
            )
        choice: _ToolChoice | None = values.get("tool_choice")
        if choice is not None and choice.disable_parallel_tool_use:
            extra["parallel_tool_calls"] = False
        config = values.get("output_config", {})
        output_format: _Format | None = converted(
            "output_config", config, _OutputConfig
        ).format or values.get("output_format")
        if output_format is not None:
            extra["response_format"] = json_schema(output_format.schema)
        dropped = [name for name in _DROPPED if name in values]
        reader = _Reader()
        messages = reader.chat(values.get("system"), values["messages"])
        tools, tool_choice = _offered(values.get("tools", []), choice, reader.dropped)
        # the policy decides how much it thinks
        if "thinking" in values and values["thinking"].type != "disabled":
            dropped.append("thinking")
        dropped += [f"output_config.{name}" for name in config if name != "format"]
        return CallRequest(
            messages=messages,
            tools=tools,
            tool_choice=tool_choice,
            extra=extra,
            dropped=(*dropped, *sorted(reader.dropped)),
            request_json=rest_json(raw, "system", "messages", "tools"),
            **sampling_fields(
                values | {"stop": values.get("stop_sequences")}, values.get("max_tokens")
            ),
        )

    def writer(self, request: CallRequest, answer: Answer) -> MessageWriter:
        return MessageWriter(answer)

    def error(self, error: BackendError) -> bytes:
        return msgspec.json.encode(_error(error))


class CountTokens(Messages):
    """`POST /v1/messages/count_tokens`: how long a message's prompt would be. Nothing is answered
    or recorded."""

    path = "messages/count_tokens"
    _required = ("model", "messages")


def _offered(
    tools: list[_Tool], choice: _ToolChoice | None, dropped: set[str]
) -> tuple[list[dict[str, Any]], str | dict[str, Any] | None]:
    """The functions, and the choice among them. CallRefused for a choice of a tool that Anthropic
    runs."""
    functions: list[dict[str, Any]] = []
    for index, tool in enumerate(tools):
        place = f"tools[{index}]"
        kind = _DATE.sub("", tool.type or "custom")
        if _TOOLS.read_as(kind, None, place, dropped) is None:
            if choice is not None and choice.type == "tool" and choice.name == tool.name:
                raise unsupported(
                    "tool_choice",
                    f"{tool.name!r} is run by Anthropic, and nothing here takes its place",
                )
            continue
        if not tool.name or tool.input_schema is None:
            raise CallRefused(f"{place} needs a name and an input_schema", param=place)
        functions.append(function(tool.name, tool.description, tool.input_schema, tool.strict))
    return functions, None if choice is None else _choice(choice)


def _choice(choice: _ToolChoice) -> str | dict[str, Any]:
    if choice.type == "tool":
        if not choice.name:
            raise CallRefused("tool_choice needs the name of the tool", param="tool_choice.name")
        return {"type": "function", "function": {"name": choice.name}}
    return {"auto": "auto", "any": "required", "none": "none"}[choice.type]


class _Reader:
    """Reads the blocks of a conversation. `dropped` has the names of those that are left out."""

    def __init__(self) -> None:
        self.dropped: set[str] = set()

    def chat(self, system: str | _Raws | None, messages: list[_Message]) -> list[dict[str, Any]]:
        """The whole conversation. Consecutive messages of one role are one turn, as the protocol
        has it."""
        require_question("messages", messages, "assistant")
        turns: list[tuple[str, list[dict[str, Any]]]] = (
            [("system", self._parts("system", system))] if system else []
        )
        numbered = enumerate(messages)
        for role, turn in groupby(numbered, key=lambda one: one[1].role):
            parts: list[dict[str, Any]] = []
            for position, message in turn:
                parts += self._parts(f"messages[{position}].content", message.content)
            turns.append((role, parts))
        return chat_of("messages", turns)

    def _parts(
        self, where: str, content: str | Sequence[msgspec.Raw] | None
    ) -> list[dict[str, Any]]:
        if content is None or isinstance(content, str):
            return [text_part(content)] if content else []
        parts: list[dict[str, Any]] = []
        for position, raw in enumerate(content):
            place = f"{where}[{position}]"
            typed = decoded(place, raw, _TYPED)
            kind = _PARTS.read_as(typed.type, typed.text, place, self.dropped)
            if kind == "document":
                parts += self._document(place, decoded(place, raw, _BLOCK))
            elif kind == "search_result":
                parts.append(self._search_result(place, decoded(place, raw, _SEARCH_RESULT)))
            elif kind is not None:
                parts += self._part(place, kind, decoded(place, raw, _BLOCK))
        return parts

    def _part(self, where: str, kind: str, block: _Block) -> list[dict[str, Any]]:
        """Chat completions have no mark of failure: a failed call's result begins with
        `Error: `."""
        match kind:
            case "text" if block.text is not None:
                return [text_part(block.text)]
            case "tool_use" if (
                block.id is not None and block.name is not None and block.input is not None
            ):
                return [
                    function_call(block.id, block.name, msgspec.json.encode(block.input).decode())
                ]
            case "tool_result" if block.tool_use_id is not None:
                parts = self._shown(where, block.content)
                if block.is_error and (isinstance(block.content, list) or not parts):
                    parts = [text_part("Error: "), *parts]
                elif block.is_error:
                    parts[0]["text"] = f"Error: {parts[0]['text']}"
                return [
                    {
                        "role": "tool",
                        "tool_call_id": block.tool_use_id,
                        "content": content_of(parts),
                    }
                ]
            case "image" if (source := block.source) is not None and source.type in (
                "url",
                "base64",
            ):
                return [image(source.url or f"data:{source.media_type};base64,{source.data}")]
            case "thinking" if block.thinking is not None:
                return [{"type": "thought", "text": block.thinking}]
            case "tool_reference" if block.tool_name is not None:
                return [text_part(block.tool_name)]
            case "compaction":  # a summary of what came before it
                return self._shown(where, block.content)
            case _:
                raise CallRefused(
                    f"messages: a block of type {kind!r} lacks a field", param="messages"
                )

    def _shown(
        self, where: str, content: str | Sequence[msgspec.Raw] | None
    ) -> list[dict[str, Any]]:
        """The content of a block, of which only text and pictures can be shown."""
        parts = self._parts(f"{where}.content", content)
        return [part for part in parts if part.get("type") == "text" or part.get("type") in SHOWN]

    def _document(self, where: str, block: _Block) -> list[dict[str, Any]]:
        """A document under its title and context, if it has them."""
        source = block.source
        if source is None or source.type == "url":
            raise CallRefused(f"{where}: {FILES_NOT_KEPT}", code="unsupported_content", param=where)
        if source.type == "text":
            parts = [text_part(source.data)]
        elif source.type == "content":
            parts = self._shown(f"{where}.source", source.content)
        else:
            parts = [attached(f"{where}.source", source.media_type, source.data, block.title)]
        head = "\n".join(filter(None, (block.title, block.context)))
        return [text_part(f"{head}\n\n"), *parts] if head else parts

    def _search_result(self, where: str, found: _SearchResult) -> dict[str, Any]:
        parts = self._shown(where, found.content)
        return text_part(
            "\n".join((found.title, found.source, *(part.get("text", "") for part in parts)))
        )


# For answers without tool calls that no stop sequence ended.
_STOP_REASONS: Final = {"length": "max_tokens", "abort": "max_tokens", "content_filter": "refusal"}


def _error(error: BackendError) -> dict[str, Any]:
    body: dict[str, Any] = {"type": error_kind(error.status, "anthropic"), "message": str(error)}
    if error.code == _NO_THREADS:
        body["details"] = {"error_code": _NO_THREADS, "unsupported": ["thread"]}
    return {"type": "error", "error": body, "request_id": None}


def _message(answer: Answer, content: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
    return {
        "id": answer.response_id,
        "type": "message",
        "role": "assistant",
        "model": answer.model,
        "content": content,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(usage),
    }


def _stop(answer: Answer, *, called: bool) -> dict[str, Any]:
    choice = answer.choices[0]
    if choice.stop_string is not None:
        reason = "stop_sequence"
    elif choice.string("refusal"):
        reason = "refusal"
    else:
        reason = _STOP_REASONS.get(
            choice.finish_reason or "abort", "tool_use" if called else "end_turn"
        )
    return {"stop_reason": reason, "stop_sequence": choice.stop_string}


def _usage(usage: Usage) -> dict[str, Any]:
    """Here the tokens that came from a cache are not among the input tokens, but beside them."""
    cached, thought = cached_and_thought(usage)
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": None if thought is None else {"thinking_tokens": thought},
    }


class MessageWriter(BlockWriter):
    """Writes one answer, whose blocks are the content of the message."""

    def started(self, event: Started) -> bytes:
        message = _message(self._answer, [], Usage(len(event.prompt_token_ids), 0))
        return _event("message_start", message=message) + _event("ping")

    def end(self) -> bytes:
        closed = self._close_all()
        stop = _stop(self._answer, called=bool(self._calls))
        ends = _event("message_delta", delta=stop, usage=_usage(self._answer.token_counts()))
        return closed + ends + _event("message_stop")

    def whole(self) -> bytes:
        answer = self._answer
        self.delta(Delta(0, answer.choices[0].message()))
        self._close_all()
        called = any(block["type"] == "tool_use" for block in self._blocks)
        message = _message(answer, self._blocks, answer.token_counts())
        return msgspec.json.encode(message | _stop(answer, called=called))

    def error(self, error: BackendError) -> bytes:
        return server_sent(_error(error), "error")

    def _begin(self, kind: str | int, call_id: str, name: str) -> bytes:
        block: dict[str, Any] = {"type": "text", "text": ""}
        if kind == "thought":
            block = {"type": "thinking", "thinking": "", "signature": ""}
        elif kind != "text":
            block = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
        self._blocks.append(block)
        return self._block_event("start", content_block=block)

    def _piece(self, kind: str | int, text: str) -> bytes:
        type, field = _DELTAS.get(kind, ("input_json_delta", "partial_json"))
        return _event(
            "content_block_delta", index=len(self._blocks) - 1, delta={"type": type, field: text}
        )

    def _end(self, kind: str | int, text: str) -> bytes:
        block = self._blocks[-1]
        if kind in _DELTAS:
            block[_DELTAS[kind][1]] = text
        elif isinstance(arguments := arguments_of(block["name"], text), str):
            self._blocks[-1] = {"type": "text", "text": arguments}
        else:
            block["input"] = arguments
        return self._block_event("stop")

    def _block_event(self, what: str, **fields: Any) -> bytes:
        return _event(f"content_block_{what}", index=len(self._blocks) - 1, **fields)


_DELTAS: Final[dict[str | int, tuple[str, str]]] = {
    "thought": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
}


def _event(kind: str, **fields: Any) -> bytes:
    return server_sent({"type": kind, **fields}, kind)
