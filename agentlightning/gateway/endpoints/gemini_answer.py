"""Google's Gemini API: answers, whole and streamed, and errors.

Knows the wire format of answers; `gemini` reads the requests. No backends, no rollouts, no HTTP server.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from agentlightning.errors import BackendError
from agentlightning.gateway.answer import Answer, Choice
from agentlightning.gateway.backend import Delta, Started, Usage
from agentlightning.gateway.endpoints.base import server_sent
from agentlightning.gateway.request import NOT_JSON

_STATUSES: Final = {
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    409: "ABORTED",
    429: "RESOURCE_EXHAUSTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
_REASONS: Final = {"length": "MAX_TOKENS", "content_filter": "SAFETY", "abort": "OTHER"}  # of the others it is STOP


def google_error(error: BackendError) -> bytes:
    """`{"error": {code, message, status}}`, as Google's SDKs read it."""
    return msgspec.json.encode(_error(error))


def _error(error: BackendError) -> dict[str, Any]:
    status = _STATUSES.get(error.status, "INVALID_ARGUMENT" if error.status < 500 else "INTERNAL")
    return {"error": {"code": error.status, "message": str(error), "status": status}}


def whole_content(answer: Answer) -> bytes:
    """The body of an answer that is not streamed."""
    candidates = [
        _candidate(
            index,
            [
                *_said(choice.string("reasoning_content") or choice.string("reasoning"), thought=True),
                *_said(choice.string("content") or choice.string("refusal")),
                *map(_call, choice.tool_calls),
            ],
            _end(choice),
        )
        for index, choice in enumerate(answer.choices)
    ]
    return msgspec.json.encode(_response(answer, candidates, usageMetadata=_usage(answer.token_counts())))


def _response(answer: Answer, candidates: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {"candidates": candidates, **more, "modelVersion": answer.model, "responseId": answer.response_id}


def _candidate(index: int, parts: list[dict[str, Any]], end: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"content": {"role": "model", "parts": parts or [{"text": ""}]}, **(end or {}), "index": index}


def _said(text: str | None, **more: bool) -> list[dict[str, Any]]:
    return [{"text": text, **more}] if text else []


def _call(call: dict[str, Any]) -> dict[str, Any]:
    """A call whose arguments are no JSON object has no form in this protocol: it stays the text it is."""
    name, arguments = call["function"]["name"], (call["function"]["arguments"] or "{}").encode()
    try:
        msgspec.json.decode(arguments, type=dict[str, Any])
    except NOT_JSON:
        return {"text": f'{{"name": {msgspec.json.encode(name).decode()}, "arguments": {arguments.decode()}}}'}
    return {"functionCall": {"id": call["id"], "name": name, "args": msgspec.Raw(arguments)}}


def _end(choice: Choice) -> dict[str, Any]:
    reason = "SAFETY" if choice.string("refusal") else _REASONS.get(choice.finish_reason or "abort", "STOP")
    return {"finishReason": reason}


def _usage(usage: Usage) -> dict[str, Any]:
    """Here the tokens of thoughts are not among those of the candidates, but beside them."""
    cached = (usage.details.get("prompt_tokens_details") or {}).get("cached_tokens")
    thought = (usage.details.get("completion_tokens_details") or {}).get("reasoning_tokens")
    return {
        "promptTokenCount": usage.prompt_tokens,
        "candidatesTokenCount": usage.completion_tokens - (thought or 0),
        "totalTokenCount": usage.prompt_tokens + usage.completion_tokens,
        **({"cachedContentTokenCount": cached} if cached else {}),
        **({"thoughtsTokenCount": thought} if thought else {}),
    }


class ContentWriter:
    """Writes one streamed answer: texts as they come, function calls, which this protocol has whole, at the end."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def started(self, event: Started) -> bytes:
        return b""

    def delta(self, event: Delta) -> bytes:
        said = event.delta
        parts = _said(said.get("reasoning_content") or said.get("reasoning"), thought=True)
        parts += _said(said.get("content") or said.get("refusal"))
        return server_sent(_response(self._answer, [_candidate(event.index, parts)])) if parts else b""

    def end(self) -> bytes:
        ends = [
            _candidate(index, [*map(_call, choice.tool_calls)], _end(choice))
            for index, choice in enumerate(self._answer.choices)
        ]
        return server_sent(_response(self._answer, ends, usageMetadata=_usage(self._answer.token_counts())))

    def error(self, error: BackendError) -> bytes:
        return server_sent(_error(error))
