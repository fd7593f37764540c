"""OpenAI's chat completions, the protocol whose form all others are read into; and its completions: a text, or token
ids, continued as they stand.

Knows the wire formats and nothing else: no backends, no rollouts, no HTTP server.
"""

from __future__ import annotations

import codecs
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Final, Literal, TypeAlias, cast

import msgspec
from msgspec import Meta

from agentlightning.gateway.answer import Answer, Choice
from agentlightning.gateway.backend import Delta, Sampling, Started
from agentlightning.gateway.endpoints.base import Endpoint, OpenAIStream, choice_body, whole_body
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
_CHAT_FIELDS = Fields(
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
    """The fields of a `CallRequest` that the protocols write alike."""
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
        values, extra, raw = _CHAT_FIELDS.read(body, "model", "messages")
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

    def whole(self, request: CallRequest, answer: Answer) -> bytes:
        choices = [_written(request, index, choice) for index, choice in enumerate(answer.choices)]
        ids = {"prompt_token_ids": answer.prompt_token_ids} if request.return_token_ids else {}
        return whole_body(answer, "chat.completion", choices, **ids)

    def stream(self, request: CallRequest, answer: Answer) -> ChunkWriter:
        return ChunkWriter(request, answer)


def _written(request: CallRequest, index: int, choice: Choice) -> dict[str, Any]:
    """A choice of a whole answer."""
    chat = request.prompt is None
    body = choice_body(index, {"message": choice.message()} if chat else {"text": choice.string("content")}, choice)
    if request.logprobs:
        entries = choice.logprob_entries
        body["logprobs"] = _chat_logprobs(entries) if chat else _Logprobs(request.top_logprobs).columns(entries)
    if request.return_token_ids:
        body |= {"token_ids": choice.token_ids, "policy_versions": choice.versions}
    return body


def _chat_logprobs(entries: Sequence[Any]) -> dict[str, Any]:
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
        return _chat_logprobs(event.logprob_entries)


# --- completions --------------------------------------------------------------------------------------------------

MAX_TOKENS: Final = 16
"""How many tokens are sampled where the request does not say, as in OpenAI's protocol."""

_Prompt: TypeAlias = str | list[int | str | list[int]]
_COMPLETION_FIELDS = Fields(
    types={**SAMPLING_TYPES, "prompt": _Prompt, "logprobs": TopLogprobs, "echo": bool, "best_of": int}, shapes={}
)


class Completions(Endpoint):
    """`POST /v1/completions`, of one prompt. With `return_token_ids`, the default where the prompt is token ids, each
    choice holds `prompt_token_ids`, `token_ids` and `policy_versions` (run-length, as in `SampledChoice.versions`)."""

    path = "completions"
    operation = "text_completion"
    id_prefix = "cmpl-"

    def read(self, body: bytes) -> CallRequest:
        values, extra, raw = _COMPLETION_FIELDS.read(body, "model", "prompt")
        if values.get("echo"):
            raise CallRefused("echo is not supported: the prompt is not repeated; leave it out", param="echo")
        n = values.get("n", 1)
        if values.get("best_of", n) != n:
            raise CallRefused("best_of is not supported: every choice is given; leave it out", param="best_of")
        prompt = _prompt(values["prompt"])
        values.setdefault("return_token_ids", not isinstance(prompt, str))
        return CallRequest(
            messages=[],
            prompt=prompt,
            logprobs="logprobs" in values,
            top_logprobs=values.get("logprobs", 0),
            extra=extra,
            request_json=rest_json(raw, "prompt"),
            **sampling_fields(values, values.get("max_tokens", MAX_TOKENS)),
        )

    def whole(self, request: CallRequest, answer: Answer) -> bytes:
        ids = {"prompt_token_ids": answer.prompt_token_ids} if request.return_token_ids else {}
        choices = [_written(request, index, choice) | ids for index, choice in enumerate(answer.choices)]
        return whole_body(answer, "text_completion", choices)

    def stream(self, request: CallRequest, answer: Answer) -> CompletionWriter:
        return CompletionWriter(request, answer)


def _prompt(given: _Prompt) -> str | tuple[int, ...]:
    """The one prompt of a request: a text or token ids, perhaps in a list of its own."""
    if isinstance(given, list) and given and not isinstance(given[0], int):
        if len(given) > 1:
            raise CallRefused(
                f"prompt holds {len(given)} prompts; one is answered per request: send a request for each",
                param="prompt",
            )
        given = cast(str | list[int | str | list[int]], given[0])
    if not given:
        raise CallRefused("prompt is empty; give a text or token ids", param="prompt")
    if isinstance(given, str):
        return given
    if not all(isinstance(token_id, int) for token_id in given):
        raise CallRefused("prompt mixes token ids and texts; give one text, or a list of token ids", param="prompt")
    return tuple(cast(list[int], given))


class CompletionWriter(OpenAIStream):
    """Writes one streamed answer, each event `data: {text_completion}`."""

    kind = "text_completion"

    def __init__(self, request: CallRequest, answer: Answer) -> None:
        super().__init__(request, answer)
        self._logprobs: defaultdict[int, _Logprobs] = defaultdict(lambda: _Logprobs(request.top_logprobs))

    def started(self, event: Started) -> bytes:
        """The prompt's ids, for each choice, where they were asked for."""
        self._head |= event.extra
        if not self._request.return_token_ids:
            return b""
        ids = {"prompt_token_ids": event.prompt_token_ids, "token_ids": ()}
        numbers = range(self._request.sampling.n)
        return b"".join(self.event([choice_body(index, self.said({})) | ids]) for index in numbers)

    def said(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"text": delta.get("content", "")}

    def logprobs(self, event: Delta) -> dict[str, Any]:
        return self._logprobs[event.index].columns(event.logprob_entries)


class _TokenLogprob(msgspec.Struct):
    token: str
    logprob: float | None = None


class _Entry(_TokenLogprob):
    written: list[int] | None = msgspec.field(default=None, name="bytes")
    top_logprobs: list[_TokenLogprob] = []


class _Logprobs:
    """Turns the logprobs of one choice, part by part, into columns: `tokens`, `token_logprobs`, `top_logprobs` and
    `text_offset`, the place of each token in the answer's text, in characters."""

    def __init__(self, top_logprobs: int) -> None:
        self._with_top = top_logprobs > 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def columns(self, entries: Iterable[Any]) -> dict[str, Any]:
        """Of `Delta.logprob_entries`."""
        read = msgspec.json.decode(msgspec.json.encode(entries), type=list[_Entry])  # some may still be JSON
        return {
            "tokens": [entry.token for entry in read],
            "token_logprobs": [entry.logprob for entry in read],
            "top_logprobs": [{top.token: top.logprob for top in entry.top_logprobs} for entry in read]
            if self._with_top
            else None,
            "text_offset": [self._place(entry) for entry in read],
        }

    def _place(self, entry: _Entry) -> int:
        place = self._offset
        written = entry.token.encode() if entry.written is None else bytes(entry.written)
        self._offset += len(self._decoder.decode(written))
        return place
