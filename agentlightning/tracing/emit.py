"""Emitters: one call, one span of the attempt that the running code belongs to.

They are synchronous, cheap (the span waits in memory) and callable from any task or thread that carries the context.
Outside a rollout they raise ConfigError: a reward that silently goes nowhere would be worse. What is not finite or
has no JSON form is an InvalidError at the call, not later in the store.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from typing import Any

from agentlightning.errors import InvalidError
from agentlightning.semconv import (
    ANNOTATION,
    EXCEPTION,
    EXCEPTION_MESSAGE,
    EXCEPTION_STACKTRACE,
    EXCEPTION_TYPE,
    MESSAGE,
    MESSAGE_BODY,
    OBJECT,
    OBJECT_JSON,
)
from agentlightning.tracing.attributes import checked_text, flatten, to_json
from agentlightning.tracing.context import Stopwatch, require_binding
from agentlightning.tracing.rewards import reward_attributes
from agentlightning.types import Attributes, Span, SpanStatus

MAX_STACKTRACE = 16_000  # characters; the end of a longer one is kept, since that is where it failed


def emit_reward(
    reward: float | Mapping[str, float],
    *,
    primary_key: str | None = None,
    final: bool = True,
    attributes: Mapping[str, Any] | None = None,
) -> Span:
    """Record a reward: a number, or several named dimensions of which `primary_key` is the one that is optimised.

    The last reward with `final=True` is the rollout's, unless the agent returns one. `final=False` marks an
    intermediate reward, which belongs to the LLM call before it and never displaces the rollout's."""
    return _emit(
        "emit_reward", ANNOTATION, {**flatten(attributes or {}), **reward_attributes(reward, primary_key, final)}
    )


def emit_message(message: str, attributes: Mapping[str, Any] | None = None) -> Span:
    """Record a line of text, such as a log message that should be seen beside the calls."""
    return _emit("emit_message", MESSAGE, {**flatten(attributes or {}), MESSAGE_BODY: _text(message)})


def emit_object(object: Any, attributes: Mapping[str, Any] | None = None) -> Span:
    """Record anything that has a JSON form."""
    body = to_json("the object", object)
    return _emit("emit_object", OBJECT, {**flatten(attributes or {}), OBJECT_JSON: body})


def emit_annotation(annotation: Mapping[str, Any]) -> Span:
    """Record facts about the rollout; nested mappings become dotted attribute names."""
    return _emit("emit_annotation", ANNOTATION, flatten(annotation))


def emit_exception(exception: BaseException, attributes: Mapping[str, Any] | None = None) -> Span:
    """Record an exception with its traceback; the span's status is ERROR."""
    described = {**flatten(attributes or {}), **exception_attributes(exception)}
    status = SpanStatus(status_code="ERROR", description=str(described[EXCEPTION_MESSAGE]))
    return _emit("emit_exception", EXCEPTION, described, status)


def exception_attributes(exception: BaseException) -> Attributes:
    """Type, message and traceback under OpenTelemetry's names."""
    return {
        EXCEPTION_TYPE: f"{type(exception).__module__}.{type(exception).__qualname__}".removeprefix("builtins."),
        EXCEPTION_MESSAGE: shown(exception),
        EXCEPTION_STACKTRACE: shown(exception, _stacktrace)[-MAX_STACKTRACE:],
    }


def shown(value: Any, write: Callable[[Any], str] = str) -> str:
    """What `write` makes of a stranger's object, also where that fails or is no Unicode text."""
    try:
        return write(value).encode(errors="replace").decode()
    except Exception as error:  # noqa: BLE001 - it is a stranger's; its text must not take the runner down
        return f"(it cannot be shown: {type(error).__name__})"


def _stacktrace(exception: BaseException) -> str:
    return "".join(traceback.format_exception(exception))


def _emit(caller: str, name: str, attributes: Attributes, status: SpanStatus | None = None) -> Span:
    binding = require_binding(caller)
    now = Stopwatch().start_time
    return binding.tracer.record(
        name, attributes, start_time=now, end_time=now, status=status, parent_id=binding.parent_id
    )


def _text(message: Any) -> str:
    if not isinstance(message, str):
        raise InvalidError(f"emit_message takes text, not a {type(message).__name__}; use emit_object for data")
    return checked_text("the message", message)
