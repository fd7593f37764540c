"""Links: attributes by which a span names others, by a key and a value, also spans that do not exist yet.

`agentlightning.link.N.{key_match,value_match}`: `trace_id` and `span_id` match the span itself, any other key an
attribute.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from agentlightning.semconv import LINK
from agentlightning.types import AttributeValue


class LinkMatch(NamedTuple):
    key_match: str
    value_match: str


def extract_links_from_attributes(attributes: Mapping[str, AttributeValue]) -> list[LinkMatch]:
    """The links of a span, in order."""
    links: list[LinkMatch] = []
    while (key := attributes.get(f"{LINK}.{len(links)}.key_match")) is not None:
        links.append(LinkMatch(str(key), str(attributes.get(f"{LINK}.{len(links)}.value_match", ""))))
    return links
