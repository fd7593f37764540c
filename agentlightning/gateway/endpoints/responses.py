"""OpenAI's responses: requests of that protocol in the form of chat completions.

Knows the wire format of requests; `responses_answer` writes the answers. No backends, no rollouts, no HTTP server.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from agentlightning.errors import BackendError
from agentlightning.gateway.answer import Answer
from agentlightning.gateway.endpoints.base import Head, openai_error
from agentlightning.gateway.endpoints.chat_completions import SAMPLING_RANGES, SAMPLING_TYPES, sampling_fields
from agentlightning.gateway.endpoints.responses_answer import ResponseWriter, whole_response
from agentlightning.gateway.endpoints.responses_items import chat_messages
from agentlightning.gateway.request import CallRefused, CallRequest, Fields, require, rest_json


class _Tool(msgspec.Struct):
    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


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
    """`auto` asks for the most there is: the reasoning itself, which is in the answer anyway."""

    effort: str | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


_FUNCTION_FIELDS: Final = ("name", "description", "parameters", "strict")
_LOGPROBS: Final = "message.output_text.logprobs"
_INCLUDED: Final = (_LOGPROBS, "reasoning.encrypted_content")  # reasoning is given as text
# Fields that cannot be honoured: the values that ask for nothing, and why.
_REFUSED: Final[dict[str, tuple[Any, str]]] = {
    "background": (False, "a response is made while its caller listens; leave it out, or stream"),
    "truncation": ("disabled", "the gateway never shortens what an agent sends; use 'disabled'"),
    "conversation": (None, "only responses are kept here; send the history as input, or previous_response_id"),
    "prompt": (None, "templates are not kept here; send instructions and input"),
    "context_management": ([], "the gateway never shortens what an agent sends; leave it out"),
    "moderation": (None, "nothing is moderated here; leave it out"),
    "n": (1, "a response is one answer; ask again for another"),
    "messages": (None, "it is called input here"),
    "max_tokens": (None, "it is called max_output_tokens here"),
    "max_completion_tokens": (None, "it is called max_output_tokens here"),
    "response_format": (None, "it is called text.format here"),
    "reasoning_effort": (None, "it is called reasoning.effort here"),
    "verbosity": (None, "it is called text.verbosity here"),
    "return_token_ids": (False, "ask chat/completions for them; the call's span has them anyway"),
    "logprobs": (False, f"ask for them with include: [{_LOGPROBS!r}]"),
}
_FIELDS = Fields(
    types={
        **dict.fromkeys(_REFUSED, Any),
        **SAMPLING_TYPES,  # its stream_options only ask for padding here, which is not added
        "input": str | list[dict[str, Any]],
        "instructions": str,
        "previous_response_id": str,
        "store": bool,
        "metadata": dict[str, str],
        "tools": list[dict[str, Any]],
        "tool_choice": str | dict[str, Any],
        "parallel_tool_calls": bool,
        "max_tool_calls": int,  # of tools that OpenAI runs itself, of which there are none here
        "text": _TextConfig,
        "reasoning": _ReasoningConfig,
        "max_output_tokens": int,
        "include": list[str],
        "top_logprobs": int,
    },
    shapes={"tools": list[_Tool]},
    ranges={**SAMPLING_RANGES, "max_output_tokens": (1, 2**31), "top_logprobs": (0, 20)},
)
# What a response repeats of its request, and what it says where that was not given.
_ECHOED: Final[dict[str, Any]] = {
    "background": False,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "service_tier": "default",
    "store": True,
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": None,
    "truncation": "disabled",
    "user": None,
}


class Responses:
    """`POST /v1/responses`; see `Endpoint`. `CallRequest.original` is what the response repeats of the request."""

    path = "responses"
    operation = "chat"
    id_prefix = "resp_"

    def read(self, body: bytes) -> CallRequest:
        values, others, raw = _FIELDS.read(body)
        require(values, "model")
        for name, (harmless, why) in _REFUSED.items():
            if values.get(name, harmless) != harmless:
                raise CallRefused(f"{name} is not supported: {why}", code="unsupported_parameter", param=name)
        given = values | others
        said = chat_messages(values.get("input", []))
        if not said and "previous_response_id" not in values:
            raise CallRefused("input is empty; a response answers something", param="input")
        instructions = [{"role": "system", "content": values["instructions"]}] if "instructions" in values else []
        return CallRequest(
            model=values["model"],
            messages=[*instructions, *said],
            instructions=len(instructions),
            continues=values.get("previous_response_id"),
            continuable=values.get("store", True),
            tools=_tools(values.get("tools", [])),
            tool_choice=_tool_choice(values.get("tool_choice")),
            logprobs=_logprobs(values),
            top_logprobs=values.get("top_logprobs", 0),
            extra=others | _chat_fields(values),
            original={name: raw[name] if name in given else default for name, default in _ECHOED.items()},
            request_json=rest_json(raw, "input", "tools"),
            **sampling_fields(values, values.get("max_output_tokens")),
        )

    def whole(self, request: CallRequest, answer: Answer, head: Head) -> bytes:
        return whole_response(request, answer, head)

    def stream(self, request: CallRequest, head: Head) -> ResponseWriter:
        return ResponseWriter(request, head)

    def error(self, error: BackendError) -> bytes:
        return openai_error(error)


def _tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Function tools in their chat form."""
    for position, tool in enumerate(tools):
        where = f"tools[{position}]"
        if tool["type"] != "function":
            why = "the gateway runs no tools; only those of type function, which the agent runs, can be offered"
            raise CallRefused(f"{where} is of type {tool['type']!r}: {why}", code="unsupported_tool", param=where)
        if "name" not in tool:
            raise CallRefused(f"{where} has no name", param=where)
        for name, value in tool.items():
            if value and name not in ("type", *_FUNCTION_FIELDS):
                raise CallRefused(f"{where}.{name} is not supported; leave it out", param=where)
    return [
        {"type": "function", "function": {name: tool[name] for name in _FUNCTION_FIELDS if tool.get(name) is not None}}
        for tool in tools
    ]


def _tool_choice(choice: Any) -> Any:
    match choice:
        case None | "none" | "auto" | "required":
            return choice
        case {"type": "function", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
        case _:
            told = choice.get("type") if isinstance(choice, dict) else choice
            message = f"tool_choice {told!r} cannot be used; give 'auto', 'none', 'required' or a function's name"
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
    fields = {
        "parallel_tool_calls": values.get("parallel_tool_calls"),
        "response_format": _response_format(text.format),
        "verbosity": text.verbosity,
        "reasoning_effort": reasoning.effort,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _response_format(given: _Format | None) -> dict[str, Any] | None:
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return {"type": "json_object"}
    if given.name is None or given.schema is None:
        raise CallRefused("text.format of type json_schema needs name and schema", param="text.format")
    described = {"name": given.name, "schema": given.schema, "description": given.description, "strict": given.strict}
    return {
        "type": "json_schema",
        "json_schema": {name: value for name, value in described.items() if value is not None},
    }
