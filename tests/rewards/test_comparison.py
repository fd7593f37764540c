"""Short answers are compared as SQuAD defines it, and as the numbers that they mean."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning import rewards
from agentlightning.errors import InvalidError

WORDS = st.lists(
    st.sampled_from(["a", "The", "cat", "Cat,", "sat", "an", "sat.", "42", "—", "x-y"]), max_size=8
)
TEXTS = st.one_of(WORDS.map(" ".join), st.text(max_size=20))


def words_by_definition(text: str) -> list[str]:
    """Lower case, then without punctuation, then without articles, then cut at white space: letter
    by letter."""
    kept = "".join(
        letter for letter in text.lower() if letter not in "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"
    )
    return re.sub(r"\b(a|an|the)\b", " ", kept).split()


def f1_by_definition(prediction: str, answer: str) -> float:
    """Harmonic mean of precision and recall over the words, each word of the answer found at most
    once."""
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
def test_texts_are_compared_as_squad_does(
    prediction: str, answer: str | list[str], exact: float, f1: float
) -> None:
    assert rewards.exact_match(prediction, answer) == exact
    assert rewards.token_f1(prediction, answer) == pytest.approx(f1)


@given(TEXTS, TEXTS)
def test_both_agree_with_their_definition_are_symmetric_and_between_0_and_1(
    one: str, other: str
) -> None:
    f1, exact = rewards.token_f1(one, other), rewards.exact_match(one, other)
    assert f1 == pytest.approx(f1_by_definition(one, other))
    assert exact == (words_by_definition(one) == words_by_definition(other))
    assert (f1, exact) == (rewards.token_f1(other, one), rewards.exact_match(other, one))
    assert exact <= f1 <= 1.0
    assert rewards.token_f1(one, [other, one]) == 1.0


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The answer is 42.", 42.0),
        ("so it costs $1,234.50, all in all", 1234.5),
        ("-$5", -5.0),
        ("−7 degrees", -7.0),
        ("1,2", 2.0),
        (".5", 0.5),
        ("-3 / 4 of it", -0.75),
        ("1 1/2 cups", 1.5),
        ("born 3/4/2024", 2024.0),
        ("12%", 0.12),
        (r"12\%", 0.12),
        (r"\boxed{7}, not 8", 7.0),
        (r"\boxed{1} or rather \boxed{\frac{3}{4}} (step 9)", 0.75),
        (r"\boxed{\$1{,}000}", 1000.0),
        ("#### 18", 18.0),
        ("€ 20", 20.0),
        ("3/0", None),
        ("1e999", None),
        ("v2", None),
        ("none at all", None),
    ],
)
def test_the_number_that_a_text_means(text: str, number: float | None) -> None:
    assert rewards.extract_number(text) == number


def test_numbers_are_equal_within_the_tolerance() -> None:
    assert rewards.numeric_equal("about 0.3333333333", "1/3") == 1.0
    assert rewards.numeric_equal("0.33", "1/3") == 0.0
    assert rewards.numeric_equal("0.33", "1/3", relative_tolerance=0.02) == 1.0
    assert rewards.numeric_equal(1e-12, 0) == 1.0
    assert rewards.numeric_equal("no idea", 3) == 0.0
    assert rewards.numeric_equal(float("nan"), 3) == 0.0


@pytest.mark.parametrize("answer", ["unknown", float("nan")])
def test_a_right_answer_without_a_number_is_an_error_of_the_data(answer: str | float) -> None:
    with pytest.raises(InvalidError, match="correct the task"):
        rewards.numeric_equal("3", answer)


@given(st.floats(min_value=-1e9, max_value=1e9), st.text(alphabet=" ,.abc()%$", max_size=3))
def test_a_number_is_found_as_it_was_written(number: float, before: str) -> None:
    assert rewards.extract_number(f"x {number!r}") == pytest.approx(number)
    assert rewards.extract_number(f"{number:,.2f} is it") == pytest.approx(float(f"{number:.2f}"))


@given(st.text(max_size=60), st.integers(-999, 999))
def test_no_text_is_an_error_and_equality_is_symmetric(text: str, number: int) -> None:
    assert rewards.numeric_equal(text, number) in (0.0, 1.0)
    if rewards.extract_number(text) is not None:
        assert rewards.numeric_equal(text, text) == 1.0
        assert rewards.numeric_equal(text, number) == rewards.numeric_equal(str(number), text)
