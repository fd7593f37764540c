"""Links name other spans by what they have; tags are words to find a span by."""

from __future__ import annotations

from agentlightning.tracing.context import recording
from agentlightning.tracing.emit import emit_annotation, emit_reward
from agentlightning.tracing.links import (
    extract_links_from_attributes,
    extract_tags_from_attributes,
    make_link_attributes,
    make_tag_attributes,
    query_linked_spans,
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
