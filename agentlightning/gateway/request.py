"""An agent's request in one form, whatever its protocol, and how bodies are read."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Final, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from agentlightning.errors import BackendError
from agentlightning.gateway.backend import LEFT_OPEN, ModelCall, Sampling

# Fields other than temperature, top_p and top_k that shape the distribution tokens are sampled
# from, and the values that do not.
NEUTRAL_PENALTIES: Final[Mapping[str, Any]] = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_p": 0.0,
}
SHAPING_FIELDS: Final = (*NEUTRAL_PENALTIES, "logit_bias")

NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
# Lists and fields of a request are looked at one by one, while other calls wait.
MANY: Final = Meta(max_length=100_000)  # messages, or parts of one
SOME: Final = Meta(max_length=10_000)  # tools
_LARGEST_SETTING: Final = 1 << 20  # bytes of a field of sampling
MOST_PARTS: Final = 2_000_000  # of a body: one of three bytes takes seventy in memory
OBJECT: Final = msgspec.json.Decoder(Annotated[dict[str, msgspec.Raw], Meta(max_length=1000)])
TopLogprobs: TypeAlias = Annotated[int, Meta(ge=0, le=20)]
# The fields of sampling, by the names and with the ranges of chat completions.
SAMPLING_TYPES: Final[dict[str, Any]] = {
    "model": str,
    "stream": bool,
    "temperature": Annotated[float, Meta(ge=0, le=2)],
    "top_p": Annotated[float, Meta(ge=0, le=1)],
    "top_k": Annotated[int, Meta(ge=-1, lt=2**31)],
    "max_tokens": Annotated[int, Meta(ge=1, lt=2**31)],
    # each is looked for behind each token
    "stop": str | Annotated[list[str], Meta(max_length=100)],
    "seed": Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)],
    "n": Annotated[int, Meta(ge=1, le=128)],
    **dict.fromkeys(NEUTRAL_PENALTIES, float),
    "logit_bias": dict[str, float],
}
# Other protocols have other names for these, and backends would take them for what they are in chat
# completions.
CHAT_ONLY: Final = frozenset(
    {
        "messages",
        "tools",
        "max_tokens",
        "max_completion_tokens",
        "n",
        "stop",
        "logprobs",
        "return_token_ids",
    }
    | {"stream_options", "response_format", "reasoning_effort", "verbosity", "parallel_tool_calls"}
)


class CallRefused(BackendError):
    """The gateway refuses a call. `param` is the wrong field, if there is one; `answered` the
    status of the server whose refusal it is."""

    answered: int | None = None

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str = "invalid_request",
        param: str | None = None,
    ):
        super().__init__(message, status=status, code=code)
        self.param = param


class CallRequest(ModelCall, frozen=True, kw_only=True):
    """A request in the form of chat completions, whatever its protocol. None or empty is not given.

    `continues` is the id of an earlier response, whose conversation comes before `messages`, but
    after their first `instructions`, which belong to this call alone. With `continuable`, a later
    response may continue this one. `messages_json` and `tools_json` are the agent's own bytes, if
    it wrote this form. `shaping` has penalties and the like (`SHAPING_FIELDS`). `dropped` names
    fields that are not sent on. `relayed` are all fields as written, for a backend with the agent's
    own protocol. `original` is what the endpoint's writer needs; `request_json` is the body without
    messages and tools, for the span."""

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


def check_parts(body: bytes) -> None:
    """CallRefused (413) for a body with more than MOST_PARTS lists, objects and commas."""
    if len(body) > MOST_PARTS and sum(map(body.count, (b"[", b"{", b","))) > MOST_PARTS:
        message = f"the request body has more than {MOST_PARTS:,} parts; send fewer"
        raise CallRefused(message, status=413, code="body_too_large")


class Fields:
    """The fields of a protocol that the gateway reads, and their types. Others are passed on,
    except `refused` ones. `spelled` gives the name of a field that may be written in several
    ways."""

    def __init__(
        self,
        types: Mapping[str, Any],
        refused: frozenset[str] = frozenset(),
        spelled: Callable[[str], str] | None = None,
    ) -> None:
        self._refused = refused
        self._spelled = spelled
        self._decoders = {name: msgspec.json.Decoder(type_) for name, type_ in types.items()}

    def read(
        self, body: bytes, *required: str
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, msgspec.Raw]]:
        """(fields that the gateway reads, all others, every field as written); null counts as not
        given.

        CallRefused (400) names a field that is missing, of the wrong type, out of range or of
        another protocol; 413 as `check_parts`."""
        check_parts(body)
        try:
            raw = OBJECT.decode(body)
        except NOT_JSON as error:
            raise CallRefused(
                f"the request body is not a JSON object: {error}", code="invalid_json"
            ) from None
        if self._spelled is not None:
            raw = {self._spelled(name): value for name, value in raw.items()}
        values: dict[str, Any] = {}
        unread: dict[str, Any] = {}
        for name, value in raw.items():
            if bytes(value) != b"null":
                (values if name in self._decoders else unread)[name] = self._decoded(name, value)
        for name in required:
            if name not in values:
                raise CallRefused(f"the request has no {name!r}, which is required", param=name)
        for name in self._refused.intersection(unread):
            raise unsupported(
                name,
                "it has another name in this protocol, or cannot be followed here; leave it out",
            )
        return values, unread, raw

    def _decoded(self, name: str, raw: msgspec.Raw) -> Any:
        if name in SAMPLING_TYPES and len(bytes(raw)) > _LARGEST_SETTING:
            raise CallRefused(
                f"{name} has more than {_LARGEST_SETTING:,} bytes; send fewer", param=name
            )
        return decoded(name, raw, self._decoders.get(name, _ANYTHING))


T = TypeVar("T")
_ANYTHING: Final[msgspec.json.Decoder[Any]] = msgspec.json.Decoder()


def decoded(where: str, raw: msgspec.Raw, decoder: msgspec.json.Decoder[T]) -> T:
    """The field `where`. CallRefused (400) names what of it is of the wrong type or out of
    range."""
    try:
        return decoder.decode(raw)
    except NOT_JSON as error:
        what, _, place = str(error).partition(" - at `$")
        where += place.removesuffix("`")
        raise CallRefused(f"{where} cannot be used: {what}", param=where) from None


def converted(where: str, raw: Any, kind: Any, *, strict: bool = True) -> Any:
    """The field `where` as another type. CallRefused (400) names what is of the wrong type or out
    of range. Without `strict`, whole numbers may be written as floats or texts."""
    try:
        return msgspec.convert(raw, kind, strict=strict)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at `$")
        where += place.removesuffix("`")
        raise CallRefused(f"{where} cannot be used: {what}", param=where) from None


def sampling_fields(values: dict[str, Any], max_tokens: int | None) -> dict[str, Any]:
    """The fields of a `CallRequest` that `SAMPLING_TYPES` name."""
    stop = values.get("stop") or ()
    sampling = Sampling(
        temperature=values.get("temperature"),
        top_p=values.get("top_p"),
        top_k=max(0, values["top_k"]) if "top_k" in values else None,
        max_tokens=max_tokens,
        stop=tuple(text for text in ((stop,) if isinstance(stop, str) else stop) if text),
        seed=values.get("seed"),
        n=values.get("n", 1),
    )
    return {
        "model": values["model"],
        "sampling": sampling,
        "stream": values.get("stream", False),
        "shaping": {name: values[name] for name in SHAPING_FIELDS if name in values},
    }


def given(**fields: Any) -> dict[str, Any]:
    """The fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


def rest_json(raw: Mapping[str, msgspec.Raw], *without: str) -> str:
    """The request body without some fields, each as the agent wrote it."""
    return msgspec.json.encode(
        {name: value for name, value in raw.items() if name not in without}
    ).decode()


def unsupported(name: str, why: str) -> CallRefused:
    return CallRefused(f"{name} is not supported: {why}", code="unsupported_parameter", param=name)


def function(
    name: str, description: str | None, parameters: Any, strict: bool | None = None
) -> dict[str, Any]:
    """A tool in the form of chat completions."""
    fields = given(name=name, description=description, parameters=parameters, strict=strict)
    return {"type": "function", "function": fields}


def function_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """A tool call in the form of chat completions."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def is_object(arguments: str) -> bool:
    """Whether these are all arguments of a call: an object, which more text would spoil."""
    if not arguments.rstrip().endswith("}"):
        return False
    try:
        msgspec.json.decode(arguments, type=dict[str, Any])
    except NOT_JSON:
        return False
    return True


def json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """`response_format` for answers of a schema."""
    return {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": schema, "strict": True},
    }


def image(url: str, detail: str | None = None) -> dict[str, Any]:
    return {"type": "image_url", "image_url": given(url=url, detail=detail)}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


_TEXTUAL: Final = frozenset(
    {"application/json", "application/xml", "application/x-yaml", "application/javascript"}
)


def attached(where: str, media_type: str, data: str, name: str | None = None) -> dict[str, Any]:
    """The part that stands for base64 `data`: plain text is text for every model. CallRefused (400)
    for text that is not base64 of UTF-8."""
    kind, _, form = media_type.partition(";")[0].lower().partition("/")
    url = f"data:{media_type};base64,{data}"
    if kind == "text" or f"{kind}/{form}" in _TEXTUAL:
        try:
            return text_part(base64.b64decode(data, validate=True).decode())
        except ValueError as error:
            raise CallRefused(f"{where} is no base64 of text: {error}", param=where) from None
    if kind == "image":
        return image(url)
    if kind == "video":
        return {"type": "video_url", "video_url": {"url": url}}
    if kind == "audio":
        return {"type": "input_audio", "input_audio": {"data": data, "format": form}}
    return {"type": "file", "file": given(filename=name, file_data=url)}


def of_data_url(where: str, url: str, name: str | None = None) -> dict[str, Any]:
    """The part that a `data:` URL stands for. CallRefused (400) for another URL: nothing is fetched
    here."""
    head, comma, data = url.partition(",")
    if not (comma and head.startswith("data:")):
        raise CallRefused(f"{where}: {FILES_NOT_KEPT}", code="unsupported_content", param=where)
    return attached(
        where, head.removeprefix("data:").removesuffix(";base64") or "text/plain", data, name
    )


_URLS: Final = frozenset(
    ("url", "uri", "image_url", "video_url", "audio_url", "file_url", "file_uri", "fileUri")
)
_OF_TOOLS: Final = frozenset(("tool_calls", "function_call", "input", "arguments", "action"))
_PASSED_ON: Final = ("http://", "https://", "data:")


def check_urls(messages: Any) -> None:
    """CallRefused (400) where messages name an image or a file by another URL than `http`, `https`
    and `data`: a server would read `file:///etc/passwd` from its own disk, and `gs://` with its own
    account. Ids of files are no URLs, and what tools are given is theirs to read."""
    waiting = [messages]
    while waiting:
        outer = waiting.pop()
        if isinstance(outer, list):
            waiting += [item for item in outer if isinstance(item, dict | list)]
            continue
        # by a hosted search, in whose results a `url` is that of a page
        quotes = str(outer.get("type")).startswith("web_")
        for name, inner in outer.items():
            named = inner.get("url") if isinstance(inner, dict) and name in _URLS else inner
            if isinstance(inner, dict | list) and name not in _OF_TOOLS:
                waiting.append(inner)
            if quotes and name == "url":
                continue
            if isinstance(named, str) and _leads_elsewhere(name, named):
                raise CallRefused(
                    f"{name} is {named[:100]!r}; images and files are passed on by http, https "
                    "and data URLs alone",
                    code="unsupported_content",
                    param=name,
                )


def _leads_elsewhere(name: str, url: str) -> bool:
    named = name in _URLS or (name == "file_data" and ":" in url[:100])
    return named and not url[:8].lower().startswith(_PASSED_ON)


FILES_NOT_KEPT: Final = (
    "files are neither kept nor fetched here; send its text, or its data as base64"
)
CUSTOM_INPUT: Final = "input"
"""The one argument of the function that a custom tool is for the model."""


def custom_function(
    name: str, description: str | None, format: Mapping[str, Any] | None
) -> dict[str, Any]:
    """A custom tool, whose input is free text, as a function of one string. The grammar of its
    input, which is not enforced here, goes to the description."""
    described = [description or ""]
    definition = (format or {}).get("definition")
    if isinstance(definition, str):
        described.append(
            f"The {CUSTOM_INPUT} follows this {(format or {}).get('syntax', '')} grammar:\n"
            f"{definition}"
        )
    schema = {
        "type": "object",
        "properties": {CUSTOM_INPUT: {"type": "string"}},
        "required": [CUSTOM_INPUT],
    }
    return function(name, "\n\n".join(filter(None, described)), schema)


def custom_call(call_id: str, name: str, text: str) -> dict[str, Any]:
    """A call of a custom tool as that of the function."""
    return function_call(call_id, name, msgspec.json.encode({CUSTOM_INPUT: text}).decode())


def custom_text(arguments: str) -> str:
    """The input of a custom tool in the arguments of the function; all of them where they have
    another form."""
    try:
        return msgspec.json.decode(arguments, type=_CustomArguments).input
    except NOT_JSON:
        return arguments


class _CustomArguments(msgspec.Struct):
    input: str


def require_question(name: str, turns: Sequence[Any], own_role: str) -> None:
    """CallRefused (400) if there are no turns, or the last is the model's."""
    if not turns:
        raise CallRefused(f"{name} is empty; a call needs at least one message", param=name)
    if turns[-1].role == own_role:
        why = (
            f"{name} ends with the {own_role}'s own words, and continuing them is not supported; "
            "end with the user's"
        )
        raise CallRefused(why, code="unsupported_parameter", param=name)
