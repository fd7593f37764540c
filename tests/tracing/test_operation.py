"""Operations are spans with a duration; what is emitted inside becomes their child."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from agentlightning import semconv
from agentlightning.errors import ConfigError
from agentlightning.tracing.context import recording
from agentlightning.tracing.dialects import arguments_of, result_of
from agentlightning.tracing.emit import MAX_SHOWN
from agentlightning.tracing.operation import MAX_LEVELS, MAX_VALUES, operation
from agentlightning.types import Span


def passed(span: Span) -> dict[str, Any]:
    """Name, input and output of an operation, without what all their names begin with."""
    prefix = f"{semconv.OPERATION}."
    return {
        name.removeprefix(prefix): value
        for name, value in span.attributes.items()
        if name.startswith(prefix) and name != semconv.OPERATION_RESULT
    }


def recorded(output: Any) -> dict[str, Any]:
    with recording() as tracer, operation() as running:
        running.set_output(output)
    return passed(tracer.get_last_trace()[0])


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
    assert (outer_span.attributes[semconv.OPERATION_NAME], outer_span.attributes["turn"]) == (
        "outer",
        1,
    )
    assert passed(outer_span) == {
        "name": "outer",
        "input.args.0": "question",
        "output": f'"{object}"',
    }


def test_exceptions_go_on_and_outside_a_rollout_the_function_is_just_a_function() -> None:
    @operation
    def inverse(x: float) -> float:
        return 1 / x

    with recording() as tracer, pytest.raises(ZeroDivisionError):
        inverse(0.0)
    (span,) = tracer.get_last_trace()
    assert (span.status.status_code, span.attributes["exception.type"]) == (
        "ERROR",
        "ZeroDivisionError",
    )
    assert inverse(2.0) == 0.5
    with operation(name="nothing") as running:
        running.set_output(1)
    with pytest.raises(ConfigError, match="inside it"):

        @operation
        def numbers() -> Iterator[int]:
            yield 1


class Tool:
    def __str__(self) -> str:
        return "a tool"

    @operation
    def search(self, city: str, *more: Any, limit: int = 3, **options: Any) -> Any:
        return options["found"]


def test_arguments_are_laid_out_by_the_names_of_their_parameters_as_in_0_3() -> None:
    with recording() as tracer:
        Tool().search("Oslo", "a", {"b": 1}, found=None, other={"deep": {"er": 1}})
    assert passed(tracer.get_last_trace()[0]) == {
        "name": "search",
        "input.self": '"a tool"',
        "input.city": "Oslo",
        "input.more.0": "a",
        "input.more.1.b": 1,
        "input.limit": 3,
        "input.options.found": "null",
        "input.options.other.deep.er": 1,
        "output": "null",
    }


CIRCLE: list[Any] = []
CIRCLE.append(CIRCLE)
DEEP: list[Any] = []
for _ in range(100_000):
    DEEP = [DEEP]


class Unspeakable:
    def __str__(self) -> str:
        raise RuntimeError("no")


# What 0.3.0 recorded, by a run of it.
LAID_OUT: list[tuple[Any, dict[str, Any]]] = [
    (1, {"output": 1}),
    (2.5, {"output": 2.5}),
    (True, {"output": True}),
    (None, {"output": "null"}),
    ("text", {"output": "text"}),
    ([1, 2], {"output": [1, 2]}),
    ([1, "x"], {"output.0": 1, "output.1": "x"}),
    ([1, 2.0], {"output.0": 1, "output.1": 2.0}),
    ([None, 1], {"output.0": "null", "output.1": 1}),
    ([[1, 2], [3]], {"output.0": [1, 2], "output.1": [3]}),
    ({"rows": [{"a": 1}, {"a": 2}]}, {"output.rows.0.a": 1, "output.rows.1.a": 2}),
    ((1, 2), {"output": "[1, 2]"}),
    ({1}, {"output": '"{1}"'}),
    (b"x", {"output": "\"b'x'\""}),
    ([], {}),
    ({"a": {}}, {}),
    ([[]], {}),
]


# What has no JSON form does not make a working tool fail.
ODD: list[tuple[Any, dict[str, Any]]] = [
    (float("nan"), {"output": "NaN"}),
    ([float("inf"), 1.0], {"output.0": "Infinity", "output.1": 1.0}),
    (2**70, {"output": str(2**70)}),
    ({1: 2j}, {"output.1": '"2j"'}),
    ({(1, 2): {(3,): 4}}, {"output.(1, 2).(3,)": 4}),
    ("lost \udcff", {"output": "lost ?"}),
    (CIRCLE, {"output": "[[...]]"}),
    (DEEP, {"output": "(it cannot be shown: RecursionError)"}),
    (Unspeakable(), {"output": '"(it cannot be shown: RuntimeError)"'}),
]


@pytest.mark.parametrize(("value", "attributes"), [*LAID_OUT, *ODD])
def test_results_are_laid_out_as_in_0_3_whatever_they_are(
    value: Any, attributes: dict[str, Any]
) -> None:
    assert recorded(value) == attributes


def test_what_is_large_or_deep_is_one_text_and_a_long_text_is_cut_in_its_middle() -> None:
    assert recorded(list(range(MAX_VALUES))) == {"output": list(range(MAX_VALUES))}
    large: Any = {"rows": [{"a": 1}] * MAX_VALUES}
    assert recorded(large) == {"output": json.dumps(large)}
    deep: Any = 1
    for _ in range(MAX_LEVELS):
        deep = {"a": deep}
    assert recorded(deep) == {f"output{'.a' * MAX_LEVELS}": 1}
    assert recorded([deep]) == {"output": json.dumps([deep])}
    cut = recorded(["a" * 2 * MAX_SHOWN])["output"][0]
    assert len(cut) < MAX_SHOWN + 10 and " … " in cut


@pytest.mark.parametrize("call", [("Oslo",), ("Oslo", "x", 3)])
def test_a_call_with_wrong_arguments_fails_as_it_would_anyway(call: tuple[Any, ...]) -> None:
    @operation
    def search(city: str, limit: int) -> None: ...

    with recording() as tracer, pytest.raises(TypeError):
        search(*call)
    (span,) = tracer.get_last_trace()
    assert passed(span) == {"name": "search"} | {
        f"input.args.{index}": value for index, value in enumerate(call)
    }
    with recording() as tracer:
        assert operation(max)(1, 2) == 2  # which tells no parameters
    assert passed(tracer.get_last_trace()[0]) == {
        "name": "max",
        "input.args.0": 1,
        "input.args.1": 2,
        "output": 2,
    }


@pytest.mark.parametrize(
    "value", ["Oslo", 3, [1, 2], {"rows": [{"a": 1}, {"a": [True]}], "n": {"m": 1}}, ["x", 1]]
)
def test_what_was_recorded_is_read_back(value: Any) -> None:
    with recording() as tracer, operation() as running:
        running.set_input(value, to=value)
        running.set_output(value)
    (span,) = tracer.get_last_trace()
    assert json.loads(arguments_of(span) or "") == {"args": [value], "to": value}
    assert result_of(span) == (value if isinstance(value, str) else json.dumps(value))


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
        # as the event loop ends those that were abandoned
        await asyncio.create_task(end(generator))
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
