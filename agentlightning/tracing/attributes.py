"""Converts Python values to flat, typed, finite span attributes, and back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import msgspec

from agentlightning.errors import InvalidError
from agentlightning.types import Attributes, AttributeValue

MAX_DEPTH: Final = 16  # groups within groups


def flatten(values: Mapping[str, Any]) -> Attributes:
    """Nested mappings become dotted names; lists of one scalar type stay, other lists are numbered; None is omitted.

    `{"a": {"b": 1}, "c": ["x", 2]}` → `{"a.b": 1, "c.0": "x", "c.1": 2}`. InvalidError for other objects and numbers
    that are not finite."""
    flat: Attributes = {}
    try:
        for name, value in values.items():
            _put(flat, checked_text("the name of an attribute", str(name)), value)
    except RecursionError:
        raise InvalidError("the attributes hold themselves, or are nested too deeply; pass plain values") from None
    return flat


def nested(attributes: Attributes, name: str) -> dict[str, Any]:
    """The group of attributes below `name`: `{"p.0.role": "user"}` under `p` → `{"0": {"role": "user"}}`.

    If a name has both a value and a group, one is dropped. Dots deeper than MAX_DEPTH do not group."""
    root: dict[str, Any] = {}
    for full, value in attributes.items():
        if full.startswith(f"{name}."):
            *path, leaf = full[len(name) + 1 :].split(".", MAX_DEPTH)
            node: Any = root
            for part in path:
                node = node.setdefault(part, {}) if isinstance(node, dict) else None
            if isinstance(node, dict):
                node[leaf] = value
    return root


def listed(node: Any) -> Any:
    """Like `nested`, but groups named 0, 1, 2 … become lists: `{"0": {"role": "user"}}` → `[{"role": "user"}]`."""
    if not isinstance(node, dict):
        return node
    group = {name: listed(value) for name, value in cast(dict[str, Any], node).items()}
    numbers = [str(number) for number in range(len(group))]
    return [group[number] for number in numbers] if group and group.keys() == set(numbers) else group


def checked_text(what: str, text: str) -> str:
    """`text`, if UTF-8 can encode it; InvalidError for half a surrogate pair, as in odd file names."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidError(f"{what} is {text[:200]!r}, which is not Unicode text: {error}") from None
    return text


def finite(what: str, value: float) -> float:
    """`value` as a float. InvalidError if it is NaN or infinite."""
    number = float(value)
    if not math.isfinite(number):
        raise InvalidError(f"{what} is {number}; it must be a finite number, since anything else poisons the training")
    return number


def to_json(what: str, value: Any) -> str:
    """`value` as JSON. InvalidError if it has no JSON form."""
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidError(f"{what} cannot be written as JSON: {error}. Pass plain dicts, lists and scalars") from None


def _put(flat: Attributes, name: str, value: Any) -> None:
    if isinstance(value, str | bool | int | float):
        flat[name] = _scalar(name, value)
    elif isinstance(value, Mapping):
        for key, item in cast(Mapping[Any, Any], value).items():
            _put(flat, checked_text("the name of an attribute", f"{name}.{key}"), item)
    elif isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        values = cast(Sequence[Any], value)
        kinds = {type(item) for item in values}
        if len(kinds) <= 1 and kinds <= {str, bool, int, float}:
            flat[name] = cast(AttributeValue, [_scalar(name, item) for item in values])
        else:
            for index, item in enumerate(values):
                _put(flat, f"{name}.{index}", item)
    elif value is not None:
        flat[name] = _scalar(name, value)


def _scalar(name: str, value: Any) -> str | bool | int | float:
    if isinstance(value, str):
        return checked_text(f"attribute {name!r}", value)
    if isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return finite(f"attribute {name!r}", value)
    raise InvalidError(
        f"attribute {name!r} is a {type(value).__name__}; attributes are str, bool, int, float, and lists or "
        "mappings of these. Use emit_object for anything that has a JSON form"
    )
