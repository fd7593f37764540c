"""Links and tags: attributes that name other spans, and words to find a span by.

A link matches spans by a key and value, even spans that do not exist yet:
`agentlightning.link.N.{key_match,value_match}`. `trace_id` and `span_id` match the span itself, any other key an
attribute. A tag is `agentlightning.tag.N`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from agentlightning.errors import InvalidError
from agentlightning.semconv import LINK, TAG
from agentlightning.types import Attributes, AttributeValue, Span


class LinkMatch(NamedTuple):
    """One condition of a link."""

    key_match: str
    value_match: str


def make_link_attributes(links: Mapping[str, str]) -> Attributes:
    """`{"span_id": "r1"}` → `{"agentlightning.link.0.key_match": "span_id", "agentlightning.link.0.value_match": "r1"}`

    Pass them to an emitter: `emit_reward(0.5, attributes=make_link_attributes(…))`. InvalidError for a value that is
    not text."""
    attributes: Attributes = {}
    for index, (key, value) in enumerate(links.items()):
        if not isinstance(value, str):  # pyright: ignore[reportUnnecessaryIsInstance] - given by users
            raise InvalidError(f"the link {key!r} is a {type(value).__name__}; links are matched as text, give a str")
        attributes[f"{LINK}.{index}.key_match"] = key
        attributes[f"{LINK}.{index}.value_match"] = value
    return attributes


def extract_links_from_attributes(attributes: Mapping[str, AttributeValue]) -> list[LinkMatch]:
    """The links of `make_link_attributes`, in order."""
    links: list[LinkMatch] = []
    while (key := attributes.get(f"{LINK}.{len(links)}.key_match")) is not None:
        links.append(LinkMatch(str(key), str(attributes.get(f"{LINK}.{len(links)}.value_match", ""))))
    return links


def query_linked_spans(spans: Sequence[Span], links: Sequence[LinkMatch]) -> list[Span]:
    """The `spans` that match all links."""
    return [span for span in spans if all(_matches(span, link) for link in links)]


def make_tag_attributes(tags: Sequence[str]) -> Attributes:
    """`["fast"]` → `{"agentlightning.tag.0": "fast"}`"""
    return {f"{TAG}.{index}": tag for index, tag in enumerate(tags)}


def extract_tags_from_attributes(attributes: Mapping[str, AttributeValue]) -> list[str]:
    """The tags of `make_tag_attributes`, in order."""
    tags: list[str] = []
    while (tag := attributes.get(f"{TAG}.{len(tags)}")) is not None:
        tags.append(str(tag))
    return tags


def _matches(span: Span, link: LinkMatch) -> bool:
    if link.key_match in ("trace_id", "span_id"):
        return getattr(span, link.key_match) == link.value_match
    return span.attributes.get(link.key_match) == link.value_match
