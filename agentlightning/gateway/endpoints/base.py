"""The seam between the gateway and a protocol: requests in, answers and errors out; and what protocols share.

Knows no backends, rollouts or HTTP server.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal, Protocol

import msgspec

from agentlightning.errors import BackendError
from agentlightning.gateway.answer import Answer
from agentlightning.gateway.backend import Delta, Started, Usage
from agentlightning.gateway.request import NOT_JSON, CallRefused, CallRequest


class Writer(Protocol):
    """Writes one answer: whole, or as server-sent events, and empty bytes where the client gets nothing."""

    def whole(self) -> bytes:
        """The body of an answer that is not streamed."""
        ...

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

    def writer(self, request: CallRequest, answer: Answer) -> Writer:
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


_PARTS: Final = {"thought": "a thought", "function": "a tool call", None: "a tool's result"}
SHOWN: Final = {"image_url": "an image", "input_audio": "audio", "file": "a file", "video_url": "a video"}
"""Parts beside text that a user can show to a model, if it sees them."""


def chat_of(field: str, turns: Iterable[tuple[str, Sequence[dict[str, Any]]]]) -> list[dict[str, Any]]:
    """The messages of turns (role, parts). A part is one of a message's content, a tool call, a tool's message, or
    `{"type": "thought", "text": …}`. Texts and thoughts of the assistant are joined unchanged, as they were sampled;
    the results of tools come before what else the user says. CallRefused (400) for what cannot stand there."""
    chat: list[dict[str, Any]] = []
    for role, parts in turns:
        of_model, before = role == "assistant", len(chat)
        said: list[dict[str, Any]] = []
        calls: list[dict[str, Any]] = []
        text: list[str] = []
        thoughts: list[str] = []
        for part in parts:
            kind = part.get("type")
            if kind == "text" and of_model:
                text.append(part["text"])
            elif kind == "text" or (kind in SHOWN and not of_model):
                said.append(part)
            elif kind == "function" and of_model:
                calls.append(part)
            elif kind == "thought" and of_model:
                thoughts.append(part["text"])
            elif kind is None and role == "user":
                chat.append(part)
            else:
                why = (
                    f"a message of role {role} holds {(_PARTS | SHOWN)[kind]}, which cannot be shown to the model there"
                )
                raise CallRefused(f"{field}: {why}; send text", code="unsupported_content", param=field)
        if of_model:
            message: dict[str, Any] = {"role": role, "content": "".join(text) or (None if calls else "")}
            if thoughts:
                message["reasoning_content"] = "".join(thoughts)
            chat.append(message | {"tool_calls": calls} if calls else message)
        elif said or len(chat) == before:
            chat.append({"role": role, "content": content_of(said)})
    return chat


def content_of(parts: Sequence[dict[str, Any]]) -> Any:
    """A message's content: one text as a string; several parts unchanged, for the backend to join."""
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts or ""


def thoughts_of(message: dict[str, Any]) -> str:
    """The reasoning in a message, or in a delta of one, under the names that servers have for it."""
    return message.get("reasoning_content") or message.get("reasoning") or ""


def cached_and_thought(usage: Usage) -> tuple[int, int | None]:
    """How many of the prompt's tokens came from a cache, and how many of the answer's are thoughts, where known."""
    read = usage.details.get("prompt_tokens_details") or {}
    made = usage.details.get("completion_tokens_details") or {}
    return read.get("cached_tokens") or 0, made.get("reasoning_tokens")


def arguments_of(name: str, arguments: str) -> msgspec.Raw | str:
    """The arguments of a tool call as a JSON object. Other arguments have no form in most protocols: the call stays
    text."""
    arguments = arguments or "{}"
    try:
        msgspec.json.decode(arguments, type=dict[str, Any])
    except NOT_JSON:
        return f'{{"name": {msgspec.json.encode(name).decode()}, "arguments": {arguments}}}'
    return msgspec.Raw(arguments.encode())


class BlockWriter:
    """Writes an answer of one choice as blocks: thoughts, texts and tool calls. At any time one block at most is open,
    the last; it is closed when another begins. Subclasses write the events, and keep the blocks in `_blocks`."""

    refusal = "text"  # the kind of block that a refusal is

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._blocks: list[dict[str, Any]] = []
        self._open: str | int | None = None  # a kind of text, the index of a tool call, or nothing
        self._written: list[str] = []  # of the open block
        self._calls = 0

    def delta(self, event: Delta) -> bytes:
        message, sent = event.delta, b""
        if thoughts := thoughts_of(message):
            sent += self._add("thought", thoughts)
        if text := message.get("content"):
            sent += self._add("text", text)
        if refusal := message.get("refusal"):
            sent += self._add(self.refusal, refusal)
        for part in message.get("tool_calls") or ():
            index, function = part.get("index", self._calls), part.get("function") or {}
            if self._open != index and index < self._calls:
                raise BackendError(f"the backend went on with tool call {index}, which it had ended")
            self._calls = index + 1
            sent += self._add(index, function.get("arguments") or "", part.get("id"), function.get("name"))
        return sent

    def _add(self, kind: str | int, text: str, call_id: str | None = None, name: str | None = None) -> bytes:
        """More of the open block, or the begin of one; the first part of a tool call brings its id and name."""
        sent = b""
        if self._open != kind:
            sent = self._close()
            self._open, self._written = kind, []
            sent += self._begin(kind, call_id or "", name or "")
        if text:
            self._written.append(text)
            sent += self._piece(kind, text)
        return sent

    def _close(self) -> bytes:
        """The events that end the open block, if there is one."""
        kind, self._open = self._open, None
        return b"" if kind is None else self._end(kind, "".join(self._written))

    def _begin(self, kind: str | int, call_id: str, name: str) -> bytes:
        raise NotImplementedError

    def _piece(self, kind: str | int, text: str) -> bytes:
        raise NotImplementedError

    def _end(self, kind: str | int, text: str) -> bytes:
        raise NotImplementedError
