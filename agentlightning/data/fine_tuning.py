"""What a line of a fine-tuning file must be: OpenAI's chat format with tools (Azure's too), and its pairs to prefer.

Knows the format, and not where lines come from. How messages belong together, what a host
counts in tokens, or finds in an image, it does not check.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import msgspec

FEWEST_LINES: Final = 10  # that OpenAI and Azure take
_MOST_TOOLS: Final = 128


# --- the format --------------------------------------------------------------------------------------------------


def _part(name: str, *fields: tuple[Any, ...], tag_field: str | None = None, strict: bool = True) -> Any:
    """An object of the format: fields and what they hold; those with a third entry may be left out. `tag_field` holds
    the name, by which it is told from others. Hosts refuse fields that they do not know, as a `strict` one does."""
    tag = name if tag_field else None
    return msgspec.defstruct(name, fields, forbid_unknown_fields=strict, tag_field=tag_field, tag=tag)


def _list(of: Any, least: int = 0, most: int | None = None) -> Any:
    return Annotated[list[of], msgspec.Meta(min_length=least, max_length=most)]


_Name: Any = Annotated[str, msgspec.Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
_Id: Any = Annotated[str, msgspec.Meta(min_length=1)]
_URL = _part("URL", ("url", _Id), ("detail", Literal["auto", "low", "high"], "auto"))
_TEXT = _part("text", ("text", str), tag_field="type")
_IMAGE = _part("image_url", ("image_url", _URL), tag_field="type")
_CALLED = _part("Called", ("name", _Name), ("arguments", str))
_CALL = _part("Call", ("id", _Id), ("type", Literal["function"]), ("function", _CALLED))
_NAMED = ("name", str | None, None)
_SAID = ("content", str | _list(_TEXT))
_MESSAGE = (
    _part("system", _SAID, _NAMED, tag_field="role")
    | _part("developer", _SAID, _NAMED, tag_field="role")
    | _part("user", ("content", str | _list(_TEXT | _IMAGE)), _NAMED, tag_field="role")
    | _part("tool", _SAID, ("tool_call_id", _Id), _NAMED, tag_field="role")
)
_ANSWER = _part(
    "assistant", ("content", str | _list(_TEXT) | None, None), ("tool_calls", _list(_CALL) | None, None),
    ("refusal", str | None, None), _NAMED, ("weight", Literal[0, 1], 1), tag_field="role",
)  # fmt: skip
_SCHEMA = _part(
    "Schema", ("type", Literal["object"], "object"), ("properties", dict[str, dict[str, Any] | bool], {}),
    ("required", list[str], []), strict=False,
)  # fmt: skip
_FUNCTION = _part(
    "Function", ("name", _Name), ("description", str | None, None), ("parameters", _SCHEMA | None, None),
    ("strict", bool | None, None),
)  # fmt: skip
_TOOL = _part("Tool", ("type", Literal["function"]), ("function", _FUNCTION))
_INPUT = _part(
    "Input", ("messages", _list(_MESSAGE | _ANSWER, least=1)), ("tools", _list(_TOOL, most=_MOST_TOOLS), []),
    ("parallel_tool_calls", bool | None, None),
)  # fmt: skip
_SIDES: Final = ("preferred_output", "non_preferred_output")
_PAIR = _part("Pair", ("input", _INPUT), *((side, _list(_ANSWER, 1, 1)) for side in _SIDES))


# --- one line ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """What keeps a line from being fine-tuned on, as in `conversations with …`, and where in the line that is."""

    what: str
    where: str = ""

    def __str__(self) -> str:
        return f"{self.what}, at {self.where}" if self.where else self.what


def line_problem(line: Any) -> Problem | None:
    """What is wrong with a line of JSON, a conversation or a pair; None where nothing is."""
    pair = isinstance(line, Mapping) and "input" in line
    try:
        msgspec.convert(line, _PAIR if pair else _INPUT)
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(" - at `$")
        return Problem(f"what the format does not have ({message[0].lower()}{message[1:]})", place.strip("`."))
    if pair:
        return None
    answers = [one for one in line["messages"] if one["role"] == "assistant"]
    if line["messages"][-1]["role"] != "assistant":
        return Problem("a last message that is not the assistant's")
    learned = any(one.get("weight", 1) for one in answers)
    return None if learned else Problem("no answer of the assistant's that has weight")
