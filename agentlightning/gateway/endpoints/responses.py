"""OpenAI's responses: requests of that protocol in the form of chat completions, and answers in its own.

    user "U"                                            →  user "U"
    reasoning R, assistant "A", function_call 1 and 2   →  assistant "A", reasoning_content R, tool_calls [1, 2]
    function_call_output 1                              →  tool (1)
    tool "read" of the namespace "files"                →  function "files__read"

Knows the wire format. No backends, no rollouts, no HTTP server.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, NamedTuple, TypeAlias

import msgspec

from agentlightning.errors import BackendError
from agentlightning.gateway.answer import Answer
from agentlightning.gateway.backend import Delta, Started, Usage
from agentlightning.gateway.endpoints.base import (
    BlockWriter,
    Endpoint,
    cached_and_thought,
    chat_of,
    content_of,
    openai_error,
    server_sent,
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


class _ReasoningConfig(msgspec.Struct):
    effort: str | None = None  # what else it holds is how it is shown: here the answer holds the reasoning itself


# The agent gets on without these tools, which OpenAI runs; all others of OpenAI's are refused.
_HOSTED: Final = ("web_search", "web_search_preview", "image_generation")
_LOGPROBS: Final = "message.output_text.logprobs"
# Fields that cannot be honoured, and the values that ask for nothing.
_REFUSED: Final[dict[str, Any]] = {"background": False, "truncation": "disabled", "context_management": []}
_REFUSED.update(dict.fromkeys(("conversation", "prompt", "moderation")))
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
        "include": list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]],  # which is text here
        "top_logprobs": TopLogprobs,
    },
    refused=CHAT_ONLY,
)
# A response repeats its request, and has these where they were not given.
_ECHOED: Final[dict[str, Any]] = {
    **dict.fromkeys(("instructions", "temperature", "top_p")),
    "metadata": {},
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
}
_NOT_ECHOED: Final = frozenset(
    {"model", "input", "stream", "stream_options", "include", "client_metadata"}  # and what it says of itself
    | {"id", "object", "created_at", "status", "error", "incomplete_details", "output", "usage"}
)


class Original(NamedTuple):
    """Of a request: what its response repeats, and (name, namespace) of the tools that the model knows by another name
    than the agent."""

    echoed: dict[str, Any]
    namespaces: dict[str, tuple[str, str]]


class Responses(Endpoint):
    """`POST /v1/responses`. `CallRequest.original` is what the response repeats of the request."""

    path = "responses"
    id_prefix = "resp_"

    def read(self, body: bytes) -> CallRequest:
        values, unread, raw = _FIELDS.read(body, "model")
        for name, nothing in _REFUSED.items():
            if values.get(name, nothing) != nothing:
                raise unsupported(name, "only OpenAI's own API does this; leave it out")
        messages = _chat(values.get("input", []))
        if not messages and "previous_response_id" not in values:
            raise CallRefused("input is empty; a response answers something", param="input")
        logprobs = _LOGPROBS in values.get("include", ())
        if values.get("top_logprobs") and not logprobs:
            raise CallRefused(f"top_logprobs needs {_LOGPROBS!r} in include", param="top_logprobs")
        tools: list[dict[str, Any]] = []
        namespaces: dict[str, tuple[str, str]] = {}
        dropped = sorted(_offer(tools, namespaces, "tools", values.get("tools", [])))
        instructions = [{"role": "system", "content": values["instructions"]}] if "instructions" in values else []
        echoed = _ECHOED | {name: raw[name] for name in (*values, *unread) if name not in _NOT_ECHOED}
        return CallRequest(
            messages=[*instructions, *messages],
            instructions=len(instructions),
            continues=values.get("previous_response_id"),
            continuable=values.get("store", True),
            tools=tools,
            tool_choice=_tool_choice(values.get("tool_choice")),
            logprobs=logprobs,
            top_logprobs=values.get("top_logprobs", 0),
            extra=unread | _chat_fields(values),
            dropped=tuple(dropped),
            original=Original(echoed, namespaces),
            request_json=rest_json(raw, "input", "tools"),
            **sampling_fields(values, values.get("max_output_tokens")),
        )

    def writer(self, request: CallRequest, answer: Answer) -> ResponseWriter:
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
            name = _flat_name(namespace, tool.name)
            if namespace is not None:
                namespaces[name] = (tool.name, namespace)
            chat.append(function(name, tool.description, tool.parameters, tool.strict))
    return dropped


def _flat_name(namespace: str | None, name: str) -> str:
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
    described = given(name=format.name, schema=format.schema, description=format.description, strict=format.strict)
    return {"type": format.type} | ({"json_schema": described} if format.type == "json_schema" else {})


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


def _chat(items: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages that `input` stands for; texts and calls of one turn of the assistant are one message.

    CallRefused (400) names the item that is malformed or of a kind that has no chat form."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    turns: list[tuple[str, list[dict[str, Any]]]] = []
    spoke = called = False  # in the assistant's turn that is under way
    for position, raw in enumerate(items):
        where, role, begins = f"input[{position}]", "assistant", False
        item = _item(where, raw)
        match item:
            case _Message("assistant", content):
                # Text after text is a turn of its own; after a call whose result has not come it belongs to that turn.
                parts, begins = [{"type": "text", "text": _text(content)}], spoke and not called
            case _Message(role, content):
                parts = _parts(where, content)
            case _Reasoning():
                if not (thought := _thought(where, item)):
                    continue
                parts, begins = [{"type": "thought", "text": thought}], spoke or called
            case _FunctionCall(call_id, name, arguments, namespace):
                parts = [function_call(call_id, _flat_name(namespace, name), arguments)]
            case _FunctionCallOutput(call_id, output):
                content = content_of(_parts(where, output))
                role, parts = "user", [{"role": "tool", "tool_call_id": call_id, "content": content}]
        if begins or role != "assistant" or not turns or turns[-1][0] != role:
            turns.append((role, []))
            spoke = called = False
        turns[-1][1].extend(parts)
        spoke, called = spoke or isinstance(item, _Message), called or isinstance(item, _FunctionCall)
    return chat_of("input", turns)


def _item(where: str, raw: dict[str, Any]) -> _Item:
    kind = raw.get("type") or "message"
    if not isinstance(kind, str) or kind not in _ITEMS:
        raise CallRefused(f"{where} is of type {kind!r}; only {', '.join(_ITEMS)} can be read here", param=where)
    return converted(where, raw, _ITEMS[kind])


def _thought(where: str, item: _Reasoning) -> str:
    thought = _text(item.content or item.summary or [])
    if not thought and item.encrypted_content:
        message = f"{where} is encrypted by another server and cannot be read here; leave it out, or send its text"
        raise CallRefused(message, param=where)
    return thought


def _text(content: str | list[_Part]) -> str:
    return content if isinstance(content, str) else "".join(part.text or part.refusal for part in content)


def _parts(where: str, content: str | list[_Part]) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [_part(where, part) for part in content]


def _part(where: str, part: _Part) -> dict[str, Any]:
    if part.type != "input_image":
        return {"type": "text", "text": part.text or part.refusal}
    if part.image_url is None:
        raise CallRefused(f"{where} has an image without image_url; files are not kept here", param=where)
    return image(part.image_url, part.detail)


_INCOMPLETE: Final = {"length": "max_output_tokens", "content_filter": "content_filter"}
_ID_PREFIXES: Final = {"reasoning": "rs", "message": "msg", "function_call": "fc"}
_ABORTED: Final = {"code": "server_error", "message": "the backend aborted the answer"}
_KINDS: Final[dict[str | int, str]] = {"thought": "reasoning_text", "text": "output_text", "refusal": "refusal"}


def _text_part(kind: str, text: str, logprobs: list[Any]) -> dict[str, Any]:
    if kind == "refusal":
        return {"type": kind, "refusal": text}
    more = {"annotations": [], "logprobs": logprobs} if kind == "output_text" else {}
    return {"type": kind, "text": text, **more}


def _usage(usage: Usage) -> dict[str, Any]:
    cached, thought = cached_and_thought(usage)
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": thought or 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


class ResponseWriter(BlockWriter):
    """Writes one answer, whose blocks are the items of the response."""

    refusal = "refusal"

    def __init__(self, request: CallRequest, answer: Answer) -> None:
        super().__init__(answer)
        self._original: Original = request.original
        self._events = 0
        self._status = "completed"  # of an item that is closed
        self._logprobs: list[Any] = []  # of all tokens since the last message was closed
        self._logprobs_sent = 0

    def started(self, event: Started) -> bytes:
        response = self._response("in_progress")
        kinds = ("response.created", "response.in_progress")
        return b"".join([self._event(kind, response=response) for kind in kinds])

    def delta(self, event: Delta) -> bytes:
        self._logprobs.extend(event.logprob_entries)
        return super().delta(event)

    def end(self) -> bytes:
        """The end of the last item and of the response."""
        if self._answer.choices[0].finish_reason in (*_INCOMPLETE, "abort"):
            self._status = "incomplete"
        sent = self._close_all()
        if not self._blocks:
            sent += self._begin("text", "", "") + self._end("text", "")
        response = self._finished()
        return sent + self._event(f"response.{response['status']}", response=response)

    def whole(self) -> bytes:
        """The response as a stream of it says at its end."""
        choice = self._answer.choices[0]
        self.delta(Delta(0, choice.message(), logprob_entries=tuple(choice.logprob_entries)))
        self.end()
        return msgspec.json.encode(self._finished())

    def error(self, error: BackendError) -> bytes:
        """Both events that say it: SDKs raise at the `error` in the first, others wait for the second."""
        body = openai_error(error)
        flat = {name: body[name] for name in ("code", "message", "param")}
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        response = self._response("failed", error={"code": code, "message": str(error)})
        return self._event("error", **flat, error=body) + self._event("response.failed", response=response)

    def _finished(self) -> dict[str, Any]:
        """The response object of an answer that has come to its end."""
        reason, status = self._answer.choices[0].finish_reason, "completed"
        fields: dict[str, Any] = {"usage": _usage(self._answer.token_counts())}
        if reason in _INCOMPLETE:
            status, fields["incomplete_details"] = "incomplete", {"reason": _INCOMPLETE[reason]}
        elif reason == "abort":
            status, fields["error"] = "failed", _ABORTED
        return self._response(status, **fields)

    def _response(self, status: str, **more: Any) -> dict[str, Any]:
        return {
            "id": self._answer.response_id,
            "object": "response",
            "created_at": self._answer.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self._answer.model,
            "output": self._blocks,
            "usage": None,
            **self._original.echoed,
            **more,
        }

    def _begin(self, kind: str | int, call_id: str, name: str) -> bytes:
        if isinstance(kind, int):
            name, namespace = self._original.namespaces.get(name, (name, None))
            called = given(call_id=call_id, name=name, namespace=namespace, arguments="")
            return self._begin_item("function_call", called)
        if kind == "thought":
            sent = self._begin_item("reasoning", {"summary": [], "content": []})
        else:
            sent = self._begin_item("message", {"role": "assistant", "content": []})
        return sent + self._part_event("response.content_part.added", part=_text_part(_KINDS[kind], "", []))

    def _begin_item(self, type: str, fields: dict[str, Any]) -> bytes:
        position = len(self._blocks)
        id = f"{_ID_PREFIXES[type]}_{self._answer.response_id.removeprefix('resp_')}_{position}"
        item = {"id": id, "type": type, **fields, "status": "in_progress"}
        self._blocks.append(item)
        return self._event("response.output_item.added", output_index=position, item=item)

    def _piece(self, kind: str | int, text: str) -> bytes:
        if isinstance(kind, int):
            return self._item_event("response.function_call_arguments.delta", delta=text)
        logprobs = {}
        if kind == "text":
            logprobs["logprobs"] = self._logprobs[self._logprobs_sent :]
            self._logprobs_sent = len(self._logprobs)
        return self._part_event(f"response.{_KINDS[kind]}.delta", delta=text, **logprobs)

    def _end(self, kind: str | int, text: str) -> bytes:
        item = self._blocks[-1]
        item["status"] = self._status
        if isinstance(kind, int):
            item["arguments"] = text
            sent = self._item_event("response.function_call_arguments.done", name=item["name"], arguments=text)
        else:
            part = _text_part(_KINDS[kind], text, self._logprobs)
            item["content"] = [part]
            fields = {name: part[name] for name in ("text", "refusal", "logprobs") if name in part}
            sent = self._part_event(f"response.{_KINDS[kind]}.done", **fields)
            sent += self._part_event("response.content_part.done", part=part)
        if kind == "text":
            self._logprobs, self._logprobs_sent = [], 0
        return sent + self._event("response.output_item.done", output_index=len(self._blocks) - 1, item=item)

    def _part_event(self, kind: str, **fields: Any) -> bytes:
        return self._item_event(kind, content_index=0, **fields)

    def _item_event(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, item_id=self._blocks[-1]["id"], output_index=len(self._blocks) - 1, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._events, **fields}
        self._events += 1
        return server_sent(data, kind)
