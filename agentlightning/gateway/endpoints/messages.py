"""Anthropic's messages: requests of that protocol in the form of chat completions, and answers in its own.

    system "S", user "U"                        →  system "S", user "U"
    assistant [thinking T, text A, tool_use t]  →  assistant "A", reasoning_content T, tool_calls [t]
    user [text U, tool_result t]                →  tool (t), user "U"

Knows the wire format. No backends, no rollouts, no HTTP server.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from agentlightning.errors import BackendError
from agentlightning.gateway.answer import Answer
from agentlightning.gateway.backend import Delta, Started, Usage
from agentlightning.gateway.endpoints.base import (
    Endpoint,
    arguments_of,
    cached_and_thought,
    error_kind,
    server_sent,
    thoughts_and_text,
)
from agentlightning.gateway.request import (
    CHAT_ONLY,
    MANY,
    SAMPLING_TYPES,
    SHAPING_FIELDS,
    SOME,
    CallRefused,
    CallRequest,
    Fields,
    assistant_message,
    content_of,
    function,
    function_call,
    image,
    json_schema,
    require_question,
    rest_json,
    sampling_fields,
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


class _ToolResult(msgspec.Struct, tag="tool_result"):
    tool_use_id: str
    content: str | list[_Text | _Image] | None = None
    is_error: bool | None = None


class _ToolUse(msgspec.Struct, tag="tool_use"):
    id: str
    name: str
    input: dict[str, msgspec.Raw]


class _Thinking(msgspec.Struct, tag="thinking"):
    thinking: str


class _RedactedThinking(msgspec.Struct, tag="redacted_thinking"):
    pass


_Block: TypeAlias = _Text | _Image | _ToolResult | _ToolUse | _Thinking | _RedactedThinking


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
_NEUTRAL: Final = ("metadata", "service_tier", "cache_control", "diagnostics", "user_profile_id")
_DROPPED: Final = ("context_management", "fallbacks", "speed")  # hints to Anthropic's own servers
_ONLY_THERE: Final = ("container", "mcp_servers", "compaction", "inference_geo", "thread")
# Upon this error Anthropic's SDKs send the whole conversation with every call instead.
_NO_THREADS: Final = "thread_unsupported_request"
_Share: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
_FIELDS = Fields(
    {
        **{name: SAMPLING_TYPES[name] for name in ("model", "max_tokens", "stream", "seed", *SHAPING_FIELDS)},
        "messages": Annotated[list[_Message], MANY],
        "system": str | Annotated[list[_Text], MANY],
        "tools": Annotated[list[_Tool], SOME],
        "tool_choice": _ToolChoice,
        "temperature": _Share,
        "top_p": _Share,
        "top_k": Annotated[int, Meta(ge=0, lt=2**31)],
        "stop_sequences": Annotated[list[str], Meta(max_length=100)],
        "thinking": _ThinkingConfig,
        "output_config": _OutputConfig,
        "output_format": _Format,
        **dict.fromkeys((*_NEUTRAL, *_DROPPED), Any),
    },
    refused=CHAT_ONLY,
)


class Messages(Endpoint):
    """`POST /v1/messages`."""

    path = "messages"
    id_prefix = "msg_"
    _required: tuple[str, ...] = ("model", "max_tokens", "messages")

    def read(self, body: bytes) -> CallRequest:
        values, extra, raw = _FIELDS.read(body, *self._required)
        for name in extra:
            if name in _ONLY_THERE:
                message = f"{name} is not supported: only Anthropic's own API does this; leave it out"
                code = _NO_THREADS if name == "thread" else "unsupported_parameter"
                raise CallRefused(message, code=code, param=name)
        tool_choice: _ToolChoice | None = values.get("tool_choice")
        if tool_choice is not None and tool_choice.disable_parallel_tool_use:
            extra["parallel_tool_calls"] = False
        config: _OutputConfig = values.get("output_config", _OutputConfig())
        output_format: _Format | None = config.format or values.get("output_format")
        if output_format is not None:
            extra["response_format"] = json_schema(output_format.schema)
        dropped = [name for name in _DROPPED if name in values]
        if "thinking" in values and values["thinking"].type != "disabled":  # the policy decides how much it thinks
            dropped.append("thinking")
        if config.effort is not None:
            dropped.append("output_config.effort")
        return CallRequest(
            messages=_chat(values.get("system"), values["messages"]),
            tools=[_tool(index, tool) for index, tool in enumerate(values.get("tools", ()))],
            tool_choice=None if tool_choice is None else _choice(tool_choice),
            extra=extra,
            dropped=tuple(dropped),
            request_json=rest_json(raw, "system", "messages", "tools"),
            **sampling_fields(values | {"stop": values.get("stop_sequences")}, values.get("max_tokens")),
        )

    def whole(self, request: CallRequest, answer: Answer) -> bytes:
        choice = answer.choices[0]
        thoughts, text = thoughts_and_text(choice.message())
        content = [_empty("thinking") | {"thinking": thoughts}] if thoughts else []
        content += [{"type": "text", "text": text}] if text else []
        content += map(_tool_block, choice.tool_calls)
        called = any(block["type"] == "tool_use" for block in content)
        return msgspec.json.encode(_message(answer, content, answer.token_counts()) | _stop(answer, called=called))

    def stream(self, request: CallRequest, answer: Answer) -> MessageWriter:
        return MessageWriter(answer)

    def error(self, error: BackendError) -> bytes:
        return msgspec.json.encode(_error(error))


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
    return function(tool.name, tool.description, tool.input_schema, tool.strict)


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
                calls.append(function_call(block.id, block.name, msgspec.json.encode(block.input).decode()))
            case _RedactedThinking():
                pass  # encrypted for another model
            case _:
                raise _refused_block(block, "an assistant's message")
    return assistant_message(text, thinking, calls)


def _user_messages(blocks: list[_Block]) -> list[dict[str, Any]]:
    """The results of tools, and then what else the user says."""
    results = [_tool_message(block) for block in blocks if isinstance(block, _ToolResult)]
    others = [block for block in blocks if not isinstance(block, _ToolResult)]
    return results + ([{"role": "user", "content": _content(others)}] if others or not results else [])


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
            return image(f"data:{source.media_type};base64,{source.data}")
        case _Image(source=_Url() as source):
            return image(source.url)
        case _:
            raise _refused_block(block, "a message of this role")


def _refused_block(block: _Block, where: str) -> CallRefused:
    kind = type(block).__struct_config__.tag
    return CallRefused(
        f"messages: {where} holds a block of type {kind!r}, which cannot be shown to the model there; send its text",
        code="unsupported_content",
        param="messages",
    )


# For answers without tool calls that no stop sequence ended.
_STOP_REASONS: Final = {"length": "max_tokens", "abort": "max_tokens", "content_filter": "refusal"}


def _error(error: BackendError) -> dict[str, Any]:
    body: dict[str, Any] = {"type": error_kind(error.status, "anthropic"), "message": str(error)}
    if error.code == _NO_THREADS:
        body["details"] = {"error_code": _NO_THREADS, "unsupported": ["thread"]}
    return {"type": "error", "error": body, "request_id": None}


def _empty(kind: str) -> dict[str, Any]:
    return {"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {})


def _tool_block(call: dict[str, Any]) -> dict[str, Any]:
    arguments = arguments_of(call)
    if isinstance(arguments, str):
        return {"type": "text", "text": arguments}
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": arguments}


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
        reason = _STOP_REASONS.get(choice.finish_reason or "abort", "tool_use" if called else "end_turn")
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


class MessageWriter:
    """Writes one streamed answer: blocks of thinking, text and tool calls, each opened when its first piece comes and
    closed when the next begins."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._blocks = 0
        self._open: str | None = None  # the kind of the last block, while it is open
        self._calls: dict[int, int] = {}  # tool call → its block

    def started(self, event: Started) -> bytes:
        message = _message(self._answer, [], Usage(len(event.prompt_token_ids), 0))
        return _event("message_start", message=message) + _event("ping")

    def delta(self, event: Delta) -> bytes:
        thoughts, text = thoughts_and_text(event.delta)
        sent = [self._written("thinking", thoughts), self._written("text", text)]
        return b"".join([*sent, *(self._called(part) for part in event.delta.get("tool_calls") or ())])

    def end(self) -> bytes:
        stop = _stop(self._answer, called=bool(self._calls))
        ends = _event("message_delta", delta=stop, usage=_usage(self._answer.token_counts()))
        return self._closed() + ends + _event("message_stop")

    def error(self, error: BackendError) -> bytes:
        return server_sent(_error(error), "error")

    def _written(self, kind: str, text: str) -> bytes:
        if not text:
            return b""
        opened = b"" if self._open == kind else self._opened(_empty(kind))
        return opened + _piece(self._blocks - 1, {"type": f"{kind}_delta", kind: text})

    def _called(self, part: dict[str, Any]) -> bytes:
        call, function = part.get("index", len(self._calls)), part.get("function") or {}
        opened = b""
        if call not in self._calls:
            block = {"type": "tool_use", "id": part.get("id") or "", "name": function.get("name") or "", "input": {}}
            opened = self._opened(block)
            self._calls[call] = self._blocks - 1
        arguments = function.get("arguments")
        if not arguments:
            return opened
        return opened + _piece(self._calls[call], {"type": "input_json_delta", "partial_json": arguments})

    def _opened(self, block: dict[str, Any]) -> bytes:
        closed = self._closed()
        self._open, self._blocks = block["type"], self._blocks + 1
        return closed + _event("content_block_start", index=self._blocks - 1, content_block=block)

    def _closed(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        return _event("content_block_stop", index=self._blocks - 1)


def _piece(block: int, delta: dict[str, str]) -> bytes:
    return _event("content_block_delta", index=block, delta=delta)


def _event(kind: str, **fields: Any) -> bytes:
    return server_sent({"type": kind, **fields}, kind)
