"""Texts with holes, and candidates as files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.errors import ConfigError
from agentlightning.prompts.components import (
    Pattern,
    candidate_of,
    changed_components,
    read_candidate,
    write_candidate,
)
from agentlightning.types import PromptCandidate, PromptText

SENT = "You are the writer. Today is {hole1}. The user is {hole2}. Be brief."
BASE = PromptCandidate(
    components={"writer.system": PromptText(place="system", sent=SENT, text=SENT)}
)


def of(text: str) -> PromptCandidate:
    return candidate_of(BASE, {"writer.system": text})


@given(st.lists(st.text(), min_size=1, max_size=4), st.lists(st.text(), max_size=3))
def test_what_matches_is_filled_again_to_the_same_text(
    segments: list[str], values: list[str]
) -> None:
    pattern = Pattern(tuple(segments))
    values = (values + [""] * 3)[: len(segments) - 1]
    text = pattern.fill(values)
    matched = pattern.match(text)
    assert matched is None or pattern.fill(matched) == text


def test_a_user_who_quotes_the_prompt_in_the_middle_is_not_matched() -> None:
    pattern = Pattern.of("You are the desk. User: {hole1}. Answer shortly. Question: {hole2}")
    quoting = "You are the desk. User: Al. Answer shortly. Question: x"
    assert pattern.match(quoting) == ("Al", "x")
    assert pattern.match(quoting.replace("Al", "Bo. Answer shortly. Question: y")) is None
    at_the_end = "You are the desk. User: Al. Answer shortly. Question: You are the desk. User: ?"
    assert pattern.match(at_the_end) == ("Al", "You are the desk. User: ?")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("Today is {hole1}.", "it has {hole2} 0 times, not 1"),
        ("{hole1} {hole2} {hole2}", "it has {hole2} 2 times, not 1"),
        ("{hole1} {hole2} {hole3}", "it has {hole3} 1 times, not 0"),
        ("{hole2} {hole1}", "its holes are in another order"),
    ],
)
def test_a_candidate_that_loses_a_hole_is_refused(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"'writer.system' cannot be used: {why}")):
        of(text)


def test_a_text_must_not_be_empty_and_a_component_must_be_there() -> None:
    bare = PromptCandidate(components={"a": PromptText(place="system", sent="A", text="A")})
    with pytest.raises(ConfigError, match="it is empty"):
        candidate_of(bare, {"a": " \n"})
    with pytest.raises(ConfigError, match="no component is called 'writer'; did you mean"):
        candidate_of(BASE, {"writer": "x"})


def test_a_candidate_is_a_file_that_people_edit(tmp_path: Path) -> None:
    path = tmp_path / "prompts.json"
    write_candidate(BASE, path)
    assert '"text": "You are the writer.' in path.read_text()
    assert changed_components(read_candidate(path)) == frozenset()
    path.write_text(path.read_text().replace('"text": "You are', '"text": "Be'))
    assert changed_components(read_candidate(tmp_path)) == {"writer.system"}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", "is no candidate"),
        ("[]", "is no candidate: Expected `object`"),
        (
            '{"components": {"a": {"place": "system", "sent": "A"}}}',
            "missing required field `text`",
        ),
        (
            '{"components": {"a": {"place": "system", "sent": "A", "text": "B", "txt": ""}}}',
            "unknown field `txt`",
        ),
        (
            '{"components": {"a": {"place": "system", "sent": "{hole2}", "text": "{hole2}"}}}',
            "the holes of `sent` must be",
        ),
        (
            '{"components": {"a": {"place": "system", "sent": "A", "text": "B"},'
            ' "b": {"place": "system", "sent": "A", "text": "C"}}}',
            "it replaces the same text as a",
        ),
    ],
)
def test_a_malformed_file_is_refused_with_the_reason(
    tmp_path: Path, content: str, why: str
) -> None:
    path = tmp_path / "candidate.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=re.escape(why)):
        read_candidate(path)


def test_a_folder_without_a_candidate_says_what_writes_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no candidate at .*prompts.json.*agl prompts"):
        read_candidate(tmp_path)
