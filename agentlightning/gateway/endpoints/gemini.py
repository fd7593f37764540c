"""Google's Gemini API: requests of its generateContent in the form of chat completions, and answers
in its own.

    systemInstruction "S", user "U"            →  system "S", user "U"
    model [thought T, text A, functionCall f]  →  assistant "A", reasoning_content T, tool_calls [f]
    user [functionResponse f, text U]          →  tool (f), user "U"

Knows the wire format. No backends, no rollouts, no HTTP server.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from itertools import groupby
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec

from agentlightning.errors import BackendError
from agentlightning.gateway.answer import Answer, Choice
from agentlightning.gateway.backend import Delta, Started, Usage
from agentlightning.gateway.endpoints.base import (
    Endpoint,
    arguments_of,
    cached_and_thought,
    chat_of,
    error_kind,
    server_sent,
    thoughts_of,
)
from agentlightning.gateway.endpoints.gemini_tools import (
    Calling,
    Camel,
    answer_format,
    camel,
    chosen,
    functions_of,
)
from agentlightning.gateway.endpoints.kinds import KINDS
from agentlightning.gateway.request import (
    FILES_NOT_KEPT,
    MANY,
    SAMPLING_TYPES,
    SOME,
    CallRefused,
    CallRequest,
    Fields,
    attached,
    converted,
    function_call,
    image,
    require_question,
    rest_json,
    sampling_fields,
    text_part,
    unsupported,
)


class _Blob(Camel, frozen=True):
    mime_type: str
    data: str


class _FunctionCall(Camel, frozen=True):
    name: str
    args: dict[str, Any] | None = None
    id: str | None = None


class _FunctionResponse(Camel, frozen=True):
    name: str = ""
    response: dict[str, Any] = msgspec.field(default_factory=dict)
    id: str | None = None


class _FileData(Camel, frozen=True):
    file_uri: str
    mime_type: str = ""


class _Part(Camel, frozen=True):
    text: str | None = None
    thought: bool | None = None
    inline_data: _Blob | None = None
    file_data: _FileData | None = None
    function_call: _FunctionCall | None = None
    function_response: _FunctionResponse | None = None


class _Content(Camel, frozen=True):
    parts: Annotated[list[dict[str, Any]], MANY] = msgspec.field(default_factory=list)
    role: Literal["user", "model", "function", "tool", "system"] = "user"


class _ToolConfig(Camel, frozen=True):
    function_calling_config: Calling | None = None


_Objects: TypeAlias = dict[str, Any] | Annotated[list[dict[str, Any]], MANY]
# What belongs to the agent in what these hold, names included.
_OPAQUE: Final = frozenset(
    {"args", "response", "parameters", "parametersJsonSchema", "responseSchema", "labels"}
)
_DEEPEST: Final = 8  # levels of the protocol's own fields
_REPEATED: Final = frozenset({"parts", "functionDeclarations"})


def _spelled(value: Any, levels: int = _DEEPEST) -> Any:
    """The value with all fields of the protocol in one spelling, and lists where one object stands
    for a list."""
    if levels == 0:
        return value
    if isinstance(value, list):
        return [_spelled(one, levels - 1) for one in value]
    if not isinstance(value, dict):
        return value
    fields: dict[str, Any] = {}
    for written, inner in value.items():
        name = camel(written)
        inner = inner if name in _OPAQUE or name.endswith("Schema") else _spelled(inner, levels - 1)
        fields[name] = [inner] if name in _REPEATED and isinstance(inner, dict) else inner
    return fields


def _listed(objects: Any) -> Any:
    return [objects] if isinstance(objects, dict) else objects


_FIELDS = Fields(
    {
        "contents": _Objects,
        "systemInstruction": dict[str, Any] | str,
        "tools": _Objects,
        "toolConfig": dict[str, Any],
        "generationConfig": dict[str, Any],
    },
    spelled=camel,
)
_PARTS: Final = KINDS["generateContent"]["parts"]
# they change nothing about what is answered
_NEUTRAL: Final = frozenset({"model", "labels", "store", "serviceTier"})
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
# Fields of a part that say something about it.
_INFORMING: Final = frozenset(
    {"thought", "thoughtSignature", "videoMetadata", "mediaResolution", "partMetadata"}
)
_ROLES: Final = {"model": "assistant", "system": "system"}  # of the others it is the user's


class GenerateContent(Endpoint):
    """`POST /v1beta/models/{model}:generateContent`, and `:streamGenerateContent`, as events
    whether or not `alt=sse` asks for them."""

    path = "generateContent"
    id_prefix = "gemini-"
    counted_as = "totalTokens"

    def __init__(self, model: str, *, stream: bool = False) -> None:
        self._addressed = {"model": model, "stream": stream}

    def read(self, body: bytes) -> CallRequest:
        fields, unread, raw = _FIELDS.read(body, "contents")
        if "cachedContent" in unread:
            raise unsupported("cachedContent", "nothing is kept here; send the contents")
        written = _spelled(fields.get("generationConfig", {}))
        config: dict[str, Any] = {
            name: value for name, value in written.items() if value is not None
        }
        if config.pop("responseLogprobs", False):
            raise unsupported("generationConfig.responseLogprobs", "the span of a call keeps them")
        values = {
            name: converted(
                f"generationConfig.{theirs}", config.pop(theirs), SAMPLING_TYPES[name], strict=False
            )
            for theirs, name in _NAMES.items()
            if theirs in config
        }
        response_format = answer_format(config)
        # What is left are hints to Google's own servers.
        dropped = {f"generationConfig.{name}" for name in config} | (unread.keys() - _NEUTRAL)
        tool_config = converted("toolConfig", _spelled(fields.get("toolConfig", {})), _ToolConfig)
        offered = converted(
            "tools", _listed(fields.get("tools", [])), Annotated[list[dict[str, Any]], SOME]
        )
        calling = tool_config.function_calling_config or Calling()
        tools, tool_choice = chosen(functions_of(_spelled(offered), dropped), calling)
        reader = _Reader(dropped)
        messages = reader.chat(fields.get("systemInstruction"), fields["contents"])
        return CallRequest(
            messages=messages,
            tools=tools,
            tool_choice=tool_choice,
            extra={} if response_format is None else {"response_format": response_format},
            dropped=tuple(sorted(dropped)),
            request_json=rest_json(raw, "contents", "systemInstruction", "tools"),
            **sampling_fields(values | self._addressed, values.get("max_tokens")),
        )

    def writer(self, request: CallRequest, answer: Answer) -> ContentWriter:
        return ContentWriter(answer)

    def error(self, error: BackendError) -> bytes:
        return msgspec.json.encode(_error(error))


class _Reader:
    """Reads the parts of a chat in their order. Calls without an id have one made up, the same
    whenever the conversation is sent; results without one belong to the first call of their name
    that has none yet. `dropped` gets the names of what is left out."""

    def __init__(self, dropped: set[str]) -> None:
        self._open = OrderedDict[str, str]()  # id → name of the calls that have no result yet
        self._named: dict[str, OrderedDict[str, None]] = {}  # their ids by name
        self._calls = 0
        self._dropped = dropped

    def chat(self, system: dict[str, Any] | str | None, contents: Any) -> list[dict[str, Any]]:
        """The whole conversation. Consecutive contents of one role are one turn, as the protocol
        has it."""
        read = converted("contents", _spelled(_listed(contents)), Annotated[list[_Content], MANY])
        require_question("contents", read, "model")
        turns: list[tuple[str, list[dict[str, Any]]]] = []
        if isinstance(system, str):
            turns.append(("system", [text_part(system)]))
        elif system is not None:
            instruction = converted("systemInstruction", _spelled(system), _Content)
            parts = self._parts("systemInstruction.parts", instruction)
            turns += [("system", parts)] if parts else []
        numbered = enumerate(read)
        for role, turn in groupby(numbered, key=lambda one: _ROLES.get(one[1].role, "user")):
            if role == "assistant":
                self._open.clear()
                self._named.clear()
            said: list[dict[str, Any]] = []
            for position, content in turn:
                said += self._parts(f"contents[{position}].parts", content)
            turns.append((role, said))
        return chat_of("contents", turns)

    def _parts(self, where: str, content: _Content) -> list[dict[str, Any]]:
        parts: list[dict[str, Any]] = []
        for position, raw in enumerate(content.parts):
            place = f"{where}[{position}]"
            kinds = [
                kind for kind, value in raw.items() if value is not None and kind not in _INFORMING
            ]
            read = [_PARTS.read_as(kind, None, place, self._dropped) for kind in kinds]
            if any(read):
                parts.append(self._part(place, converted(place, raw, _Part)))
        return parts

    def _part(self, where: str, part: _Part) -> dict[str, Any]:
        match part:
            case _Part(function_call=_FunctionCall() as call):
                self._calls += 1
                # Mistral's templates take nine letters or digits
                call_id = call.id or f"{self._calls:09}"
                self._close(call_id)
                self._open[call_id] = call.name
                self._named.setdefault(call.name, OrderedDict())[call_id] = None
                return function_call(
                    call_id, call.name, json.dumps(call.args or {}, ensure_ascii=False)
                )
            case _Part(function_response=_FunctionResponse() as result):
                return self._result(result)
            case _Part(inline_data=_Blob(mime_type, data)):
                return attached(where, mime_type, data)
            case _Part(file_data=_FileData(uri, mime_type)) if (
                mime_type.startswith("image/") and "://" in uri
            ):
                return image(uri)
            case _Part(text=str(text)):
                return {"type": "thought" if part.thought else "text", "text": text}
            case _:
                raise CallRefused(
                    f"{where}: {FILES_NOT_KEPT}", code="unsupported_content", param=where
                )

    def _result(self, result: _FunctionResponse) -> dict[str, Any]:
        call_id = result.id if result.id in self._open else None
        if call_id is None:
            call_id = next(
                iter(self._named.get(result.name) or self._open), result.id or result.name
            )
        self._close(call_id)
        return {"role": "tool", "tool_call_id": call_id, "content": _text(result.response)}

    def _close(self, call_id: str) -> None:
        if (name := self._open.pop(call_id, None)) is not None:
            del self._named[name][call_id]


def _text(response: dict[str, Any]) -> str:
    """The text that a function returned, without the name that wraps it: that of the protocol, or
    of the SDK's."""
    match response:
        case {"output": output} | {"result": output} | {"error": output} if len(response) == 1:
            text = output if isinstance(output, str) else json.dumps(output, ensure_ascii=False)
            return f"Error: {text}" if "error" in response else text
        case _:
            return json.dumps(response, ensure_ascii=False)


# of the others it is STOP
_REASONS: Final = {"length": "MAX_TOKENS", "content_filter": "SAFETY", "abort": "OTHER"}


def _error(error: BackendError) -> dict[str, Any]:
    return {
        "error": {
            "code": error.status,
            "message": str(error),
            "status": error_kind(error.status, "google"),
        }
    }


def _response(answer: Answer, candidates: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {
        "candidates": candidates,
        **more,
        "modelVersion": answer.model,
        "responseId": answer.response_id,
    }


def _candidate(
    index: int, parts: list[dict[str, Any]], ended: Choice | None = None
) -> dict[str, Any]:
    end = {}
    if ended is not None:
        reason = (
            "SAFETY"
            if ended.string("refusal")
            else _REASONS.get(ended.finish_reason or "abort", "STOP")
        )
        end["finishReason"] = reason
    return {"content": {"role": "model", "parts": parts or [{"text": ""}]}, **end, "index": index}


def _text_parts(message: dict[str, Any]) -> list[dict[str, Any]]:
    thoughts = thoughts_of(message)
    text = message.get("content") or message.get("refusal")
    return ([{"text": thoughts, "thought": True}] if thoughts else []) + (
        [{"text": text}] if text else []
    )


def _call(call: dict[str, Any]) -> dict[str, Any]:
    arguments = arguments_of(call["function"]["name"], call["function"]["arguments"])
    if isinstance(arguments, str):
        return {"text": arguments}
    return {"functionCall": {"id": call["id"], "name": call["function"]["name"], "args": arguments}}


def _usage(usage: Usage) -> dict[str, Any]:
    """Here the tokens of thoughts are not among those of the candidates, but beside them."""
    cached, thought = cached_and_thought(usage)
    return {
        "promptTokenCount": usage.prompt_tokens,
        "candidatesTokenCount": usage.completion_tokens - (thought or 0),
        "totalTokenCount": usage.prompt_tokens + usage.completion_tokens,
        **({"cachedContentTokenCount": cached} if cached else {}),
        **({"thoughtsTokenCount": thought} if thought else {}),
    }


class ContentWriter:
    """Writes one answer: texts as they come, function calls, which this protocol has whole, at the
    end."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def started(self, event: Started) -> bytes:
        return b""

    def delta(self, event: Delta) -> bytes:
        parts = _text_parts(event.delta)
        return (
            server_sent(_response(self._answer, [_candidate(event.index, parts)])) if parts else b""
        )

    def end(self) -> bytes:
        return server_sent(self._ended(lambda choice: []))

    def whole(self) -> bytes:
        return msgspec.json.encode(self._ended(lambda choice: _text_parts(choice.message())))

    def _ended(self, texts: Callable[[Choice], list[dict[str, Any]]]) -> dict[str, Any]:
        answer = self._answer
        ends = [
            _candidate(index, [*texts(choice), *map(_call, choice.tool_calls)], choice)
            for index, choice in enumerate(answer.choices)
        ]
        return _response(answer, ends, usageMetadata=_usage(answer.token_counts()))

    def error(self, error: BackendError) -> bytes:
        return server_sent(_error(error))
