"""Is an answer right? 1 or 0: of two numbers by their value, of two polynomials by their terms.

Knows texts; not how they came about. The last number, or polynomial, in an answer counts, so that
naming many does not help, and only what was worked out: the question itself is no answer to it. So
a whole number is not to be given as a quotient, nor a term of a polynomial as a product of numbers.
"""

from __future__ import annotations

import re

import sympy
from calculator import read

from agentlightning.rewards import extract_number, numeric_equal

TOLERANCE = 1e-4  # relative; Calc-X rounds some of its results
FORMULA = re.compile(r"[\w.+\-*^()/ ]+")
NUMBER = re.compile(r"(?<![\d.])(?<!\w\^)\d+")  # but exponents


def grade(task: dict, answer: str) -> float:
    """1.0 for a right answer to a generated task or one of Calc-X, else 0.0."""
    if task["kind"] == "product":
        return float(same_polynomial(answer, task["answer"]))
    if float(extract_number(task["answer"]) or 0).is_integer():
        answer = answer.replace("/", " ")
    return numeric_equal(answer, task["answer"], relative_tolerance=TOLERANCE)


def same_polynomial(answer: str, right: str) -> bool:
    """Whether what stands last in `answer`, after `:`, `=` or nothing, has the terms of `right`, in
    any order."""
    pieces = [piece.strip(" .") for piece in FORMULA.findall(answer.replace("**", "^"))]
    last = next((piece for piece in reversed(pieces) if piece), "")
    if "(" in last or any(len(NUMBER.findall(term)) > 1 for term in _terms(last)):
        return False
    try:
        given = read(last)
    except ValueError:
        return False
    return bool(sympy.expand(given - read(right)) == 0) and len(_terms(last)) == len(_terms(right))


def _terms(text: str) -> list[str]:
    """The terms that a sum without brackets is written with."""
    return re.split(r"(?<=[\w\s])[+-]", text.strip())
