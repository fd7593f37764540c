"""Is an answer right? 1 or 0: what reasoning-gym's scorer says of its problems; of Calc-X, two
numbers by their value.

Of Calc-X the last number in an answer counts, so that naming many does not help; a whole number is
not to be given as a quotient, which the question itself would be."""

from __future__ import annotations

from agentlightning.rewards import extract_number, numeric_equal, reasoning_gym_score

TOLERANCE = 1e-4  # relative; Calc-X rounds some of its results


def grade(task: dict, answer: str) -> float:
    """1.0 for a right answer to a problem of reasoning-gym or one of Calc-X, else 0.0."""
    if "source" in task:  # whose scorer gives a little for any number
        return float(reasoning_gym_score(task, answer) == 1.0)
    if float(extract_number(task["answer"]) or 0).is_integer():
        answer = answer.replace("/", " ")
    return numeric_equal(answer, task["answer"], relative_tolerance=TOLERANCE)
