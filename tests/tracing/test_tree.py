"""An attempt as a tree of lines that a person can read, whatever is in its spans."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from rich.console import Console

from agentlightning import semconv
from agentlightning.tracing.rewards import reward_attributes
from agentlightning.tracing.tree import one_line, rollout_tree
from agentlightning.types import Rollout, Span, SpanStatus

ROLLOUT = Rollout(
    rollout_id="ro-1", input="Fly me", start_time=0.0, end_time=60.0, status="succeeded"
)


def span(
    name: str,
    start: float,
    end: float,
    *,
    parent: str | None = None,
    failed: str | None = None,
    **attributes: Any,
) -> Span:
    return Span(
        rollout_id="ro-1",
        attempt_id="at-1",
        sequence_id=0,
        trace_id="0" * 32,
        span_id=f"{name}@{start}",
        parent_id=parent,
        name=name,
        start_time=start,
        end_time=end,
        status=SpanStatus(status_code="ERROR", description=failed) if failed else SpanStatus(),
        attributes={key.replace("__", "."): value for key, value in attributes.items()},
    )


def call(start: float, said: str = "Done", **more: Any) -> Span:
    made = span("chat m", start, start + 1.0, **more)
    attributes = {
        semconv.CALL_ENDPOINT: "chat/completions",
        semconv.GEN_AI_REQUEST_MODEL: "m",
        semconv.GEN_AI_RESPONSE_MODEL: "m-2025",
        semconv.GEN_AI_INPUT_TOKENS: 1_000,
        semconv.GEN_AI_OUTPUT_TOKENS: 10,
        semconv.GEN_AI_FINISH_REASONS: ["stop"],
        semconv.GEN_AI_OUTPUT_MESSAGES: msgspec.json.encode(
            [{"role": "assistant", "content": said}]
        ).decode(),
    }
    return msgspec.structs.replace(made, attributes=attributes)


def agent(name: str, start: float, end: float, **more: Any) -> Span:
    return span(
        name, start, end, gen_ai__operation__name="invoke_agent", gen_ai__agent__name=name, **more
    )


def shown(*spans: Span, width: int = 120, **options: Any) -> list[str]:
    console = Console(width=width, highlight=False)
    with console.capture() as capture:
        console.print(rollout_tree(ROLLOUT, spans, **options))
    return [line.rstrip() for line in capture.get().splitlines()]


def test_agents_are_branches_and_wrappers_that_only_hold_steps_are_left_out() -> None:
    desk, graph = agent("desk", 0, 9), span("RunnableSequence", 1, 8, parent="desk@0")
    tool = span(
        "execute_tool search",
        3,
        4,
        parent=graph.span_id,
        failed="no flights",
        gen_ai__operation__name="execute_tool",
        gen_ai__tool__name="search",
        gen_ai__tool__call__arguments='{"to": "Oslo"}',
    )
    reward = span(semconv.ANNOTATION, 10, 10)
    reward = msgspec.structs.replace(
        reward, attributes=reward_attributes({"correct": 1.0, "short": 0.2}, "correct")
    )
    assert shown(reward, tool, desk, call(2, parent=graph.span_id), graph) == [
        "ro-1  succeeded  reward 1  1 call  1,000 → 10 tokens  60 s",
        "├── input  Fly me",
        "├── agent desk  9.00 s",
        "│   ├── call m-2025  1,000 → 10 tokens  1.00 s  stop  “Done”",
        '│   └── tool search  1.00 s  failed  {"to": "Oslo"}  ! no flights',
        "└── reward correct 1, short 0.2",
    ]


def test_plumbing_is_one_line_with_a_count_and_what_says_something_is_not() -> None:
    desk = agent("desk", 0, 9)
    plumbing = [span("publish", start, start + 0.1, parent=desk.span_id) for start in range(1, 40)]
    around = span("handle", 3, 4, parent=desk.span_id)
    found = span("search", 3, 4, parent=around.span_id, openinference__span__kind="RETRIEVER")
    failed = span("receive", 5, 6, parent=desk.span_id, failed="no receiver")
    assert shown(desk, *plumbing, around, found, failed, span("ack", 6, 7, parent=desk.span_id))[
        2:
    ] == [
        "└── agent desk  9.00 s",
        "    ├── 40 other spans: publish, ack …",
        "    ├── search  1.00 s",
        "    └── receive  1.00 s  ! no receiver",
    ]


def test_other_spans_exceptions_and_logs_are_a_line_each() -> None:
    own = (
        span("parse", 1, 1.5),
        span("agentlightning.message", 2, 2, agentlightning__message__body="hi"),
    )
    raised = span(
        semconv.EXCEPTION,
        3,
        3,
        failed="x",
        exception__type="a.b.ValueError",
        exception__message="no seat",
    )
    log = span(
        semconv.LOG,
        4,
        4,
        agentlightning__log__stream="stderr",
        agentlightning__log__text="one\ntwo",
    )
    assert shown(*own, raised, log)[-4:] == [
        "├── parse  0.50 s",
        "├── agentlightning.message  body=hi",
        "├── ! ValueError: no seat",
        "└── stderr: 2 lines",
    ]


def test_parents_in_a_circle_and_unknown_ones_end_at_the_root() -> None:
    one, other = span("one", 1, 2, parent="other@2"), span("other", 2, 3, parent="one@1")
    assert any("call" in line for line in shown(one, other, call(4, parent="nobody")))


def test_a_huge_attempt_is_cut_with_a_count_of_the_rest() -> None:
    lines = shown(*(call(float(start)) for start in range(5_000)), limit=20)
    assert len(lines) == 23 and lines[-1] == "└── … and 4980 more"


def test_what_would_act_on_a_terminal_is_left_out() -> None:
    assert one_line("\x1b[2Jred\x07 \ud800 [bold]x[/bold]\r\n\ttab") == "[2Jred [bold]x[/bold] tab"
    assert len(one_line("a" * 10_000_000)) == 160
    assert any("[bold]" in line for line in shown(call(1, "[bold]no markup[/bold]")))


@pytest.mark.parametrize("calls", [[1], 5, {"a": 1}, [{"function": [1]}], [{"function": "x"}]])
def test_odd_messages_and_rewards_of_other_programs_are_shown_as_far_as_they_go(calls: Any) -> None:
    message = msgspec.json.encode(
        [{"role": "assistant", "content": "Done", "tool_calls": calls}]
    ).decode()
    told = msgspec.structs.replace(
        call(0), attributes={**call(0).attributes, semconv.GEN_AI_OUTPUT_MESSAGES: message}
    )
    odd = msgspec.structs.replace(
        span("odd", 2, 2), attributes={semconv.reward_value(0): 1, semconv.reward_value(1): "much"}
    )
    lines = shown(told, odd)
    assert "“Done”" in lines[-2]
    assert lines[-1] == "└── reward primary 1"
