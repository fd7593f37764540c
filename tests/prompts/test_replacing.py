"""A candidate in requests of every protocol, and what the program had sent, rebuilt."""

from __future__ import annotations

import json
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentlightning import semconv
from agentlightning.prompts.places import FIELDS, blocks, change_field
from agentlightning.prompts.replacing import Replaced, Replacer, as_sent, met_components
from agentlightning.types import PromptCandidate, PromptText
from tests.prompts.world import call

SYSTEM = "You are the writer. Today is {hole1}. Be brief."
REMINDER = "<system-reminder>Never tell the user about this reminder.</system-reminder>"
CANDIDATE = PromptCandidate(
    components={
        "writer.system": PromptText(
            place="system", sent=SYSTEM, text="WRITE WELL.\n\nIt is {hole1}."
        ),
        "user.system-reminder": PromptText(place="user", sent=REMINDER, text="MIND THIS.\n\nYES."),
        "tools.search.description": PromptText(
            place="tools.search.description", sent="Looks up.", text="FINDS."
        ),
        "tools.search.parameters.city": PromptText(
            place="tools.search.parameters.city", sent="The city.", text="THE TOWN."
        ),
        "unchanged": PromptText(place="system", sent="Same.", text="Same."),
    }
)
PROMPT = SYSTEM.replace("{hole1}", "May 3")
NEW = "WRITE WELL.\n\nIt is May 3."
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "description": "The city."}}}
TOOL = {"name": "search", "description": "Looks up."}
ASKED = f"{REMINDER}\nHow far?"
BODIES: dict[str, dict[str, Any]] = {
    "chat": {
        "messages": [
            {"role": "system", "content": PROMPT},
            {"role": "user", "content": ASKED},
        ],
        "tools": [{"type": "function", "function": {**TOOL, "parameters": SCHEMA}}],
    },
    "chat in parts": {
        "messages": [
            {"role": "developer", "content": [{"type": "text", "text": PROMPT}]},
            {"role": "user", "content": [{"type": "text", "text": ASKED}]},
        ],
        "tools": [{"type": "function", "function": {**TOOL, "parameters": SCHEMA}}],
    },
    "responses": {
        "instructions": PROMPT,
        "input": ASKED,
        "tools": [{"type": "web_search"}, {"type": "function", **TOOL, "parameters": SCHEMA}],
        "previous_response_id": "resp_1",
    },
    "responses in items": {
        "input": [
            {"role": "developer", "content": [{"type": "input_text", "text": PROMPT}]},
            {"type": "function_call_output", "call_id": "1", "output": PROMPT},
            {"type": "message", "role": "user", "content": ASKED},
        ],
        "tools": [{"type": "function", **TOOL, "parameters": SCHEMA}],
    },
    "messages": {
        "system": [
            {"type": "text", "text": PROMPT, "cache_control": {"type": "ephemeral"}},
        ],
        "messages": [{"role": "user", "content": [{"type": "text", "text": ASKED}]}],
        "tools": [{**TOOL, "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}}],
    },
    "gemini": {
        "systemInstruction": {"parts": [{"text": PROMPT}]},
        "contents": [{"role": "user", "parts": [{"text": ASKED}]}],
        "tools": [{"functionDeclarations": [{**TOOL, "parametersJsonSchema": SCHEMA}]}],
    },
    "gemini in snakes": {
        "system_instruction": {"parts": {"text": PROMPT}},
        "contents": {"parts": {"text": ASKED}},
        "tools": {"function_declarations": {**TOOL, "parameters": SCHEMA}},
    },
}
UNKNOWN = {"seed_of_theirs": 12345678901234567890123, "price": "1.10", "x": {"y": [1, None]}}


def put(body: dict[str, Any], candidate: PromptCandidate = CANDIDATE) -> Replaced | None:
    encoded = json.dumps(body).encode()
    return Replacer(candidate, "rs-1").replaced(
        msgspec.json.decode(encoded, type=dict[str, msgspec.Raw])
    )


@pytest.mark.parametrize("name", BODIES)
def test_every_protocol_gets_the_candidates_texts_and_keeps_the_rest(name: str) -> None:
    body = UNKNOWN | BODIES[name]
    replaced = put(body)
    assert replaced is not None
    written = json.dumps(body)
    for old, new in (
        (PROMPT, NEW),
        (REMINDER, "MIND THIS.\n\nYES."),
        ("Looks up.", "FINDS."),
        ("The city.", "THE TOWN."),
    ):
        written = written.replace(json.dumps(old)[1:-1], json.dumps(new)[1:-1])
    expected = json.loads(written)
    if name == "responses in items":  # what a tool returned is not the program's prompt
        expected["input"][1]["output"] = PROMPT
    assert json.loads(replaced.body) == expected
    assert b"12345678901234567890123" in replaced.body
    read = json.loads(replaced.body)
    for field in FIELDS.keys() & body.keys():
        assert change_field(FIELDS[field], read[field], replaced.as_sent) == body[field]


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "assistant", "content": PROMPT}]},
        {"messages": [{"role": "user", "content": PROMPT}]},
        {"messages": [{"role": "system", "content": PROMPT + " "}]},
        {"messages": [{"role": "system", "content": "Same."}]},
        {"messages": "x", "tools": "y", "system": None},
        {"messages": [{"content": None}, {"role": "system"}], "tools": [None, {"name": "search"}]},
        {"tools": [{"type": "function", "function": {**TOOL, "description": "Looks up"}}]},
    ],
)
def test_what_is_not_the_programs_text_to_the_letter_stays(body: dict[str, Any]) -> None:
    assert put(body) is None


def test_nfd_is_not_taken_for_nfc_and_marks_of_direction_count() -> None:
    text = PromptText(place="system", sent="\u200fCafé, kurz.", text="\u200fNEU")
    candidate = PromptCandidate(components={"a": text})
    for other in ("\u200fCafe\u0301, kurz.", "Café, kurz."):
        assert put({"messages": [{"role": "system", "content": other}]}, candidate) is None
    assert put({"messages": [{"role": "system", "content": text.sent}]}, candidate) is not None


def test_the_pattern_that_says_most_is_taken() -> None:
    texts = {
        "wide": PromptText(place="system", sent="{hole1} Answer in one line.", text="W {hole1}"),
        "exact": PromptText(
            place="system", sent="You are the desk. Answer in one line.", text="EXACT"
        ),
    }
    body = {"messages": [{"role": "system", "content": texts["exact"].sent}]}
    replaced = put(body, PromptCandidate(components=texts))
    assert replaced is not None and b"EXACT" in replaced.body


def test_a_repeated_request_is_replaced_in_the_same_way() -> None:
    replacer = Replacer(CANDIDATE, "rs-1")
    for body in [*BODIES.values()] * 2:
        fields = msgspec.json.decode(json.dumps(body), type=dict[str, msgspec.Raw])
        replaced, fresh = replacer.replaced(fields), put(body)
        assert replaced is not None and fresh is not None
        assert (replaced.body, replaced.record) == (fresh.body, fresh.record)


def recorded(body: dict[str, Any], record: str | None) -> Any:
    span = call(None, replaced=record)
    span.attributes[semconv.GEN_AI_INPUT_MESSAGES] = json.dumps(body["messages"])
    span.attributes[semconv.GEN_AI_TOOL_DEFINITIONS] = json.dumps(body.get("tools", []))
    return span


WORDS = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=12)
TEXTS = st.one_of(
    WORDS,
    WORDS.map(lambda word: SYSTEM.replace("{hole1}", word)),
    st.lists(st.one_of(WORDS, st.just(REMINDER), st.just("\n\n")), max_size=4).map("".join),
)
MESSAGES = st.lists(
    st.tuples(st.sampled_from(["system", "developer", "user", "assistant"]), TEXTS), max_size=5
)


@settings(max_examples=200, deadline=None)
@given(MESSAGES, WORDS, WORDS)
def test_what_the_program_sent_is_rebuilt_byte_for_byte(
    messages: list[tuple[str, str]], before: str, after: str
) -> None:
    # no text of the program's may be one of the candidate's, which the mark sees to
    new = f"{before}\ufffe{{hole1}}\ufffe{after}".replace("{hole2}", "")
    texts = {
        "writer.system": PromptText(place="system", sent=SYSTEM, text=new),
        "user.reminder": PromptText(place="user", sent=REMINDER, text=f"{after}\n\n\ufffe{before}"),
    }
    candidate = PromptCandidate(components=texts)
    body = {
        "messages": [
            {"role": role, "content": text.replace("\ufffe", "")} for role, text in messages
        ]
    }
    replaced = put(body, candidate)
    if replaced is None:
        return
    span = recorded(json.loads(replaced.body), replaced.record)
    assert as_sent(span, {"rs-1": candidate}).messages == body["messages"]
    assert met_components([span]) <= texts.keys()


def test_what_was_met_and_by_which_fingerprint_is_on_the_span() -> None:
    replaced = put(BODIES["chat"])
    assert replaced is not None
    body = json.loads(replaced.body)
    span = recorded(body, replaced.record)
    assert met_components([span, call(None)]) == CANDIDATE.components.keys() - {"unchanged"}
    record = json.loads(replaced.record)
    assert record["resources_id"] == "rs-1"
    assert record["texts"][0]["parts"][0]["holes"] == [[19, 24]]
    for text in (PROMPT, NEW, "Looks up.", "FINDS."):  # no text is stored twice
        assert text not in replaced.record
    sent = as_sent(span, {"rs-1": CANDIDATE})
    assert (sent.messages, sent.tools) == (BODIES["chat"]["messages"], BODIES["chat"]["tools"])


@given(st.text(alphabet="<a>/ b\n\t-", max_size=60))
def test_blocks_joined_are_the_text(text: str) -> None:
    assert "".join(blocks(text)) == text


def test_many_tags_that_are_never_closed_take_no_time() -> None:
    text = "".join(f"<t{number}>" for number in range(50_000))
    assert "".join(blocks(text)) == text


def test_a_deep_schema_ends() -> None:
    schema: dict[str, Any] = {"description": "end"}
    for _ in range(200):
        schema = {"items": schema}
    tools = [{"name": "t", "parameters": schema}]
    seen: list[str] = []
    change_field("tools", tools, lambda place, text: seen.append(text) or text)  # type: ignore[func-returns-value]
    assert seen == []


def test_a_long_text_is_not_copied_for_each_of_its_paragraphs() -> None:
    text = PromptText(place="user", sent="Answer the question briefly.", text="Be brief.")
    replacer = Replacer(PromptCandidate(components={"user": text}), "r1")
    seconds: list[float] = []
    for first in ("a", "a" * 2_000_000):
        content = first + "\n\na" * 3_000 + f"\n\n{text.sent}"
        messages = msgspec.json.encode([{"role": "user", "content": content}])
        began = time.process_time()
        replaced = replacer.replaced({"messages": msgspec.Raw(messages)})
        seconds.append(time.process_time() - began)
        assert replaced is not None and b"Be brief." in replaced.body
    assert seconds[1] < 50 * seconds[0]
