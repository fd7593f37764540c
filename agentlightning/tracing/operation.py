"""`operation`: a stretch of work as one span, as a decorator or a context manager, sync and async.

Spans emitted inside become its children. Outside a rollout the work simply runs and nothing is recorded: a decorated
tool stays an ordinary function of the user's program.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self, TypeVar, cast, overload

from agentlightning.errors import ConfigError, InvalidError
from agentlightning.semconv import OPERATION, OPERATION_INPUT, OPERATION_NAME, OPERATION_OUTPUT
from agentlightning.tracing.attributes import flatten, to_json
from agentlightning.tracing.context import Binding, Stopwatch, bind, current_binding, new_span_id
from agentlightning.tracing.emit import exception_attributes, shown
from agentlightning.types import Attributes, Span, SpanStatus

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


class Operation:
    """One running operation. Serves as `with` and `async with`; use one object for one block."""

    def __init__(self, attributes: Attributes, propagate: bool = True) -> None:
        self._attributes = attributes
        self._propagate = propagate
        self._span: Span | None = None
        self._binding: Binding | None = None
        self._stack = ExitStack()
        self._span_id = new_span_id()
        self._clock = Stopwatch()

    def set_input(self, *args: Any, **kwargs: Any) -> None:
        """Record what went in, as JSON."""
        self._attributes[OPERATION_INPUT] = _described({"args": args, "kwargs": kwargs})

    def set_output(self, output: Any) -> None:
        """Record what came out, as JSON."""
        self._attributes[OPERATION_OUTPUT] = _described(output)

    def span(self) -> Span:
        """What was recorded. ConfigError before the end, and where nothing is recorded."""
        if self._span is None:
            raise ConfigError("the operation has no span: it is not over, or it ran outside a rollout")
        return self._span

    def set_attributes(self, attributes: Mapping[str, Any]) -> None:
        """Record more about it; nested mappings become dotted names, None is left out."""
        self._attributes.update(flatten(attributes))

    def __enter__(self) -> Self:
        self._binding = current_binding() if self._propagate else None
        if self._binding is not None:
            self._stack.enter_context(bind(self._binding.tracer, self._span_id))
        self._clock = Stopwatch()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        if self._binding is None:
            return
        status = SpanStatus()
        if error is not None and not isinstance(error, GeneratorExit):  # a generator that is read no further is well
            self._attributes.update(exception_attributes(error))
            status = SpanStatus(status_code="ERROR", description=shown(error))
        self._span = self._binding.tracer.record(
            OPERATION,
            self._attributes,
            start_time=self._clock.start_time,
            end_time=self._clock.end_time(),
            status=status,
            span_id=self._span_id,
            parent_id=self._binding.parent_id,
        )

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)

    def __call__(self, function: FunctionT) -> FunctionT:
        """Use as a decorator with attributes: `@operation(step="plan")`."""
        return _decorated(function, self._attributes, self._propagate)


@overload
def operation(function: FunctionT, /) -> FunctionT: ...
@overload
def operation(*, propagate: bool = True, name: str | None = None, **attributes: Any) -> Operation: ...
def operation(
    function: Callable[..., Any] | None = None,
    /,
    *,
    propagate: bool = True,
    name: str | None = None,
    **attributes: Any,
) -> Any:
    """`@operation`, `@operation(step="plan")`, `with operation(name="plan") as op:` or `async with`.

    As a decorator the span holds the function's name, arguments and result; a raised exception is recorded and goes
    on. Generator functions are refused (ConfigError): put the context manager inside them. With `propagate=False`
    nothing is recorded."""
    flat = flatten({OPERATION_NAME: name, **attributes})
    if function is not None:
        return _decorated(function, flat, propagate)
    return Operation(flat, propagate)


def _decorated(function: FunctionT, attributes: Attributes, propagate: bool) -> FunctionT:
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigError(
            f"{function.__qualname__} is a generator; `operation` decorates functions that return. "
            "Use `with operation():` inside it"
        )
    named: Attributes = {OPERATION_NAME: getattr(function, "__qualname__", repr(function)), **attributes}

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def run_async(*args: Any, **kwargs: Any) -> Any:
            with Operation(dict(named), propagate) as running:
                running.set_input(*args, **kwargs)
                output = await function(*args, **kwargs)
                running.set_output(output)
                return output

        return cast(FunctionT, run_async)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with Operation(dict(named), propagate) as running:
            running.set_input(*args, **kwargs)
            output = function(*args, **kwargs)
            running.set_output(output)
            return output

    return cast(FunctionT, run)


def _described(value: Any) -> str:
    """JSON, with `repr` in place of what has no JSON form: recording must not make a working tool fail."""
    try:
        return to_json("the value", value)
    except InvalidError:
        return shown(value, repr)
