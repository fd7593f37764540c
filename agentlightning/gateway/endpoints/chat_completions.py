"""OpenAI's chat completions: the protocol whose form all others are read into.

Knows the wire format and nothing else: no backends, no rollouts, no HTTP server.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from agentlightning.errors import BackendError
from agentlightning.gateway.answer import Answer, Choice
from agentlightning.gateway.backend import Delta, Sampling, Started
from agentlightning.gateway.endpoints.base import Head, OpenAIStream, openai_error, openai_usage
from agentlightning.gateway.request import (
    MAX_CHOICES,
    SHAPING_FIELDS,
    CallRefused,
    CallRequest,
    Fields,
    require,
    rest_json,
    stop_strings,
)


class StreamOptions(msgspec.Struct):
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


# What the OpenAI endpoints with a choice of sampling have in common.
SAMPLING_TYPES: dict[str, Any] = {
    "model": str,
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "max_tokens": int,
    "stop": str | list[str],
    "seed": int,
    "n": int,
    "stream": bool,
    "stream_options": StreamOptions,
    "return_token_ids": bool,
    "presence_penalty": float,
    "frequency_penalty": float,
    "repetition_penalty": float,
    "min_p": float,
    "logit_bias": dict[str, float],
}
SAMPLING_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "top_k": (-1, 2**31),
    "max_tokens": (1, 2**31),
    "seed": (-(2**63), 2**63 - 1),
    "n": (1, MAX_CHOICES),
}
_FIELDS = Fields(
    types={
        **SAMPLING_TYPES,
        "messages": list[dict[str, Any]],
        "tools": list[dict[str, Any]],
        "tool_choice": str | dict[str, Any],
        "max_completion_tokens": int,
        "logprobs": bool,
        "top_logprobs": int,
    },
    # Messages and tools travel as the agent wrote them, with fields unknown here; these say whether they are usable.
    shapes={"messages": list[_Message], "tools": list[_Tool]},
    ranges={**SAMPLING_RANGES, "max_completion_tokens": (1, 2**31), "top_logprobs": (0, 20)},
)


def sampling_fields(values: dict[str, Any], max_tokens: int | None) -> dict[str, Any]:
    """The fields of a `CallRequest` that OpenAI's endpoints write alike."""
    sampling = Sampling(
        temperature=values.get("temperature"),
        top_p=values.get("top_p"),
        top_k=max(0, values["top_k"]) if "top_k" in values else None,
        max_tokens=max_tokens,
        stop=stop_strings(values.get("stop")),
        seed=values.get("seed"),
        n=values.get("n", 1),
    )
    return {
        "sampling": sampling,
        "stream": values.get("stream", False),
        "include_usage": "stream_options" in values and bool(values["stream_options"].include_usage),
        "return_token_ids": values.get("return_token_ids", False),
        "shaping": {name: values[name] for name in SHAPING_FIELDS if name in values},
    }


class ChatCompletions:
    """`POST /v1/chat/completions`; see `Endpoint`. With `return_token_ids` the answer holds `prompt_token_ids`, and
    each choice `token_ids` and `policy_versions` (run-length, as in `SampledChoice.versions`)."""

    path = "chat/completions"
    operation = "chat"
    id_prefix = "chatcmpl-"

    def read(self, body: bytes) -> CallRequest:
        values, extra, raw = _FIELDS.read(body)
        require(values, "model", "messages")
        if not values["messages"]:
            raise CallRefused("messages is empty; a call needs at least one message", param="messages")
        if values.get("top_logprobs") and not values.get("logprobs"):
            raise CallRefused("top_logprobs needs logprobs to be true", param="top_logprobs")
        tools = values.get("tools", [])
        limits = {name: values[name] for name in ("max_completion_tokens", "max_tokens") if name in values}
        return CallRequest(
            model=values["model"],
            messages=values["messages"],
            messages_json=bytes(raw["messages"]).decode(),
            tools=tools,
            tools_json=bytes(raw["tools"]).decode() if tools else None,
            tool_choice=values.get("tool_choice"),
            max_tokens_name="max_tokens" if [*limits] == ["max_tokens"] else "max_completion_tokens",
            logprobs=values.get("logprobs", False),
            top_logprobs=values.get("top_logprobs", 0),
            extra=extra,
            request_json=rest_json(raw, "messages", "tools"),
            **sampling_fields(values, min(limits.values(), default=None)),
        )

    def whole(self, request: CallRequest, answer: Answer, head: Head) -> bytes:
        body: dict[str, Any] = {
            "id": head.response_id,
            "object": "chat.completion",
            "created": head.created,
            "model": head.model,
            "choices": [_choice(request, index, choice) for index, choice in enumerate(answer.choices)],
            "usage": openai_usage(answer.token_counts()),
            **answer.extra,
        }
        if request.return_token_ids:
            body["prompt_token_ids"] = answer.prompt_token_ids
        return msgspec.json.encode(body)

    def stream(self, request: CallRequest, head: Head) -> ChunkWriter:
        return ChunkWriter(request, head)

    def error(self, error: BackendError) -> bytes:
        return openai_error(error)


def _choice(request: CallRequest, index: int, choice: Choice) -> dict[str, Any]:
    body: dict[str, Any] = {
        "index": index,
        "message": choice.message(),
        "logprobs": _logprobs(choice.logprob_entries) if request.logprobs else None,
        "finish_reason": choice.finish_reason,
    }
    if choice.stop_string is not None:
        body["stop_reason"] = choice.stop_string
    if request.return_token_ids:
        body |= {"token_ids": choice.token_ids, "policy_versions": choice.versions}
    return body


def _logprobs(entries: Any) -> dict[str, Any]:
    return {"content": entries, "refusal": None}


class ChunkWriter(OpenAIStream):
    """Writes one streamed answer, each event `data: {chat.completion.chunk}`."""

    def __init__(self, request: CallRequest, head: Head) -> None:
        super().__init__(request, head, "chat.completion.chunk")

    def started(self, event: Started) -> bytes:
        """The first chunk of each choice."""
        self._head |= event.extra
        ids = {"prompt_token_ids": event.prompt_token_ids} if self._request.return_token_ids else {}
        delta = {"role": "assistant", "content": ""}
        return b"".join(
            self._event(
                [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}], **({} if index else ids)
            )
            for index in range(self._request.sampling.n)
        )

    def delta(self, event: Delta) -> bytes:
        request = self._request
        if not event.delta and not ((request.return_token_ids or request.logprobs) and event.token_ids):
            return b""
        choice: dict[str, Any] = {"index": event.index, "delta": event.delta, "logprobs": None, "finish_reason": None}
        if request.logprobs:
            choice["logprobs"] = _logprobs(event.logprob_entries)
        if request.return_token_ids:
            choice["token_ids"] = event.token_ids
            return self._event([choice], policy_version=event.version)
        return self._event([choice])

    def end(self, answer: Answer) -> bytes:
        return self._end(answer, [_last(index, choice) for index, choice in enumerate(answer.choices)])


def _last(index: int, choice: Choice) -> dict[str, Any]:
    last: dict[str, Any] = {"index": index, "delta": {}, "logprobs": None, "finish_reason": choice.finish_reason}
    if choice.stop_string is not None:
        last["stop_reason"] = choice.stop_string
    return last
