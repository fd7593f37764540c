"""The part that texts share: which of their segments are constant, and what is a hole.

    "You are helping Ann. Answer in one word."
    "You are helping Bob. Answer in one word."  →  "You are helping {hole1}. Answer in one word."
    "You are helping Cyd. Answer in one word."

Knows texts alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import SequenceMatcher
from itertools import accumulate, groupby
from typing import Final

from agentlightning.prompts.components import Pattern

SHORTEST: Final = 12  # characters of a constant segment beside a hole
_MONTH: Final = (
    "(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|"
    "Sept?(?:ember)?|Oct(?:ober)?|Nov(?:ember)?|Dec(?:ember)?)"
)
_DAY: Final = r"\d{1,2}(?:st|nd|rd|th)?"
# What is another on another day or machine, even where it was the same in every recording.
_VARYING: Final = re.compile(
    r"\b\d{4}[-/.]\d{1,2}[-/.]\d{1,2}(?:T[\d:.]+(?:Z|[+-]\d{2}:?\d{2})?)?"
    r"|\b\d{1,2}[-/.]\d{1,2}[-/.]\d{4}\b"
    rf"|\b{_MONTH}\.? {_DAY}(?:,? \d{{4}})?\b|\b{_DAY}\.? {_MONTH}\b(?:,? \d{{4}}\b)?"
    rf"|\b{_MONTH} \d{{4}}\b|\b(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day\b"
    r"|\b\d{1,2}:\d{2}(?::\d{2}(?:\.\d+)?)?(?: ?[AaPp][Mm]\b)?"
    r"|\b\d{10,}\b|\b(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{12,}\b"
    r"|\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b"
    r"|(?:(?<![\w/])/(?:home|Users|tmp|root|private|var/folders)/|\b[A-Za-z]:\\)[^\s\"'`<>)\]}]*"
)
_LINE: Final = re.compile(r"[^\n]*\n|[^\n]+")
_WORD: Final = re.compile(r"\w+|\s+|[^\w\s]")
_MOST_WORDS: Final = 4_000_000  # of a passage, times those of the passage that it is compared with
_COMPARED: Final = 12  # texts that are aligned; the others are matched with the result


def masked(text: str) -> Pattern:
    """The text with holes for dates, times, weekdays, ids and paths of the machine."""
    return _pattern(_VARYING.split(text))


def _pattern(segments: Sequence[str]) -> Pattern:
    """A pattern of these segments, without those that are too short to be found again."""
    if len(segments) == 1:
        return Pattern(tuple(segments))
    first, *inner, last = (
        segment if len(segment.strip()) >= SHORTEST else "" for segment in segments
    )
    return Pattern((first, *filter(None, inner), last))


def aligned(texts: Sequence[str]) -> Pattern | str:
    """The pattern that all these texts have, or the reason why there is none."""
    several = sorted({*texts}, key=len)
    base, *others = several[:: max(1, len(several) // _COMPARED)]
    shared = [part for segment in _common(base, others) for part in _VARYING.split(segment)]
    first, *rest = _pattern(shared).segments
    # a segment that stands twice in a text is not found again for sure
    sure = [part for part in rest[:-1] if all(text.count(part) == 1 for text in several)]
    pattern = Pattern((first, *sure, *rest[-1:]))
    lines = [{line for line in text.split("\n") if len(line) >= SHORTEST} for text in several]
    alike = [line for line in set.intersection(*lines) if not _VARYING.search(line)]
    if any(line not in "\n".join(pattern.segments) for line in alike):
        return "its parts come in another order in each call"
    if not any(pattern.segments):
        return f"no {SHORTEST} characters in a row are the same in all its calls"
    if any(pattern.match(text) is None for text in several):
        return "its constant parts cannot be told from what varies"
    return pattern


def _common(base: str, others: Sequence[str]) -> list[str]:
    """The segments that all texts have, in order and in one piece; between them are holes."""
    shifts = [_shifts(base, other) for other in others]
    segments: list[str] = [""]
    end = 0
    for shift, run in groupby(range(len(base)), key=lambda at: tuple(one[at] for one in shifts)):
        places = [*run]
        if None in shift:
            continue
        end = places[-1] + 1
        part = base[places[0] : end]
        if places[0] == 0 and not any(shift):
            segments = [part]
        else:
            segments.append(part)
    ends = [len(other) - len(base) for other in others]
    whole = end == len(base) and [one[-1] for one in shifts] == ends
    return segments if whole else [*segments, ""]


def _shifts(base: str, other: str) -> list[int | None]:
    """For each character how far on it stands in the other text, None if it is not there: lines
    are compared first, then the words of those that differ."""
    shifts: list[int | None] = [None] * len(base)

    def compare(a: tuple[int, int], b: tuple[int, int], pieces: re.Pattern[str]) -> None:
        ours = pieces.findall(base, *a)
        theirs = pieces.findall(other, *b)
        if pieces is _WORD and len(ours) * len(theirs) > _MOST_WORDS:
            return
        at = [*accumulate(map(len, ours), initial=a[0])]
        there = [*accumulate(map(len, theirs), initial=b[0])]
        low = high = 0
        matcher = SequenceMatcher(None, ours, theirs, autojunk=False)
        for mine, his, size in matcher.get_matching_blocks():
            if pieces is _LINE:
                compare((at[low], at[mine]), (there[high], there[his]), _WORD)
            low = mine + size
            high = his + size
            for index in range(at[mine], at[low]):
                shifts[index] = there[his] - at[mine]

    compare((0, len(base)), (0, len(other)), _LINE)
    return shifts
