"""Requests that a backend answers in the agent's own protocol: read just enough to route them and to record them.

Knows the wire formats of OpenAI's embeddings and responses and of Anthropic's messages. Knows no backends and no HTTP.
"""

from __future__ import annotations

import time
from typing import Any, Final

import msgspec

from agentlightning.data.conversations import chat_messages
from agentlightning.errors import BackendError
from agentlightning.gateway.answer import Answer
from agentlightning.gateway.backend import Delta, Usage
from agentlightning.gateway.endpoints.base import Endpoint
from agentlightning.gateway.request import NOT_JSON, OBJECT, CallRefused, CallRequest, rest_json
from agentlightning.tracing.dialects import items, joined, json_of, mapping
from agentlightning.types import FinishReason

# What is let through of the agent's headers: nothing that names a key or an account.
HEADERS: Final = frozenset({"accept", "anthropic-beta", "anthropic-version", "openai-beta", "user-agent"})
_INPUTS: Final = ("messages", "input")  # fields that hold the input of the model
_KEPT_BYTES: Final = 8 * 1024 * 1024  # of one answer, for its span


class Embeddings(Endpoint):
    """`POST /v1/embeddings`: only backends that embed answer it, in their own words."""

    path = "embeddings"
    operation = "embeddings"
    id_prefix = "embd-"

    def read(self, body: bytes) -> CallRequest:
        raise CallRefused(
            "the backend of this model makes no embeddings; name a model that is registered with an HTTP backend",
            code="unsupported_endpoint",
            param="model",
        )


def read_passed_through(body: bytes) -> CallRequest:
    """What routing and the span need of a request; the backend reads the rest. CallRefused (400)
    without a `model`."""
    try:
        body.decode()  # what is not read here is not looked at further on
        fields = OBJECT.decode(body)
        model = msgspec.json.decode(fields.get("model", b"null"), type=str)
    except NOT_JSON as error:
        raise CallRefused(f"the body must be a JSON object that names a model: {error}", param="model") from None
    written = {name: bytes(value).decode() for name, value in fields.items()}
    messages = next((written[name] for name in _INPUTS if name in written), None)
    system = json_of(written.get("system") or written.get("instructions"))
    return CallRequest(
        model=model,
        messages=[{"role": "system", "content": system}, *items(json_of(messages))],
        messages_json=messages,
        tools_json=written.get("tools"),
        stream=written.get("stream") == "true",
        request_json=rest_json(fields, "tools", *_INPUTS),
        relayed=fields,
    )


class AnswerCopy:
    """Gathers the bytes of an answer that is passed through, and reads them into an `Answer` at its end."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0
        self._began: float | None = None

    def add(self, part: bytes) -> None:
        self._began = self._began or time.monotonic()
        self._size += len(part)
        if self._size <= _KEPT_BYTES:
            self._parts.append(part)

    def refusal(self, status: int) -> BackendError:
        """What an answer says that is an error."""
        text = b"".join(self._parts)[:500].decode(errors="replace")
        return BackendError(f"the backend answered {status}: {text}", status=status)

    def read_into(self, answer: Answer, *, streamed: bool) -> FinishReason:
        """The text so far, tool calls, usage and the body itself; returns how it ended. An answer in a
        form that is not known, or too large to be kept, leaves all this out, and nothing fails."""
        answer.first_token_time = self._began
        body = b"".join(self._parts)
        try:
            whole = None if self._size > _KEPT_BYTES else _streamed(body) if streamed else _decoded(body)
            if whole is None:
                return "stop"
            message, usage, reason = _message(whole), _usage(whole), _finish_reason(whole)
        except (AttributeError, KeyError, TypeError, ValueError):
            return "stop"
        if usage is not None:
            answer.add(usage)
        if "data" not in whole:  # vectors are not kept
            answer.response_json = msgspec.json.encode(whole).decode()
        answer.add(Delta(0, message))
        return reason


def _usage(whole: dict[str, Any]) -> Usage | None:
    usage = whole.get("usage")
    if not isinstance(usage, dict):
        return None
    given = usage.get("input_tokens", usage.get("prompt_tokens", 0))
    return Usage(int(given or 0), int(usage.get("output_tokens") or 0))


def _decoded(body: bytes) -> dict[str, Any] | None:
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except NOT_JSON:
        return None


def _streamed(body: bytes) -> dict[str, Any] | None:
    """The whole answer at the end of an event stream: the last event that holds it (responses), or what the events of
    a message add up to."""
    message: dict[str, Any] | None = None
    for line in body.split(b"\n"):
        event = _decoded(line[5:]) if line.startswith(b"data:") else None
        if event is None:
            continue
        if isinstance(event.get("response"), dict):
            message = event["response"]
        elif event.get("type") == "message_start":
            message = event["message"]
        elif message is not None:
            _add_event(message, event)
    return message


def _add_event(message: dict[str, Any], event: dict[str, Any]) -> None:
    """One event of Anthropic's stream into the message it belongs to."""
    content: list[dict[str, Any]] = message.setdefault("content", [])
    match event:
        case {"type": "content_block_start", "content_block": dict(block)}:
            content.append(block)
        case {"type": "content_block_delta", "delta": dict(delta)} if content:
            for name, value in delta.items():
                if name == "partial_json":
                    content[-1]["partial_json"] = content[-1].get("partial_json", "") + value
                elif name != "type" and isinstance(value, str):
                    content[-1][name] = (content[-1].get(name) or "") + value
        case {"type": "content_block_stop"} if content and "partial_json" in content[-1]:
            content[-1]["input"] = _decoded(content[-1].pop("partial_json").encode() or b"{}") or {}
        case {"type": "message_delta"}:
            message |= event.get("delta") or {}
            message["usage"] = {**(message.get("usage") or {}), **(event.get("usage") or {})}
        case _:
            pass


def _message(whole: dict[str, Any]) -> dict[str, Any]:
    """Text and tool calls of a response or a message, in the form of chat completions."""
    messages = chat_messages(map(mapping, items(whole.get("output")) or [whole]), answer=True)
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    text = "".join(joined(message["content"]) for message in messages)
    return {"content": text} | ({"tool_calls": calls} if calls else {})


_ENDS: Final[dict[Any, FinishReason]] = {"max_tokens": "length", "incomplete": "length", "tool_use": "tool_calls"}


def _finish_reason(whole: dict[str, Any]) -> FinishReason:
    return _ENDS.get(whole.get("stop_reason") or whole.get("status"), "stop")
