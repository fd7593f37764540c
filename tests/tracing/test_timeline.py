"""An attempt on one axis: what is busy is no gap, and together they fill the axis."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.tracing.context import recording
from agentlightning.tracing.steps import read_steps
from agentlightning.tracing.tree import drawn, timeline
from agentlightning.types import Attempt, AttemptStatus

TOOL = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "search"}
AGENT = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "writer"}


def attempt(status: AttemptStatus, end: float | None) -> Attempt:
    return Attempt(
        rollout_id="r", attempt_id="a", sequence_id=1, start_time=100.0, end_time=end, status=status
    )


def steps(*times: tuple[float, float], attributes: dict = TOOL):
    with recording() as tracer:
        for start, end in times:
            tracer.record("step", dict(attributes), start_time=start, end_time=end)
        return read_steps(tracer.get_last_trace())


@given(st.lists(st.tuples(st.floats(95, 135), st.floats(0, 20)), max_size=8))
def test_gaps_are_apart_in_order_long_enough_and_free_of_steps(parts) -> None:
    found = timeline(
        attempt("timeout", 130.0), steps(*((at, at + took) for at, took in parts)), now=0.0
    )
    assert found.start <= 100 and found.end >= 130
    reached = found.start
    for gap in found.gaps:
        assert reached <= gap.start_time < gap.end_time <= found.end
        assert gap.end_time - gap.start_time >= 0.05 * (found.end - found.start) - 1e-9
        assert not any(
            at < gap.end_time and at + took > gap.start_time and took > 0 for at, took in parts
        )
        reached = gap.end_time


@pytest.mark.parametrize(
    ("status", "end", "said"),
    [
        (
            "timeout",
            130.0,
            "timeout 30.0 s after its start, 20.0 s after its last recorded step: tool search",
        ),
        ("running", None, "running for 40.0 s, 30.0 s after its last recorded step: tool search"),
    ],
)
def test_where_it_stood_is_said_and_the_span_is_named(
    status: AttemptStatus, end: float | None, said: str
) -> None:
    did = steps((100.0, 110.0), (101.0, 102.0))
    found = timeline(attempt(status, end), did, now=140.0)
    assert found.stood == said and found.last_span == did[0].span.span_id
    assert (
        timeline(attempt(status, end), [], now=140.0).stood
        == f"{said.partition(',')[0]}; no step was recorded"
    )
    within = timeline(attempt("succeeded", 130.0), steps((100.0, 130.0), attributes=AGENT), now=0.0)
    # what an agent wraps counts
    assert [(gap.start_time, gap.end_time) for gap in within.gaps] == [(100.0, 130.0)]
    assert within.stood is None and within.last_span is None


def test_a_terminal_shows_each_step_at_its_time_and_counts_what_is_too_much() -> None:
    did = steps((100.0, 110.0), (120.0, 130.0))
    first, gap, second, end = drawn(timeline(attempt("failed", 130.0), did, 0.0), did)
    assert (
        first.startswith("+   0.00 s   10.00 s  ▓▓")
        and gap.startswith("+  10.00 s   10.00 s  ·")
        and "░" in gap
    )
    assert (
        second.startswith("+  20.00 s")
        and end.startswith("+  30.00 s")
        and "┤ failed 30.0 s" in end
    )
    many = steps(*((100.0 + n / 10, 100.1 + n / 10) for n in range(250)))
    lines = list(drawn(timeline(attempt("succeeded", 130.0), many, 0.0), many))
    assert "more" in lines[-2] and lines[-1].endswith("│ succeeded")
