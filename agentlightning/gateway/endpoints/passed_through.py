"""Requests that a backend answers in the agent's own protocol: read just enough to route them and
to record them.

Knows the wire formats of OpenAI's embeddings and responses and of Anthropic's messages. Knows no
backends and no HTTP."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any, Final

import msgspec

from agentlightning.data.conversations import chat_messages
from agentlightning.errors import BackendError
from agentlightning.gateway.answer import Answer
from agentlightning.gateway.backend import Delta, Usage, token_count
from agentlightning.gateway.endpoints.base import Endpoint
from agentlightning.gateway.request import (
    NOT_JSON,
    OBJECT,
    CallRefused,
    CallRequest,
    check_urls,
    rest_json,
)
from agentlightning.prompts.replacing import REPEATED, Replaced
from agentlightning.store.redaction import text_without_secrets
from agentlightning.tracing.dialects import items, joined, json_of, mapping
from agentlightning.types import FinishReason

# What is let through of the agent's headers: nothing that names a key or an account.
HEADERS: Final = frozenset(
    {"accept", "anthropic-beta", "anthropic-version", "openai-beta", "user-agent"}
)
_INPUTS: Final = ("messages", "input")  # fields that hold the input of the model
_KEPT_BYTES: Final = 8 * 1024 * 1024  # of one answer, for its span


class Embeddings(Endpoint):
    """`POST /v1/embeddings`: only backends that embed answer it, in their own words."""

    path = "embeddings"
    operation = "embeddings"
    id_prefix = "embd-"

    def read(self, body: bytes) -> CallRequest:
        raise CallRefused(
            "the backend of this model makes no embeddings; name a model that is registered with "
            "an HTTP backend",
            code="unsupported_endpoint",
            param="model",
        )


def read_passed_through(body: bytes) -> CallRequest:
    """Read the parts of a request that routing and the span need; the backend reads the rest.
    CallRefused (400) without a `model`."""
    try:
        body.decode()  # what is not read here is not looked at further on
        fields = OBJECT.decode(body)
        model = msgspec.json.decode(fields.get("model", b"null"), type=str)
    except NOT_JSON as error:
        raise CallRefused(
            f"the body must be a JSON object that names a model: {error}", param="model"
        ) from None
    written = {name: bytes(value).decode() for name, value in fields.items()}
    messages = next((written[name] for name in _INPUTS if name in written), None)
    inputs = {name: items(json_of(written[name])) for name in _INPUTS if name in written}
    for parts in inputs.values():
        check_urls(parts)
    system = json_of(written.get("system") or written.get("instructions"))
    return CallRequest(
        model=model,
        messages=[{"role": "system", "content": system}, *next(iter(inputs.values()), ())],
        messages_json=messages,
        tools_json=written.get("tools"),
        stream=written.get("stream") == "true",
        request_json=rest_json(fields, "tools", *_INPUTS),
        relayed=fields,
    )


class OwnWords:
    """Makes a response that repeats the request repeat the agent's own. Of a stream whole lines
    come out, of another answer all of it at its end."""

    def __init__(self, replaced: Replaced, *, streamed: bool) -> None:
        self._replaced = replaced
        self._streamed = streamed
        self._open = b""

    def part(self, part: bytes) -> bytes:
        """The next bytes of a stream."""
        *lines, self._open = (self._open + part).split(b"\n")
        return b"".join([self._line(line) + b"\n" for line in lines])

    def end(self, rest: bytes) -> bytes:
        return self._line(self._open + rest)

    def _line(self, line: bytes) -> bytes:
        head = b"data:" if self._streamed else b""
        answer = mapping(_decoded(line.removeprefix(head)) if line.startswith(head) else None)
        response = mapping(answer.get("response")) if self._streamed else answer
        if not any(map(response.get, REPEATED)):
            return line
        own = self._replaced.repeated(response)
        return head + msgspec.json.encode(answer | {"response": own} if self._streamed else own)


class AnswerCopy:
    """Gathers the bytes of an answer that is passed through, and reads them into an `Answer` at its
    end."""

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
        """The message of an answer that is an error."""
        text = text_without_secrets(b"".join(self._parts).decode(errors="replace"))
        return BackendError(f"the backend answered {status}: {text[:500]}", status=status)

    def read_into(self, answer: Answer) -> FinishReason:
        """The text so far, tool calls, usage and the body itself; returns how it ended. What is in
        a form that is not known is left out, or all of an answer that is too large to be kept, and
        nothing fails."""
        answer.first_token_time = self._began
        body = b"".join(self._parts)
        whole = {} if self._size > _KEPT_BYTES else mapping(_decoded(body)) or _Events().read(body)
        if not whole:
            return "stop"
        counts = [
            token_count(_first(mapping(whole.get("usage")), *names)) for names in (_READ, _WRITTEN)
        ]
        if counts != [None, None]:
            answer.add(Usage(counts[0] or 0, counts[1] or 0))
        if "data" not in whole:  # vectors are not kept
            with suppress(ValueError):
                answer.response_json = msgspec.json.encode(whole).decode()
        answer.add(Delta(0, _message(whole)))
        end = whole.get("stop_reason") or whole.get("status")
        return _ENDS.get(end, "stop") if isinstance(end, str) else "stop"


_READ: Final = ("input_tokens", "prompt_tokens")
_WRITTEN: Final = ("output_tokens", "completion_tokens")


def _first(fields: dict[str, Any], *names: str) -> Any:
    return next((fields[name] for name in names if fields.get(name) is not None), None)


def _decoded(data: bytes) -> Any:
    return json_of(data.decode(errors="replace").strip())


class _Events:
    """The events of a stream, of responses or of Anthropic's messages, as the whole answer that
    they add up to. Parts are keyed by the number of their block or item, in whatever order they
    come."""

    def __init__(self) -> None:
        self._whole: dict[str, Any] = {}
        self._parts: dict[int, dict[str, Any]] = {}
        # that came after their part was begun, by its field
        self._texts: dict[int, dict[str, list[str]]] = {}

    def read(self, body: bytes) -> dict[str, Any]:
        for line in body.split(b"\n"):
            if line.startswith(b"data:"):
                self._add(mapping(_decoded(line[5:])))
        parts = [self._part(number) for number in sorted(self._parts)]
        for part in parts:
            if isinstance(arguments := part.pop("partial_json", None), str):
                part["input"] = mapping(json_of(arguments))
        name = "content" if "role" in self._whole else "output"
        if parts and not self._whole.get(name):
            self._whole[name] = parts
        return self._whole

    def _add(self, event: dict[str, Any]) -> None:
        match event:
            case {"response": dict(response)}:
                self._whole = mapping(response)
            case {"type": "message_start", "message": dict(message)}:
                self._whole = {"role": "assistant", **mapping(message)}
            case {"type": "message_delta"}:
                usage = mapping(self._whole.get("usage")) | mapping(event.get("usage"))
                self._whole |= mapping(event.get("delta")) | {"usage": usage}
            case {"index": int(number), "content_block": dict(part)} | {
                "output_index": int(number),
                "item": dict(part),
            }:
                self._parts[number] = dict(mapping(part))
                self._texts.pop(number, None)
            case {"index": int(number), "delta": dict(delta)}:
                self._parts.setdefault(number, {"type": "text"})
                for name, text in mapping(delta).items():
                    if name != "type" and isinstance(text, str):
                        self._say(number, name, text)
            case {
                "output_index": int(number),
                "delta": str(text),
                "type": "response.output_text.delta",
            }:
                self._parts.setdefault(number, {"type": "message", "role": "assistant"})
                self._say(number, "content", text)
            case _:
                pass

    def _say(self, number: int, name: str, text: str) -> None:
        self._texts.setdefault(number, {}).setdefault(name, []).append(text)

    def _part(self, number: int) -> dict[str, Any]:
        """A part with what was said since it was begun."""
        part = self._parts[number]
        for name, texts in self._texts.get(number, {}).items():
            said = "".join(texts)
            if name == "content":  # of a message of a response
                part[name] = [{"type": "output_text", "text": joined(part.get(name)) + said}]
            else:
                part[name] = f"{part.get(name) or ''}{said}"
        return part


def _message(whole: dict[str, Any]) -> dict[str, Any]:
    """Text and tool calls of a response or a message, in the form of chat completions."""
    messages = chat_messages(map(mapping, items(whole.get("output")) or [whole]), answer=True)
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    text = "".join(joined(message["content"]) for message in messages)
    return {"content": text} | ({"tool_calls": calls} if calls else {})


_ENDS: Final[dict[Any, FinishReason]] = {
    "max_tokens": "length",
    "incomplete": "length",
    "tool_use": "tool_calls",
}
