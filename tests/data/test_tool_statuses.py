"""How the tool calls of each model call went, from tools' spans and from API logs alone."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentlightning import semconv
from agentlightning.data.tool_statuses import ToolStatus, tool_statuses
from agentlightning.tracing.dialects import is_gateway_call
from agentlightning.tracing.links import read_links
from agentlightning.tracing.steps import read_steps
from agentlightning.types import Span
from tests.data.recordings import says, span, tool_says
from tests.tracing.recorded import WITH_AGENTS, recorded


def statuses(spans: list[Span]) -> list[list[ToolStatus]]:
    """Of each call, in order."""
    calls = sorted(filter(is_gateway_call, spans), key=lambda span: span.start_time)
    read = tool_statuses(read_steps(spans), read_links(calls))
    return [read.get(call.span_id, []) for call in calls]


def call(index: int, asked: list[tuple[str, str]], messages: Any) -> Span:
    """A call that ended in these tool calls, (id, name)."""
    tool_calls = [{"id": id, "function": {"name": name, "arguments": "{}"}} for id, name in asked]
    about = {
        semconv.CALL_ENDPOINT: "chat/completions",
        semconv.GEN_AI_INPUT_MESSAGES: json.dumps(messages),
        semconv.GEN_AI_OUTPUT_MESSAGES: json.dumps(
            [says("assistant", None, tool_calls=tool_calls)]
        ),
    }
    return span(f"call{index}", float(index), index + 0.5, **about)


def tool_span(name: str, start: float, end: float) -> Span:
    return span("tool", start, end, **{"tool.name": name})


@pytest.mark.parametrize("framework", WITH_AGENTS)
def test_each_framework_tells_which_call_asked_for_a_tool_and_how_it_went(framework: str) -> None:
    first, second, *others = statuses(recorded(framework))
    assert [(one.tool, one.status) for one in first] == [("add", 1)]
    assert [(one.tool, one.status) for one in second] == [("boom", -1)]
    # DSPy's and smolagents'
    assert {one.tool for other in others for one in other} <= {"finish", "final_answer"}
    assert all(one.duration is not None and one.duration > 0 for one in (*first, *second))


def chat(content: Any) -> list[Any]:
    return [{"role": "tool", "tool_call_id": "t", "content": content}]


def anthropic(content: Any, **more: Any) -> list[Any]:
    return [
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t", "content": content, **more}],
        }
    ]


def responses(output: Any) -> list[Any]:
    return [{"type": "function_call_output", "call_id": "t", "output": output}]


@pytest.mark.parametrize(
    ("messages", "status"),
    [
        (chat("3"), 1),
        (chat('{"status": "ok", "is_error": false}'), 1),
        (chat([{"type": "text", "text": "sunny"}]), 1),
        (chat(None), -1),
        (chat("null"), -1),
        (chat('{"status": 404, "body": "not found"}'), -1),
        # what it reports on failed
        (chat('{"status": 200, "data": {"job": 7, "status": "error"}}'), 1),
        (chat('{"isError": true}'), -1),
        (chat("Error: it exploded"), -1),
        (chat('"[ERROR] boom"'), -1),
        (chat("sqlite3.OperationalError: no such table"), -1),
        (chat("Traceback (most recent call last):\n  File"), -1),
        (chat("HTTP 503: Service Unavailable"), -1),
        (chat("Tool call failed with exit code 1"), -1),
        (chat('{"error": "no such city"}'), -1),
        (chat('{"exit_code": 2, "stdout": ""}'), -1),
        (chat("{'error': 'no such city', 'at': None}"), -1),  # as Python writes it
        (chat('{"result": "Error: it exploded"}'), -1),  # google-adk's
        (chat("it exploded\n\nFix the errors and try again."), -1),  # pydantic-ai's
        (chat('{"error": null, "temperature": 3}'), 1),
        (chat('{"success": true, "error": "", "exit_code": 0}'), 1),
        (chat("The standard error: 0.35"), 1),
        (chat("Failure is an option, says the mayor"), 1),
        (responses("An error occurred while running the tool. Please try again."), -1),
        (anthropic("3"), 1),
        (anthropic("3 exploded", is_error=True), -1),
        (anthropic([{"type": "text", "text": '{"status": 503}'}]), -1),
        (responses("3"), 1),
        (responses('{"is_error": true}'), -1),
        (responses(None), -1),
    ],
)
def test_without_tool_spans_the_next_request_tells(messages: list[Any], status: int) -> None:
    read = statuses([call(0, [("t", "look")], []), call(1, [], messages)])
    assert read == [[ToolStatus("look", status, None)], []]  # type: ignore[arg-type]


def test_a_pattern_of_your_own_says_which_answers_are_failures() -> None:
    spans = [
        call(0, [("t", "look")], []),
        call(1, [], chat("Kein Treffer")),
        call(2, [("u", "look")], []),
    ]
    spans.append(call(3, [], [tool_says("u", "Error: 0.3")]))
    steps = read_steps(spans, "^Kein")
    assert [found.status for of in tool_statuses(steps, {}, "^Kein").values() for found in of] == [
        -1,
        1,
    ]


def test_parallel_calls_are_distinguished_by_their_ids() -> None:
    results = [
        {"role": "tool", "tool_call_id": id, "content": content}
        for id, content in (("b", None), ("a", "3"))
    ]
    read = statuses(
        [call(0, [("a", "one"), ("b", "two"), ("c", "never answered")], []), call(1, [], results)]
    )
    assert read[0] == [ToolStatus("one", 1, None), ToolStatus("two", -1, None)]


def test_ids_that_a_server_uses_again_are_distinguished_by_their_conversations() -> None:
    left, right = ([{"role": "user", "content": side}] for side in ("left", "right"))
    asked = says(
        "assistant",
        None,
        tool_calls=[{"id": "call_0", "function": {"name": "x", "arguments": "{}"}}],
    )
    answer = {"role": "tool", "tool_call_id": "call_0"}
    read = statuses(
        [
            call(0, [("call_0", "x")], left),
            call(1, [("call_0", "x")], right),
            call(2, [], [*right, asked, {**answer, "content": None}]),
            call(3, [], [*left, asked, {**answer, "content": "3"}]),
        ]
    )
    assert [one[0].status for one in read[:2]] == [1, -1]


def test_a_tool_that_no_answer_names_belongs_to_the_call_before_it() -> None:
    """An agent may read tool calls out of the text."""
    spans = [call(0, [], []), call(1, [], []), tool_span("x", 1.6, 1.8), call(2, [], [])]
    assert [len(found) for found in statuses(spans)] == [0, 1, 0]
