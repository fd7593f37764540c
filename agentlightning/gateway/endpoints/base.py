"""The seam between the gateway and a protocol: requests in, answers and errors out; and what
protocols share.

Knows no backends, rollouts or HTTP server.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal, NamedTuple, Protocol

import msgspec

from agentlightning.errors import BackendError
from agentlightning.gateway.answer import Answer
from agentlightning.gateway.backend import Delta, Started, Usage
from agentlightning.gateway.request import NOT_JSON, CallRefused, CallRequest, is_object
from agentlightning.prompts.replacing import Replaced


class Writer(Protocol):
    """Writes one answer: whole, or as server-sent events, and empty bytes where the client gets
    nothing."""

    def whole(self) -> bytes:
        """The body of an answer that is not streamed."""
        ...

    def started(self, event: Started) -> bytes:
        """The events before the first token."""
        ...

    def delta(self, event: Delta) -> bytes: ...

    def end(self) -> bytes:
        """The finish reason of each choice, usage and the end of the stream: sent when the call has
        been stored."""
        ...

    def error(self, error: BackendError) -> bytes:
        """An error in mid-stream, as the protocol's SDKs expect it."""
        ...


class Endpoint:
    """One protocol under `/v1/{path}`. `operation` is its `gen_ai.operation.name`; `id_prefix`
    begins the ids of its answers, `counted_as` names a count of tokens. An endpoint that is only
    passed through writes no answers."""

    path: str
    operation = "chat"
    id_prefix: str
    counted_as = "input_tokens"

    def read(self, body: bytes) -> CallRequest:
        """The request in `body`. CallRefused (400) names the field that is missing, of the wrong
        type, out of range or not supported."""
        raise NotImplementedError

    def repeating(self, request: CallRequest, replaced: Replaced) -> CallRequest:
        """The request whose answer repeats what the agent sent, where the protocol has that."""
        return request

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
    return {
        "message": str(error),
        "type": error_kind(error.status, "openai"),
        "param": param,
        "code": error.code,
    }


_PARTS: Final = {"thought": "a thought", "function": "a tool call", None: "a tool's result"}
SHOWN: Final = {
    "image_url": "an image",
    "input_audio": "audio",
    "file": "a file",
    "video_url": "a video",
}
"""Parts beside text that a user can show to a model, if it sees them."""


def chat_of(
    field: str, turns: Iterable[tuple[str, Sequence[dict[str, Any]]]]
) -> list[dict[str, Any]]:
    """The messages of turns (role, parts). A part is one of a message's content, a tool call, a
    tool's message, or `{"type": "thought", "text": …}`. Texts and thoughts of the assistant are
    joined unchanged, as they were sampled; the results of tools come before what else the user
    says. CallRefused (400) for what cannot stand there."""
    chat: list[dict[str, Any]] = []
    for role, parts in turns:
        of_model = role == "assistant"
        before = len(chat)
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
                    f"a message of role {role} holds {(_PARTS | SHOWN)[kind]}, which cannot be "
                    "shown to the model there"
                )
                raise CallRefused(
                    f"{field}: {why}; send text", code="unsupported_content", param=field
                )
        if of_model:
            message: dict[str, Any] = {
                "role": role,
                "content": "".join(text) or (None if calls else ""),
            }
            if thoughts:
                message["reasoning_content"] = "".join(thoughts)
            chat.append(message | {"tool_calls": calls} if calls else message)
        elif said or len(chat) == before:
            chat.append({"role": role, "content": content_of(said)})
    return chat


def content_of(parts: Sequence[dict[str, Any]]) -> Any:
    """A message's content: one text as a string; several parts unchanged, for the backend to
    join."""
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts or ""


def thoughts_of(message: dict[str, Any]) -> str:
    """The reasoning in a message, or in a delta of one, under the names that servers have for
    it."""
    return message.get("reasoning_content") or message.get("reasoning") or ""


def cached_and_thought(usage: Usage) -> tuple[int, int | None]:
    """The number of the prompt's tokens from a cache, and of the answer's that are thoughts, where
    known."""
    read = usage.details.get("prompt_tokens_details") or {}
    made = usage.details.get("completion_tokens_details") or {}
    return read.get("cached_tokens") or 0, made.get("reasoning_tokens")


def arguments_of(name: str, arguments: str) -> msgspec.Raw | str:
    """The arguments of a tool call as a JSON object. Other arguments have no form in most
    protocols: the call stays text."""
    arguments = arguments or "{}"
    try:
        msgspec.json.decode(arguments, type=dict[str, Any])
    except NOT_JSON:
        return f'{{"name": {msgspec.json.encode(name).decode()}, "arguments": {arguments}}}'
    return msgspec.Raw(arguments.encode())


class BlockWriter:
    """Writes an answer of one choice as blocks: thoughts, texts and tool calls. At any time one
    block at most is open, the last; it is closed when another begins. What comes while a tool call
    is open whose arguments are no object yet is held until they are, as parts of calls may
    interleave. Subclasses write the events, and keep the blocks in `_blocks`."""

    refusal = "text"  # the kind of block that a refusal is

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._blocks: list[dict[str, Any]] = []
        self._open: _Part | None = None
        self._written: list[str] = []  # of the open block
        self._held: list[_Part] = []
        self._calls: set[str | int] = set()  # those that have been open

    def delta(self, event: Delta) -> bytes:
        message = event.delta
        parts = list[_Part]()
        if thoughts := thoughts_of(message):
            parts.append(_Part("thought", thoughts))
        if text := message.get("content"):
            parts.append(_Part("text", text))
        if refusal := message.get("refusal"):
            parts.append(_Part(self.refusal, refusal))
        for position, part in enumerate(message.get("tool_calls") or ()):
            function = part.get("function") or {}
            arguments = function.get("arguments") or ""
            name = function.get("name") or ""
            parts.append(_Part(part.get("index", position), arguments, part.get("id") or "", name))
        return b"".join(map(self._say, parts))

    def _say(self, part: _Part) -> bytes:
        """Write a part, or hold it."""
        current = self._open
        if current is None or not isinstance(current.kind, int):
            return self._add(part)
        if part.kind != current.kind:
            if self._held or not is_object("".join(self._written)):
                self._held.append(part)
                return b""
            return self._add(part)
        sent = self._add(part)
        if self._held and is_object("".join(self._written)):
            held = self._held
            self._held = []
            sent += b"".join(map(self._say, held))
        return sent

    def _add(self, part: _Part) -> bytes:
        """More of the open block, or another block. That of a tool call begins with its arguments:
        its name may come in several parts."""
        sent = b""
        if self._open is None or self._open.kind != part.kind:
            if part.kind in self._calls:
                raise BackendError(
                    f"the backend went on with tool call {part.kind}, which it had ended"
                )
            sent = self._close()
            self._open = part._replace(text="")
            self._written = []
            if isinstance(part.kind, int):
                self._calls.add(part.kind)
            else:
                sent += self._begin(part.kind, "", "")
        elif part.name:
            self._open = self._open._replace(name=self._open.name + part.name)
        if part.text:
            sent += b"" if self._written else self._begin_call(self._open)
            self._written.append(part.text)
            sent += self._piece(part.kind, part.text)
        return sent

    def _begin_call(self, call: _Part) -> bytes:
        return self._begin(call.kind, call.id, call.name) if isinstance(call.kind, int) else b""

    def _close(self) -> bytes:
        """The events that end the open block, if there is one."""
        ended = self._open
        self._open = None
        if ended is None:
            return b""
        sent = b"" if self._written else self._begin_call(ended)
        return sent + self._end(ended.kind, "".join(self._written))

    def _close_all(self) -> bytes:
        """The events that end the open block and write whole what was held."""
        sent = self._close()
        while self._held:
            kind = self._held[0].kind
            of_kind = [part for part in self._held if part.kind == kind]
            self._held = [part for part in self._held if part.kind != kind]
            sent += b"".join(map(self._add, of_kind)) + self._close()
        return sent

    def _begin(self, kind: str | int, call_id: str, name: str) -> bytes:
        raise NotImplementedError

    def _piece(self, kind: str | int, text: str) -> bytes:
        raise NotImplementedError

    def _end(self, kind: str | int, text: str) -> bytes:
        raise NotImplementedError


class _Part(NamedTuple):
    """Part of a block: of a kind of text, or of the tool call of this index, whose first part has
    its `id`."""

    kind: str | int
    text: str
    id: str = ""
    name: str = ""
