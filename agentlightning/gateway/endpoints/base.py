"""The seam between the gateway and a protocol: requests in, answers and errors out; and what OpenAI's protocols share.

Knows no backends, rollouts or HTTP server.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

import msgspec

from agentlightning.errors import BackendError
from agentlightning.gateway.answer import Answer, Choice
from agentlightning.gateway.backend import Delta, Started, Usage
from agentlightning.gateway.request import CallRefused, CallRequest


class StreamWriter(Protocol):
    """Writes one streamed answer as server-sent events; empty bytes where the client gets nothing."""

    def started(self, event: Started) -> bytes:
        """What comes before the first token."""
        ...

    def delta(self, event: Delta) -> bytes: ...

    def end(self) -> bytes:
        """How each choice finished, usage and the end of the stream: sent when the call has been stored."""
        ...

    def error(self, error: BackendError) -> bytes:
        """An error in mid-stream, as the protocol's SDKs expect it."""
        ...


class Endpoint:
    """One protocol under `/v1/{path}`. `operation` is its `gen_ai.operation.name`; `id_prefix` begins the ids of its
    answers. One that is only ever passed through writes no answers."""

    path: str
    operation = "chat"
    id_prefix: str
    counted_as = "input_tokens"

    def read(self, body: bytes) -> CallRequest:
        """The request in `body`. CallRefused (400) names the field that is missing, of the wrong type, out of range or
        not supported."""
        raise NotImplementedError

    def whole(self, request: CallRequest, answer: Answer) -> bytes:
        """The body of an answer that is not streamed."""
        raise NotImplementedError

    def stream(self, request: CallRequest, answer: Answer) -> StreamWriter:
        raise NotImplementedError

    def error(self, error: BackendError) -> bytes:
        """The body of an answer with `error.status`."""
        return openai_error(error)


def server_sent(data: Any, event: str | None = None) -> bytes:
    """One server-sent event with JSON data."""
    name = b"" if event is None else b"event: " + event.encode() + b"\n"
    return name + b"data: " + msgspec.json.encode(data) + b"\n\n"


_ERROR_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


def openai_error(error: BackendError) -> bytes:
    """`{"error": {message, type, param, code}}`, as OpenAI's SDKs read it."""
    return msgspec.json.encode({"error": openai_error_fields(error)})


def openai_error_fields(error: BackendError) -> dict[str, Any]:
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    param = error.param if isinstance(error, CallRefused) else None
    return {"message": str(error), "type": kind, "param": param, "code": error.code}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        **usage.details,
    }


def _object(answer: Answer, kind: str) -> dict[str, Any]:
    return {"id": answer.response_id, "object": kind, "created": answer.created, "model": answer.model}


def choice_body(index: int, said: dict[str, Any], ended: Choice | None = None) -> dict[str, Any]:
    """One choice, or a part of it, with `said` in it, of chat completions or completions."""
    reason = None if ended is None else ended.finish_reason
    body: dict[str, Any] = {"index": index, **said, "logprobs": None, "finish_reason": reason}
    if ended is not None and ended.stop_string is not None:
        body["stop_reason"] = ended.stop_string
    return body


def whole_body(answer: Answer, kind: str, choices: list[dict[str, Any]], **more: Any) -> bytes:
    """The body of a whole answer, of chat completions or completions."""
    usage = _usage(answer.token_counts())
    return msgspec.json.encode(
        {**_object(answer, kind), "choices": choices, "usage": usage, **answer.started.extra, **more}
    )


class OpenAIStream:
    """What the streams of chat completions and completions share: each event is `data: {…}` of one `kind` of object,
    and the last is `[DONE]`."""

    kind: str

    def __init__(self, request: CallRequest, answer: Answer) -> None:
        self._request = request
        self._answer = answer
        self._head = _object(answer, self.kind)

    def said(self, delta: dict[str, Any]) -> dict[str, Any]:
        """How a part of a choice says what is new."""
        raise NotImplementedError

    def logprobs(self, event: Delta) -> dict[str, Any]:
        raise NotImplementedError

    def delta(self, event: Delta) -> bytes:
        request = self._request
        if not event.delta and not ((request.return_token_ids or request.logprobs) and event.token_ids):
            return b""
        choice = choice_body(event.index, self.said(event.delta))
        if request.logprobs:
            choice["logprobs"] = self.logprobs(event)
        if request.return_token_ids:
            choice["token_ids"] = event.token_ids
            return self.event([choice], policy_version=event.version)
        return self.event([choice])

    def end(self) -> bytes:
        """The last event of each choice, usage if it was asked for, and the end of the stream."""
        ends = [
            self.event([choice_body(index, self.said({}), ended)]) for index, ended in enumerate(self._answer.choices)
        ]
        if self._request.include_usage:
            ends.append(self.event([], usage=_usage(self._answer.token_counts())))
        return b"".join(ends) + b"data: [DONE]\n\n"

    def error(self, error: BackendError) -> bytes:
        return b"data: " + openai_error(error) + b"\n\n"

    def event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return server_sent({**self._head, "choices": choices, **more})
