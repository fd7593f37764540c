"""Anthropic's messages: requests of that protocol in the form of chat completions.

    system "S", user "U"                        →  system "S", user "U"
    assistant [thinking T, text A, tool_use t]  →  assistant "A", reasoning_content T, tool_calls [t]
    user [text U, tool_result t]                →  tool (t), user "U"

Knows the wire format of requests; `messages_answer` writes the answers. No backends, no rollouts, no HTTP server.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from agentlightning.errors import BackendError
from agentlightning.gateway.answer import Answer
from agentlightning.gateway.endpoints.base import Endpoint
from agentlightning.gateway.endpoints.completions import SAMPLING_TYPES, sampling_fields
from agentlightning.gateway.endpoints.messages_answer import NO_THREADS, MessageWriter, anthropic_error, whole_message
from agentlightning.gateway.request import (
    MANY,
    SHAPING_FIELDS,
    SOME,
    CallRefused,
    CallRequest,
    Fields,
    assistant_message,
    content_of,
    given,
    require_question,
    rest_json,
    unsupported,
)


class _Text(msgspec.Struct, tag="text"):
    text: str


class _Base64(msgspec.Struct, tag="base64"):
    media_type: str
    data: str


class _Url(msgspec.Struct, tag="url"):
    url: str


class _Image(msgspec.Struct, tag="image"):
    source: _Base64 | _Url


class _Document(msgspec.Struct, tag="document"):
    pass


class _SearchResult(msgspec.Struct, tag="search_result"):
    pass


_Shown: TypeAlias = _Text | _Image | _Document | _SearchResult


class _ToolResult(msgspec.Struct, tag="tool_result"):
    tool_use_id: str
    content: str | list[_Shown] | None = None
    is_error: bool | None = None


class _ToolUse(msgspec.Struct, tag="tool_use"):
    id: str
    name: str
    input: dict[str, msgspec.Raw]


class _Thinking(msgspec.Struct, tag="thinking"):
    thinking: str


class _RedactedThinking(msgspec.Struct, tag="redacted_thinking"):
    pass


_Block: TypeAlias = _Shown | _ToolResult | _ToolUse | _Thinking | _RedactedThinking


class _Message(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[_Block], MANY]


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


class _OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    effort: str | None = None
    format: _Format | None = None


class _ThinkingConfig(msgspec.Struct):
    type: Literal["enabled", "adaptive", "between_tools", "disabled"]


# Read, and without effect: they change nothing about what is answered.
_NEUTRAL: Final[dict[str, Any]] = {
    "metadata": dict[str, Any],
    "service_tier": str,
    "cache_control": dict[str, Any],
    "diagnostics": dict[str, Any],
    "user_profile_id": str,
}
_DROPPED: Final = ("context_management", "fallbacks", "speed")  # hints to Anthropic's own servers
_ONLY_THERE: Final = "only Anthropic's own API does this; leave it out"
_REFUSED: Final = {
    **dict.fromkeys(("container", "mcp_servers", "compaction", "inference_geo"), _ONLY_THERE),
    "n": "a message is one answer",
    "stop": "it is called stop_sequences here",
    "max_completion_tokens": "it is called max_tokens here",
}
_Share: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
_FIELDS = Fields(
    types={
        "model": str,
        "max_tokens": SAMPLING_TYPES["max_tokens"],
        "messages": Annotated[list[_Message], MANY],
        "system": str | Annotated[list[_Text], MANY],
        "tools": Annotated[list[_Tool], SOME],
        "tool_choice": _ToolChoice,
        "temperature": _Share,
        "top_p": _Share,
        "top_k": Annotated[int, Meta(ge=0, lt=2**31)],
        "stop_sequences": Annotated[list[str], Meta(max_length=100)],
        "stream": bool,
        "thinking": _ThinkingConfig,
        "output_config": _OutputConfig,
        "output_format": _Format,
        **_NEUTRAL,
        **dict.fromkeys(_DROPPED, Any),
        # Not Anthropic's, but what a run decides or a policy's backend knows.
        **{name: SAMPLING_TYPES[name] for name in ("seed", *SHAPING_FIELDS)},
    },
    shapes={},
)


class Messages(Endpoint):
    """`POST /v1/messages`."""

    path = "messages"
    id_prefix = "msg_"
    _required: tuple[str, ...] = ("model", "max_tokens", "messages")

    def read(self, body: bytes) -> CallRequest:
        values, extra, raw = _FIELDS.read(body, *self._required)
        if "thread" in extra:
            raise CallRefused(f"thread is not supported: {_ONLY_THERE}", code=NO_THREADS, param="thread")
        for name in extra:
            if name in _REFUSED:
                raise unsupported(name, _REFUSED[name])
        tool_choice: _ToolChoice | None = values.get("tool_choice")
        if tool_choice is not None and tool_choice.disable_parallel_tool_use:
            extra["parallel_tool_calls"] = False
        config: _OutputConfig = values.get("output_config", _OutputConfig())
        wanted: _Format | None = config.format or values.get("output_format")
        if wanted is not None:
            schema = {"name": "answer", "schema": wanted.schema, "strict": True}
            extra["response_format"] = {"type": "json_schema", "json_schema": schema}
        return CallRequest(
            messages=_chat(values.get("system"), values["messages"]),
            tools=[_tool(index, tool) for index, tool in enumerate(values.get("tools", ()))],
            tool_choice=None if tool_choice is None else _choice(tool_choice),
            extra=extra,
            dropped=tuple(_dropped(values, config)),
            request_json=rest_json(raw, "system", "messages", "tools"),
            **sampling_fields(values | {"stop": values.get("stop_sequences")}, values.get("max_tokens")),
        )

    def whole(self, request: CallRequest, answer: Answer) -> bytes:
        return whole_message(answer)

    def stream(self, request: CallRequest, answer: Answer) -> MessageWriter:
        return MessageWriter(answer)

    def error(self, error: BackendError) -> bytes:
        return anthropic_error(error)


def _dropped(values: dict[str, Any], config: _OutputConfig) -> list[str]:
    """How much a policy thinks is its own affair."""
    dropped = [name for name in _DROPPED if name in values]
    if "thinking" in values and values["thinking"].type != "disabled":
        dropped.append("thinking")
    return dropped + (["output_config.effort"] if config.effort else [])


class CountTokens(Messages):
    """`POST /v1/messages/count_tokens`: how long a message's prompt would be. Nothing is answered or recorded."""

    path = "messages/count_tokens"
    _required = ("model", "messages")


def _tool(index: int, tool: _Tool) -> dict[str, Any]:
    place = f"tools[{index}]"
    if tool.type not in (None, "custom"):
        raise unsupported(
            place, f"{tool.type!r} is a tool of Anthropic's; define your own by name, description and input_schema"
        )
    if not tool.name or tool.input_schema is None:
        raise CallRefused(f"{place} needs a name and an input_schema", param=place)
    function = given(name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict)
    return {"type": "function", "function": function}


def _choice(choice: _ToolChoice) -> str | dict[str, Any]:
    if choice.type == "tool":
        if not choice.name:
            raise CallRefused("tool_choice needs the name of the tool", param="tool_choice.name")
        return {"type": "function", "function": {"name": choice.name}}
    return {"auto": "auto", "any": "required", "none": "none"}[choice.type]


def _chat(system: str | list[_Text] | None, messages: list[_Message]) -> list[dict[str, Any]]:
    """The whole conversation. Consecutive messages of one role are one turn, as the protocol has it."""
    require_question("messages", messages, "assistant")
    chat: list[dict[str, Any]] = [{"role": "system", "content": _content(_blocks(system))}] if system else []
    for role, turn in groupby(messages, key=lambda message: message.role):
        blocks = [block for message in turn for block in _blocks(message.content)]
        if role == "assistant":
            chat.append(_assistant_message(blocks))
        elif role == "user":
            chat += _user_messages(blocks)
        else:
            chat.append({"role": "system", "content": _content(blocks)})
    return chat


def _blocks(content: str | Iterable[_Block]) -> list[_Block]:
    return [_Text(content)] if isinstance(content, str) else list(content)


def _assistant_message(blocks: list[_Block]) -> dict[str, Any]:
    text: list[str] = []
    thinking: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in blocks:
        match block:
            case _Text():
                text.append(block.text)
            case _Thinking():
                thinking.append(block.thinking)
            case _ToolUse():
                function = {"name": block.name, "arguments": msgspec.json.encode(block.input).decode()}
                calls.append({"id": block.id, "type": "function", "function": function})
            case _RedactedThinking():
                pass  # encrypted for another model
            case _:
                raise _refused_block(block, "an assistant's message")
    return assistant_message(text, thinking, calls)


def _user_messages(blocks: list[_Block]) -> list[dict[str, Any]]:
    """The results of tools, and then what else the user says."""
    results = [_tool_message(block) for block in blocks if isinstance(block, _ToolResult)]
    said = [block for block in blocks if not isinstance(block, _ToolResult)]
    return results + ([{"role": "user", "content": _content(said)}] if said or not results else [])


def _tool_message(result: _ToolResult) -> dict[str, Any]:
    """Chat completions have no mark of failure: a failed call's result begins with `Error: `."""
    content = result.content or ""
    if result.is_error:
        content = f"Error: {content}" if isinstance(content, str) else [_Text("Error: "), *content]
    return {"role": "tool", "tool_call_id": result.tool_use_id, "content": _content(_blocks(content))}


def _content(blocks: Sequence[_Block]) -> str | list[dict[str, Any]]:
    return content_of([_part(block) for block in blocks])


def _part(block: _Block) -> dict[str, Any]:
    match block:
        case _Text():
            return {"type": "text", "text": block.text}
        case _Image(source=_Base64() as source):
            return {"type": "image_url", "image_url": {"url": f"data:{source.media_type};base64,{source.data}"}}
        case _Image(source=_Url() as source):
            return {"type": "image_url", "image_url": {"url": source.url}}
        case _:
            raise _refused_block(block, "a message of this role")


def _refused_block(block: _Block, where: str) -> CallRefused:
    kind = type(block).__struct_config__.tag
    return CallRefused(
        f"messages: {where} holds a block of type {kind!r}, which cannot be shown to the model there; send its text",
        code="unsupported_content",
        param="messages",
    )
