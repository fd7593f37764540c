"""WordNet, read from the files of Debian's package `wordnet-base` (the format: `man wndb`).

Knows synsets, their relations and the passage of each. Does not know questions or search."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FILES = ("data.noun", "data.verb", "data.adj", "data.adv")
RELATIONS = ("kind", "whole", "group", "topic")
# WordNet's pointers: hypernym, instance hypernym, part, substance and member holonym, domain
POINTERS = {
    "@": "kind",
    "@i": "kind",
    "#p": "whole",
    "#s": "whole",
    "#m": "group",
    ";c": "topic",
}
SHOWN = 3  # synsets of a relation that a passage names
MISSING = "there is no {path}: apt install wordnet-base, or set WORDNET=DIR to WordNet's folder"


@dataclass(frozen=True, slots=True)
class Synset:
    """Words of one meaning. `related` has the keys of other synsets, by relation."""

    names: tuple[str, ...]
    gloss: str
    related: dict[str, list[str]]


@cache
def wordnet() -> dict[str, Synset]:
    """All synsets, by key, such as `n02084071`. FileNotFoundError where a file is missing,
    ValueError for a line that is no synset; both say what to do."""
    folder = Path(os.environ.get("WORDNET", "/usr/share/wordnet"))
    synsets: dict[str, Synset] = {}
    for path in (folder / name for name in FILES):
        if not path.is_file():
            raise FileNotFoundError(MISSING.format(path=path))
        with path.open(encoding="utf-8", errors="replace") as lines:
            for number, line in enumerate(lines, start=1):
                if line.startswith("  "):  # the licence
                    continue
                try:
                    key, synset = read_synset(line)
                except (ValueError, IndexError):
                    raise ValueError(f"{path}, line {number}: not a synset of WordNet") from None
                synsets[key] = synset
    return synsets


def read_synset(line: str) -> tuple[str, Synset]:
    """One line of a data file:
    `02084071 05 n 01 dog 0 001 @ 02083346 n 0000 | a member …`; counts of words are hexadecimal."""
    head, gloss = line.split(" | ", 1)
    fields = head.split()
    end = 4 + 2 * int(fields[3], 16)
    names = (re.sub(r"\(\w+\)$", "", word).replace("_", " ") for word in fields[4:end:2])
    related: dict[str, list[str]] = {}
    for start in range(end + 1, end + 1 + 4 * int(fields[end]), 4):
        pointer, offset, part = fields[start : start + 3]
        if pointer in POINTERS:
            related.setdefault(POINTERS[pointer], []).append(part + offset)
    # an adjective that others cluster around is `s` in its own file and `a` in pointers
    return fields[2].replace("s", "a") + fields[0], Synset(tuple(names), gloss.strip(), related)


def passage(synset: Synset) -> str:
    """`lion: kind: big cat. group: Panthera. large gregarious … Also: king of beasts.`"""
    parts = [f"{synset.names[0]}:"]
    for relation in RELATIONS:
        if keys := synset.related.get(relation):
            names = (wordnet()[key].names[0] for key in keys[:SHOWN])
            parts.append(f"{relation}: {', '.join(names)}.")
    parts.append(synset.gloss)
    if others := synset.names[1:]:
        parts.append(f"Also: {', '.join(others)}.")
    return " ".join(parts)


def passages() -> list[str]:
    return [passage(synset) for synset in wordnet().values()]
