"""Reasoning and tool calls in sampled text: what is one, what stays text, and that streaming
changes neither."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.gateway.chat.text import TOOL_FORMATS, Reasoning, ToolCall, detect_tool_format


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
    st.lists(
        st.sampled_from(["<think>", "</think>", "<", "think>", "\n", "a", " ", "</", "é"]),
        max_size=8,
    ),
    st.booleans(),
    st.data(),
)
def test_it_does_not_matter_how_the_text_comes(
    parts: list[str], begun: bool, data: st.DataObject
) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    places = [0, *cuts, len(text)]
    pieces = [text[start:end] for start, end in pairwise(places)]
    assert split(pieces, begun=begun) == split([text], begun=begun)


A = '<tool_call>{"name": "a", "arguments": {"x": 1}}</tool_call>'
B = '<tool_call>\n{"name": "b", "arguments": {}}\n</tool_call>'


def parsed(
    tool_format: str, text: str, cuts: list[int] | None = None
) -> tuple[str, list[ToolCall]]:
    """(content, calls) of a text fed in pieces cut at the given places, by default character by
    character."""
    parser = TOOL_FORMATS[tool_format].parser()
    places = sorted({0, len(text), *(cuts if cuts is not None else range(len(text)))})
    parts = [part for a, b in pairwise(places) for part in parser.feed(text[a:b])]
    parts += parser.finish()
    content = "".join(part for part in parts if isinstance(part, str))
    return content, [part for part in parts if isinstance(part, ToolCall)]


@pytest.mark.parametrize(
    ("tool_format", "text", "content", "calls"),
    [
        ("hermes", "just text < more", "just text < more", []),
        ("hermes", A, "", [("a", '{"x": 1}')]),
        ("hermes", f"Look.\n{A}\n{B}\n", "Look.", [("a", '{"x": 1}'), ("b", "{}")]),
        ("hermes", f"{A} and then", " and then", [("a", '{"x": 1}')]),
        ("hermes", "trailing space ", "trailing space ", []),
        (
            "hermes",
            f"{A}<tool_call>{{</tool_call>{B}",
            "<tool_call>{</tool_call>",
            [("a", '{"x": 1}'), ("b", "{}")],
        ),
        ("llama3", '{"name": "a", "parameters": {"x": [1, {}]}}', "", [("a", '{"x": [1, {}]}')]),
        ("llama3", '<|python_tag|>{"name": "a", "parameters": {}}', "", [("a", "{}")]),
        ("llama3", "words first {}", "words first {}", []),
    ],
)
def test_well_formed_calls_are_found(
    tool_format: str, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    assert parsed(tool_format, text) == (content, [ToolCall(*call) for call in calls])


@pytest.mark.parametrize(
    ("tool_format", "text"),
    [
        ("hermes", '<tool_call>{"name": "a", "arguments": {"x": }}</tool_call>'),
        ("hermes", '<tool_call>{"name": "a"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "a", "arguments": "{}"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "a", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "a", "arguments": {}, "thought": 1}</tool_call>'),
        ("hermes", '<tool_call>{"name": "a", "arguments": {}}'),
        ("hermes", "<tool_call>" + '{"name": "a", "arguments": ' + '{"x":' * 5000 + "</tool_call>"),
        ("llama3", '{"name": "a", "parameters": ' + '{"x":' * 5000),
        ("hermes", "text <tool_call>"),
        ("hermes", "text </tool_call>"),
        ("llama3", '{"name": "a", "parameters": {}'),
        ("llama3", '{"name": "a", "parameters": {}} trailing'),
        ("llama3", '{"name": "a", "parameters": {}}; {"name": "b", "parameters": {}}'),
        ("llama3", "{}"),
    ],
)
def test_anything_else_stays_the_text_it_is(tool_format: str, text: str) -> None:
    assert parsed(tool_format, text) == (text, [])


PIECES = st.sampled_from([A, B, "<tool_call>", "</tool_call>", "{", " ", "\n", "word", "<", "é🙂"])


@given(st.lists(PIECES, max_size=8).map("".join), st.lists(st.integers(0, 400), max_size=12))
def test_how_a_text_is_cut_into_pieces_changes_nothing(text: str, cuts: list[int]) -> None:
    cuts = [cut for cut in cuts if cut < len(text)]
    for tool_format in ("hermes", "llama3"):
        assert parsed(tool_format, text, cuts) == parsed(tool_format, text, [])


def test_content_streams_while_a_call_is_held_back() -> None:
    parser = TOOL_FORMATS["hermes"].parser()
    assert parser.feed("Let me") == ["Let me"]
    assert parser.feed(" see <tool") == [" see"]
    assert parser.feed("box>") == [" <toolbox>"]
    assert parser.feed("<tool_call>{") == []


@pytest.mark.parametrize(
    ("template", "tool_format"),
    [
        ("… <tool_call> …", "hermes"),
        ("… <|python_tag|> …", "llama3"),
        ("… <tool_call>\n<function=f> …", None),
        ("no tools at all", None),
    ],
)
def test_the_format_is_recognised_from_the_template(template: str, tool_format: str | None) -> None:
    assert detect_tool_format(template) == tool_format
