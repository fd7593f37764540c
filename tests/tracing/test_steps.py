"""Spans of real instrumentation, of every dialect, read as one list of steps."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning import semconv
from agentlightning.tracing.context import recording
from agentlightning.tracing.dialects import is_gateway_call
from agentlightning.tracing.operation import operation
from agentlightning.tracing.steps import Step, read_steps
from agentlightning.types import Span, SpanEvent, SpanStatus
from tests.tracing.recorded import ALL, NAMED, NO_IDS, WITH_AGENTS, recorded


def span(
    name: str,
    start: float,
    end: float,
    parent: str | None = None,
    status: Any = "UNSET",
    **told: Any,
) -> Span:
    return Span(
        rollout_id="r",
        attempt_id="a",
        sequence_id=0,
        trace_id="0" * 32,
        span_id=name,
        parent_id=parent,
        name=name,
        start_time=start,
        end_time=end,
        status=SpanStatus(status_code=status),
        attributes={key.replace("__", "."): value for key, value in told.items()},
    )


def gateway(
    name: str, start: float, end: float, said: str = "", *asked: str, parent: str | None = None
) -> Span:
    """A call recorded by the gateway, whose answer is `said` and asks for the tools `asked` by the
    ids NAME-TOOL."""
    tools = [
        {"id": f"{name}-{tool}", "function": {"name": tool, "arguments": "{}"}} for tool in asked
    ]
    answer = msgspec.json.encode(
        [{"role": "assistant", "content": said, "tool_calls": tools}]
    ).decode()
    told = {semconv.CALL_ENDPOINT: "chat/completions", semconv.GEN_AI_OUTPUT_MESSAGES: answer}
    told |= {
        semconv.GEN_AI_RESPONSE_MODEL: "policy",
        semconv.GEN_AI_RESPONSE_ID: f"chatcmpl-{name}",
    }
    return msgspec.structs.replace(span(name, start, end, parent), attributes=told)


def tools(steps: list[Step]) -> list[tuple[str, bool]]:
    """Those that agents were given: some frameworks have a tool of their own to end with."""
    ends = ("final_answer", "finish")
    return [
        (step.name, step.failed) for step in steps if step.kind == "tool" and step.name not in ends
    ]


@pytest.mark.parametrize("framework", ALL)
def test_each_call_is_one_step_however_many_instrumentations_report_it(framework: str) -> None:
    spans = recorded(framework)
    calls = [step for step in read_steps(spans) if step.kind == "call"]
    assert [step.span for step in calls] == sorted(
        filter(is_gateway_call, spans), key=lambda one: one.start_time
    )
    assert all(step.call is step.span for step in calls)


@pytest.mark.parametrize("framework", WITH_AGENTS)
def test_each_tool_is_one_step_with_its_outcome_its_agent_and_the_call_that_asked(
    framework: str,
) -> None:
    steps = read_steps(recorded(framework))
    add, boom = [step for step in steps if step.kind == "tool"][:2]
    first, second = [step for step in steps if step.kind == "call"][:2]
    agent = "writer" if framework in NAMED else None
    assert (add.name, add.failed, add.agent, add.call) == ("add", False, agent, first.span)
    assert (boom.name, boom.failed, boom.agent, boom.call) == ("boom", True, agent, second.span)
    if framework != "dspy":  # reads the calls of tools out of the text
        assert add.tool_call_id is not None
        assert boom.tool_call_id not in (None, add.tool_call_id)
    assert add.arguments is not None
    assert add.result == "3"
    assert 0 < add.duration < 1


@pytest.mark.parametrize("framework", NAMED)
def test_each_call_is_of_the_agent_that_the_framework_names(framework: str) -> None:
    agents = [step.agent for step in read_steps(recorded(framework)) if step.kind == "call"]
    assert agents == ["writer"] * (len(agents) - 1) + ["rewriter"]


# its nodes are no agents
@pytest.mark.parametrize("framework", [name for name in NAMED if name != "langgraph"])
def test_an_agent_at_work_is_one_step(framework: str) -> None:
    counted = Counter(step.name for step in read_steps(recorded(framework)) if step.kind == "agent")
    assert (counted["writer"], counted["rewriter"]) == (1, 1)


@pytest.mark.parametrize("framework", WITH_AGENTS)
def test_autogen_style_gaps_are_filled_without_the_gateway_too(framework: str) -> None:
    steps = read_steps([one for one in recorded(framework) if not is_gateway_call(one)])
    assert tools(steps) == [("add", False), ("boom", True)]
    assert all(step.call is None for step in steps)


CALLS_WITHOUT_IDS = (*NO_IDS, "autogen", "google-adk", "smolagents")


@pytest.mark.parametrize("framework", [name for name in NAMED if name not in CALLS_WITHOUT_IDS])
@pytest.mark.parametrize("ahead", [-2.0, 2.0])
def test_the_clock_of_the_gateway_may_differ_from_the_agents(framework: str, ahead: float) -> None:
    def moved(one: Span) -> Span:
        start, end = one.start_time + ahead, one.end_time + ahead
        return msgspec.structs.replace(one, parent_id=None, start_time=start, end_time=end)

    steps = read_steps([moved(one) if is_gateway_call(one) else one for one in recorded(framework)])
    calls = [step for step in steps if step.kind == "call"]
    assert [step.agent for step in calls] == ["writer"] * (len(calls) - 1) + ["rewriter"]
    assert [step.call for step in steps if step.kind == "tool"] == [step.span for step in calls[:2]]


def test_no_status_is_success_and_an_exception_event_is_failure() -> None:
    quiet = span("quiet", 0, 1, tool__name="quiet")
    loud = msgspec.structs.replace(
        span("loud", 1, 2, tool__name="loud"), events=(SpanEvent(name="exception"),)
    )
    told = span("told", 2, 3, tool__name="told", output__value='{"is_error": true}')
    typed = span("typed", 3, 4, tool__name="typed", error__type="KeyError")
    found = tools(read_steps([quiet, loud, told, typed]))
    assert found == [("quiet", False), ("loud", True), ("told", True), ("typed", True)]


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (
            '{"id": "c", "name": "look", "response": {"result": "Error: no such city"}}',
            "Error: no such city",
        ),
        # google-adk's
        ('{"id": "c", "name": "look", "response": {"status": "error"}}', '{"status": "error"}'),
        (
            '{"raw_output": "Error: no such city", "is_error": false, "tool_name": "look"}',
            "Error: no such city",
        ),
        # LlamaIndex'
        (
            '{"raw_output": {"error": "no such city"}, "is_error": false}',
            '{"error": "no such city"}',
        ),
        (
            '{"type": "tool", "tool_call_id": "c", "content": "{\\"success\\": false}"}',
            '{"success": false}',
        ),  # LangChain's
    ],
)
def test_a_failure_is_found_within_what_a_framework_puts_around_it(result: str, said: str) -> None:
    (failed,) = read_steps([span("look", 0, 1, tool__name="look", output__value=result)])
    assert (failed.failed, failed.result) == (True, said)


def test_two_executions_of_one_tool_at_once_or_within_each_other_are_two_steps() -> None:
    both = [
        span(name, 0, 1, gen_ai__tool__name="search", gen_ai__tool__call__id=name)
        for name in ("one", "two")
    ]
    call = gateway("call", 0, 0.1, "", "search")
    assert [step.tool_call_id for step in read_steps([call, *both]) if step.kind == "tool"] == [
        "one",
        "two",
    ]
    outer = span("outer", 0, 3, tool__name="walk", otel__scope__name="x")
    inner = span("inner", 1, 2, "outer", tool__name="walk", otel__scope__name="x")
    assert len(tools(read_steps([outer, inner]))) == 2


def test_a_tool_that_was_tried_again_for_one_request_is_one_step_that_failed() -> None:
    tries = [
        span(
            "first",
            1,
            2,
            status="ERROR",
            gen_ai__tool__name="search",
            gen_ai__tool__call__id="call-search",
        ),
        span(
            "second",
            3,
            4,
            status="OK",
            gen_ai__tool__name="search",
            gen_ai__tool__call__id="call-search",
        ),
    ]
    assert tools(read_steps([gateway("call", 0, 0.5, "", "search"), *tries])) == [("search", True)]


AGENT = {"openinference__span__kind": "AGENT"}
LOOK = {"gen_ai__tool__name": "look", "gen_ai__tool__call__id": "call-look"}
SEARCHERS = [span(name, 0, 9, **AGENT, agent__name="searcher") for name in ("l", "r")]
LOOKING = [
    gateway("one", 1, 2, "", "look", parent="l"),
    gateway("two", 1.1, 2.1, "", "look", parent="r"),
]
REUSED = [
    msgspec.structs.replace(gateway("call", at, at + 1, "", "look"), span_id=f"c{at}")
    for at in (0, 4)
]


def tool(name: str, at: float, tool: str, parent: str | None = None, **told: Any) -> Span:
    return span(name, at, at + 0.5, parent, tool__name=tool, **told)


@pytest.mark.parametrize(
    ("spans", "asked"),
    [
        # Without ids they answer the latest call that asked, in order.
        (
            [gateway("a", 0, 1, "", "add"), gateway("b", 2, 3, "", "add", "add")]
            + [tool(f"t{at}", at, "add") for at in (1.2, 3.2, 4.2)],
            ["a", "b", "b"],
        ),
        # Ids that a server uses again in each answer are told apart by time.
        ([*REUSED, span("t0", 2, 3, **LOOK), span("t4", 6, 7, **LOOK)], ["c0", "c4"]),
        # Agents of one name at once are told apart by the spans around them, also where nobody
        # asked for the tool.
        (
            [*SEARCHERS, *LOOKING, tool("tl", 2.2, "look", "l"), tool("tr", 2.3, "look", "r")],
            ["one", "two"],
        ),
        (
            [*SEARCHERS, *LOOKING, tool("tl", 4, "read", "l"), tool("tr", 4.1, "read", "r")],
            ["one", "two"],
        ),
        # A call that has ended comes before one that goes on.
        (
            [
                gateway("a", 0, 1, "", "look"),
                gateway("b", 0.9, 3, "", "look"),
                tool("t", 1.5, "look"),
            ],
            ["a"],
        ),
        # A tool that nobody asked for is not of another agent's call.
        (
            [
                *(span("writer", 0, 2, **AGENT), gateway("call", 0, 1, parent="writer")),
                *(span("loader", 3, 5, **AGENT), tool("load", 4, "load", "loader")),
            ],
            [None],
        ),
        # Ids in the results of a tool are not those of tool calls.
        (
            [gateway("call", 0, 0.5, "", "dial")]
            + [tool(f"t{at}", at, "dial", output__value='{"call_id": "7"}') for at in (1, 2)],
            ["call", "call"],
        ),
    ],
)
def test_tools_are_of_the_calls_that_asked_for_them(
    spans: list[Span], asked: list[str | None]
) -> None:
    steps = [step for step in read_steps(spans) if step.kind == "tool"]
    assert [step.call and step.call.span_id for step in steps] == asked


def test_a_call_without_parents_is_of_the_agent_at_work_unless_several_are() -> None:
    writer = span("w", 0, 5, gen_ai__operation__name="invoke_agent", gen_ai__agent__name="writer")
    inner = span(
        "i", 1, 4, "w", gen_ai__operation__name="invoke_agent", gen_ai__agent__name="inner"
    )
    beside = span("b", 1, 4, gen_ai__operation__name="invoke_agent", gen_ai__agent__name="beside")
    call = gateway("call", 2, 3)
    assert [step.agent for step in read_steps([writer, call]) if step.kind == "call"] == ["writer"]
    assert [step.agent for step in read_steps([writer, inner, call]) if step.kind == "call"] == [
        "inner"
    ]
    assert [
        step.agent for step in read_steps([writer, inner, beside, call]) if step.kind == "call"
    ] == [None]


def system(text: str) -> str:
    return msgspec.json.encode([{"role": "system", "content": text}]).decode()


@pytest.mark.parametrize(
    ("reported", "answered", "agents"),
    [
        (
            [{"output__value": "good morning"}, {"output__value": "good night"}],
            ["good night", "good morning"],
            ["r", "l"],
        ),
        (
            [{"llm__input_messages__0__message__content": f"You are {name}."} for name in "lr"],
            ["", ""],
            ["r", "l"],
        ),
        ([{}, {}], ["", ""], [None, None]),  # reports that may be of either call name nobody
    ],
)
def test_calls_at_the_same_time_are_told_apart_by_answers_and_system_prompts(
    reported: list[dict[str, str]], answered: list[str], agents: list[str | None]
) -> None:
    llm = {"openinference__span__kind": "LLM", "llm__model_name": "policy"}
    spans = [span(name, 0, 5, openinference__span__kind="AGENT") for name in "lr"]
    spans += [
        span(f"{name}2", 1, 4, name, **llm, **more)
        for name, more in zip("lr", reported, strict=True)
    ]
    calls = [gateway("one", 2, 3, answered[0]), gateway("two", 2.1, 3, answered[1])]
    for call, name in zip(calls, "rl", strict=True):
        call.attributes[semconv.GEN_AI_INPUT_MESSAGES] = system(f"You are {name}.")  # type: ignore[index]
    steps = [step for step in read_steps([*spans, *calls]) if step.kind == "call"]
    assert [step.span for step in steps] == calls
    assert [step.agent for step in steps] == agents


def test_a_call_that_the_gateway_did_not_see_is_a_step_without_one() -> None:
    elsewhere = span("m", 0, 1, gen_ai__operation__name="chat", gen_ai__response__model="other")
    (step, other) = read_steps([elsewhere, gateway("call", 0.2, 0.8)])
    assert (step.kind, step.name, step.call) == ("call", "other", None)
    assert other.call is other.span


def test_a_report_is_told_by_the_id_of_its_answer_as_the_gateway_makes_them() -> None:
    call = gateway("at-1.0-2-ab", 2, 3)
    report = span(
        "r",
        0,
        1,
        openinference__span__kind="LLM",
        output__value='{"id":"chatcmpl-at-1.0-2-ab","choices":[]}',
    )
    assert [step.call for step in read_steps([call, report])] == [call]


def test_an_agent_without_a_name_names_nobody() -> None:
    loop = span("anthropic.messages.tool_runner", 0, 5, gen_ai__operation__name="invoke_agent")
    calls = [gateway("within", 1, 2, parent=loop.span_id), gateway("beside", 3, 4)]
    assert [step.agent for step in read_steps([loop, *calls]) if step.kind == "call"] == [
        None,
        None,
    ]


def test_an_operation_is_a_tool_only_if_it_says_so() -> None:
    with recording() as tracer:
        with operation(name="plan"):
            pass
        with operation(**{"gen_ai.tool.name": "search"}):
            pass
    assert [(step.kind, step.name) for step in read_steps(tracer.get_last_trace())] == [
        ("other", semconv.OPERATION),
        ("tool", "search"),
    ]


WORDS = "LLM TOOL AGENT chat execute_tool invoke_agent x [] {} null 3".split()  # noqa: SIM905
NAMES = [
    semconv.GEN_AI_AGENT_NAME,
    semconv.CALL_ENDPOINT,
    semconv.GEN_AI_OUTPUT_MESSAGES,
    semconv.GEN_AI_RESPONSE_ID,
]
NAMES += [
    "openinference.span.kind",
    "gen_ai.operation.name",
    "gen_ai.tool.name",
    "gen_ai.tool.call.id",
]
NAMES += ["output.value", "metadata"]
values = (
    st.sampled_from([*WORDS, '[{"tool_calls": [1]}]'])
    | st.integers()
    | st.lists(st.integers(), max_size=2)
)
anything = st.builds(
    lambda id, parent, start, length, told: msgspec.structs.replace(
        span(str(id), start, start + length, str(parent)), attributes=told
    ),
    st.integers(0, 8),
    st.integers(0, 8),
    st.floats(0, 9),
    st.floats(0, 9),
    st.dictionaries(st.sampled_from(NAMES), values, max_size=4),
)


@given(st.lists(anything, max_size=9, unique_by=lambda one: one.span_id))
def test_whatever_spans_there_are_each_is_told_at_most_once_and_every_gateway_call_is(
    spans: list[Span],
) -> None:
    steps = read_steps(spans)
    assert max(Counter(step.span.span_id for step in steps).values(), default=1) == 1
    assert {one.span_id for one in spans if is_gateway_call(one)} <= {
        one.span.span_id for one in steps
    }
    assert [step.span.start_time for step in steps] == sorted(
        step.span.start_time for step in steps
    )


def nested(count: int, **told: Any) -> list[Span]:
    """Each span in the one before it, which begins later."""
    return [
        span(str(n), n, n + 1, str(n + 1), tool__name=f"t{n % 2}", **told) for n in range(count)
    ]


def at_once(count: int) -> list[Span]:
    """Calls of the gateway that all go on at the same time, and as many reports that do not say of
    which."""
    calls = [gateway(f"g{n}", 0, 9, f"answer {n}", "look") for n in range(count)]
    return calls + [
        span(f"s{n}", 0, 9, gen_ai__operation__name="chat", llm__model_name="policy")
        for n in range(count)
    ]


@pytest.mark.parametrize("make", [nested, at_once])
def test_reading_takes_time_in_proportion_to_the_spans(make: Any) -> None:
    """Steps of Python, which no load on the machine changes: of four times the spans about four
    times as many."""

    def work(count: int) -> int:
        spans, calls = make(count), 0

        def seen(*_: object) -> None:
            nonlocal calls
            calls += 1

        sys.setprofile(seen)
        try:
            read_steps(spans)
        finally:
            sys.setprofile(None)
        return calls

    assert work(600) < 5.5 * work(150)
