"""Anthropic's messages: answers, whole and streamed, errors, and model cards.

Knows the wire format of answers; `messages` reads the requests. No backends, no rollouts, no HTTP server.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from agentlightning.errors import BackendError
from agentlightning.gateway.answer import Answer, Choice
from agentlightning.gateway.backend import Delta, Started, Usage
from agentlightning.gateway.endpoints.base import server_sent
from agentlightning.gateway.request import NOT_JSON

_ERROR_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
# What Anthropic's SDKs must be told by this name to send the whole conversation with every call instead.
NO_THREADS: Final = "thread_unsupported_request"
# Of an answer without tool calls that no stop sequence ended. One that was broken off was cut short, whoever did it.
_STOP_REASONS: Final = {"length": "max_tokens", "abort": "max_tokens", "content_filter": "refusal"}


def anthropic_error(error: BackendError) -> bytes:
    """`{"type": "error", "error": {type, message}, request_id}`, as Anthropic's SDKs read it."""
    return msgspec.json.encode(_error(error))


def _error(error: BackendError) -> dict[str, Any]:
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    told: dict[str, Any] = {"type": kind, "message": str(error)}
    if error.code == NO_THREADS:
        told["details"] = {"error_code": NO_THREADS, "unsupported": ["thread"]}
    return {"type": "error", "error": told, "request_id": None}


def model_card(name: str) -> dict[str, Any]:
    """One model of `GET /v1/models`. When it was made is not known, which the protocol writes as the epoch."""
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": "1970-01-01T00:00:00Z",
        "lifecycle": "active",
    }


def model_list(names: Sequence[str]) -> dict[str, Any]:
    """All models on one page."""
    first, last = (names[0], names[-1]) if names else (None, None)
    return {"data": [model_card(name) for name in names], "has_more": False, "first_id": first, "last_id": last}


def whole_message(answer: Answer) -> bytes:
    """The body of an answer that is not streamed."""
    choice = answer.choices[0]
    content: list[dict[str, Any]] = []
    if thinking := choice.string("reasoning_content") or choice.string("reasoning"):
        content.append({"type": "thinking", "thinking": thinking, "signature": ""})
    if text := choice.string("content") or choice.string("refusal"):
        content.append({"type": "text", "text": text})
    content += map(_tool_block, choice.tool_calls)
    called = any(block["type"] == "tool_use" for block in content)
    return msgspec.json.encode(_message(answer, content, answer.token_counts()) | _stop(choice, called=called))


def _tool_block(call: dict[str, Any]) -> dict[str, Any]:
    """A call whose arguments are no JSON object has no form in this protocol: it stays the text it is."""
    name, arguments = call["function"]["name"], (call["function"]["arguments"] or "{}").encode()
    try:
        msgspec.json.decode(arguments, type=dict[str, Any])
    except NOT_JSON:
        written = f'{{"name": {msgspec.json.encode(name).decode()}, "arguments": {arguments.decode()}}}'
        return {"type": "text", "text": written}
    return {"type": "tool_use", "id": call["id"], "name": name, "input": msgspec.Raw(arguments)}


def _message(answer: Answer, content: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
    return {
        "id": answer.response_id,
        "type": "message",
        "role": "assistant",
        "model": answer.model,
        "content": content,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(usage),
    }


def _stop(choice: Choice, *, called: bool) -> dict[str, Any]:
    if choice.stop_string is not None:
        reason = "stop_sequence"
    elif choice.string("refusal"):
        reason = "refusal"
    else:
        reason = _STOP_REASONS.get(choice.finish_reason or "abort", "tool_use" if called else "end_turn")
    return {"stop_reason": reason, "stop_sequence": choice.stop_string}


def _usage(usage: Usage) -> dict[str, Any]:
    """Here the tokens that came from a cache are not among the input tokens, but beside them."""
    cached = (usage.details.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    thought = (usage.details.get("completion_tokens_details") or {}).get("reasoning_tokens")
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": None if thought is None else {"thinking_tokens": thought},
    }


class MessageWriter:
    """Writes one streamed answer: blocks of thinking, text and tool calls, each opened when its first piece comes and
    closed when the next begins."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._blocks = 0
        self._open: str | None = None  # the kind of the last block, while it is open
        self._calls: dict[int, int] = {}  # tool call → its block

    def started(self, event: Started) -> bytes:
        message = _message(self._answer, [], Usage(len(event.prompt_token_ids), 0))
        return _event("message_start", message=message) + _event("ping")

    def delta(self, event: Delta) -> bytes:
        said = event.delta
        parts = [
            self._written("thinking", said.get("reasoning_content") or said.get("reasoning")),
            self._written("text", said.get("content") or said.get("refusal")),
            *(self._called(part) for part in said.get("tool_calls") or ()),
        ]
        return b"".join(parts)

    def end(self) -> bytes:
        stop = _stop(self._answer.choices[0], called=bool(self._calls))
        ends = _event("message_delta", delta=stop, usage=_usage(self._answer.token_counts()))
        return self._closed() + ends + _event("message_stop")

    def error(self, error: BackendError) -> bytes:
        return server_sent(_error(error), "error")

    def _written(self, kind: str, text: str | None) -> bytes:
        if not text:
            return b""
        empty = {"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {})
        opened = b"" if self._open == kind else self._opened(empty)
        return opened + _piece(self._blocks - 1, {"type": f"{kind}_delta", kind: text})

    def _called(self, part: dict[str, Any]) -> bytes:
        call, function = part.get("index", len(self._calls)), part.get("function") or {}
        opened = b""
        if call not in self._calls:
            block = {"type": "tool_use", "id": part.get("id") or "", "name": function.get("name") or "", "input": {}}
            opened = self._opened(block)
            self._calls[call] = self._blocks - 1
        arguments = function.get("arguments")
        if not arguments:
            return opened
        return opened + _piece(self._calls[call], {"type": "input_json_delta", "partial_json": arguments})

    def _opened(self, block: dict[str, Any]) -> bytes:
        closed = self._closed()
        self._open, self._blocks = block["type"], self._blocks + 1
        return closed + _event("content_block_start", index=self._blocks - 1, content_block=block)

    def _closed(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        return _event("content_block_stop", index=self._blocks - 1)


def _piece(block: int, delta: dict[str, str]) -> bytes:
    return _event("content_block_delta", index=block, delta=delta)


def _event(kind: str, **fields: Any) -> bytes:
    return server_sent({"type": kind, **fields}, kind)
