"""Answers in the form of OpenAI's responses: the response object, and the events of a stream.

Knows the wire format of answers; `responses` reads the requests. No backends, no rollouts, no HTTP server.
"""

from __future__ import annotations

from typing import Any, Final, Literal, NamedTuple, TypeAlias

import msgspec

from agentlightning.errors import BackendError
from agentlightning.gateway.answer import Answer
from agentlightning.gateway.backend import Delta, Started, Usage
from agentlightning.gateway.endpoints.base import cached_and_thought, openai_error, server_sent
from agentlightning.gateway.request import CallRequest, given

_INCOMPLETE: Final = {"length": "max_output_tokens", "content_filter": "content_filter"}
_ID_PREFIXES: Final = {"reasoning": "rs", "message": "msg", "function_call": "fc"}
_ABORTED: Final = {"code": "server_error", "message": "the backend aborted the answer"}


class Original(NamedTuple):
    """Of a request: what its response repeats, and (name, namespace) of the tools that the model knows by another name
    than the agent."""

    echoed: dict[str, Any]
    namespaces: dict[str, tuple[str, str]]


_TextKind: TypeAlias = Literal["reasoning_text", "output_text", "refusal"]


def _text_part(kind: _TextKind, text: str, logprobs: list[Any]) -> dict[str, Any]:
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


class ResponseWriter:
    """Writes one answer. At any time one item at most is open, the last; it is closed when another begins.

    `_kind` is what is open: a kind of text, the index of a tool call, or nothing."""

    def __init__(self, request: CallRequest, answer: Answer) -> None:
        self._original: Original = request.original
        self._answer = answer
        self._events = 0
        self._items: list[dict[str, Any]] = []
        self._kind: _TextKind | int | None = None
        self._written: list[str] = []  # of the open item
        self._logprobs: list[Any] = []  # of all tokens since the last message was closed
        self._logprobs_sent = 0
        self._calls = 0

    def started(self, event: Started) -> bytes:
        response = self._response("in_progress")
        kinds = ("response.created", "response.in_progress")
        return b"".join([self._event(kind, response=response) for kind in kinds])

    def delta(self, event: Delta) -> bytes:
        self._logprobs.extend(event.logprob_entries)
        message = event.delta
        texts: dict[_TextKind, str | None] = {
            "reasoning_text": message.get("reasoning_content") or message.get("reasoning"),
            "output_text": message.get("content"),
            "refusal": message.get("refusal"),
        }
        sent = [self._text(kind, text) for kind, text in texts.items() if text]
        sent += [self._tool_call(part) for part in message.get("tool_calls") or ()]
        return b"".join(sent)

    def end(self) -> bytes:
        """The end of the last item and of the response."""
        cut = self._answer.choices[0].finish_reason in (*_INCOMPLETE, "abort")
        sent = self._begin_text("output_text") if not self._items else b""
        sent += self._close("incomplete" if cut else "completed")
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
        reason, extra = self._answer.choices[0].finish_reason, self._answer.started.extra
        fields: dict[str, Any] = {"usage": _usage(self._answer.token_counts())}
        if "service_tier" in extra:
            fields["service_tier"] = extra["service_tier"]
        status = "completed"
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
            "output": self._items,
            "usage": None,
            **self._original.echoed,
            **more,
        }

    def _text(self, kind: _TextKind, text: str) -> bytes:
        sent = b"" if self._kind == kind else self._close() + self._begin_text(kind)
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
        sent, arguments = b"", function.get("arguments")
        if self._kind != index:
            if index < self._calls:
                raise BackendError(f"the backend went on with tool call {index}, which it had ended")
            self._calls = index + 1
            name = function.get("name") or ""
            name, namespace = self._original.namespaces.get(name, (name, None))
            called = given(call_id=part.get("id") or "", name=name, namespace=namespace, arguments="")
            sent = self._close() + self._begin(index, "function_call", **called)
        if not arguments:
            return sent
        self._written.append(arguments)
        return sent + self._item_event("response.function_call_arguments.delta", delta=arguments)

    def _begin(self, kind: _TextKind | int, type: str, **fields: Any) -> bytes:
        self._kind, self._written, position = kind, [], len(self._items)
        id = f"{_ID_PREFIXES[type]}_{self._answer.response_id.removeprefix('resp_')}_{position}"
        item = {"id": id, "type": type, **fields, "status": "in_progress"}
        self._items.append(item)
        return self._event("response.output_item.added", output_index=position, item=item)

    def _close(self, status: Literal["completed", "incomplete"] = "completed") -> bytes:
        """The events that end the open item, if there is one."""
        kind, text = self._kind, "".join(self._written)
        if kind is None:
            return b""
        item = self._items[-1]
        item["status"] = status
        if isinstance(kind, int):
            item["arguments"] = text
            sent = self._item_event("response.function_call_arguments.done", name=item["name"], arguments=text)
        else:
            part = _text_part(kind, text, self._logprobs)
            item["content"] = [part]
            fields = {name: part[name] for name in ("text", "refusal", "logprobs") if name in part}
            sent = self._part_event(f"response.{kind}.done", **fields)
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
        data = {"type": kind, "sequence_number": self._events, **fields}
        self._events += 1
        return server_sent(data, kind)
