"""Emitters: each call records one span of the attempt that the running code belongs to.

They are synchronous and cheap (the span stays in memory), and work in any task or thread with the
attempt's context. ConfigError outside a rollout, where a reward would be lost; InvalidError for a
value that is not finite or has no JSON form."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from typing import Any

from agentlightning import semconv
from agentlightning.errors import InvalidError
from agentlightning.store.redaction import text_without_secrets
from agentlightning.tracing.attributes import checked_text, flatten, to_json
from agentlightning.tracing.context import AttemptTracer, Binding, require_binding
from agentlightning.tracing.rewards import reward_attributes
from agentlightning.types import UNATTRIBUTED, Attributes, Span, SpanStatus

# characters; the end of a longer one is kept, since that is where it failed
MAX_STACKTRACE = 16_000
# of any other text of a stranger's; of a longer one the beginning and the end are kept
MAX_SHOWN = 2 * MAX_STACKTRACE
_DEPTH = 100  # of groups of exceptions


def emit_reward(
    reward: float | Mapping[str, float],
    *,
    primary_key: str | None = None,
    final: bool = True,
    attributes: Mapping[str, Any] | None = None,
    propagate: bool = True,
) -> Span:
    """Record a reward: a number, or several named ones, of which `primary_key` is optimised.

    The rollout's reward is what the agent returns, or else the last one with `final=True`.
    `final=False` is an intermediate reward of the LLM call before it. With `propagate=False`, this
    and the other emitters record nothing and only return the span. ConfigError outside a rollout;
    InvalidError for a reward that is not finite."""
    own = reward_attributes(reward, primary_key, final)
    return _emit("emit_reward", semconv.ANNOTATION, own, attributes, propagate)


def emit_message(
    message: str, attributes: Mapping[str, Any] | None = None, propagate: bool = True
) -> Span:
    """Record a text, such as a log message, to show it beside the calls."""
    if not isinstance(message, str):  # pyright: ignore[reportUnnecessaryIsInstance] - given by users
        raise InvalidError(
            f"emit_message takes text, not a {type(message).__name__}; use emit_object for data"
        )
    own: Attributes = {semconv.MESSAGE_BODY: checked_text("the message", message)}
    return _emit("emit_message", semconv.MESSAGE, own, attributes, propagate)


def emit_object(
    object: Any, attributes: Mapping[str, Any] | None = None, propagate: bool = True
) -> Span:
    """Record a value as JSON; bytes become base64."""
    own: Attributes = {
        semconv.OBJECT_TYPE: _type_name(object),
        semconv.OBJECT_JSON: to_json("the object", object),
    }
    return _emit("emit_object", semconv.OBJECT, own, attributes, propagate)


def emit_annotation(annotation: Mapping[str, Any], propagate: bool = True) -> Span:
    """Record attributes of the rollout; nested mappings become dotted names. InvalidError for a
    value without a JSON form."""
    return _emit("emit_annotation", semconv.ANNOTATION, {}, annotation, propagate)


def emit_exception(
    exception: BaseException, attributes: Mapping[str, Any] | None = None, propagate: bool = True
) -> Span:
    """Record an exception with its traceback; the span's status is ERROR."""
    own = exception_attributes(exception)
    status = SpanStatus(status_code="ERROR", description=str(own[semconv.EXCEPTION_MESSAGE]))
    return _emit("emit_exception", semconv.EXCEPTION, own, attributes, propagate, status)


def exception_attributes(exception: BaseException) -> Attributes:
    """Type, message and traceback, by OpenTelemetry's names."""
    return {
        semconv.EXCEPTION_TYPE: _type_name(exception),
        semconv.EXCEPTION_MESSAGE: shown_error(exception),
        semconv.EXCEPTION_STACKTRACE: shown(
            exception, lambda error: "".join(traceback.format_exception(error))
        )[-MAX_STACKTRACE:],
    }


def shown(value: Any, write: Callable[[Any], str] = str) -> str:
    """The text that `write` makes of an object of the user's, without secrets and shortened; also
    where `write` fails or the text is not valid Unicode."""
    try:
        text = text_without_secrets(write(value))  # before it is cut: half a key looks like none
        if len(text) > MAX_SHOWN:
            text = f"{text[: MAX_SHOWN // 2]} … {text[-MAX_SHOWN // 2 :]}"
        return text.encode(errors="replace").decode()
    except Exception as error:  # noqa: BLE001 - it is a stranger's; its text must not take the runner down
        return f"(it cannot be shown: {type(error).__name__})"


def shown_error(error: BaseException) -> str:
    """The text of an exception with its notes, and of the first one in a group, shortened."""
    return shown(error, _told)


def _told(error: BaseException) -> str:
    text = "; ".join([str(error), *map(str, getattr(error, "__notes__", ()))])
    first = first_of_group(error)
    return text if first is error else f"{text}; {type(first).__name__}: {_told(first)}"


def first_of_group(error: BaseException) -> BaseException:
    """The first exception in a group, however deep; an exception that is none itself."""
    for _ in range(_DEPTH):
        if not isinstance(error, BaseExceptionGroup):
            break
        error = error.exceptions[0]
    return error


def _emit(
    caller: str,
    name: str,
    own: Attributes,
    given: Mapping[str, Any] | None,
    propagate: bool,
    status: SpanStatus | None = None,
) -> Span:
    attributes = {**flatten(given or {}), **own}
    binding = (
        require_binding(caller) if propagate else Binding(AttemptTracer(UNATTRIBUTED, UNATTRIBUTED))
    )
    return binding.tracer.record(name, attributes, status=status, parent_id=binding.parent_id)


def _type_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
