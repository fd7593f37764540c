"""Texts with holes, and the JSON file of a candidate, which people read and edit.

    "Today is {hole1}. Be brief."  matches  "Today is May 3. Be brief."  →  ("May 3",)

Knows no requests and no spans."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from agentlightning.errors import ConfigError, nearest
from agentlightning.types import PromptCandidate

FILE: Final = "prompts.json"
"""The file of a candidate in the directory of a run."""
PROMPTS: Final = "prompts"
"""The name of a candidate among the resources."""
HOLE: Final = re.compile(r"\{hole(\d+)\}")


@dataclass(frozen=True)
class Pattern:
    """A text with holes, as the constant `segments` around them: one more than there are holes."""

    segments: tuple[str, ...]

    @classmethod
    def of(cls, text: str) -> Pattern:
        """`"A {hole1} B"` → `("A ", " B")`."""
        return cls(tuple(HOLE.split(text)[::2]))

    def __str__(self) -> str:
        return self.fill([f"{{hole{number}}}" for number in range(1, len(self.segments))])

    @property
    def constant(self) -> int:
        """The number of characters that are not in holes. Of several patterns that a text has, the
        one with most says what it is."""
        return sum(map(len, self.segments))

    def match(self, text: str) -> tuple[str, ...] | None:
        """What stands in the holes of `text`. None where it has not this form, or has it in two
        ways, as where a user quotes the prompt."""
        first, *inner = self.segments
        if not inner:
            return () if text == first else None
        last = inner.pop()
        at = len(first)
        end = len(text) - len(last)
        if at > end or not (text.startswith(first) and text.endswith(last)):
            return None
        values: list[str] = []
        for segment in inner:
            found = text.find(segment, at, end)
            if found < 0 or text.find(segment, found + 1, end) >= 0:
                return None
            values.append(text[at:found])
            at = found + len(segment)
        return (*values, text[at:end])

    def fill(self, values: Sequence[str]) -> str:
        """The text with these values in its holes."""
        filled = zip(values, self.segments[1:], strict=True)
        return self.segments[0] + "".join(value + segment for value, segment in filled)


def fingerprint(place: str, text: str) -> str:
    """16 hexadecimal digits that name a text at a place."""
    return hashlib.blake2b(f"{place}\0{text}".encode(), digest_size=8).hexdigest()


def problem(sent: str, text: str) -> str | None:
    """The reason why `text` cannot take the place of `sent`, or None: each hole must be in it once,
    in the same order."""
    holes = HOLE.findall(sent)
    given = HOLE.findall(text)
    for number in {*holes, *given}:
        if given.count(number) != holes.count(number):
            return f"it has {{hole{number}}} {given.count(number)} times, not {holes.count(number)}"
    if given != holes:
        return "its holes are in another order"
    return None if text.strip() else "it is empty"


def checked(prompts: PromptCandidate, where: str) -> PromptCandidate:
    """The candidate, if it can be used. ConfigError names the component that cannot, and why."""
    known: dict[tuple[str, str], str] = {}
    for name, component in prompts.components.items():
        wrong = problem(component.sent, component.text)
        if str(Pattern.of(component.sent)) != component.sent:
            wrong = "the holes of `sent` must be {hole1}, {hole2} … in this order"
        twin = known.setdefault((component.place, component.sent), name)
        if twin != name:
            wrong = f"it replaces the same text as {twin}; leave one of them out"
        if wrong is not None:
            raise ConfigError(f"{where}: the component {name!r} cannot be used: {wrong}")
    return prompts


def read_candidate(place: str | Path) -> PromptCandidate:
    """The candidate in a JSON file, or in the directory of a run. ConfigError if there is none, or
    it cannot be used."""
    path = Path(place)
    path = path / FILE if path.is_dir() else path
    try:
        prompts = msgspec.json.decode(path.read_bytes(), type=PromptCandidate)
    except OSError as error:
        raise ConfigError(
            f"there is no candidate at {path} ({error.strerror}); `agl prompts` writes one"
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} is no candidate: {error}; its form is "
            '{"components": {NAME: {"place": …, "sent": …, "text": …}}}'
        ) from None
    return checked(prompts, str(path))


def write_candidate(prompts: PromptCandidate, path: Path) -> None:
    """Write a candidate as `read_candidate` reads it, indented."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(prompts)) + b"\n")


def candidate_of(base: PromptCandidate, texts: Mapping[str, str]) -> PromptCandidate:
    """The candidate with new texts for some components of `base`. ConfigError for a component that
    there is not, and as `checked`."""
    components = dict(base.components)
    for name, text in texts.items():
        if name not in components:
            raise ConfigError(f"no component is called {name!r}; {nearest(name, components)}")
        components[name] = msgspec.structs.replace(components[name], text=text)
    return checked(PromptCandidate(components=components), "the candidate")


def changed_components(prompts: PromptCandidate) -> frozenset[str]:
    """The components whose texts differ from those that the program sends."""
    return frozenset(name for name, each in prompts.components.items() if each.text != each.sent)
