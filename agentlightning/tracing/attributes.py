"""Converts Python values to flat, typed, finite span attributes, and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

import msgspec

from agentlightning.errors import InvalidError
from agentlightning.types import Attributes, AttributeValue

MAX_DEPTH: Final = 16  # groups within groups
_PLAIN: Final = frozenset({str, bool, int, float, type(None)})
_LEVELS: Final = 100  # of values that are flattened; more are taken for a circle


def flatten(values: Mapping[str, Any]) -> Attributes:
    """Nested mappings become dotted names; lists of one scalar type stay, other lists are numbered;
    None and what is empty are omitted.

    `{"a": {"b": 1}, "c": ["x", 2]}` → `{"a.b": 1, "c.0": "x", "c.1": 2}`. InvalidError for other
    objects and numbers that are not finite."""
    flat: Attributes = {}
    for name, value in values.items():
        found = laid_out(_word(name), value, _scalar, _word, (Mapping, Sequence), levels=_LEVELS)
        if found is None:
            raise InvalidError(
                "the attributes hold themselves, or are nested too deeply; pass plain values"
            )
        flat |= found
    return flat


def laid_out(
    name: str,
    value: Any,
    scalar: Callable[[str, Any], str | bool | int | float | None],
    word: Callable[[Any], str],
    groups: tuple[type, ...],
    *,
    levels: int,
    most: float = math.inf,
) -> Attributes | None:
    """A value as attributes below `name`, its items by what `word` makes of their keys, its
    `scalar`s by path and value. None if it has more than `most` items in all or so many `levels` of
    `groups`."""
    if type(value) in _PLAIN:
        found = scalar(name, value)
        return {} if found is None else {name: found}
    attributes: Attributes = {}
    waiting: list[tuple[str, Any, int]] = [(name, value, 0)]
    held = 0
    while waiting:
        path, part, level = waiting.pop()
        if not isinstance(part, groups) or isinstance(part, (str, bytes, bytearray)):
            found = scalar(path, part)
        else:
            held += len(part)
            if held > most or level >= levels:
                return None
            is_mapping = isinstance(part, Mapping)
            found = None if is_mapping else _of_one_type(path, part, scalar)
            if found is None:
                below = part.items() if is_mapping else enumerate(part)
                waiting += reversed(
                    [(f"{path}.{word(key)}", item, level + 1) for key, item in below]
                )
        if found is not None:
            attributes[path] = found
    return attributes


def nested(attributes: Attributes, name: str) -> dict[str, Any]:
    """The group of attributes below `name`: `{"p.0.role": "user"}` under `p` →
    `{"0": {"role": "user"}}`.

    If a name has both a value and a group, one is dropped. Dots deeper than MAX_DEPTH do not
    group."""
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
    """Like `nested`, but groups named 0, 1, 2 … become lists: `{"0": {"role": "user"}}` →
    `[{"role": "user"}]`."""
    if not isinstance(node, dict):
        return node
    group = {name: listed(value) for name, value in cast(dict[str, Any], node).items()}
    numbers = [str(number) for number in range(len(group))]
    return (
        [group[number] for number in numbers] if group and group.keys() == set(numbers) else group
    )


def checked_text(what: str, text: str) -> str:
    """`text`, if UTF-8 can encode it; InvalidError for half a surrogate pair, as in odd file
    names."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidError(
            f"{what} is {text[:200]!r}, which is not Unicode text: {error}"
        ) from None
    return text


def finite(what: str, value: float) -> float:
    """`value` as a float. InvalidError if it is NaN or infinite."""
    number = float(value)
    if not math.isfinite(number):
        raise InvalidError(
            f"{what} is {number}; it must be a finite number, since anything else poisons the "
            "training"
        )
    return number


def to_json(what: str, value: Any) -> str:
    """`value` as JSON. InvalidError if it has no JSON form."""
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidError(
            f"{what} cannot be written as JSON: {error}. Pass plain dicts, lists and scalars"
        ) from None


def _of_one_type(
    path: str, values: Sequence[Any], scalar: Callable[[str, Any], Any]
) -> AttributeValue | None:
    """The values, if an attribute can hold them as one list."""
    for value in values:
        if not isinstance(value, (str, int, float)):
            return None
    scalars = [scalar(path, value) for value in values]
    return cast(AttributeValue, scalars) if len(set(map(type, scalars))) == 1 else None


def _word(key: Any) -> str:
    return checked_text("the name of an attribute", str(key))


def _scalar(path: str, value: Any) -> str | bool | int | float | None:
    if isinstance(value, str):
        return checked_text(f"attribute {path!r}", value)
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return finite(f"attribute {path!r}", value)
    raise InvalidError(
        f"attribute {path!r} is a {type(value).__name__}; attributes are str, bool, int, float, "
        "and lists or mappings of these. Use emit_object for anything that has a JSON form"
    )
