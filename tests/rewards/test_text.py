"""Short answers are compared as SQuAD defines it."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning import rewards

WORDS = st.lists(st.sampled_from(["a", "The", "cat", "Cat,", "sat", "an", "sat.", "42", "—", "x-y"]), max_size=8)
TEXTS = st.one_of(WORDS.map(" ".join), st.text(max_size=20))


def words_by_definition(text: str) -> list[str]:
    """Lower case, then without punctuation, then without articles, then cut at white space: letter by letter."""
    kept = "".join(letter for letter in text.lower() if letter not in "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")
    return re.sub(r"\b(a|an|the)\b", " ", kept).split()


def f1_by_definition(prediction: str, answer: str) -> float:
    """Harmonic mean of precision and recall over the words, each word of the answer found at most once."""
    given_words, left = words_by_definition(prediction), words_by_definition(answer)
    total, found = len(left), 0
    if not given_words or not left:
        return 1.0 if given_words == left else 0.0
    for word in given_words:
        if word in left:
            left.remove(word)
            found += 1
    if not found:
        return 0.0
    precision, recall = found / len(given_words), found / total
    return 2 * precision * recall / (precision + recall)


@pytest.mark.parametrize(
    ("prediction", "answer", "exact", "f1"),
    [
        ("The  Eiffel Tower!", "eiffel tower", 1.0, 1.0),
        ("the tower", "Eiffel tower", 0.0, 2 / 3),
        ("in Paris, France", "Paris", 0.0, 0.5),
        ("", "Paris", 0.0, 0.0),
        ("the", "", 1.0, 1.0),
        ("yes", ["no", "Yes."], 1.0, 1.0),
        ("yes", [], 0.0, 0.0),
    ],
)
def test_examples(prediction: str, answer: str | list[str], exact: float, f1: float) -> None:
    assert rewards.exact_match(prediction, answer) == exact
    assert rewards.token_f1(prediction, answer) == pytest.approx(f1)


@given(TEXTS, TEXTS)
def test_both_agree_with_their_definition_are_symmetric_and_between_0_and_1(one: str, other: str) -> None:
    f1, exact = rewards.token_f1(one, other), rewards.exact_match(one, other)
    assert f1 == pytest.approx(f1_by_definition(one, other))
    assert exact == (words_by_definition(one) == words_by_definition(other))
    assert (f1, exact) == (rewards.token_f1(other, one), rewards.exact_match(other, one))
    assert exact <= f1 <= 1.0
    assert rewards.token_f1(one, [other, one]) == 1.0
