"""OpenAI's chat completions: the protocol whose form all others are read into.

Knows the wire format and nothing else: no backends, no rollouts, no HTTP server.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from agentlightning.gateway.answer import Answer
from agentlightning.gateway.backend import Delta, Sampling, Started
from agentlightning.gateway.endpoints.base import Endpoint, Head, OpenAIStream, choice_body, whole_body
from agentlightning.gateway.request import (
    MANY,
    SHAPING_FIELDS,
    SOME,
    CallRefused,
    CallRequest,
    Fields,
    rest_json,
    stop_strings,
)


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
    content: str | Annotated[list[_Part], MANY] | None = None
    tool_calls: Annotated[list[_ToolCall], MANY] | None = None


class _ToolFunction(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Tool(msgspec.Struct):
    type: Literal["function"]
    function: _ToolFunction


_Limit: TypeAlias = Annotated[int, Meta(ge=1, lt=2**31)]
TopLogprobs: TypeAlias = Annotated[int, Meta(ge=0, le=20)]
# What the OpenAI endpoints with a choice of sampling have in common.
SAMPLING_TYPES: dict[str, Any] = {
    "model": str,
    "temperature": Annotated[float, Meta(ge=0, le=2)],
    "top_p": Annotated[float, Meta(ge=0, le=1)],
    "top_k": Annotated[int, Meta(ge=-1, lt=2**31)],
    "max_tokens": _Limit,
    "stop": str | Annotated[list[str], Meta(max_length=100)],  # each is looked for behind each token
    "seed": Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)],
    "n": Annotated[int, Meta(ge=1, le=128)],
    "stream": bool,
    "stream_options": _StreamOptions,
    "return_token_ids": bool,
    "return_weight_versions": bool,  # they come with the token ids
    "presence_penalty": float,
    "frequency_penalty": float,
    "repetition_penalty": float,
    "min_p": float,
    "logit_bias": dict[str, float],
}
_FIELDS = Fields(
    types={
        **SAMPLING_TYPES,
        "messages": list[dict[str, Any]],
        "tools": list[dict[str, Any]],
        "tool_choice": str | dict[str, Any],
        "max_completion_tokens": _Limit,
        "logprobs": bool,
        "top_logprobs": TopLogprobs,
    },
    # Messages and tools travel as the agent wrote them, with fields unknown here; these say whether they are usable.
    shapes={"messages": Annotated[list[_Message], MANY], "tools": Annotated[list[_Tool], SOME]},
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
        "model": values["model"],
        "sampling": sampling,
        "stream": values.get("stream", False),
        "include_usage": "stream_options" in values and bool(values["stream_options"].include_usage),
        "return_token_ids": values.get("return_token_ids", False),
        "shaping": {name: values[name] for name in SHAPING_FIELDS if name in values},
    }


class ChatCompletions(Endpoint):
    """`POST /v1/chat/completions`. With `return_token_ids` the answer holds `prompt_token_ids`, and each choice
    `token_ids` and `policy_versions` (run-length, as in `SampledChoice.versions`)."""

    path = "chat/completions"
    id_prefix = "chatcmpl-"

    def read(self, body: bytes) -> CallRequest:
        values, extra, raw = _FIELDS.read(body, "model", "messages")
        if not values["messages"]:
            raise CallRefused("messages is empty; a call needs at least one message", param="messages")
        if values.get("top_logprobs") and not values.get("logprobs"):
            raise CallRefused("top_logprobs needs logprobs to be true", param="top_logprobs")
        tools = values.get("tools", [])
        limits = {name: values[name] for name in ("max_completion_tokens", "max_tokens") if name in values}
        return CallRequest(
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
        choices: list[dict[str, Any]] = []
        for index, choice in enumerate(answer.choices):
            written = choice_body(index, {"message": choice.message()}, choice)
            if request.logprobs:
                written["logprobs"] = _logprobs(choice.logprob_entries)
            if request.return_token_ids:
                written |= {"token_ids": choice.token_ids, "policy_versions": choice.versions}
            choices.append(written)
        ids = {"prompt_token_ids": answer.prompt_token_ids} if request.return_token_ids else {}
        return whole_body(head, "chat.completion", choices, answer, **ids)

    def stream(self, request: CallRequest, head: Head) -> ChunkWriter:
        return ChunkWriter(request, head)


def _logprobs(entries: Sequence[Any]) -> dict[str, Any]:
    return {"content": entries, "refusal": None}


class ChunkWriter(OpenAIStream):
    """Writes one streamed answer, each event `data: {chat.completion.chunk}`."""

    kind = "chat.completion.chunk"

    def started(self, event: Started) -> bytes:
        """The first chunk of each choice."""
        self._head |= event.extra
        ids = {"prompt_token_ids": event.prompt_token_ids} if self._request.return_token_ids else {}
        said = self.said({"role": "assistant", "content": ""})
        return b"".join(
            self.event([choice_body(index, said)], **({} if index else ids))
            for index in range(self._request.sampling.n)
        )

    def said(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"delta": delta}

    def logprobs(self, event: Delta) -> dict[str, Any]:
        return _logprobs(event.logprob_entries)
