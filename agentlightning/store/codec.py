"""Writes nouns into columns: JSON for open fields, typed binary for tokens.

It refuses what would not be read back the same (NaN, infinities, ids that cannot be in a URL). It
does not know SQL or HTTP. Token ids are int32 and logprobs float32, little-endian: a logprob is
read back as the nearest float32."""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from agentlightning.arrays import float32, int32
from agentlightning.errors import InvalidError
from agentlightning.semconv import LARGEST_REWARD, is_reward_value
from agentlightning.types import (
    Attributes,
    FinishReason,
    SampledChoice,
    Span,
    SpanEvent,
    SpanLink,
    SpanStatus,
    TokenCapture,
)

_ID: Final = re.compile(r"(?!\.+\Z)[A-Za-z0-9_.:\-]{1,200}")
_LARGEST_SEQUENCE_ID: Final = 2**53
# levels of nesting; the decoders of another process may have less room than this process
_DEEPEST: Final = 200
ID_SIZE: Final = 4  # bytes of a token id


class _Choice(msgspec.Struct, frozen=True, array_like=True):
    tokens: int
    logprobs: int
    finish_reason: FinishReason
    versions: tuple[tuple[int, int], ...]


class SpanColumns(NamedTuple):
    """One span as the columns of its row, in the order of the table."""

    span_id: str
    sequence_id: int
    trace_id: str
    parent_id: str | None
    name: str
    start_time: float
    end_time: float
    status_code: str
    status_description: str | None
    attributes: str
    events: str | None
    links: str | None
    resource: str | None
    prompt_token_ids: bytes | None
    token_ids: bytes | None
    logprobs: bytes | None
    choices: str | None
    base: str | None = None  # see `prompts`
    repeated: str | None = None


SPAN_COLUMNS: Final = ", ".join(SpanColumns._fields)

_encoder: Final = msgspec.json.Encoder()
_msgpack: Final = msgspec.msgpack.Encoder()
_attributes: Final = msgspec.json.Decoder(Attributes)
_events: Final = msgspec.json.Decoder(tuple[SpanEvent, ...])
_links: Final = msgspec.json.Decoder(tuple[SpanLink, ...])
_choices: Final = msgspec.json.Decoder(tuple[_Choice, ...])


def new_id(kind: str) -> str:
    """A new unique id such as `ro-5f0c…`."""
    return f"{kind}-{secrets.token_hex(8)}"


def check_id(value: str, what: str) -> str:
    """`value`, if it can be in a URL and a key. InvalidError otherwise."""
    if not _ID.fullmatch(value):
        raise InvalidError(
            f"{what} is {value!r}; use 1 to 200 letters, digits, or any of . _ : -, and not dots "
            "alone"
        )
    return value


def to_json(value: Any, what: str) -> str:
    """JSON of a value. InvalidError names the place of what JSON or msgpack would not give back:
    NaN, infinities, integers beyond 64 bits, values nested too deep."""
    try:
        data = _encoder.encode(value)
        _msgpack.encode(value)
        if b"null" in data or data.count(b"[") + data.count(b"{") > _DEEPEST:
            _check(msgspec.to_builtins(value), what)
        return data.decode()
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        _check(value, what)
        raise InvalidError(f"{what} cannot be stored as JSON: {error}") from None


def from_json(text: str) -> Any:
    return msgspec.json.decode(text)


def same(stored: Any, value: Any, what: str) -> bool:
    """Whether two values are the same JSON, in any order of keys."""
    return from_json(to_json(stored, what)) == from_json(to_json(value, what))


def merged(value: Any, patch: Any) -> Any:
    """The JSON value with a merge patch applied (RFC 7396): `{"a": 1, "b": 2}`,
    `{"b": None, "c": 3}` → `{"a": 1, "c": 3}`."""
    if not isinstance(patch, Mapping):
        return patch
    known: Mapping[str, Any] = value if isinstance(value, Mapping) else {}
    changed = {key: merged(known.get(key), part) for key, part in patch.items() if part is not None}
    return {key: part for key, part in known.items() if key not in patch} | changed


def text(value: str) -> str:
    """The text without NUL, which PostgreSQL refuses. (Texts inside JSON keep theirs.)"""
    return value.replace("\0", "\ufffd") if "\0" in value else value


def check_finite(value: float, what: str) -> None:
    if not math.isfinite(value):
        raise InvalidError(f"{what} is {value}; only finite numbers can be stored")


def _check(value: Any, where: str, depth: int = 0) -> None:
    if depth > _DEEPEST:
        raise InvalidError(
            f"{where[:200]} … is nested deeper than {_DEEPEST} levels; give it as text"
        )
    if isinstance(value, float):
        check_finite(value, where)
    elif isinstance(value, int):
        if not -(2**63) <= value < 2**64:
            raise InvalidError(
                f"{where} is an integer of {value.bit_length()} bits; give what exceeds 64 bits "
                "as text"
            )
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(item, str):
                _check(item, f"{where}[{key!r}]", depth + 1)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            if not isinstance(item, str):
                _check(item, f"{where}[{index}]", depth + 1)
    elif isinstance(value, msgspec.Struct):
        _check(msgspec.structs.asdict(value), where, depth)


def span_columns(
    span: Span,
    prompt_ids: bytes | None = None,
    base: str | None = None,
    repeated: str | None = None,
) -> SpanColumns:
    """The columns of a span; `prompt_ids` stand in place of those of its tokens, if given.
    InvalidError names an attribute that is not finite or an id that is not usable."""
    check_id(span.span_id, "span_id")
    if not 0 <= span.sequence_id <= _LARGEST_SEQUENCE_ID:
        raise InvalidError(
            f"the sequence_id of span {span.span_id} is {span.sequence_id}; give 1, 2 …, or 0 for "
            "the next"
        )
    # PostgreSQL takes it for queries by duration
    if not math.isfinite(span.end_time - span.start_time):
        raise InvalidError(
            f"span {span.span_id} runs from {span.start_time} to {span.end_time}; these, and how "
            "long it is, must be finite"
        )
    tokens = (
        (None, None, None, None) if span.tokens is None else _token_columns(span.tokens, prompt_ids)
    )
    place = f"of span {span.name!r} ({span.span_id})"
    return SpanColumns(
        span.span_id,
        span.sequence_id,
        text(span.trace_id),
        None if span.parent_id is None else text(span.parent_id),
        text(span.name),
        span.start_time,
        span.end_time,
        span.status.status_code,
        None if span.status.description is None else text(span.status.description),
        _attributes_json(span.attributes, place),
        _parts_json(span.events, f"{place}, events") if span.events else None,
        _parts_json(span.links, f"{place}, links") if span.links else None,
        _attributes_json(span.resource, f"{place}, resource") if span.resource else None,
        *tokens,
        base,
        repeated,
    )


LARGE: Final = 256_000
"""Characters and parts of spans, which take some milliseconds to search and to encode."""
_LEAST: Final = 64  # of them take as long as a span without any


def larger(spans: Sequence[Span], limit: int) -> bool:
    """Whether spans have more than about this many characters and parts; stops counting there."""
    size = 0
    for span in spans:
        parts = (*span.events, *span.links)
        size += _LEAST + len(span.name) + len(span.status.description or "") + len(parts)
        attributes = (span.attributes, span.resource, *(part.attributes for part in parts))
        for name, value in (item for several in attributes for item in several.items()):
            if isinstance(value, list | tuple):
                size += len(value)
                size += (
                    sum(len(text) for text in value if isinstance(text, str))
                    if size <= limit
                    else 0
                )
            else:
                size += len(value) if isinstance(value, str) else 1
            size += len(name)
            if size > limit:
                return True
    return size > limit


def span_from_columns(rollout_id: str, attempt_id: str, row: SpanColumns) -> Span:
    """The span of a row without a base."""
    return Span(
        rollout_id=rollout_id,
        attempt_id=attempt_id,
        sequence_id=row.sequence_id,
        trace_id=row.trace_id,
        span_id=row.span_id,
        name=row.name,
        start_time=row.start_time,
        end_time=row.end_time,
        parent_id=row.parent_id,
        status=msgspec.convert(
            {"status_code": row.status_code, "description": row.status_description}, type=SpanStatus
        ),
        attributes=_attributes.decode(row.attributes),
        events=_events.decode(row.events) if row.events else (),
        links=_links.decode(row.links) if row.links else (),
        resource=_attributes.decode(row.resource) if row.resource else {},
        tokens=_tokens(row),
    )


def _attributes_json(attributes: Attributes, place: str) -> str:
    _check_attributes(attributes, place)
    return _json_text(attributes, place)


def _parts_json(parts: Sequence[SpanEvent] | Sequence[SpanLink], place: str) -> str:
    for part in parts:
        _check_attributes(part.attributes, place)
        if isinstance(part, SpanEvent) and part.timestamp is not None:
            check_finite(part.timestamp, f"the timestamp of event {part.name!r} {place}")
    return _json_text(parts, place)


def _json_text(value: Any, place: str) -> str:
    try:
        return _encoder.encode(value).decode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidError(f"the attributes {place} cannot be stored as JSON: {error}") from None


def _check_attributes(attributes: Attributes, place: str) -> None:
    for name, value in attributes.items():
        if isinstance(value, str | bool):
            continue
        if isinstance(value, int | float) and abs(value) > LARGEST_REWARD and is_reward_value(name):
            raise InvalidError(
                f"attribute {name!r} {place} is {value:g}; a reward lies between "
                f"−{LARGEST_REWARD:g} and {LARGEST_REWARD:g}"
            )
        for item in value if isinstance(value, list | tuple) else (value,):
            if isinstance(item, float):
                check_finite(item, f"attribute {name!r} {place}")
            elif isinstance(item, int):
                if not -(2**63) <= item < 2**63:
                    raise InvalidError(
                        f"attribute {name!r} {place} exceeds 64 bits; give it as text"
                    )
            elif not isinstance(item, str):
                kind = type(item).__name__
                raise InvalidError(
                    f"attribute {name!r} {place} is or holds a {kind}; give texts, numbers, "
                    "booleans, or a list of them"
                )


def _token_columns(
    tokens: TokenCapture, prompt_ids: bytes | None
) -> tuple[bytes, bytes, bytes, str]:
    choices = [
        _Choice(len(choice.token_ids), len(choice.logprobs), choice.finish_reason, choice.versions)
        for choice in tokens.choices
    ]
    return (
        tokens.prompt_token_ids.tobytes() if prompt_ids is None else prompt_ids,
        b"".join([choice.token_ids for choice in tokens.choices]),
        b"".join([choice.logprobs for choice in tokens.choices]),
        to_json(choices, "the choices of a call"),
    )


def _tokens(row: SpanColumns) -> TokenCapture | None:
    if row.prompt_token_ids is None or row.token_ids is None or row.logprobs is None:
        return None
    ids = int32(row.token_ids)
    logprobs = float32(row.logprobs)
    choices: list[SampledChoice] = []
    for choice in _choices.decode(row.choices or "[]"):
        choices.append(
            SampledChoice(
                token_ids=ids[: choice.tokens],
                logprobs=logprobs[: choice.logprobs],
                finish_reason=choice.finish_reason,
                versions=choice.versions,
            )
        )
        ids = ids[choice.tokens :]
        logprobs = logprobs[choice.logprobs :]
    return TokenCapture(prompt_token_ids=int32(row.prompt_token_ids), choices=tuple(choices))
