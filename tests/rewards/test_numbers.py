"""Which number a text means, and which numbers are equal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning import rewards
from agentlightning.errors import InvalidError


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("42", 42.0),
        ("The answer is 42.", 42.0),
        ("so it costs $1,234.50, all in all", 1234.5),
        ("-$5", -5.0),
        ("$-5", -5.0),
        ("−7 degrees", -7.0),
        ("10-5", 5.0),
        ("first 3, then 4", 4.0),
        ("1,2", 2.0),
        ("12,345,678", 12345678.0),
        ("1.5e3", 1500.0),
        (".5", 0.5),
        ("3/4", 0.75),
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
        ("", None),
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
