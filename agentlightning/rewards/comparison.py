r"""Compares short answers, as texts and as numbers.

Texts are compared like SQuAD (Rajpurkar et al. 2016, arXiv:1606.05250, and its evaluation script):
lower-cased, without ASCII punctuation, the words a, an, the, and repeated white space. If several
answers are right, the best match counts.

The number of a text is that in its last `\boxed{…}`, or else its last number. It may be written
`1,234.5`, with `$`, `€` or `£` in front, `-` or `−`, `1.5e3`, `12%` (0.12), `3/4`, `1 1/2` or
`\frac{3}{4}`; but not with a decimal comma, in Roman numerals or in words."""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

from agentlightning.errors import InvalidError

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalize_answer(text: str) -> str:
    """`"The  Eiffel Tower!"` → `"eiffel tower"`"""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(
    prediction: str | float | None, answer: str | float | Sequence[str | float]
) -> float:
    """1.0 if the normalised texts are equal, else 0.0. With several right answers, any of them may
    match. Numbers are compared as they are written; None, an answer without text, is empty.
    InvalidError if there is no right answer."""
    given = normalize_answer(_text(prediction))
    return _best(lambda right: float(given == normalize_answer(right)), answer)


def token_f1(prediction: str | float | None, answer: str | float | Sequence[str | float]) -> float:
    """F1 of the words that prediction and answer share, from 0 to 1; the best of several right
    answers. Values are read as by `exact_match`.

    If one side has no words, 0.0; if neither has, 1.0, as in SQuAD 2.0."""
    words = normalize_answer(_text(prediction)).split()
    return _best(lambda right: _f1(words, normalize_answer(right).split()), answer)


def _text(value: object) -> str:
    return "" if value is None else str(value)


def _f1(prediction: list[str], answer: list[str]) -> float:
    if not prediction or not answer:
        return float(prediction == answer)
    shared = (Counter(prediction) & Counter(answer)).total()
    return 2 * shared / (len(prediction) + len(answer))


def _best(score: Callable[[str], float], answer: object) -> float:
    if answer is None:
        raise InvalidError("the right answer is None; correct the task, or leave it out")
    several = (
        isinstance(answer, Iterable) and not isinstance(answer, str) and getattr(answer, "ndim", 1)
    )
    rights = cast("Iterable[object]", answer) if several else [answer]
    return max((score(_text(right)) for right in rights), default=0.0)


_PLAIN = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_NUMBER = re.compile(
    rf"""(?<![\w.])(?P<sign>[-+]?)\s?[$€£]?(?P<inner_sign>-?)
    (?:(?P<whole>\d+)[ ](?=\d+/\d))?                     # of a mixed number: 1 1/2
    (?P<number>(?:{_PLAIN})(?:e[-+]?\d+)?)
    (?:\s?/\s?(?P<below>{_PLAIN}))?
    \s?(?P<percent>\\?%)?""",
    re.VERBOSE | re.IGNORECASE,
)
_BOXED = re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")


def extract_number(text: str) -> float | None:
    r"""The number of `text`; None if it has none, or not a finite one.

    `"so it costs $1,234.50."` → 1234.5; `"\boxed{\frac{3}{4}}"` → 0.75; `"12%"` → 0.12"""
    boxed = _BOXED.findall(text)
    text = _FRACTION.sub(r" \1/\2", (boxed[-1] if boxed else text).replace("{,}", ","))
    text = text.replace("−", "-").replace("\\$", "$")
    found = list(_NUMBER.finditer(text))
    return _value(found[-1]) if found else None


def numeric_equal(
    prediction: str | float | None,
    answer: str | float,
    *,
    relative_tolerance: float = 1e-6,
    absolute_tolerance: float = 1e-9,
) -> float:
    """1.0 if both have numbers at most `max(relative_tolerance · the larger, absolute_tolerance)`
    apart, else 0.0. InvalidError if `answer` has no number: then the task is wrong. None, an answer
    without text, has none."""
    right = _number(answer)
    if right is None or not math.isfinite(right):
        raise InvalidError(
            f"the right answer {answer!r} holds no finite number; correct the task, or compare as "
            "text"
        )
    given = _number(prediction)
    if given is None:
        return 0.0
    return float(math.isclose(given, right, rel_tol=relative_tolerance, abs_tol=absolute_tolerance))


def _number(value: object) -> float | None:
    if isinstance(value, str):
        return extract_number(value)
    try:
        return float(cast(Any, value))
    except (TypeError, ValueError):
        return None


def _value(found: re.Match[str]) -> float | None:
    value = _plain(found["number"])
    if found["below"] is not None:
        below = _plain(found["below"])
        if not below:
            return None
        value /= below
    value += _plain(found["whole"] or "0")
    if found["percent"]:
        value /= 100
    if "-" in found["sign"] + found["inner_sign"]:
        value = -value
    return value if math.isfinite(value) else None


def _plain(text: str) -> float:
    return float(text.replace(",", ""))
