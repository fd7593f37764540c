"""The part that texts share: which of their segments are constant, and what is a hole.

    "You are helping Ann. Answer in one word."
    "You are helping Bob. Answer in one word."  →  "You are helping {hole1}. Answer in one word."
    "You are helping Cyd. Answer in one word."

Knows texts alone."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from typing import Final

from agentlightning.prompts.components import Pattern

SHORTEST: Final = 12  # characters of a constant segment between holes
_HOLE: Final = "\ufdd0"  # which no text has: Unicode keeps it free
_MONTHS: Final = (
    "Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|"
    "Sept?(?:ember)?|Oct(?:ober)?|Nov(?:ember)?|Dec(?:ember)?"
)
# What is another on another day or machine, even where it was the same in every recording.
_VARYING: Final = re.compile(
    r"\b\d{4}[-/.]\d{1,2}[-/.]\d{1,2}(?:[T ]\d{1,2}:\d{2}(?::\d{2}(?:\.\d+)?)?(?:Z|[+-]\d{2}:?\d{2})?)?"
    r"|\b\d{1,2}[-/.]\d{1,2}[-/.]\d{4}\b"
    rf"|\b(?:{_MONTHS})\.? \d{{1,2}}(?:st|nd|rd|th)?(?:,? \d{{4}})?\b"
    rf"|\b\d{{1,2}}(?:st|nd|rd|th)?\.? (?:{_MONTHS})\.?(?:,? \d{{4}})?\b"
    rf"|\b(?:{_MONTHS}) \d{{4}}\b"
    r"|\b(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day\b"
    r"|\b\d{1,2}:\d{2}(?::\d{2}(?:\.\d+)?)?(?: ?[AaPp]\.?[Mm]\b\.?)?"
    r"|\b\d{10,}\b"
    r"|\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b"
    r"|\b(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{12,}\b"
    r"|(?<![\w/])/(?:home|Users|tmp|root|private|var/folders)/[^\s\"'`<>)\]}]*"
    r"|\b[A-Za-z]:\\[^\s\"'`<>)\]}]*"
)
_WORD: Final = re.compile(r"\w+|\s+|[^\w\s]")
_MOST_WORDS: Final = 4_000_000  # of a passage, times those of the passage that it is compared with
_COMPARED: Final = 12  # texts that are aligned; the others are matched with the result


def masked(text: str) -> Pattern:
    """The text with holes for dates, times, weekdays, ids and paths of the machine."""
    return _pattern(_VARYING.sub(_HOLE, text).split(_HOLE))


def _pattern(segments: Sequence[str]) -> Pattern:
    """A pattern of these segments, without those that are too short to be found again."""
    if len(segments) == 1:
        return Pattern(tuple(segments))
    first, *inner, last = segments
    kept = [segment for segment in inner if len(segment) >= SHORTEST]
    ends = [segment if len(segment.strip()) >= SHORTEST else "" for segment in (first, last)]
    return Pattern((ends[0], *kept, ends[1]))


def aligned(texts: Sequence[str]) -> Pattern | str:
    """The pattern that all these texts have, or the reason why there is none."""
    several = sorted({*texts}, key=len)
    step = max(1, len(several) // _COMPARED)
    compared = several[::step]
    words = _words(_VARYING.sub(_HOLE, compared[0]))
    others = [_words(_VARYING.sub(_HOLE, text)) for text in compared[1:]]
    pattern = _pattern(_common(words, others))
    while (unsure := _unsure(pattern, several)) is not None:
        pattern = Pattern(tuple(part for part in pattern.segments if part != unsure))
    constant = "\n".join(pattern.segments)
    if any(line not in constant for line in _shared_lines(several)):
        return "its parts come in another order in each call"
    if not any(segment.strip() for segment in pattern.segments):
        return f"no {SHORTEST} characters in a row are the same in all its calls"
    if any(pattern.match(text) is None for text in several):
        return "its constant parts cannot be told from what varies"
    return pattern


def _unsure(pattern: Pattern, texts: Sequence[str]) -> str | None:
    """A segment between holes that stands more than once in one of the texts."""
    for segment in pattern.segments[1:-1]:
        if any(text.count(segment) > 1 for text in texts):
            return segment
    return None


def _shared_lines(texts: Sequence[str]) -> set[str]:
    """The lines of some length that are in all texts, with nothing in them that is a hole."""
    lines = [{line for line in text.split("\n") if len(line) >= SHORTEST} for text in texts]
    return {line for line in set.intersection(*lines) if not _VARYING.search(line)}


def _words(text: str) -> list[str]:
    return _WORD.findall(text)


def _common(words: list[str], others: Sequence[list[str]]) -> list[str]:
    """The segments of `words` that all others have, in order and in one piece; between them are
    holes."""
    places = [_places(words, other) for other in others]
    segments: list[str] = [""]
    hole = False
    for index, word in enumerate(words):
        at = [place[index] for place in places]
        if word == _HOLE or None in at:
            hole = True
            continue
        torn = index > 0 and any(
            place[index - 1] is not None and here != place[index - 1] + 1
            for place, here in zip(places, at, strict=True)
        )
        begins = index == 0 and any(at)
        if hole or torn or begins:
            segments.append("")
        segments[-1] += word
        hole = False
    ends = any(
        place[-1] is not None and place[-1] != len(other) - 1
        for place, other in zip(places, others, strict=True)
    )
    return [*segments, ""] if hole or ends else segments


def _places(words: list[str], other: list[str]) -> list[int | None]:
    """For each word its place in the other text, if it is there too: lines first, then words of
    the lines that differ."""
    places: list[int | None] = [None] * len(words)
    ours = list(_lines(words))
    theirs = list(_lines(other))
    texts = [["".join(side[a:b]) for a, b in cut] for side, cut in ((words, ours), (other, theirs))]
    matcher = SequenceMatcher(None, texts[0], texts[1], autojunk=False)
    for operation, low, high, at, end in matcher.get_opcodes():
        first = ours[low][0] if low < len(ours) else len(words)
        last = ours[high - 1][1] if high > low else first
        theirs_first = theirs[at][0] if at < len(theirs) else len(other)
        theirs_last = theirs[end - 1][1] if end > at else theirs_first
        passage = words[first:last]
        against = other[theirs_first:theirs_last]
        if operation == "equal":
            places[first:last] = range(theirs_first, theirs_last)
        elif len(passage) * len(against) <= _MOST_WORDS:
            inner = SequenceMatcher(None, passage, against, autojunk=False)
            for mine, his, size in inner.get_matching_blocks():
                places[first + mine : first + mine + size] = range(
                    theirs_first + his, theirs_first + his + size
                )
    return places


def _lines(words: Sequence[str]) -> Iterator[tuple[int, int]]:
    """(first word, end) of each line."""
    first = 0
    for index, word in enumerate(words):
        if "\n" in word:
            yield first, index + 1
            first = index + 1
    if first < len(words):
        yield first, len(words)
