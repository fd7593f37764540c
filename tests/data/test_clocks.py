"""A reward goes to its call although the agent's clock is not the gateway's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest

from agentlightning import semconv
from agentlightning.data.clocks import align_clocks
from agentlightning.tracing.dialects import is_gateway_call
from agentlightning.types import Span
from agentlightning.v03 import make_link_attributes
from tests.data.recordings import asks_for, tool_says, trace_stored
from tests.data.test_rewards import SUCCEEDED, call, reward, rewards, span

SKEWS = (-7.0, -0.5, 0.5, 7.0)


def agents_clock(spans: Sequence[Span], ahead: float) -> list[Span]:
    """The spans as an agent's machine would have sent them whose clock is so many seconds ahead."""
    return [
        one
        if is_gateway_call(one)
        else msgspec.structs.replace(
            one, start_time=one.start_time + ahead, end_time=one.end_time + ahead
        )
        for one in spans
    ]


def with_attributes(made: Span, attributes: Mapping[str, Any]) -> Span:
    return msgspec.structs.replace(made, attributes={**made.attributes, **attributes})


def asks(made: Span, tool_call_id: str) -> Span:
    return with_attributes(
        made, {semconv.GEN_AI_OUTPUT_MESSAGES: json.dumps([asks_for(tool_call_id)])}
    )


def answered(made: Span, tool_call_id: str) -> Span:
    return with_attributes(
        made, {semconv.GEN_AI_INPUT_MESSAGES: json.dumps([tool_says(tool_call_id, "3")])}
    )


def tool(start: float, end: float, tool_call_id: str, parent: str | None = None) -> Span:
    about = {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "add",
        "gen_ai.tool.call.id": tool_call_id,
    }
    return span(f"tool-{tool_call_id}", start, end, parent, **about)


CONVERSATION = [
    asks(call(0, 1.0), "t0"),
    tool(1.6, 1.9, "t0"),
    reward(0.1, 1.95),
    asks(answered(call(1, 2.0), "t0"), "t1"),
    reward(0.25, 2.55),  # before the tool begins
    tool(2.6, 2.9, "t1"),
    answered(call(2, 3.0), "t1"),
    reward(0.5, 3.6),
]
UNREWARDED = [made for made in CONVERSATION if not made.span_id.startswith("reward")]


@pytest.mark.parametrize("ahead", [0.0, *SKEWS])
def test_tools_show_how_far_the_agents_clock_is_off(ahead: float) -> None:
    traced = trace_stored(SUCCEEDED, agents_clock(CONVERSATION, ahead))
    assert rewards(traced) == [0.1, 0.25, 0.5]
    assert traced.clock_skew == pytest.approx(ahead, abs=0.1)


def test_one_machine_of_several_moves_nothing() -> None:
    elsewhere = agents_clock([tool(2.6, 2.9, "t1")], 100.0)
    spans = [one for one in CONVERSATION if one.span_id != "tool-t1"]
    outer = [span("lead", 0.9, 3.7)]
    inside = [
        msgspec.structs.replace(one, parent_id="lead") if is_gateway_call(one) else one
        for one in spans
    ]
    spans = [*outer, *inside, *elsewhere]
    assert align_clocks(spans) == (spans, None)


@pytest.mark.parametrize("ahead", SKEWS)
def test_a_posted_reward_has_the_servers_clock(ahead: float) -> None:
    posted = with_attributes(reward(0.25, 2.55), {semconv.REWARD_POSTED: True})
    assert rewards(trace_stored(SUCCEEDED, [*agents_clock(UNREWARDED, ahead), posted])) == [
        None,
        0.25,
        None,
    ]


@pytest.mark.parametrize(
    "attributes",
    [
        {"tool_call_id": "t0"},
        {"gen_ai.tool.call.id": "t0"},
        make_link_attributes({"gen_ai.tool.call.id": "t0"}),
    ],
)
def test_a_reward_that_names_a_tool_call_belongs_to_the_call_that_asked_for_it(
    attributes: Any,
) -> None:
    late = with_attributes(reward(0.25, 3.6), attributes)
    assert rewards(trace_stored(SUCCEEDED, [*UNREWARDED, late])) == [0.25, None, None]


def test_a_reward_inside_a_tool_belongs_to_the_call_that_asked_for_it() -> None:
    """Two agents at once: the other's call ended while the tool ran."""
    spans = [
        asks(call(0, 1.0), "t0"),
        tool(1.6, 3.0, "t0"),
        call(1, 2.0),
        reward(0.25, 2.9, "tool-t0"),
    ]
    assert rewards(trace_stored(SUCCEEDED, spans)) == [0.25, None]
