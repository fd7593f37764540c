"""0.3's links and tags, its decorator of reward functions, and what reads back what was emitted."""

from __future__ import annotations

import base64
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from itertools import count, takewhile
from typing import Any, TypeVar, cast

import msgspec

from agentlightning.errors import InvalidError
from agentlightning.semconv import LINK, MESSAGE_BODY, OBJECT_JSON, OBJECT_TYPE, TAG
from agentlightning.tracing.emit import emit_reward
from agentlightning.tracing.links import LinkMatch
from agentlightning.types import Attributes, AttributeValue, Span

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def reward(function: FunctionT) -> FunctionT:
    """Decorate a function, sync or async, so that the reward it returns is also emitted."""

    def emitted(value: Any) -> Any:
        emit_reward(value)
        return value

    async def emitting_async(*args: Any, **kwargs: Any) -> Any:
        return emitted(await function(*args, **kwargs))

    def emitting(*args: Any, **kwargs: Any) -> Any:
        return emitted(function(*args, **kwargs))

    wrapper = emitting_async if inspect.iscoroutinefunction(function) else emitting
    return cast(FunctionT, functools.wraps(function)(wrapper))


def get_message_value(span: Span) -> str | None:
    """The text of a span of `emit_message`; None for any other span."""
    body = span.attributes.get(MESSAGE_BODY)
    return body if isinstance(body, str) else None


def get_object_value(span: Span) -> Any:
    """The value of a span of `emit_object`; None for any other span."""
    body = span.attributes.get(OBJECT_JSON)
    if not isinstance(body, str):
        return None
    value = msgspec.json.decode(body)
    return base64.b64decode(value) if span.attributes.get(OBJECT_TYPE) == "bytes" else value


def make_link_attributes(links: Mapping[str, str]) -> Attributes:
    """`{"span_id": "r1"}` → `{"agentlightning.link.0.key_match": "span_id", "agentlightning.link.0.value_match": "r1"}`

    Pass them to an emitter: `emit_reward(0.5, attributes=make_link_attributes(…))`. InvalidError for a value that is
    not text."""
    attributes: Attributes = {}
    for index, (key, value) in enumerate(links.items()):
        if not isinstance(value, str):  # pyright: ignore[reportUnnecessaryIsInstance] - given by users
            raise InvalidError(f"the link {key!r} is a {type(value).__name__}; links are matched as text, give a str")
        attributes |= {f"{LINK}.{index}.key_match": key, f"{LINK}.{index}.value_match": value}
    return attributes


def query_linked_spans(spans: Sequence[Span], links: Sequence[LinkMatch]) -> list[Span]:
    """The `spans` that match all links."""
    own = [{**span.attributes, "trace_id": span.trace_id, "span_id": span.span_id} for span in spans]
    return [span for span, has in zip(spans, own, strict=True) if all(has.get(key) == value for key, value in links)]


def make_tag_attributes(tags: Sequence[str]) -> Attributes:
    """`["fast"]` → `{"agentlightning.tag.0": "fast"}`"""
    return {f"{TAG}.{index}": tag for index, tag in enumerate(tags)}


def extract_tags_from_attributes(attributes: Mapping[str, AttributeValue]) -> list[str]:
    """The tags of `make_tag_attributes`, in order."""
    found = takewhile(lambda tag: tag is not None, (attributes.get(f"{TAG}.{index}") for index in count()))
    return [str(tag) for tag in found]
