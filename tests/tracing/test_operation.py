"""Operations are spans with a duration; what is emitted inside becomes their child."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator

import pytest

from agentlightning import semconv
from agentlightning.errors import ConfigError
from agentlightning.tracing.context import recording
from agentlightning.tracing.emit import emit_message
from agentlightning.tracing.operation import operation


def test_a_decorated_function_records_arguments_result_and_children() -> None:
    @operation
    def add(a: int, b: int = 2) -> int:
        emit_message("adding")
        return a + b

    with recording() as tracer:
        assert add(1, b=3) == 4
    message, span = tracer.get_last_trace()
    assert span.name == semconv.OPERATION
    assert str(span.attributes[semconv.OPERATION_NAME]).endswith("add")
    assert json.loads(str(span.attributes[semconv.OPERATION_INPUT])) == {"args": [1], "kwargs": {"b": 3}}
    assert span.attributes[semconv.OPERATION_OUTPUT] == "4"
    assert message.parent_id == span.span_id
    assert span.parent_id is None
    assert span.start_time <= message.start_time <= span.end_time


@pytest.mark.anyio
async def test_async_functions_and_context_managers_nest() -> None:
    @operation(step="plan")
    async def plan() -> str:
        return "x"

    with recording() as tracer:
        async with operation(name="outer", turn=1) as outer:
            outer.set_input("question")
            await plan()
            outer.set_output(object)
    inner_span, outer_span = tracer.get_last_trace()
    assert inner_span.attributes["step"] == "plan"
    assert inner_span.parent_id == outer_span.span_id
    assert (outer_span.attributes[semconv.OPERATION_NAME], outer_span.attributes["turn"]) == ("outer", 1)
    assert outer_span.attributes[semconv.OPERATION_OUTPUT] == repr(object)


def test_an_exception_is_recorded_and_goes_on() -> None:
    @operation
    def fail() -> None:
        raise KeyError("gone")

    with recording() as tracer, pytest.raises(KeyError):
        fail()
    (span,) = tracer.get_last_trace()
    assert span.status.status_code == "ERROR"
    assert span.attributes["exception.type"] == "KeyError"


def test_outside_a_rollout_the_function_is_just_a_function() -> None:
    @operation
    def double(x: float) -> float:
        return 2 * x

    assert double(float("nan")) != 0
    with operation(name="nothing") as running:
        running.set_output(1)


@pytest.mark.parametrize(("value", "shown"), [({1: 2j}, "{1: 2j}"), ("lost \udcff", "\\udcff"), ([[]], "[[]]")])
def test_values_without_a_json_form_do_not_make_a_working_tool_fail(value: object, shown: str) -> None:
    @operation
    def same(x: object) -> object:
        return x

    with recording() as tracer:
        same(value)
    assert shown in str(tracer.get_last_trace()[0].attributes[semconv.OPERATION_OUTPUT])


def test_generators_are_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match="inside it"):

        @operation
        def numbers() -> Iterator[int]:
            yield 1


@pytest.mark.anyio
async def test_a_generator_that_is_read_no_further_has_done_well_wherever_it_is_ended() -> None:
    async def found() -> AsyncIterator[int]:
        with operation(name="search"):
            yield 1
            yield 2

    async def end(generator: AsyncIterator[int]) -> None:
        await generator.aclose()  # type: ignore[attr-defined]

    with recording() as tracer:
        generator = found()
        assert await anext(generator) == 1
        await asyncio.create_task(end(generator))  # as the event loop ends those that were abandoned
    (span,) = tracer.get_last_trace()
    assert span.status.status_code == "UNSET"


def test_an_operation_gives_its_span_once_it_is_over() -> None:
    with recording() as tracer:
        with operation(name="plan") as running:
            running.set_attributes({"model": {"name": "m"}})
            with pytest.raises(ConfigError, match="not over"):
                running.span()
        with operation(name="quiet", propagate=False) as quiet:
            pass
    assert tracer.get_last_trace() == [running.span()]
    assert running.span().attributes["model.name"] == "m"
    with pytest.raises(ConfigError, match="outside a rollout"):
        quiet.span()
