"""0.3's links, which name other spans by what they have, its tags, and what reads back what was emitted."""

from __future__ import annotations

import pytest

from agentlightning.errors import InvalidError
from agentlightning.tracing.context import recording
from agentlightning.tracing.emit import emit_annotation, emit_message, emit_object, emit_reward
from agentlightning.tracing.links import extract_links_from_attributes
from agentlightning.v03.emitters import (
    extract_tags_from_attributes,
    get_message_value,
    get_object_value,
    make_link_attributes,
    make_tag_attributes,
    query_linked_spans,
    reward,
)


def test_a_link_is_written_read_and_followed() -> None:
    with recording() as tracer:
        answer = emit_annotation({"gen_ai.response.id": "r1", "kind": "answer"})
        emit_annotation({"gen_ai.response.id": "r2"})
        links = {"gen_ai.response.id": "r1", "span_id": answer.span_id}
        graded = emit_reward(0.5, attributes=make_link_attributes(links))
    assert graded.attributes["agentlightning.link.0.key_match"] == "gen_ai.response.id"
    assert graded.attributes["agentlightning.link.0.value_match"] == "r1"
    read = extract_links_from_attributes(graded.attributes)
    assert [(link.key_match, link.value_match) for link in read] == list(links.items())
    assert query_linked_spans(tracer.get_last_trace(), read) == [answer]
    assert query_linked_spans(tracer.get_last_trace(), []) == tracer.get_last_trace()


def test_tags_are_written_and_read_in_order() -> None:
    attributes = make_tag_attributes(["fast", "reliable"])
    assert attributes == {"agentlightning.tag.0": "fast", "agentlightning.tag.1": "reliable"}
    assert extract_tags_from_attributes(attributes) == ["fast", "reliable"]
    assert extract_tags_from_attributes({}) == extract_links_from_attributes({}) == []


def test_what_was_emitted_can_be_read_back() -> None:
    values = ["text", 5, 0.5, True, None, b"\x00\xff", {"a": [1, {"b": 2}]}, [1, "x"]]
    with recording():
        assert [get_object_value(emit_object(value)) for value in values] == values
        assert get_message_value(emit_message("hello")) == "hello"
        assert get_message_value(emit_object("hello")) is get_object_value(emit_message("hello")) is None
        assert emit_object([]).attributes["agentlightning.object.type"] == "list"


@pytest.mark.anyio
async def test_a_reward_function_emits_what_it_returns() -> None:
    @reward
    def grade(right: bool) -> float:
        return float(right)

    @reward
    async def grade_later(right: bool) -> bool:
        return right

    with recording() as tracer:
        assert (grade(False), await grade_later(True)) == (0.0, True)
    assert [span.attributes["agentlightning.reward.0.value"] for span in tracer.get_last_trace()] == [0.0, 1.0]


def test_a_link_to_something_that_is_no_text_is_refused() -> None:
    with pytest.raises(InvalidError, match="give a str"):
        make_link_attributes({"step": 3})  # type: ignore[dict-item]
