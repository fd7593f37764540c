"""`<think>…</think>` at the beginning of an answer is its reasoning, however the text is cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.gateway.chat.text import Reasoning


def split(pieces: list[str], *, begun: bool) -> tuple[str, str]:
    parser = Reasoning(begun=begun)
    told = [parser.feed(piece, last=index == len(pieces) - 1) for index, piece in enumerate(pieces)]
    return "".join(one for one, _ in told), "".join(one for _, one in told)


@pytest.mark.parametrize(
    ("text", "begun", "expected"),
    [
        ("<think>\nhm\n</think>\n\nParis", False, ("\nhm\n", "Paris")),
        ("hm</think>\n\nParis\n", True, ("hm", "Paris\n")),
        ("\n <think>a", False, ("a", "")),
        ("a </thi", True, ("a </thi", "")),
        ("Paris <think>no</think>", False, ("", "Paris <think>no</think>")),
        ("  Paris", False, ("", "  Paris")),
        ("<thi", False, ("", "<thi")),
        ("</think>", True, ("", "")),
        ("a</think>b</think>\n\nc", True, ("a", "b</think>\n\nc")),
        ("", True, ("", "")),
    ],
)
def test_reasoning_is_told_apart(text: str, begun: bool, expected: tuple[str, str]) -> None:
    assert split([text], begun=begun) == expected
    assert split([*text, ""], begun=begun) == expected


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<", "think>", "\n", "a", " ", "</", "é"]), max_size=8),
    st.booleans(),
    st.data(),
)
def test_it_does_not_matter_how_the_text_comes(parts: list[str], begun: bool, data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    places = [0, *cuts, len(text)]
    pieces = [text[start:end] for start, end in pairwise(places)]
    assert split(pieces, begun=begun) == split([text], begun=begun)
