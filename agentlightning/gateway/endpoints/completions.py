"""OpenAI's chat completions, the protocol whose form all others are read into; and its completions:
a text, or token ids, continued as they stand.

Knows the wire formats and nothing else: no backends, no rollouts, no HTTP server.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, TypeAlias, cast

import msgspec

from agentlightning.errors import BackendError
from agentlightning.gateway.answer import Answer, Choice
from agentlightning.gateway.backend import Delta, Started, Usage
from agentlightning.gateway.endpoints.base import Endpoint, openai_error, server_sent
from agentlightning.gateway.request import (
    MANY,
    SAMPLING_TYPES,
    SOME,
    CallRefused,
    CallRequest,
    Fields,
    TopLogprobs,
    custom_text,
    rest_json,
    sampling_fields,
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


class _CalledCustom(msgspec.Struct):
    name: str
    input: str


class _ToolCall(msgspec.Struct):
    function: _CalledFunction | None = None
    custom: _CalledCustom | None = None
    id: str | None = None


class _Message(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[_Part], MANY] | None = None
    tool_calls: Annotated[list[_ToolCall], MANY] | None = None
    function_call: _CalledFunction | None = None
    name: str | None = None


class _ToolFunction(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Custom(msgspec.Struct):
    name: str
    description: str | None = None
    format: dict[str, Any] | None = None


class _Tool(msgspec.Struct):
    type: str
    function: _ToolFunction | None = None
    custom: _Custom | None = None


_COMMON: Final[dict[str, Any]] = {
    **SAMPLING_TYPES,
    "stream_options": _StreamOptions,
    "return_token_ids": bool,
    "return_weight_versions": bool,  # they come with the token ids
}
_CHAT_FIELDS = Fields(
    {
        **_COMMON,
        "messages": Annotated[list[_Message], MANY],
        "tools": Annotated[list[_Tool], SOME],
        "tool_choice": str | dict[str, Any],
        "max_completion_tokens": SAMPLING_TYPES["max_tokens"],
        "logprobs": bool,
        "top_logprobs": TopLogprobs,
    }
)
_OBJECTS: Final = msgspec.json.Decoder(list[dict[str, Any]])


class ChatCompletions(Endpoint):
    """`POST /v1/chat/completions`. With `return_token_ids` the answer holds `prompt_token_ids`, and
    each choice `token_ids` and `policy_versions` (run-length, as in `SampledChoice.versions`)."""

    path = "chat/completions"
    id_prefix = "chatcmpl-"

    def read(self, body: bytes) -> CallRequest:
        values, extra, raw = _CHAT_FIELDS.read(body, "model", "messages")
        if not values["messages"]:
            raise CallRefused(
                "messages is empty; a call needs at least one message", param="messages"
            )
        if values.get("top_logprobs") and not values.get("logprobs"):
            raise CallRefused("top_logprobs needs logprobs to be true", param="top_logprobs")
        tools: list[_Tool] = values.get("tools", [])
        for position, tool in enumerate(tools):
            if tool.type in ("function", "custom") and getattr(tool, tool.type) is None:
                where = f"tools[{position}]"
                raise CallRefused(
                    f"{where} is of type {tool.type!r} and lacks that field", param=where
                )
        limits = {
            name: values[name] for name in ("max_completion_tokens", "max_tokens") if name in values
        }
        # Messages and tools travel as the agent wrote them, with fields unknown here.
        return CallRequest(
            messages=_OBJECTS.decode(raw["messages"]),
            messages_json=bytes(raw["messages"]).decode(),
            tools=_OBJECTS.decode(raw["tools"]) if values.get("tools") else [],
            tools_json=bytes(raw["tools"]).decode() if values.get("tools") else None,
            tool_choice=values.get("tool_choice"),
            max_tokens_name="max_tokens"
            if [*limits] == ["max_tokens"]
            else "max_completion_tokens",
            logprobs=values.get("logprobs", False),
            top_logprobs=values.get("top_logprobs", 0),
            extra=extra,
            original=frozenset(tool.custom.name for tool in tools if tool.custom is not None),
            request_json=rest_json(raw, "messages", "tools"),
            **_written_alike(values),
            **sampling_fields(values, min(limits.values(), default=None)),
        )

    def writer(self, request: CallRequest, answer: Answer) -> ChunkWriter:
        return ChunkWriter(request, answer)


def _written_alike(values: dict[str, Any]) -> dict[str, Any]:
    return {
        "include_usage": "stream_options" in values
        and bool(values["stream_options"].include_usage),
        "return_token_ids": values.get("return_token_ids", False),
    }


MAX_TOKENS: Final = 16
"""How many tokens are sampled where the request does not say, as in OpenAI's protocol."""

_Prompt: TypeAlias = str | list[int | str | list[int]]
_COMPLETION_FIELDS = Fields(
    {**_COMMON, "prompt": _Prompt, "logprobs": TopLogprobs, "echo": bool, "best_of": int}
)


class Completions(ChatCompletions):
    """`POST /v1/completions`, of one prompt. With `return_token_ids`, the default where the prompt
    is token ids, each choice holds `prompt_token_ids`, `token_ids` and `policy_versions`
    (run-length, as in `SampledChoice.versions`)."""

    path = "completions"
    operation = "text_completion"
    id_prefix = "cmpl-"

    def read(self, body: bytes) -> CallRequest:
        values, extra, raw = _COMPLETION_FIELDS.read(body, "model", "prompt")
        n = values.get("n", 1)
        for name, asked_for in (
            ("echo", values.get("echo")),
            ("best_of", values.get("best_of", n) != n),
        ):
            if asked_for:
                raise CallRefused(f"{name} is not supported: leave it out", param=name)
        prompt = _prompt(values["prompt"])
        values.setdefault("return_token_ids", not isinstance(prompt, str))
        return CallRequest(
            messages=[],
            prompt=prompt,
            logprobs="logprobs" in values,
            top_logprobs=values.get("logprobs", 0),
            extra=extra,
            request_json=rest_json(raw, "prompt"),
            **_written_alike(values),
            **sampling_fields(values, values.get("max_tokens", MAX_TOKENS)),
        )


def _prompt(given: _Prompt) -> str | tuple[int, ...]:
    """The one prompt of a request: a text or token ids, perhaps in a list of its own."""
    if isinstance(given, list) and given and not isinstance(given[0], int):
        if len(given) > 1:
            raise CallRefused(
                f"prompt holds {len(given)} prompts; one is answered per request: send a request "
                "for each",
                param="prompt",
            )
        given = cast(str | list[int | str | list[int]], given[0])
    if not given:
        raise CallRefused("prompt is empty; give a text or token ids", param="prompt")
    if isinstance(given, str):
        return given
    if not all(isinstance(token_id, int) for token_id in given):
        raise CallRefused(
            "prompt mixes token ids and texts; give one text, or a list of token ids",
            param="prompt",
        )
    return tuple(cast(list[int], given))


def _usage(usage: Usage) -> dict[str, Any]:
    total = usage.prompt_tokens + usage.completion_tokens
    counts = {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens}
    return {**counts, "total_tokens": total, **usage.details}


def _choice(index: int, content: dict[str, Any], ended: Choice | None = None) -> dict[str, Any]:
    """One choice, or a part of it, with this content."""
    reason = None if ended is None else ended.finish_reason
    body: dict[str, Any] = {"index": index, **content, "logprobs": None, "finish_reason": reason}
    if ended is not None and ended.stop_string is not None:
        body["stop_reason"] = ended.stop_string
    return body


class _TokenLogprob(msgspec.Struct):
    token: str
    logprob: float | None = None
    top_logprobs: list[_TokenLogprob] = []


def _logprobs(request: CallRequest, entries: Sequence[Any]) -> dict[str, Any]:
    """The entries of `Delta.logprob_entries`: unchanged for a chat, else in columns."""
    if request.prompt is None:
        return {"content": entries, "refusal": None}
    # some may still be JSON
    read = msgspec.json.decode(msgspec.json.encode(entries), type=list[_TokenLogprob])
    likeliest = [{top.token: top.logprob for top in entry.top_logprobs} for entry in read]
    return {
        "tokens": [entry.token for entry in read],
        "token_logprobs": [entry.logprob for entry in read],
        "top_logprobs": likeliest if request.top_logprobs else None,
    }


_PLACE: Final = b"\0"  # which JSON does not hold


class ChunkWriter:
    """Writes one answer. In a stream each event is `data: {…}` of one kind of object, and the last
    is `[DONE]`."""

    def __init__(self, request: CallRequest, answer: Answer) -> None:
        self._request = request
        self._answer = answer
        self._chat = request.prompt is None
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        self._head = {
            "id": answer.response_id,
            "object": kind,
            "created": answer.created,
            "model": answer.model,
        }
        # of each choice, what is around the delta in an event
        self._frames: dict[int, list[bytes]] = {}
        self._customs: frozenset[str] = request.original or frozenset()

    def started(self, event: Started) -> bytes:
        """The first chunk of each choice, and the prompt's ids where they were asked for."""
        self._head |= event.extra
        request = self._request
        numbers = range(self._request.sampling.n)
        ids = (
            {"prompt_token_ids": event.prompt_token_ids.tolist()}
            if request.return_token_ids
            else {}
        )
        if self._chat:
            content = self._content({"role": "assistant", "content": ""})
            return b"".join(
                [
                    self._event([_choice(index, content)], **({} if index else ids))
                    for index in numbers
                ]
            )
        content = {**self._content({}), **ids, "token_ids": ()}
        return (
            b"".join([self._event([_choice(index, {}) | content]) for index in numbers])
            if ids
            else b""
        )

    def delta(self, event: Delta) -> bytes:
        request = self._request
        if self._customs and "tool_calls" in event.delta:
            event = msgspec.structs.replace(event, delta=self._without_customs(event))
        if not (request.return_token_ids or request.logprobs):
            return self._framed(event.index, self._content(event.delta)) if event.delta else b""
        if not event.delta and not event.token_ids:
            return b""
        choice = _choice(event.index, self._content(event.delta))
        if request.logprobs:
            choice["logprobs"] = _logprobs(request, event.logprob_entries)
        if request.return_token_ids:
            choice["token_ids"] = event.token_ids
            return self._event([choice], policy_version=event.version)
        return self._event([choice])

    def _without_customs(self, event: Delta) -> dict[str, Any]:
        """The delta without the calls of custom tools, whose input is known when all their
        arguments are: the answer, which has the parts up to here, tells which they are."""
        calls = self._answer.choices[event.index].tool_calls
        parts = [
            part
            for part in event.delta["tool_calls"]
            if not self._is_custom(calls[part.get("index", -1)])
        ]
        rest = {name: value for name, value in event.delta.items() if name != "tool_calls"}
        return rest | ({"tool_calls": parts} if parts else {})

    def _is_custom(self, call: dict[str, Any]) -> bool:
        return "function" in call and call["function"]["name"] in self._customs

    def _own(self, call: dict[str, Any]) -> dict[str, Any]:
        """A call in the form of its tool."""
        if not self._is_custom(call):
            return call
        name = call["function"]["name"]
        arguments = call["function"]["arguments"]
        return {
            "id": call["id"],
            "type": "custom",
            "custom": {"name": name, "input": custom_text(arguments)},
        }

    def _custom_calls(self) -> bytes:
        """The calls of custom tools, each in one piece."""
        sent = b""
        for index, choice in enumerate(self._answer.choices if self._customs else ()):
            calls = [
                {"index": position, **self._own(call)}
                for position, call in enumerate(choice.tool_calls)
                if self._is_custom(call)
            ]
            sent += (
                self._event([_choice(index, {"delta": {"tool_calls": calls}})]) if calls else b""
            )
        return sent

    def _message(self, choice: Choice) -> dict[str, Any]:
        message = choice.message()
        if self._customs and "tool_calls" in message:
            message["tool_calls"] = [self._own(call) for call in message["tool_calls"]]
        return message

    def _framed(self, index: int, content: dict[str, Any]) -> bytes:
        """The event of a choice that says only this; all but that is encoded once."""
        ((name, value),) = content.items()
        if index not in self._frames:
            self._frames[index] = self._event([_choice(index, {name: msgspec.Raw(_PLACE)})]).split(
                _PLACE
            )
        before, after = self._frames[index]
        return b"%b%b%b" % (before, msgspec.json.encode(value), after)

    def end(self) -> bytes:
        """The last event of each choice, usage if it was asked for, and the end of the stream."""
        choices = enumerate(self._answer.choices)
        ends = [self._event([_choice(index, self._content({}), ended)]) for index, ended in choices]
        if self._request.include_usage:
            ends.append(self._event([], usage=_usage(self._answer.token_counts())))
        return self._custom_calls() + b"".join(ends) + b"data: [DONE]\n\n"

    def whole(self) -> bytes:
        request = self._request
        answer = self._answer
        chat = self._chat
        choices: list[dict[str, Any]] = []
        for index, choice in enumerate(answer.choices):
            body = _choice(
                index,
                {"message": self._message(choice)} if chat else {"text": choice.string("content")},
                choice,
            )
            if request.logprobs:
                body["logprobs"] = _logprobs(request, choice.logprob_entries)
            if request.return_token_ids:
                body |= {"token_ids": choice.token_ids.tolist(), "policy_versions": choice.versions}
            choices.append(body)
        response = {
            "id": answer.response_id,
            "object": "chat.completion" if chat else "text_completion",
            "created": answer.created,
            "model": answer.model,
            "choices": choices,
            "usage": _usage(answer.token_counts()),
            **answer.started.extra,
        }
        if request.return_token_ids:
            for holder in (response,) if chat else choices:
                holder["prompt_token_ids"] = answer.prompt_token_ids.tolist()
        return msgspec.json.encode(response)

    def error(self, error: BackendError) -> bytes:
        return server_sent({"error": openai_error(error)})

    def _content(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"delta": delta} if self._chat else {"text": delta.get("content", "")}

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return server_sent({**self._head, "choices": choices, **more})
