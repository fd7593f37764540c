"""Is an answer right? 1 or 0: of two numbers by their value, of two polynomials by their terms.

Knows texts; not how they came about. The last number, or polynomial, in an answer counts, so that naming many does not
help, and a polynomial counts only as it was asked for, multiplied out: the question itself is no answer to it.
"""

from __future__ import annotations

import re

import sympy
from calculator import read

from agentlightning.rewards import numeric_equal

TOLERANCE = 1e-4  # relative; Calc-X rounds some of its results
FORMULA = re.compile(r"[\w.+\-*^()/ ]+")


def grade(task: dict, answer: str) -> float:
    """1.0 for a right answer to a generated task or one of Calc-X, else 0.0."""
    if task["kind"] == "product":
        return float(same_polynomial(answer, task["answer"]))
    return numeric_equal(answer, task["answer"], relative_tolerance=TOLERANCE)


def same_polynomial(answer: str, right: str) -> bool:
    """Whether what stands last in `answer`, after `:`, `=` or nothing, has the terms of `right`, in any order."""
    pieces = [piece.strip(" .") for piece in FORMULA.findall(answer.replace("**", "^"))]
    last = next((piece for piece in reversed(pieces) if piece), "")
    if "(" in last:
        return False
    try:
        given = read(last)
    except ValueError:
        return False
    return bool(sympy.expand(given - read(right)) == 0) and _terms(last) == _terms(right)


def _terms(text: str) -> int:
    """How many terms a sum without brackets is written with."""
    return len(re.split(r"(?<=[\w\s])[+-]", text.strip()))
