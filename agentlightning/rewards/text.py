"""Compares short answers like SQuAD (Rajpurkar et al. 2016, arXiv:1606.05250, and its evaluation script).

Both sides are first lower-cased, without ASCII punctuation, the words a, an, the, and repeated white space. If several
answers are right, the best match counts.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalize_answer(text: str) -> str:
    """`"The  Eiffel Tower!"` → `"eiffel tower"`"""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, answer: str | Sequence[str]) -> float:
    """1.0 if the normalised texts are equal, else 0.0. With several right answers, any of them may match."""
    return _best(lambda right: float(normalize_answer(prediction) == normalize_answer(right)), answer)


def token_f1(prediction: str, answer: str | Sequence[str]) -> float:
    """F1 of the words that prediction and answer share, from 0 to 1; the best of several right answers.

    If one side has no words, 0.0; if neither has, 1.0, as in SQuAD 2.0."""
    return _best(lambda right: _f1(normalize_answer(prediction).split(), normalize_answer(right).split()), answer)


def _f1(prediction: list[str], answer: list[str]) -> float:
    if not prediction or not answer:
        return float(prediction == answer)
    shared = (Counter(prediction) & Counter(answer)).total()
    return 2 * shared / (len(prediction) + len(answer))


def _best(score: Callable[[str], float], answer: str | Sequence[str]) -> float:
    return max(map(score, [answer] if isinstance(answer, str) else answer), default=0.0)
