"""The images in the messages of a request, as references. Knows the forms of the three protocols and nothing else."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import unquote_to_bytes

from agentlightning.tracing.dialects import items, json_of, mapping

_MARKS: Final = ('"image', '_image"', '_screenshot"')  # texts with an image hold one of these
_LONGEST_MARK: Final = max(map(len, _MARKS))


def image_references(messages: str | None, without: str = "") -> tuple[str, ...]:
    """References of the images in a request's messages (JSON), in order: a URL or file id as it is, of inline data
    `sha256:<hex>;<media type>` of its bytes. `without` are messages that hold none: in messages that go on from these
    only the rest is looked through."""
    if messages is None:
        return ()
    start = max(0, len(without) - _LONGEST_MARK) if messages.startswith(without[:-1]) else 0
    if all(messages.find(mark, start) < 0 for mark in _MARKS):
        return ()
    return tuple(reference for message in items(json_of(messages)) for reference in _references(message))


def _references(message: Any) -> Iterator[str]:
    """Of a message and of the parts of its content; results of tools hold parts too."""
    parts: list[Any] = [message]
    while parts:
        part = mapping(parts.pop())
        source, url = mapping(part.get("source")), part.get("image_url")
        address = mapping(url).get("url") or url  # chat completions: {"url": …}, responses: the address itself
        if part.get("type") == "image" and source.get("type") == "base64":
            yield _digest(_decoded(str(source.get("data"))), str(source.get("media_type")))
        elif part.get("type") == "image":
            yield str(source.get("url") or source.get("file_id"))
        elif isinstance(address, str):
            yield _reference(address)
        elif part.get("type") in ("input_image", "computer_screenshot"):
            yield str(part.get("file_id"))
        for inner in (part.get("output"), part.get("content")):
            parts += reversed(items(inner)) if isinstance(inner, list) else [inner] * isinstance(inner, dict)


def _reference(address: str) -> str:
    if not address.startswith("data:"):
        return address
    kind, _, data = address.removeprefix("data:").partition(",")
    media_type, _, encoding = kind.partition(";")
    return _digest(_decoded(data) if "base64" in encoding else unquote_to_bytes(data), media_type)


def _decoded(data: str) -> bytes:
    try:
        return base64.b64decode(data)
    except ValueError:
        return data.encode()  # still the same reference for the same image


def _digest(data: bytes, media_type: str) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()};{media_type}"
