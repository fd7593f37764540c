"""OpenAI's responses: requests of that protocol in the form of chat completions, and answers in its
own.

    user "U"                                            →  user "U"
    reasoning R, assistant "A", function_call 1 and 2
        →  assistant "A", reasoning_content R, tool_calls [1, 2]
    function_call_output 1                              →  tool (1)
    tool "read" of the namespace "files"                →  function "files__read"
    custom tool "patch"                                 →  function "patch" of one string, `input`

Knows the wire format. No backends, no rollouts, no HTTP server.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec

from agentlightning.errors import BackendError
from agentlightning.gateway.answer import Answer
from agentlightning.gateway.backend import Delta, Started, Usage
from agentlightning.gateway.endpoints.base import (
    BlockWriter,
    Endpoint,
    cached_and_thought,
    openai_error,
    server_sent,
)
from agentlightning.gateway.endpoints.response_items import AgentTool, ItemReader
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
    custom_text,
    given,
    rest_json,
    sampling_fields,
    unsupported,
)
from agentlightning.prompts.replacing import Replaced


class _Format(msgspec.Struct):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class _TextConfig(msgspec.Struct):
    format: _Format | None = None
    verbosity: str | None = None


class _ReasoningConfig(msgspec.Struct):
    # what else it holds is how it is shown: here the answer holds the reasoning itself
    effort: str | None = None


_LOGPROBS: Final = "message.output_text.logprobs"
_INCLUDED: Final = (_LOGPROBS, "reasoning.encrypted_content")  # which is text here
# Fields that cannot be honoured, and the values that ask for nothing.
_REFUSED: Final[dict[str, Any]] = {
    "background": False,
    "conversation": None,
    "prompt": None,
    "moderation": None,
}
# Hints for conversations that become too long, and the values that ask for nothing.
_HINTS: Final[dict[str, Any]] = {"truncation": "disabled", "context_management": []}
_FIELDS = Fields(
    {
        **dict.fromkeys((*_REFUSED, *_HINTS), Any),
        **{
            name: SAMPLING_TYPES[name]
            for name in ("model", "stream", "temperature", "top_p", "top_k", "seed", "stop")
        },
        **{name: SAMPLING_TYPES[name] for name in SHAPING_FIELDS},
        "stream_options": dict[str, Any],  # they only ask for padding here, which is not added
        "input": str | Annotated[list[dict[str, Any]], MANY],
        "instructions": str,
        "previous_response_id": str,
        "store": bool,
        "metadata": dict[str, str],
        "client_metadata": dict[str, Any],
        "tools": Annotated[list[dict[str, Any]], SOME],
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
# A response repeats its request, and has these where they were not given.
_ECHOED: Final[dict[str, Any]] = {
    **dict.fromkeys(("instructions", "temperature", "top_p")),
    "metadata": {},
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
}
_NOT_ECHOED: Final = frozenset(
    # and what it says of itself
    {"model", "input", "stream", "stream_options", "include", "client_metadata"}
    | {"id", "object", "created_at", "status", "error", "incomplete_details", "output", "usage"}
)


class Original(NamedTuple):
    """Parts of a request: what its response repeats, and the agent's tools by the names of the
    model's functions."""

    echoed: dict[str, Any]
    tools: dict[str, AgentTool]


class Responses(Endpoint):
    """`POST /v1/responses`. `CallRequest.original` is what the response repeats of the request."""

    path = "responses"
    id_prefix = "resp_"

    def read(self, body: bytes) -> CallRequest:
        values, unread, raw = _FIELDS.read(body, "model")
        for name, nothing in _REFUSED.items():
            if values.get(name, nothing) != nothing:
                raise unsupported(name, "only OpenAI's own API does this; leave it out")
        reader = ItemReader()
        reader.offer("tools", values.get("tools", []))
        messages = reader.chat(values.get("input", []))
        if not messages and "previous_response_id" not in values:
            raise CallRefused("input is empty; a response answers something", param="input")
        asked_for = values.get("include", ())
        logprobs = _LOGPROBS in asked_for
        if values.get("top_logprobs") and not logprobs:
            raise CallRefused(f"top_logprobs needs {_LOGPROBS!r} in include", param="top_logprobs")
        dropped = reader.dropped | {
            f"include.{name}"[:100] for name in asked_for if name not in _INCLUDED
        }
        dropped |= {
            name for name, nothing in _HINTS.items() if values.get(name, nothing) != nothing
        }
        tools, tool_choice = reader.chosen(values.get("tool_choice"))
        instructions = (
            [{"role": "system", "content": values["instructions"]}]
            if "instructions" in values
            else []
        )
        echoed = _ECHOED | {
            name: raw[name] for name in (*values, *unread) if name not in _NOT_ECHOED
        }
        return CallRequest(
            messages=[*instructions, *messages],
            instructions=len(instructions),
            continues=values.get("previous_response_id"),
            continuable=values.get("store", True),
            tools=tools,
            tool_choice=tool_choice,
            logprobs=logprobs,
            top_logprobs=values.get("top_logprobs", 0),
            extra=unread | _chat_fields(values),
            dropped=tuple(sorted(dropped)),
            original=Original(echoed, reader.tools),
            request_json=rest_json(raw, "input", "tools"),
            **sampling_fields(values, values.get("max_output_tokens")),
        )

    def repeating(self, request: CallRequest, replaced: Replaced) -> CallRequest:
        own = request.original._replace(echoed=replaced.repeated(request.original.echoed))
        return msgspec.structs.replace(request, original=own)

    def writer(self, request: CallRequest, answer: Answer) -> ResponseWriter:
        return ResponseWriter(request, answer)


def _chat_fields(values: dict[str, Any]) -> dict[str, Any]:
    """The fields that chat completions know by another name, or in another place."""
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
    described = given(
        name=format.name, schema=format.schema, description=format.description, strict=format.strict
    )
    return {"type": format.type} | (
        {"json_schema": described} if format.type == "json_schema" else {}
    )


_INCOMPLETE: Final = {"length": "max_output_tokens", "content_filter": "content_filter"}
_ID_PREFIXES: Final = {
    "reasoning": "rs",
    "message": "msg",
    "function_call": "fc",
    "custom_tool_call": "ctc",
}
_ABORTED: Final = {"code": "server_error", "message": "the backend aborted the answer"}
_KINDS: Final[dict[str | int, str]] = {
    "thought": "reasoning_text",
    "text": "output_text",
    "refusal": "refusal",
}


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
        """Both events that say it: SDKs raise at the `error` in the first, others wait for the
        second."""
        body = openai_error(error)
        flat = {name: body[name] for name in ("code", "message", "param")}
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        response = self._response("failed", error={"code": code, "message": str(error)})
        return self._event("error", **flat, error=body) + self._event(
            "response.failed", response=response
        )

    def _finished(self) -> dict[str, Any]:
        """The response object of an answer that has come to its end."""
        reason = self._answer.choices[0].finish_reason
        status = "completed"
        fields: dict[str, Any] = {"usage": _usage(self._answer.token_counts())}
        if reason in _INCOMPLETE:
            status = "incomplete"
            fields["incomplete_details"] = {"reason": _INCOMPLETE[reason]}
        elif reason == "abort":
            status = "failed"
            fields["error"] = _ABORTED
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
            tool = self._original.tools.get(name, AgentTool(name))
            called = given(call_id=call_id, name=tool.name, namespace=tool.namespace)
            if tool.custom:
                return self._begin_item("custom_tool_call", called | {"input": ""})
            return self._begin_item("function_call", called | {"arguments": ""})
        if kind == "thought":
            sent = self._begin_item("reasoning", {"summary": [], "content": []})
        else:
            sent = self._begin_item("message", {"role": "assistant", "content": []})
        return sent + self._part_event(
            "response.content_part.added", part=_text_part(_KINDS[kind], "", [])
        )

    def _begin_item(self, type: str, fields: dict[str, Any]) -> bytes:
        position = len(self._blocks)
        id = f"{_ID_PREFIXES[type]}_{self._answer.response_id.removeprefix('resp_')}_{position}"
        item = {"id": id, "type": type, **fields, "status": "in_progress"}
        self._blocks.append(item)
        return self._event("response.output_item.added", output_index=position, item=item)

    def _piece(self, kind: str | int, text: str) -> bytes:
        if isinstance(kind, int):
            if self._blocks[-1]["type"] == "custom_tool_call":
                return b""  # its input is known when all arguments are
            return self._item_event("response.function_call_arguments.delta", delta=text)
        logprobs = {}
        if kind == "text":
            logprobs["logprobs"] = self._logprobs[self._logprobs_sent :]
            self._logprobs_sent = len(self._logprobs)
        return self._part_event(f"response.{_KINDS[kind]}.delta", delta=text, **logprobs)

    def _end(self, kind: str | int, text: str) -> bytes:
        item = self._blocks[-1]
        item["status"] = self._status
        if item["type"] == "custom_tool_call":
            item["input"] = text = custom_text(text)
            sent = self._item_event("response.custom_tool_call_input.delta", delta=text)
            sent += self._item_event("response.custom_tool_call_input.done", input=text)
        elif isinstance(kind, int):
            item["arguments"] = text
            sent = self._item_event(
                "response.function_call_arguments.done", name=item["name"], arguments=text
            )
        else:
            part = _text_part(_KINDS[kind], text, self._logprobs)
            item["content"] = [part]
            fields = {name: part[name] for name in ("text", "refusal", "logprobs") if name in part}
            sent = self._part_event(f"response.{_KINDS[kind]}.done", **fields)
            sent += self._part_event("response.content_part.done", part=part)
        if kind == "text":
            self._logprobs = []
            self._logprobs_sent = 0
        return sent + self._event(
            "response.output_item.done", output_index=len(self._blocks) - 1, item=item
        )

    def _part_event(self, kind: str, **fields: Any) -> bytes:
        return self._item_event(kind, content_index=0, **fields)

    def _item_event(self, kind: str, **fields: Any) -> bytes:
        return self._event(
            kind, item_id=self._blocks[-1]["id"], output_index=len(self._blocks) - 1, **fields
        )

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._events, **fields}
        self._events += 1
        return server_sent(data, kind)
