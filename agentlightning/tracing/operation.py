"""`operation`: a piece of work as one span; a decorator or a context manager, sync and async.

Spans emitted inside become its children. Outside a rollout nothing is recorded, and a decorated
function works as usual."""

from __future__ import annotations

import functools
import inspect
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Self, TypeVar, cast, overload

from agentlightning.errors import ConfigError
from agentlightning.semconv import (
    ANNOTATION,
    OPERATION,
    OPERATION_INPUT,
    OPERATION_NAME,
    OPERATION_ONCE,
    OPERATION_OUTPUT,
    OPERATION_REPLAYED,
    OPERATION_RESULT,
)
from agentlightning.tracing.attributes import flatten, laid_out
from agentlightning.tracing.context import Binding, Bound, bind, current_binding, new_span_id
from agentlightning.tracing.emit import exception_attributes, shown
from agentlightning.tracing.recorded import RecordedOperation, whole
from agentlightning.types import Attributes, Span, SpanStatus

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

MAX_VALUES: Final = 256  # of one argument or result, in all its groups and lists
MAX_LEVELS: Final = 8  # groups and lists within each other
_UNRECORDED: Final = (
    "an operation with once=True is not recorded here, so that it would run again: omit "
    "propagate=False, let the agent be a Python function and no command, and start threads of "
    "your own by contextvars.copy_context().run"
)


class Operation:
    """One running operation, for one `with` or `async with` block."""

    def __init__(
        self, attributes: Attributes, propagate: bool = True, *, decorates: bool = False
    ) -> None:
        self._attributes = attributes
        self._decorates = decorates
        self._propagate = propagate
        self._span: Span | None = None
        self._binding: Binding | None = None
        self._bound: Bound | None = None
        self._span_id = new_span_id()
        self._start_time = self._started = 0.0

    def set_input(self, /, *args: Any, **kwargs: Any) -> None:
        """Record the input: `("Oslo", limit=3)` → `….input.args.0`, `….input.limit` (see
        `spread`)."""
        for name, value in (_numbered("args", args) | kwargs).items():
            self._attributes.update(spread(f"{OPERATION_INPUT}.{name}", value))

    def set_output(self, output: Any) -> None:
        """Record the output: `{"price": 120}` → `….output.price` (see `spread`)."""
        self._attributes.update(spread(OPERATION_OUTPUT, output))
        result = whole(output)
        if result is not None:
            self._attributes[OPERATION_RESULT] = result

    def recorded_result(self) -> RecordedOperation | None:
        """What an earlier attempt recorded of this operation, with the rewards inside; None if it
        is to run. NotRecordedError if it must not run twice, and no result is known; ConfigError if
        it must not, and nothing is recorded here."""
        if self._binding is None:
            unrecorded = not self._propagate or "AGL_ATTEMPT_ID" in os.environ
            if OPERATION_ONCE in self._attributes and unrecorded:
                raise ConfigError(_UNRECORDED)
            return None
        tracer = self._binding.tracer
        found = tracer.recorded and tracer.recorded.take(self._attributes)
        if found is not None:
            self._attributes[OPERATION_REPLAYED] = True
            for reward in found.rewards:
                tracer.record(ANNOTATION, reward, parent_id=self._span_id)
        return found

    def span(self) -> Span:
        """The recorded span. ConfigError before the block ends, or if nothing is recorded."""
        if self._span is None:
            raise ConfigError(
                "the operation has no span: it is not over, or it ran outside a rollout"
            )
        return self._span

    def set_attributes(self, attributes: Mapping[str, Any]) -> None:
        """Record more attributes; nested mappings become dotted names, None is omitted."""
        self._attributes.update(flatten(attributes))

    def __enter__(self) -> Self:
        if self._decorates:
            raise ConfigError("once=True is for functions, which can be left out: decorate one")
        self._binding = current_binding() if self._propagate else None
        if self._binding is not None:
            self._bound = bind(self._binding.tracer, self._span_id)
            self._bound.__enter__()
        self._start_time = time.time()
        self._started = time.perf_counter()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._binding is None or self._bound is None:
            return
        self._bound.__exit__(None, None, None)
        status = SpanStatus()
        # a generator that is read no further is well
        if error is not None and not isinstance(error, GeneratorExit):
            self._attributes.update(exception_attributes(error))
            status = SpanStatus(status_code="ERROR", description=shown(error))
        self._span = self._binding.tracer.record(
            OPERATION,
            self._attributes,
            start_time=self._start_time,
            # By a clock that is never set back.
            end_time=self._start_time + time.perf_counter() - self._started,
            status=status,
            span_id=self._span_id,
            parent_id=self._binding.parent_id,
        )

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.__exit__(kind, error, trace)

    def __call__(self, function: FunctionT) -> FunctionT:
        """Use as a decorator with attributes: `@operation(step="plan")`."""
        return _decorated(function, self._attributes, self._propagate)


@overload
def operation(function: FunctionT, /) -> FunctionT: ...
@overload
def operation(
    *, propagate: bool = True, name: str | None = None, once: bool = False, **attributes: Any
) -> Operation: ...
def operation(
    function: Callable[..., Any] | None = None,
    /,
    *,
    propagate: bool = True,
    name: str | None = None,
    once: bool = False,
    **attributes: Any,
) -> Any:
    """Record a function or a block as a span: `@operation`, `@operation(step="plan")`,
    `with operation(name="plan") as op:` or `async with`.

    As a decorator, the span has the function's name, arguments and result; exceptions are recorded
    and raised. For generator functions, put the context manager inside (ConfigError as a
    decorator). Nothing is recorded with `propagate=False`.

    A function that is decorated with `once=True` does not run again where the calls of an attempt
    are replayed, in a retry or a fork: it returns what it returned to the same arguments then,
    which must be a JSON value. If the attempt is killed while it runs, or a moment later, it runs
    again."""
    flat = flatten({OPERATION_NAME: name, **attributes})
    if once:
        flat[OPERATION_ONCE] = True
    if function is not None:
        return _decorated(function, flat, propagate)
    return Operation(flat, propagate, decorates=once)


def _decorated(function: FunctionT, attributes: Attributes, propagate: bool) -> FunctionT:
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigError(
            f"{function.__qualname__} is a generator; `operation` decorates functions that return. "
            "Use `with operation():` inside it"
        )
    named: Attributes = {
        OPERATION_NAME: getattr(function, "__name__", repr(function)),
        **attributes,
    }
    arguments = _arguments_of(function)

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def run_async(*args: Any, **kwargs: Any) -> Any:
            with Operation(dict(named), propagate) as running:
                running.set_input(**arguments(args, kwargs))
                found = running.recorded_result()
                output = found.value if found else await function(*args, **kwargs)
                running.set_output(output)
                return output

        return cast(FunctionT, run_async)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with Operation(dict(named), propagate) as running:
            running.set_input(**arguments(args, kwargs))
            found = running.recorded_result()
            output = found.value if found else function(*args, **kwargs)
            running.set_output(output)
            return output

    return cast(FunctionT, run)


def _arguments_of(
    function: Callable[..., Any],
) -> Callable[[tuple[Any, ...], dict[str, Any]], dict[str, Any]]:
    """A function that names the arguments of a call by parameter, defaults included:
    `("Oslo", "x")` for `(city, *more, limit=3)` → `{"limit": 3, "city": "Oslo", "more.0": "x"}`."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some of Python's own have none
        return lambda args, kwargs: _numbered("args", args) | {"kwargs": kwargs}
    parameters = signature.parameters
    defaults = {
        name: given.default
        for name, given in parameters.items()
        if given.default is not given.empty
    }
    many = next(
        (name for name, given in parameters.items() if given.kind is given.VAR_POSITIONAL), ""
    )

    def arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:  # which the call will raise as well
            return _numbered("args", args) | {"kwargs": kwargs}
        several = _numbered(many, given.pop(many, ()))
        return defaults | given | several

    return arguments


def _numbered(name: str, values: tuple[Any, ...]) -> dict[str, Any]:
    return {f"{name}.{index}": value for index, value in enumerate(values)}


def spread(name: str, value: Any) -> Attributes:
    """Any value as attributes, in the layout of Agent Lightning 0.3 (see `flatten`), None as
    `null`.

    Other objects become JSON, or `str` where they have no JSON form. A value with more than
    MAX_VALUES values or MAX_LEVELS levels is one JSON text; of a text longer than MAX_SHOWN, the
    beginning and the end are kept. Nothing is raised: recording must not break a working tool."""
    attributes = laid_out(
        name, value, _scalar, shown, (dict, list), levels=MAX_LEVELS, most=MAX_VALUES
    )
    return {name: _json(value)} if attributes is None else attributes


def _scalar(path: str, value: Any) -> str | bool | int | float:
    if isinstance(value, str):
        return shown(value, str.__str__)
    if isinstance(value, bool):
        return value
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return int(value)
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    return _json(value)


def _json(value: Any) -> str:
    try:
        return shown(json.dumps(value, default=shown))
    except (TypeError, ValueError, RecursionError):
        # keys that are no text, a circle, no end of depth
        return shown(value, repr)
