"""What an agent asks for, whichever protocol it speaks: the chat form of a request, and how bodies are read into it.

Knows JSON bodies and nothing else: no backends, no rollouts, no HTTP server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec

from agentlightning.errors import BackendError
from agentlightning.gateway.backend import LEFT_OPEN, ModelCall, Sampling

# Fields other than temperature, top_p and top_k that shape the distribution tokens are sampled from, and the values
# that do not.
NEUTRAL_PENALTIES: Final[Mapping[str, Any]] = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_p": 0.0,
}
SHAPING_FIELDS: Final = (*NEUTRAL_PENALTIES, "logit_bias")

NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
# Lists and fields of a request are looked at one by one, while other calls wait.
MANY: Final = msgspec.Meta(max_length=100_000)  # messages, or parts of one
SOME: Final = msgspec.Meta(max_length=10_000)  # tools
OBJECT: Final = msgspec.json.Decoder(Annotated[dict[str, msgspec.Raw], msgspec.Meta(max_length=1000)])


class CallRefused(BackendError):
    """The gateway itself refuses a call. `param` names the request field at fault, where there is one."""

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request", param: str | None = None):
        super().__init__(message, status=status, code=code)
        self.param = param


class CallRequest(ModelCall, frozen=True, kw_only=True):
    """A request in the form of chat completions, whatever protocol it came in; what is None or empty was not given.

    `continues` names an earlier response whose conversation comes before `messages`, though behind the first
    `instructions` of them, which belong to this call alone; with `continuable` a later response may continue this one.
    `messages_json` and `tools_json` are the agent's own bytes where it wrote them in this form. `shaping` holds
    penalties and the like (see `SHAPING_FIELDS`). `dropped` names what nobody is sent, `relayed` are all fields as
    they were written where the backend answers in the agent's own protocol. `original` is what the
    endpoint's own writer needs of the request, `request_json` the body without its messages and tools, for the span."""

    sampling: Sampling = LEFT_OPEN
    continues: str | None = None
    continuable: bool = False
    instructions: int = 0
    messages_json: str | None = None
    tools_json: str | None = None
    include_usage: bool = False
    return_token_ids: bool = False
    shaping: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    dropped: tuple[str, ...] = ()
    original: Any = None
    request_json: str = "{}"
    relayed: dict[str, msgspec.Raw] | None = None


class Fields:
    """The fields of one protocol that the gateway reads: their types, and what may be said more of their shapes. All
    others are passed on unread."""

    def __init__(self, types: Mapping[str, Any], shapes: Mapping[str, Any]) -> None:
        self._decoders = {name: msgspec.json.Decoder(type_) for name, type_ in types.items()}
        self._shapes = {name: msgspec.json.Decoder(type_) for name, type_ in shapes.items()}

    def read(self, body: bytes, *required: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, msgspec.Raw]]:
        """(fields the gateway reads, all others, every field as it was written); nulls count as not given.

        CallRefused (400) names the field that is missing, of the wrong type or out of range."""
        try:
            raw = OBJECT.decode(body)
        except NOT_JSON as error:
            raise CallRefused(f"the request body is not a JSON object: {error}", code="invalid_json") from None
        values: dict[str, Any] = {}
        others: dict[str, Any] = {}
        for name, value in raw.items():
            if bytes(value) != b"null":
                (values if name in self._decoders else others)[name] = self._decoded(name, value)
        for name in required:
            if name not in values:
                raise CallRefused(f"the request has no {name!r}, which is required", param=name)
        return values, others, raw

    def _decoded(self, name: str, raw: msgspec.Raw) -> Any:
        try:
            if name in self._shapes:
                self._shapes[name].decode(raw)
            return self._decoders[name].decode(raw) if name in self._decoders else msgspec.json.decode(raw)
        except NOT_JSON as error:
            what, _, place = str(error).partition(" - at `$")
            field = name + place.removesuffix("`")
            if "[...]" in field and name in self._shapes:
                field = field.replace("[...]", _position(self._shapes[name], raw), 1)
            raise CallRefused(f"{field} cannot be used: {what}", param=field) from None


def _position(decoder: msgspec.json.Decoder[Any], raw: msgspec.Raw) -> str:
    """`[3]` for the fourth item if that is the first unusable one; `[...]` where it cannot be told."""
    for position, item in enumerate(msgspec.json.decode(raw, type=list[msgspec.Raw])):
        try:
            decoder.decode(b"[" + bytes(item) + b"]")
        except NOT_JSON:
            return f"[{position}]"
    return "[...]"


def converted(where: str, raw: Any, kind: Any, *, strict: bool = True) -> Any:
    """The field `where`, as a value of another type. CallRefused (400) names what in it is of the wrong type or out of
    range; without `strict`, numbers may be written as texts."""
    try:
        return msgspec.convert(raw, kind, strict=strict)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at `$")
        where = (where + place.removesuffix("`")).removeprefix(".")
        raise CallRefused(f"{where or 'the request'} cannot be used: {what}", param=where) from None


def given(**fields: Any) -> dict[str, Any]:
    """The fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


def stop_strings(stop: Any) -> tuple[str, ...]:
    """The `stop` field, one string or several, without empty ones."""
    return (stop,) if isinstance(stop, str) and stop else tuple(text for text in stop or () if text)


def rest_json(raw: Mapping[str, msgspec.Raw], *without: str) -> str:
    """The request body without some fields, each as the agent wrote it."""
    return msgspec.json.encode({name: value for name, value in raw.items() if name not in without}).decode()


def unsupported(name: str, why: str) -> CallRefused:
    return CallRefused(f"{name} is not supported: {why}", code="unsupported_parameter", param=name)


def assistant_message(text: list[str], thinking: list[str], calls: list[dict[str, Any]]) -> dict[str, Any]:
    """Texts and thoughts are joined as they are: it is how they were sampled."""
    said = {"role": "assistant", "content": "".join(text) or (None if calls else "")}
    more = {"reasoning_content": "".join(thinking), "tool_calls": calls}
    return said | {name: value for name, value in more.items() if value}


def content_of(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """A message's content: one text as a string; several parts as such, which the backend joins in its own way."""
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts or ""


def require_question(name: str, turns: Sequence[Any], own_role: str) -> None:
    """CallRefused (400) where there are no turns, or the last one is the model's own."""
    if not turns:
        raise CallRefused(f"{name} is empty; a call needs at least one message", param=name)
    if turns[-1].role == own_role:
        why = f"{name} ends with the {own_role}'s own words, and continuing them is not supported; end with the user's"
        raise CallRefused(why, code="unsupported_parameter", param=name)
