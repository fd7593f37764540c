"""Google's Gemini API: requests of its generateContent in the form of chat completions.

    systemInstruction "S", user "U"            →  system "S", user "U"
    model [thought T, text A, functionCall f]  →  assistant "A", reasoning_content T, tool_calls [f]
    user [functionResponse f, text U]          →  tool (f), user "U"

Knows the wire format of requests; `gemini_answer` writes the answers. No backends, no rollouts, no HTTP server.
"""

from __future__ import annotations

import json
import re
from itertools import groupby
from typing import Annotated, Any, Final, Literal

import msgspec

from agentlightning.errors import BackendError
from agentlightning.gateway.answer import Answer
from agentlightning.gateway.endpoints.base import Endpoint
from agentlightning.gateway.endpoints.completions import SAMPLING_TYPES, sampling_fields
from agentlightning.gateway.endpoints.gemini_answer import ContentWriter, google_error, whole_content
from agentlightning.gateway.request import (
    MANY,
    NOT_JSON,
    SOME,
    CallRefused,
    CallRequest,
    assistant_message,
    content_of,
    converted,
    given,
    require_question,
    unsupported,
)


class _Struct(msgspec.Struct, rename="camel", frozen=True):
    pass


class _Blob(_Struct, frozen=True):
    mime_type: str
    data: str


class _File(_Struct, frozen=True):
    file_uri: str
    mime_type: str = "image/*"


class _FunctionCall(_Struct, frozen=True):
    name: str
    args: dict[str, Any] = {}
    id: str | None = None


class _FunctionResponse(_Struct, frozen=True):
    name: str = ""
    response: dict[str, Any] = {}
    id: str | None = None
    parts: Annotated[list[_Part], MANY] = []


class _Part(_Struct, frozen=True):
    text: str | None = None
    thought: bool = False
    inline_data: _Blob | None = None
    file_data: _File | None = None
    function_call: _FunctionCall | None = None
    function_response: _FunctionResponse | None = None


class _Content(_Struct, frozen=True):
    parts: Annotated[list[_Part], MANY] = []
    role: Literal["user", "model", "function", "system"] = "user"


class _Function(_Struct, frozen=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    parameters_json_schema: dict[str, Any] | None = None


class _Calling(_Struct, frozen=True):
    mode: str = "AUTO"
    allowed_function_names: list[str] = []


class _ToolConfig(_Struct, frozen=True):
    function_calling_config: _Calling = _Calling()


class _Request(_Struct, frozen=True):
    contents: Annotated[list[_Content], MANY]
    system_instruction: _Content | None = None
    tools: Annotated[list[dict[str, Any]], SOME] = []
    tool_config: _ToolConfig = _ToolConfig()
    generation_config: dict[str, Any] = {}


_CONVERSATION: Final = frozenset({"contents", "systemInstruction", "tools"})
_READ: Final = _CONVERSATION | {"toolConfig", "generationConfig"}
_NEUTRAL: Final = frozenset({"model", "labels", "store", "serviceTier"})  # they change nothing about what is answered
_DROPPED: Final = frozenset({"safetySettings"})  # hints to Google's own servers, as are those of generationConfig
_DROPPED_CONFIG: Final = frozenset({"thinkingConfig", "mediaResolution", "speechConfig", "imageConfig"})
# The agent gets on without these tools, which Google runs; all others of Google's are refused.
_HOSTED: Final = frozenset({"googleSearch", "googleSearchRetrieval", "googleMaps", "urlContext", "codeExecution"})
_NAMES: Final = {
    "temperature": "temperature",
    "topP": "top_p",
    "topK": "top_k",
    "maxOutputTokens": "max_tokens",
    "stopSequences": "stop",
    "seed": "seed",
    "candidateCount": "n",
    "presencePenalty": "presence_penalty",
    "frequencyPenalty": "frequency_penalty",
}
_CHOICES: Final = {"MODE_UNSPECIFIED": None, "AUTO": "auto", "VALIDATED": "auto", "NONE": "none", "ANY": "required"}


class GenerateContent(Endpoint):
    """`POST /v1beta/models/{model}:generateContent`, and `:streamGenerateContent`, as events whether or not `alt=sse`
    asks for them."""

    path = "generateContent"
    id_prefix = "gemini-"
    counted_as = "totalTokens"

    def __init__(self, model: str, *, stream: bool = False) -> None:
        self._said = {"model": model, "stream": stream}

    def read(self, body: bytes) -> CallRequest:
        try:
            fields = _fields(msgspec.json.decode(body, type=dict[str, Any]))
            return self._read(fields.get("generateContentRequest", fields))  # which counting may wrap it in
        except NOT_JSON as error:
            raise CallRefused(f"the request body is not a JSON object: {error}", code="invalid_json") from None

    def _read(self, fields: dict[str, Any]) -> CallRequest:
        request: _Request = converted("", fields, _Request, strict=False)
        if "cachedContent" in fields:
            raise unsupported("cachedContent", "nothing is kept here; send the contents")
        config = dict(request.generation_config)
        if config.pop("responseLogprobs", False):
            raise unsupported("generationConfig.responseLogprobs", "the span of a call keeps them")
        dropped = [f"generationConfig.{name}" for name in config if name in _DROPPED_CONFIG]
        values = {
            name: converted(f"generationConfig.{theirs}", config.pop(theirs), SAMPLING_TYPES[name], strict=False)
            for theirs, name in _NAMES.items()
            if theirs in config
        }
        response_format = _response_format(config)
        known = _READ | _NEUTRAL | _DROPPED
        rest = {name: value for name, value in fields.items() if name not in _CONVERSATION}
        tools, tool_choice = _chosen(_tools(request.tools, dropped), request.tool_config.function_calling_config)
        return CallRequest(
            messages=_chat(request.system_instruction, request.contents),
            tools=tools,
            tool_choice=tool_choice,
            extra={name: value for name, value in fields.items() if name not in known}
            | {name: value for name, value in config.items() if name not in _DROPPED_CONFIG}
            | given(response_format=response_format),
            dropped=tuple(sorted({*dropped, *_DROPPED.intersection(fields)})),
            request_json=msgspec.json.encode(rest).decode(),
            **sampling_fields(values | self._said, values.get("max_tokens")),
        )

    def whole(self, request: CallRequest, answer: Answer) -> bytes:
        return whole_content(answer)

    def stream(self, request: CallRequest, answer: Answer) -> ContentWriter:
        return ContentWriter(answer)

    def error(self, error: BackendError) -> bytes:
        return google_error(error)


# --- Google's JSON -----------------------------------------------------------------------------------------------

_AS_WRITTEN: Final = frozenset(
    {"args", "response", "parameters", "parametersJsonSchema", "responseSchema", "responseJsonSchema"}
)
_LISTS: Final = frozenset({"contents", "parts", "tools", "functionDeclarations"})
_UNDERSCORE: Final = re.compile(r"_([a-z])")


def _fields(value: dict[str, Any]) -> dict[str, Any]:
    """A body in one of the ways to write it, whose names may have underscores and whose lists of one no brackets. Nulls
    count as not given; what agents name themselves stays."""
    read: dict[str, Any] = {}
    for written, inner in value.items():
        name = _UNDERSCORE.sub(lambda found: found[1].upper(), written)
        if name not in _AS_WRITTEN:
            if name in _LISTS and isinstance(inner, dict):
                inner = [inner]
            if isinstance(inner, dict):
                inner = _fields(inner)
            elif isinstance(inner, list):
                inner = [_fields(one) if isinstance(one, dict) else one for one in inner]
        if inner is not None:
            read[name] = inner
    return read


_COUNTS: Final = frozenset({"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"})


def _schema(schema: Any) -> Any:
    """OpenAPI's form of a schema, as Google has it, in JSON Schema's.

    {"type": "STRING", "nullable": true, "maxLength": "9"}  →  {"type": ["string", "null"], "maxLength": 9}"""
    if not isinstance(schema, dict):
        return schema
    told: dict[str, Any] = {}
    for name, value in schema.items():
        match name, value:
            case "type", str():
                told[name] = [value.lower(), "null"] if schema.get("nullable") is True else value.lower()
            case "properties", dict():
                told[name] = {key: _schema(one) for key, one in value.items()}
            case "items", dict():
                told[name] = _schema(value)
            case "anyOf", list():
                told[name] = [_schema(one) for one in value]
            case "nullable" | "propertyOrdering", _:
                pass
            case _:
                told[name] = converted(name, value, int, strict=False) if name in _COUNTS else value
    return told


def _response_format(config: dict[str, Any]) -> dict[str, Any] | None:
    """How the answer has to be written, taken out of `config`."""
    kind, modalities = config.pop("responseMimeType", "text/plain"), config.pop("responseModalities", ["TEXT"])
    schema, openapi = config.pop("responseJsonSchema", None), config.pop("responseSchema", None)
    if modalities != ["TEXT"]:
        raise unsupported("generationConfig.responseModalities", "answers are text")
    if kind not in ("text/plain", "application/json"):
        raise unsupported("generationConfig.responseMimeType", "answers are text/plain or application/json")
    if schema is None and openapi is not None:
        schema = _schema(openapi)
    if schema is None:
        return {"type": "json_object"} if kind == "application/json" else None
    if kind != "application/json":
        why = "generationConfig.responseMimeType must be application/json where there is a schema"
        raise CallRefused(why, param="generationConfig.responseMimeType")
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


# --- tools -------------------------------------------------------------------------------------------------------


def _tools(tools: list[dict[str, Any]], dropped: list[str]) -> list[dict[str, Any]]:
    """The functions of all tools. The names of those left out go to `dropped`."""
    told: list[dict[str, Any]] = []
    for index, tool in enumerate(tools):
        for kind, inner in tool.items():
            if kind in _HOSTED:
                dropped.append(f"tools.{kind}")
                continue
            if kind != "functionDeclarations":
                why = "the gateway runs no tools; only functionDeclarations, which the agent runs, can be offered"
                raise CallRefused(f"tools[{index}].{kind}: {why}", code="unsupported_tool", param=f"tools[{index}]")
            for one in converted(f"tools[{index}].{kind}", inner, Annotated[list[_Function], SOME], strict=False):
                schema = one.parameters_json_schema or _schema(one.parameters)
                function = given(name=one.name, description=one.description, parameters=schema)
                told.append({"type": "function", "function": function})
    return told


def _chosen(tools: list[dict[str, Any]], calling: _Calling) -> tuple[list[dict[str, Any]], Any]:
    """The tools that may be called, and the choice among them."""
    allowed = calling.allowed_function_names
    if calling.mode not in _CHOICES:
        known = ", ".join(_CHOICES)
        message = f"toolConfig.functionCallingConfig.mode is {calling.mode!r}; known: {known}"
        raise CallRefused(message, param="toolConfig.functionCallingConfig.mode")
    if calling.mode == "ANY" and len(allowed) == 1:
        return tools, {"type": "function", "function": {"name": allowed[0]}}
    return [one for one in tools if not allowed or one["function"]["name"] in allowed], _CHOICES[calling.mode]


# --- the conversation --------------------------------------------------------------------------------------------


def _chat(system: _Content | None, contents: list[_Content]) -> list[dict[str, Any]]:
    """The whole conversation. Consecutive contents of one role are one turn, as the protocol has it."""
    require_question("contents", contents, "model")
    turns = _Turns()
    if system is not None and system.parts:
        turns.messages.append({"role": "system", "content": _content(system.parts)})
    for role, turn in groupby(contents, key=lambda content: "user" if content.role == "function" else content.role):
        parts = [part for content in turn for part in content.parts]
        if role == "model":
            turns.answered(parts)
        elif role == "user":
            turns.asked(parts)
        else:
            turns.messages.append({"role": "system", "content": _content(parts)})
    return turns.messages


class _Turns:
    """The chat as it grows. Calls without an id have one made up, the same whenever the conversation is sent; results
    without one belong to the first call of their name that has none yet."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._calls = 0
        self._open: dict[str, str] = {}  # id → name

    def answered(self, parts: list[_Part]) -> None:
        self._open.clear()
        text: list[str] = []
        thoughts: list[str] = []
        calls: list[dict[str, Any]] = []
        for part in parts:
            if part.function_call is not None:
                calls.append(self._call(part.function_call))
            elif part.text is not None:
                (thoughts if part.thought else text).append(part.text)
            else:
                raise _unshown("of the role model")
        self.messages.append(assistant_message(text, thoughts, calls))

    def asked(self, parts: list[_Part]) -> None:
        """The results of functions, and then what else the user says."""
        results = [part.function_response for part in parts if part.function_response is not None]
        said = [part for part in parts if part.function_response is None]
        self.messages += [self._result(result) for result in results]
        if said or not results:
            self.messages.append({"role": "user", "content": _content(said)})

    def _call(self, call: _FunctionCall) -> dict[str, Any]:
        self._calls += 1
        call_id = call.id or f"{self._calls:09}"  # nine characters, which is what Mistral's templates take
        self._open[call_id] = call.name
        arguments = json.dumps(call.args, ensure_ascii=False)
        return {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": arguments}}

    def _result(self, result: _FunctionResponse) -> dict[str, Any]:
        call_id = result.id if result.id in self._open else None
        if call_id is None:
            named = [call_id for call_id, name in self._open.items() if name == result.name]
            call_id = next(iter(named or self._open), result.id or result.name)
        self._open.pop(call_id, None)
        parts = [_Part(text=_text(result.response)), *result.parts]
        return {"role": "tool", "tool_call_id": call_id, "content": _content(parts)}


def _text(response: dict[str, Any]) -> str:
    """What a function returned, without the name that wraps it: that of the protocol, or of the SDK's."""
    match response:
        case {"output": told} | {"result": told} | {"error": told} if len(response) == 1:
            text = told if isinstance(told, str) else json.dumps(told, ensure_ascii=False)
            return f"Error: {text}" if "error" in response else text
        case _:
            return json.dumps(response, ensure_ascii=False)


def _content(parts: list[_Part]) -> str | list[dict[str, Any]]:
    return content_of([_shown(part) for part in parts])


def _shown(part: _Part) -> dict[str, Any]:
    match part:
        case _Part(text=str(text)):
            return {"type": "text", "text": text}
        case _Part(inline_data=_Blob(mime_type, data)) if mime_type.startswith("image/"):
            return {"type": "image_url", "image_url": {"url": f"data:{mime_type};base64,{data}"}}
        case _Part(file_data=_File(uri, mime_type)) if mime_type.startswith("image/") and uri.startswith("http"):
            return {"type": "image_url", "image_url": {"url": uri}}
        case _:
            raise _unshown("of this role")


def _unshown(where: str) -> CallRefused:
    message = f"contents: a content {where} holds a part that cannot be shown to the model there; send text or images"
    return CallRefused(message, code="unsupported_content", param="contents")
