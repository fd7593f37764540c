"""A candidate's texts with holes, and the JSON file that people read and edit.

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
from agentlightning.types import Prompts, PromptText

FILE: Final = "prompts.json"
"""The file of a candidate in the directory of a run."""
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
        holes = [f"{{hole{number}}}" for number in range(1, len(self.segments))]
        return self.fill(holes)

    @property
    def constant(self) -> int:
        """Its characters outside holes. Of several patterns that match, the one with most says what
        a text is."""
        return sum(map(len, self.segments))

    def match(self, text: str) -> tuple[str, ...] | None:
        """What stands in the holes of `text`. None where it has not this form, or has it in two
        ways, as where a user quotes the prompt."""
        first = self.segments[0]
        last = self.segments[-1]
        if len(self.segments) == 1:
            return () if text == first else None
        end = len(text) - len(last)
        at = len(first)
        if at > end or not (text.startswith(first) and text.endswith(last)):
            return None
        values: list[str] = []
        for segment in self.segments[1:-1]:
            found = text.find(segment, at, end)
            if found < 0 or text.find(segment, found + 1, end) >= 0:
                return None
            values.append(text[at:found])
            at = found + len(segment)
        return (*values, text[at:end])

    def fill(self, values: Sequence[str]) -> str:
        """The text with these values in its holes."""
        return self.segments[0] + "".join(
            value + segment for value, segment in zip(values, self.segments[1:], strict=True)
        )

    def values(self, text: str, lengths: Sequence[int]) -> tuple[str, ...] | None:
        """What stands in holes of these lengths; None unless `text` is this pattern so filled."""
        at = len(self.segments[0])
        found: list[str] = []
        for length, segment in zip(lengths, self.segments[1:], strict=True):
            found.append(text[at : at + length])
            at += length + len(segment)
        return tuple(found) if self.fill(found) == text else None


def fingerprint(place: str, sent: str) -> str:
    """16 hexadecimal digits that name a text at a place."""
    return hashlib.blake2b(f"{place}\0{sent}".encode(), digest_size=8).hexdigest()


def problem(sent: str, text: str) -> str | None:
    """The reason why `text` cannot take the place of `sent`, or None: each hole must be there
    once, in the same order."""
    if not text.strip():
        return "it is empty"
    holes = HOLE.findall(sent)
    given = HOLE.findall(text)
    for number in holes:
        if given.count(number) != 1:
            times = given.count(number) or "not"
            return f"{{hole{number}}} is {times} in it; each hole must be there once"
    unknown = [number for number in given if number not in holes]
    if unknown:
        return f"{{hole{unknown[0]}}} is no hole of the text that it replaces"
    return None if given == holes else "its holes are in another order"


def checked(prompts: Prompts, where: str) -> Prompts:
    """The candidate, if it can be used. ConfigError names the component that cannot, and why."""
    known: dict[tuple[str, tuple[str, ...]], str] = {}
    for name, component in prompts.components.items():
        wrong = problem(component.sent, component.text)
        holes = HOLE.findall(component.sent)
        if holes != [str(number + 1) for number in range(len(holes))]:
            wrong = "`sent` must number its holes from {hole1}, each once"
        twin = known.setdefault((component.place, Pattern.of(component.sent).segments), name)
        if twin != name:
            wrong = f"it replaces the same text as {twin}; leave one of them out"
        if wrong is not None:
            raise ConfigError(f"{where}: component {name!r} cannot be used: {wrong}")
    return prompts


def read_candidate(place: str | Path) -> Prompts:
    """The candidate in a JSON file, or in the directory of a run. ConfigError if there is none, or
    it cannot be used."""
    path = Path(place)
    path = path / FILE if path.is_dir() else path
    try:
        prompts = msgspec.json.decode(path.read_bytes(), type=Prompts)
    except OSError:
        raise ConfigError(
            f"there is no candidate at {path}; `agl prompts … --out {FILE}` writes one"
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} is no candidate: {error}; it has the form "
            '{"components": {NAME: {"place": …, "sent": …, "text": …}}}'
        ) from None
    return checked(prompts, str(path))


def write_candidate(prompts: Prompts, path: Path) -> None:
    """Write a candidate as `read_candidate` reads it, indented."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(prompts)) + b"\n")


def candidate_of(base: Prompts, texts: Mapping[str, str]) -> Prompts:
    """The candidate with new texts for some components of `base`. ConfigError for a component that
    there is not, and as `checked`."""
    for name in texts:
        if name not in base.components:
            raise ConfigError(f"no component is called {name!r}; {nearest(name, base.components)}")
    components = {
        name: msgspec.structs.replace(component, text=texts.get(name, component.text))
        for name, component in base.components.items()
    }
    return checked(Prompts(components=components), "the candidate")


def changed_components(prompts: Prompts) -> frozenset[str]:
    """The components whose texts differ from those that the program sends."""
    return frozenset(
        name
        for name, component in prompts.components.items()
        if component.text != component.sent
    )
