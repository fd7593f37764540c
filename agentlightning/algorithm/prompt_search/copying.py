"""Finds words of a task in a prompt: a prompt that repeats them may know the answer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, Final, cast

LONGEST: Final = 8  # words that a prompt may share with a task by chance
_WORD: Final = re.compile(r"\w+")


def runs_of_words(texts: Iterable[str]) -> frozenset[str]:
    """All runs of eight words, in lower case."""
    found: set[str] = set()
    for text in texts:
        words = _WORD.findall(text.lower())
        found |= {" ".join(words[at : at + LONGEST]) for at in range(len(words) - LONGEST + 1)}
    return frozenset(found)


def texts_in(task: Any) -> Iterator[str]:
    """All texts in a JSON value."""
    if isinstance(task, str):
        yield task
    elif isinstance(task, dict):
        for value in cast("dict[str, Any]", task).values():
            yield from texts_in(value)
    elif isinstance(task, list):
        for value in cast("list[Any]", task):
            yield from texts_in(value)
