"""The OpenAI chat-completions protocol: requests parsed and checked, responses, chunks and errors written.

Knows the wire format and nothing else: no backends, no rollouts, no HTTP server. JSON goes through msgspec both ways.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from agentlightning.errors import BackendError
from agentlightning.gateway.answer import Answer, Choice
from agentlightning.gateway.backend import Delta, Finished, Usage

# Fields other than temperature, top_p and top_k that shape the distribution tokens are sampled from.
SHAPING_FIELDS = ("presence_penalty", "frequency_penalty", "repetition_penalty", "min_p", "logit_bias")
MAX_CHOICES = 128


class CallRefused(BackendError):
    """The gateway itself refuses a call. `param` names the request field at fault, where there is one."""

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request", param: str | None = None):
        super().__init__(message, status=status, code=code)
        self.param = param


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Part(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None


class _CalledFunction(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] | None = None


class _ToolCall(msgspec.Struct):
    function: _CalledFunction
    id: str | None = None


class _Message(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_Part] | None = None
    tool_calls: list[_ToolCall] | None = None


class _ToolFunction(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Tool(msgspec.Struct):
    type: Literal["function"]
    function: _ToolFunction


# The type of every field the gateway itself reads; all others travel in `ChatRequest.extra`.
_FIELDS: dict[str, Any] = {
    "model": str,
    "messages": list[dict[str, Any]],
    "tools": list[dict[str, Any]],
    "tool_choice": str | dict[str, Any],
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "max_tokens": int,
    "max_completion_tokens": int,
    "stop": str | list[str],
    "seed": int,
    "n": int,
    "stream": bool,
    "stream_options": _StreamOptions,
    "logprobs": bool,
    "top_logprobs": int,
    "return_token_ids": bool,
    "presence_penalty": float,
    "frequency_penalty": float,
    "repetition_penalty": float,
    "min_p": float,
    "logit_bias": dict[str, float],
}
_DECODERS = {name: msgspec.json.Decoder(type_) for name, type_ in _FIELDS.items()}
# Messages and tools travel as the agent wrote them, with fields unknown here; these only say whether they are usable.
_SHAPES = {"messages": msgspec.json.Decoder(list[_Message]), "tools": msgspec.json.Decoder(list[_Tool])}
_NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_BODY_DECODER = msgspec.json.Decoder(dict[str, msgspec.Raw])
_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "top_k": (-1, 2**31),
    "max_tokens": (1, 2**31),
    "max_completion_tokens": (1, 2**31),
    "seed": (-(2**63), 2**63 - 1),
    "n": (1, MAX_CHOICES),
}


@dataclass(frozen=True)
class ChatRequest:
    """A chat-completions request as the agent sent it; None and empty mean not given.

    `messages_json` and `tools_json` are the agent's own bytes. `shaping` holds penalties and the like (see
    `SHAPING_FIELDS`), `extra` every field the gateway does not read."""

    model: str
    messages: list[dict[str, Any]]
    messages_json: str
    tools: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    tools_json: str | None = None
    tool_choice: Any = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    return_token_ids: bool = False
    shaping: dict[str, Any] = field(default_factory=dict[str, Any])
    extra: dict[str, Any] = field(default_factory=dict[str, Any])


def parse_chat_request(body: bytes) -> ChatRequest:
    """The request in `body`. CallRefused (400) names the field that is missing, of the wrong type or out of range."""
    try:
        raw = _BODY_DECODER.decode(body)
    except _NOT_JSON as error:
        raise CallRefused(f"the request body is not a JSON object: {error}", code="invalid_json") from None
    values: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    for name, value in raw.items():
        if bytes(value) == b"null":
            continue
        target = values if name in _DECODERS else extra
        target[name] = _decoded(name, value)
    _check_messages(values)
    if values.get("top_logprobs", 0) > 0:
        raise CallRefused(
            "top_logprobs is not supported: only the sampled token's logprob is known; leave it out or set it to 0",
            param="top_logprobs",
        )
    tools = values.get("tools", [])
    stop = values.get("stop") or ()
    limits = [values[name] for name in ("max_completion_tokens", "max_tokens") if name in values]
    return ChatRequest(
        model=values["model"],
        messages=values["messages"],
        messages_json=bytes(raw["messages"]).decode(),
        tools=tools,
        tools_json=bytes(raw["tools"]).decode() if tools else None,
        tool_choice=values.get("tool_choice"),
        temperature=values.get("temperature"),
        top_p=values.get("top_p"),
        top_k=max(0, values["top_k"]) if "top_k" in values else None,
        max_tokens=min(limits, default=None),
        stop=(stop,) if isinstance(stop, str) else tuple(text for text in stop if text),
        seed=values.get("seed"),
        n=values.get("n", 1),
        stream=values.get("stream", False),
        include_usage="stream_options" in values and bool(values["stream_options"].include_usage),
        logprobs=values.get("logprobs", False),
        return_token_ids=values.get("return_token_ids", False),
        shaping={name: values[name] for name in SHAPING_FIELDS if name in values},
        extra=extra,
    )


def _decoded(name: str, raw: msgspec.Raw) -> Any:
    try:
        if name in _SHAPES:
            _SHAPES[name].decode(raw)
        value = _DECODERS[name].decode(raw) if name in _DECODERS else msgspec.json.decode(raw)
    except _NOT_JSON as error:
        what, _, place = str(error).partition(" - at `$")
        field = name + place.removesuffix("`")
        if "[...]" in field:
            field = field.replace("[...]", _position(name, raw), 1)
        raise CallRefused(f"{field} cannot be used: {what}", param=field) from None
    if name in _RANGES:
        low, high = _RANGES[name]
        if not low <= value <= high:
            raise CallRefused(f"{name} is {value}; it must lie between {low} and {high}", param=name)
    return value


def _position(name: str, raw: msgspec.Raw) -> str:
    """`[3]` for the fourth message or tool if that is the first unusable one; `[...]` where it cannot be told."""
    if name in _SHAPES:
        for position, item in enumerate(msgspec.json.decode(raw, type=list[msgspec.Raw])):
            try:
                _SHAPES[name].decode(b"[" + bytes(item) + b"]")
            except _NOT_JSON:
                return f"[{position}]"
    return "[...]"


def _check_messages(values: dict[str, Any]) -> None:
    for name in ("model", "messages"):
        if name not in values:
            raise CallRefused(f"the request has no {name!r}, which is required", param=name)
    if not values["messages"]:
        raise CallRefused("messages is empty; a call needs at least one message", param="messages")


# --- what goes out ------------------------------------------------------------------------------------------------


def error_body(error: BackendError) -> bytes:
    """`{"error": {message, type, param, code}}`, as OpenAI's SDKs read it."""
    types = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = types.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    param = error.param if isinstance(error, CallRefused) else None
    return msgspec.json.encode({"error": {"message": str(error), "type": kind, "param": param, "code": error.code}})


def completion_body(request: ChatRequest, answer: Answer, response_id: str, model: str, created: int) -> bytes:
    """The whole `chat.completion` object."""
    body: dict[str, Any] = {
        "id": response_id,
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": [_choice(request, index, choice) for index, choice in enumerate(answer.choices)],
        "usage": _usage(answer.token_counts()),
    }
    if request.return_token_ids:
        body["prompt_token_ids"] = answer.prompt_token_ids
    return msgspec.json.encode(body)


def _choice(request: ChatRequest, index: int, choice: Choice) -> dict[str, Any]:
    body: dict[str, Any] = {
        "index": index,
        "message": choice.message(),
        "logprobs": _logprobs(choice.tokens, choice.logprobs) if request.logprobs else None,
        "finish_reason": choice.finish_reason,
    }
    if request.return_token_ids:
        body["token_ids"] = choice.token_ids
    return body


def _logprobs(tokens: list[bytes] | tuple[bytes, ...], logprobs: list[float] | tuple[float, ...]) -> dict[str, Any]:
    content = [
        {"token": token.decode(errors="replace"), "logprob": logprob, "bytes": list(token), "top_logprobs": []}
        for token, logprob in zip(tokens, logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def _usage(usage: Usage) -> dict[str, int]:
    total = usage.prompt_tokens + usage.completion_tokens
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": total,
    }


class ChunkWriter:
    """Writes one streamed answer as server-sent events, each `data: {chat.completion.chunk}`."""

    def __init__(self, request: ChatRequest, response_id: str, model: str, created: int) -> None:
        self._request = request
        self._head = {"id": response_id, "object": "chat.completion.chunk", "created": created, "model": model}

    def role(self, index: int, prompt_token_ids: tuple[int, ...]) -> bytes:
        """The first chunk of a choice."""
        delta = {"role": "assistant", "content": ""}
        ids = {"prompt_token_ids": prompt_token_ids} if self._request.return_token_ids and index == 0 else {}
        return self._event([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}], **ids)

    def delta(self, event: Delta) -> bytes | None:
        """What the client gets of `event`; None where that is nothing, such as text held back."""
        request = self._request
        if not event.delta and not ((request.return_token_ids or request.logprobs) and event.token_ids):
            return None
        choice: dict[str, Any] = {"index": event.index, "delta": event.delta, "logprobs": None, "finish_reason": None}
        if request.logprobs:
            choice["logprobs"] = _logprobs(event.tokens, event.logprobs)
        if request.return_token_ids:
            choice["token_ids"] = event.token_ids
            return self._event([choice], policy_version=event.version)
        return self._event([choice])

    def finish(self, event: Finished) -> bytes:
        """The last chunk of a choice."""
        return self._event(
            [{"index": event.index, "delta": {}, "logprobs": None, "finish_reason": event.finish_reason}]
        )

    def end(self, answer: Answer) -> bytes:
        """Usage, if it was asked for, and the end of the stream."""
        usage = self._event([], usage=_usage(answer.token_counts())) if self._request.include_usage else b""
        return usage + b"data: [DONE]\n\n"

    @staticmethod
    def error(error: BackendError) -> bytes:
        """An error in mid-stream, as the SDKs expect it."""
        return b"data: " + error_body(error) + b"\n\n"

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return b"data: " + msgspec.json.encode({**self._head, "choices": choices, **more}) + b"\n\n"
