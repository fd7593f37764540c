"""The seam between the gateway and a protocol: requests in, answers and errors out; and what protocols share.

Knows no backends, rollouts or HTTP server.
"""

from __future__ import annotations

from typing import Any, Final, Literal, Protocol

import msgspec

from agentlightning.errors import BackendError
from agentlightning.gateway.answer import Answer
from agentlightning.gateway.backend import Delta, Started, Usage
from agentlightning.gateway.request import NOT_JSON, CallRefused, CallRequest


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
    answers, `counted_as` names a count of tokens. An endpoint that is only passed through writes no answers."""

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
        return msgspec.json.encode({"error": openai_error(error)})


def server_sent(data: Any, event: str | None = None) -> bytes:
    """One server-sent event with JSON data."""
    name = b"" if event is None else b"event: " + event.encode() + b"\n"
    return name + b"data: " + msgspec.json.encode(data) + b"\n\n"


# HTTP status → the kinds of error of OpenAI, Anthropic and Google.
_ERRORS: Final = {
    401: ("authentication_error", "authentication_error", "UNAUTHENTICATED"),
    403: ("permission_error", "permission_error", "PERMISSION_DENIED"),
    404: ("not_found_error", "not_found_error", "NOT_FOUND"),
    409: ("invalid_request_error", "invalid_request_error", "ABORTED"),
    413: ("invalid_request_error", "request_too_large", "INVALID_ARGUMENT"),
    429: ("rate_limit_error", "rate_limit_error", "RESOURCE_EXHAUSTED"),
    503: ("server_error", "overloaded_error", "UNAVAILABLE"),
    504: ("server_error", "timeout_error", "DEADLINE_EXCEEDED"),
    529: ("server_error", "overloaded_error", "INTERNAL"),
}
_OTHER_4XX: Final = ("invalid_request_error", "invalid_request_error", "INVALID_ARGUMENT")
_OTHER_5XX: Final = ("server_error", "api_error", "INTERNAL")


def error_kind(status: int, protocol: Literal["openai", "anthropic", "google"]) -> str:
    kinds = _ERRORS.get(status, _OTHER_4XX if status < 500 else _OTHER_5XX)
    return kinds[("openai", "anthropic", "google").index(protocol)]


def openai_error(error: BackendError) -> dict[str, Any]:
    param = error.param if isinstance(error, CallRefused) else None
    return {"message": str(error), "type": error_kind(error.status, "openai"), "param": param, "code": error.code}


def thoughts_and_text(message: dict[str, Any]) -> tuple[str, str]:
    """What a message, or a delta of one, holds of each, under the names that servers have for them."""
    thoughts = message.get("reasoning_content") or message.get("reasoning") or ""
    return thoughts, message.get("content") or message.get("refusal") or ""


def cached_and_thought(usage: Usage) -> tuple[int, int | None]:
    """How many of the prompt's tokens came from a cache, and how many of the answer's are thoughts, where known."""
    read = usage.details.get("prompt_tokens_details") or {}
    made = usage.details.get("completion_tokens_details") or {}
    return read.get("cached_tokens") or 0, made.get("reasoning_tokens")


def arguments_of(call: dict[str, Any]) -> msgspec.Raw | str:
    """The arguments of a tool call as a JSON object. Other arguments have no form in most protocols: the call stays
    text."""
    name, arguments = call["function"]["name"], call["function"]["arguments"] or "{}"
    try:
        msgspec.json.decode(arguments, type=dict[str, Any])
    except NOT_JSON:
        return f'{{"name": {msgspec.json.encode(name).decode()}, "arguments": {arguments}}}'
    return msgspec.Raw(arguments.encode())
