"""OpenAI's responses: requests of that protocol in the form of chat completions.

    user "U"                                            →  user "U"
    reasoning R, assistant "A", function_call 1 and 2   →  assistant "A", reasoning_content R, tool_calls [1, 2]
    function_call_output 1                              →  tool (1)
    tool "read" of the namespace "files"                →  function "files__read"

Knows the wire format of requests; `responses_answer` writes the answers. No backends, no rollouts, no HTTP server.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec

from agentlightning.gateway.answer import Answer
from agentlightning.gateway.endpoints.base import Endpoint
from agentlightning.gateway.endpoints.responses_answer import Original, ResponseWriter
from agentlightning.gateway.request import (
    CHAT_ONLY,
    MANY,
    SAMPLING_TYPES,
    SHAPING_FIELDS,
    SOME,
    CallRefused,
    CallRequest,
    Fields,
    TopLogprobs,
    converted,
    function,
    function_call,
    given,
    image,
    rest_json,
    sampling_fields,
    unsupported,
)


class _Tool(msgspec.Struct):
    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    tools: Annotated[list[_Tool], SOME] = []


class _Format(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class _TextConfig(msgspec.Struct, forbid_unknown_fields=True):
    format: _Format | None = None
    verbosity: str | None = None


class _ReasoningConfig(msgspec.Struct, forbid_unknown_fields=True):
    """The answer holds the reasoning itself, however a summary was asked for."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None


# The agent gets on without these tools, which OpenAI runs; all others of OpenAI's are refused.
_HOSTED: Final = ("web_search", "web_search_preview", "image_generation")
_LOGPROBS: Final = "message.output_text.logprobs"
_INCLUDED: Final = (_LOGPROBS, "reasoning.encrypted_content")  # reasoning is given as text
# Fields that cannot be honoured: the value that asks for nothing, and why.
_REFUSED: Final[dict[str, tuple[Any, str]]] = {
    "background": (False, "a response is made while its caller listens; leave it out, or stream"),
    "truncation": ("disabled", "the gateway never shortens what an agent sends; use 'disabled'"),
    "conversation": (None, "only responses are kept here; send the history as input, or previous_response_id"),
    "prompt": (None, "templates are not kept here; send instructions and input"),
    "context_management": ([], "the gateway never shortens what an agent sends; leave it out"),
    "moderation": (None, "nothing is moderated here; leave it out"),
}
_FIELDS = Fields(
    {
        **dict.fromkeys(_REFUSED, Any),
        **{name: SAMPLING_TYPES[name] for name in ("model", "stream", "temperature", "top_p", "top_k", "seed", "stop")},
        **{name: SAMPLING_TYPES[name] for name in SHAPING_FIELDS},
        "stream_options": dict[str, Any],  # they only ask for padding here, which is not added
        "input": str | Annotated[list[dict[str, Any]], MANY],
        "instructions": str,
        "previous_response_id": str,
        "store": bool,
        "metadata": dict[str, str],
        "client_metadata": dict[str, Any],
        "tools": Annotated[list[_Tool], SOME],
        "tool_choice": str | dict[str, Any],
        "parallel_tool_calls": bool,
        "max_tool_calls": int,  # of tools that OpenAI runs itself, of which there are none here
        "text": _TextConfig,
        "reasoning": _ReasoningConfig,
        "max_output_tokens": SAMPLING_TYPES["max_tokens"],
        "include": list[str],
        "top_logprobs": TopLogprobs,
    },
    refused=CHAT_ONLY,
)
# What a response repeats of its request, and its values for fields that were not given.
_ECHOED: Final[dict[str, Any]] = {
    "metadata": {},
    "parallel_tool_calls": True,
    "reasoning": {"effort": None, "summary": None},
    "service_tier": "default",
    "store": True,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "truncation": "disabled",
    "background": False,
    **dict.fromkeys(
        ("instructions", "max_output_tokens", "max_tool_calls", "previous_response_id", "prompt_cache_key")
    ),
    **dict.fromkeys(("safety_identifier", "temperature", "top_p", "user")),
}


class Responses(Endpoint):
    """`POST /v1/responses`. `CallRequest.original` is what the response repeats of the request."""

    path = "responses"
    id_prefix = "resp_"

    def read(self, body: bytes) -> CallRequest:
        values, unread, raw = _FIELDS.read(body, "model")
        for name, (harmless, why) in _REFUSED.items():
            if values.get(name, harmless) != harmless:
                raise unsupported(name, why)
        messages = _chat_messages(values.get("input", []))
        if not messages and "previous_response_id" not in values:
            raise CallRefused("input is empty; a response answers something", param="input")
        tools: list[dict[str, Any]] = []
        namespaces: dict[str, tuple[str, str]] = {}
        dropped = sorted(_offer(tools, namespaces, "tools", values.get("tools", [])))
        instructions = [{"role": "system", "content": values["instructions"]}] if "instructions" in values else []
        echoed = _ECHOED | {name: raw[name] for name in _ECHOED if name in values or name in unread}
        return CallRequest(
            messages=[*instructions, *messages],
            instructions=len(instructions),
            continues=values.get("previous_response_id"),
            continuable=values.get("store", True),
            tools=tools,
            tool_choice=_tool_choice(values.get("tool_choice")),
            logprobs=_logprobs(values),
            top_logprobs=values.get("top_logprobs", 0),
            extra=unread | _chat_fields(values),
            dropped=tuple(dropped),
            original=Original(echoed, namespaces),
            request_json=rest_json(raw, "input", "tools"),
            **sampling_fields(values, values.get("max_output_tokens")),
        )

    def whole(self, request: CallRequest, answer: Answer) -> bytes:
        return ResponseWriter(request, answer).whole()

    def stream(self, request: CallRequest, answer: Answer) -> ResponseWriter:
        return ResponseWriter(request, answer)


def _offer(
    chat: list[dict[str, Any]],
    namespaces: dict[str, tuple[str, str]],
    place: str,
    tools: list[_Tool],
    namespace: str | None = None,
) -> set[str]:
    """Add tools to `chat`, and to `namespaces` what the agent calls those of one; gives the names of those left out."""
    dropped: set[str] = set()
    for position, tool in enumerate(tools):
        where = f"{place}[{position}]"
        if tool.type in _HOSTED:
            dropped.add(f"tools.{tool.type}")
        elif tool.type == "namespace" and namespace is None:
            dropped |= _offer(chat, namespaces, f"{where}.tools", tool.tools, tool.name)
        elif tool.type != "function":
            why = "the gateway runs no tools; only those of type function, which the agent runs, can be offered"
            raise CallRefused(f"{where} is of type {tool.type!r}: {why}", code="unsupported_tool", param=where)
        elif not tool.name:
            raise CallRefused(f"{where} has no name", param=where)
        else:
            name = flat_name(namespace, tool.name)
            if namespace is not None:
                namespaces[name] = (tool.name, namespace)
            chat.append(function(name, tool.description, tool.parameters, tool.strict))
    return dropped


def flat_name(namespace: str | None, name: str) -> str:
    return name if namespace is None else f"{namespace}__{name}"


def _tool_choice(choice: Any) -> Any:
    match choice:
        case None | "none" | "auto" | "required":
            return choice
        case {"type": "function", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
        case _:
            kind = choice.get("type") if isinstance(choice, dict) else choice
            message = f"tool_choice {kind!r} cannot be used; give 'auto', 'none', 'required' or a function's name"
            raise CallRefused(message, param="tool_choice")


def _logprobs(values: dict[str, Any]) -> bool:
    """Whether logprobs are asked for."""
    include: list[str] = values.get("include", [])
    for name in include:
        if name not in _INCLUDED:
            raise CallRefused(f"include has {name!r}; only {' and '.join(_INCLUDED)} can be", param="include")
    if values.get("top_logprobs") and _LOGPROBS not in include:
        raise CallRefused(f"top_logprobs needs {_LOGPROBS!r} in include", param="top_logprobs")
    return _LOGPROBS in include


def _chat_fields(values: dict[str, Any]) -> dict[str, Any]:
    """What chat completions know by another name, or in another place."""
    text: _TextConfig = values.get("text", _TextConfig())
    reasoning: _ReasoningConfig = values.get("reasoning", _ReasoningConfig())
    return given(
        parallel_tool_calls=values.get("parallel_tool_calls"),
        response_format=_response_format(text.format),
        verbosity=text.verbosity,
        reasoning_effort=reasoning.effort,
    )


def _response_format(format: _Format | None) -> dict[str, Any] | None:
    if format is None or format.type == "text":
        return None
    if format.type == "json_object":
        return {"type": "json_object"}
    if format.name is None or format.schema is None:
        raise CallRefused("text.format of type json_schema needs name and schema", param="text.format")
    described = given(name=format.name, schema=format.schema, description=format.description, strict=format.strict)
    return {"type": "json_schema", "json_schema": described}


class _Part(msgspec.Struct):
    type: Literal["input_text", "output_text", "text", "refusal", "input_image", "reasoning_text", "summary_text"]
    text: str = ""
    refusal: str = ""
    image_url: str | None = None
    detail: str | None = None


class _Message(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[_Part]


class _Reasoning(msgspec.Struct):
    content: list[_Part] | None = None
    summary: list[_Part] | None = None
    encrypted_content: str | None = None


class _FunctionCall(msgspec.Struct):
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None


class _FunctionCallOutput(msgspec.Struct):
    call_id: str
    output: str | list[_Part]


_Item: TypeAlias = _Message | _Reasoning | _FunctionCall | _FunctionCallOutput
_ITEMS: Final[dict[Any, type[_Item]]] = {
    "message": _Message,
    "reasoning": _Reasoning,
    "function_call": _FunctionCall,
    "function_call_output": _FunctionCallOutput,
}


def _chat_messages(items: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages that `input` stands for; texts and calls of one turn of the assistant are one message.

    CallRefused (400) names the item that is malformed or of a kind that has no chat form."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[dict[str, Any]] = []
    for position, raw in enumerate(items):
        where = f"input[{position}]"
        match _item(where, raw):
            case _Message("assistant", content):
                # Text after text is a turn of its own; after a call whose result has not come it belongs to that turn.
                turn = _turn(messages, lambda turn: "content" in turn and "tool_calls" not in turn)
                turn.setdefault("content", []).append(content if isinstance(content, str) else _text(content))
            case _Message(role, content):
                messages.append({"role": role, "content": _content(where, content)})
            case _Reasoning() as item:
                if thought := _thought(where, item):
                    turn = _turn(messages, lambda turn: "content" in turn or "tool_calls" in turn)
                    turn.setdefault("reasoning_content", []).append(thought)
            case _FunctionCall(call_id, name, arguments, namespace):
                call = function_call(call_id, flat_name(namespace, name), arguments)
                _turn(messages, lambda turn: False).setdefault("tool_calls", []).append(call)
            case _FunctionCallOutput(call_id, output):
                messages.append({"role": "tool", "tool_call_id": call_id, "content": _content(where, output)})
    for message in messages:
        if message["role"] == "assistant":  # joined at once: text after text would be copied each time
            message.setdefault("content", None)
            message |= {name: "".join(message[name]) for name in ("content", "reasoning_content") if message.get(name)}
    return messages


def _item(where: str, raw: dict[str, Any]) -> _Item:
    kind = raw.get("type") or "message"
    if not isinstance(kind, str) or kind not in _ITEMS:
        raise CallRefused(f"{where} is of type {kind!r}; only {', '.join(_ITEMS)} can be read here", param=where)
    return converted(where, raw, _ITEMS[kind])


def _turn(messages: list[dict[str, Any]], ended: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The assistant's turn that is under way, or a new one; its texts are lists of their parts."""
    if not messages or messages[-1]["role"] != "assistant" or ended(messages[-1]):
        messages.append({"role": "assistant"})
    return messages[-1]


def _thought(where: str, item: _Reasoning) -> str:
    thought = _text(item.content or item.summary or [])
    if not thought and item.encrypted_content:
        message = f"{where} is encrypted by another server and cannot be read here; leave it out, or send its text"
        raise CallRefused(message, param=where)
    return thought


def _text(parts: list[_Part]) -> str:
    return "".join(part.text or part.refusal for part in parts)


def _content(where: str, content: str | list[_Part]) -> str | list[dict[str, Any]]:
    """A message's content: a single text as it is, several parts as parts."""
    if isinstance(content, str):
        return content
    if len(content) == 1 and content[0].type != "input_image":
        return _text(content)
    return [_chat_part(where, part) for part in content]


def _chat_part(where: str, part: _Part) -> dict[str, Any]:
    if part.type != "input_image":
        return {"type": "text", "text": part.text or part.refusal}
    if part.image_url is None:
        raise CallRefused(f"{where} has an image without image_url; files are not kept here", param=where)
    return image(part.image_url, part.detail)
