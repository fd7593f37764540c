"""Answers in the form of OpenAI's responses: the response object, and the events of one that is streamed.

Knows the wire format of answers; `responses` reads the requests. No backends, no rollouts, no HTTP server.
"""

from __future__ import annotations

from typing import Any, Final, Literal, NamedTuple, TypeAlias

import msgspec

from agentlightning.errors import BackendError
from agentlightning.gateway.answer import Answer
from agentlightning.gateway.backend import Delta, Started, Usage
from agentlightning.gateway.endpoints.base import openai_error_fields, server_sent
from agentlightning.gateway.request import NOT_JSON, CallRequest, given

_INCOMPLETE: Final = {"length": "max_output_tokens", "content_filter": "content_filter"}
_ID_PREFIXES: Final = {"reasoning": "rs", "message": "msg", "function_call": "fc", "custom_tool_call": "ctc"}
_ABORTED: Final = {"code": "server_error", "message": "the backend aborted the answer"}


class Called(NamedTuple):
    """What the agent calls a tool. A `custom` one takes a text of any form."""

    name: str
    namespace: str | None = None
    custom: bool = False


class Original(NamedTuple):
    """Of a request: what its response repeats, and the tools that the model knows by another name than the agent."""

    echoed: dict[str, Any]
    called: dict[str, Called]


_Status: TypeAlias = Literal["completed", "incomplete"]
_TextKind: TypeAlias = Literal["reasoning_text", "output_text", "refusal"]


def _text_part(kind: _TextKind, text: str, logprobs: list[Any]) -> dict[str, Any]:
    match kind:
        case "output_text":
            return {"type": kind, "text": text, "annotations": [], "logprobs": logprobs}
        case "reasoning_text":
            return {"type": kind, "text": text}
        case "refusal":
            return {"type": kind, "refusal": text}


class _FreeText(msgspec.Struct):
    input: str


def _free_text(arguments: str) -> str:
    """What a custom tool is given. Arguments of another form are a text as well."""
    try:
        return msgspec.json.decode(arguments, type=_FreeText).input
    except NOT_JSON:
        return arguments


def whole_response(request: CallRequest, answer: Answer) -> bytes:
    """The response as a stream of it says at its end."""
    choice, writer = answer.choices[0], ResponseWriter(request, answer, silent=True)
    writer.delta(Delta(0, choice.message(), logprob_entries=tuple(choice.logprob_entries)))
    writer.end()
    return msgspec.json.encode(writer.finished())


def _last_status(answer: Answer) -> _Status:
    return "incomplete" if answer.choices[0].finish_reason in (*_INCOMPLETE, "abort") else "completed"


def _usage(usage: Usage) -> dict[str, Any]:
    read = usage.details.get("prompt_tokens_details", {})
    made = usage.details.get("completion_tokens_details", {})
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": read.get("cached_tokens") or 0, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": made.get("reasoning_tokens") or 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


class ResponseWriter:
    """Writes one streamed answer, or, if it is `silent`, gathers its items only. At any time one item at most is open,
    the last; it is closed when another begins.

    `_kind` is what is open: a kind of text, the index of a tool call, or nothing."""

    def __init__(self, request: CallRequest, answer: Answer, *, silent: bool = False) -> None:
        self._request = request
        self._silent = silent
        self._answer = answer
        self._events = 0
        self._items: list[dict[str, Any]] = []
        self._kind: _TextKind | int | None = None
        self._written: list[str] = []  # of the open item
        self._logprobs: list[Any] = []  # of all tokens since the last message was closed
        self._logprobs_sent = 0
        self._calls = 0

    def started(self, event: Started) -> bytes:
        response = self._response("in_progress", [])
        kinds = ("response.created", "response.in_progress")
        return b"".join([self._event(kind, response=response) for kind in kinds])

    def delta(self, event: Delta) -> bytes:
        self._logprobs.extend(event.logprob_entries)
        said = event.delta
        texts: dict[_TextKind, str | None] = {
            "reasoning_text": said.get("reasoning_content") or said.get("reasoning"),
            "output_text": said.get("content"),
            "refusal": said.get("refusal"),
        }
        sent = [self._text(kind, text) for kind, text in texts.items() if text]
        sent += [self._tool_call(part) for part in said.get("tool_calls") or ()]
        return b"".join(sent)

    def end(self) -> bytes:
        """The end of the last item and of the response."""
        sent = self._begin_text("output_text") if not self._items else b""
        sent += self._close(_last_status(self._answer))
        response = self.finished()
        return sent + self._event(f"response.{response['status']}", response=response)

    def finished(self) -> dict[str, Any]:
        """The response object of an answer that has come to its end."""
        answer = self._answer
        reason = answer.choices[0].finish_reason
        fields: dict[str, Any] = {"usage": _usage(answer.token_counts())}
        if "service_tier" in answer.started.extra:
            fields["service_tier"] = answer.started.extra["service_tier"]
        status = "completed"
        if reason in _INCOMPLETE:
            status, fields["incomplete_details"] = "incomplete", {"reason": _INCOMPLETE[reason]}
        elif reason == "abort":
            status, fields["error"] = "failed", _ABORTED
        return self._response(status, self._items, **fields)

    def error(self, error: BackendError) -> bytes:
        """Both events that say it: SDKs raise at the `error` in the first, others wait for the second."""
        told = openai_error_fields(error)
        flat = {name: told[name] for name in ("code", "message", "param")}
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        response = self._response("failed", self._items, error={"code": code, "message": str(error)})
        return self._event("error", **flat, error=told) + self._event("response.failed", response=response)

    def _response(self, status: str, items: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {
            "id": self._answer.response_id,
            "object": "response",
            "created_at": self._answer.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self._answer.model,
            "output": items,
            "usage": None,
            **self._request.original.echoed,
            **more,
        }

    def _text(self, kind: _TextKind, text: str) -> bytes:
        sent = b"" if self._kind == kind else self._close("completed") + self._begin_text(kind)
        self._written.append(text)
        logprobs = {}
        if kind == "output_text":
            logprobs["logprobs"] = self._logprobs[self._logprobs_sent :]
            self._logprobs_sent = len(self._logprobs)
        return sent + self._part_event(f"response.{kind}.delta", delta=text, **logprobs)

    def _begin_text(self, kind: _TextKind) -> bytes:
        if kind == "reasoning_text":
            sent = self._begin(kind, "reasoning", summary=[], content=[])
        else:
            sent = self._begin(kind, "message", role="assistant", content=[])
        return sent + self._part_event("response.content_part.added", part=_text_part(kind, "", []))

    def _tool_call(self, part: dict[str, Any]) -> bytes:
        """A part of a tool call: the first of an index brings id and name, later ones more of the arguments."""
        index, function = part.get("index", self._calls), part.get("function") or {}
        sent = b""
        if self._kind != index:
            if index < self._calls:
                raise BackendError(f"the backend went on with tool call {index}, which it had ended")
            self._calls = index + 1
            sent = self._close("completed") + self._begin_call(index, part.get("id") or "", function.get("name") or "")
        arguments = function.get("arguments")
        if not arguments:
            return sent
        self._written.append(arguments)
        if "input" in self._items[-1]:  # its text is known at the end
            return sent
        return sent + self._item_event("response.function_call_arguments.delta", delta=arguments)

    def _begin_call(self, index: int, call_id: str, told: str) -> bytes:
        name, namespace, custom = self._request.original.called.get(told, Called(told))
        kind, empty = ("custom_tool_call", {"input": ""}) if custom else ("function_call", {"arguments": ""})
        return self._begin(index, kind, call_id=call_id, **given(name=name, namespace=namespace), **empty)

    def _begin(self, kind: _TextKind | int, type: str, **fields: Any) -> bytes:
        self._kind, self._written, position = kind, [], len(self._items)
        id = f"{_ID_PREFIXES[type]}_{self._answer.response_id.removeprefix('resp_')}_{position}"
        item = {"id": id, "type": type, **fields, "status": "in_progress"}
        self._items.append(item)
        return self._event("response.output_item.added", output_index=position, item=item)

    def _close(self, status: _Status) -> bytes:
        """The events that end the open item, if there is one."""
        kind, text = self._kind, "".join(self._written)
        if kind is None:
            return b""
        item = self._items[-1]
        item["status"] = status
        if "input" in item:
            item["input"] = _free_text(text)
            sent = self._item_event("response.custom_tool_call_input.done", input=item["input"])
        elif isinstance(kind, int):
            item["arguments"] = text
            sent = self._item_event("response.function_call_arguments.done", name=item["name"], arguments=text)
        else:
            part = _text_part(kind, text, self._logprobs)
            item["content"] = [part]
            told = {name: part[name] for name in ("text", "refusal", "logprobs") if name in part}
            sent = self._part_event(f"response.{kind}.done", **told)
            sent += self._part_event("response.content_part.done", part=part)
        if kind == "output_text":
            self._logprobs, self._logprobs_sent = [], 0
        self._kind = None
        return sent + self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _part_event(self, kind: str, **fields: Any) -> bytes:
        return self._item_event(kind, content_index=0, **fields)

    def _item_event(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, item_id=self._items[-1]["id"], output_index=len(self._items) - 1, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        if self._silent:
            return b""
        data = {"type": kind, "sequence_number": self._events, **fields}
        self._events += 1
        return server_sent(data, kind)
