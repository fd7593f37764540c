"""Emitters write one span each, to the attempt that the running code belongs to."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial

import pytest

from agentlightning import semconv
from agentlightning.errors import ConfigError, InvalidError
from agentlightning.tracing.context import AttemptTracer, bind, recording
from agentlightning.tracing.emit import (
    MAX_SHOWN,
    emit_annotation,
    emit_exception,
    emit_message,
    emit_object,
    emit_reward,
    shown_error,
)


def test_a_reward_is_an_annotation_with_the_names_of_0_3() -> None:
    with recording("R", "A") as tracer:
        span = emit_reward(0.3)
    assert span.name == "agentlightning.annotation"
    assert span.attributes == {
        "agentlightning.reward.0.name": "primary",
        "agentlightning.reward.0.value": 0.3,
    }
    assert (span.rollout_id, span.attempt_id) == ("R", "A")
    assert span.resource == {"agentlightning.rollout_id": "R", "agentlightning.attempt_id": "A"}
    assert tracer.get_last_trace() == [span]


NOT_NUMBERS = [math.nan, math.inf, -math.inf, "1.0", 1j, None, {}, {"a": math.nan}]
CIRCLE: dict[str, object] = {}
CIRCLE["it"] = CIRCLE
LOST = "file \udcff"  # no Unicode


@pytest.mark.parametrize(
    ("emit", "says"),
    [
        *((partial(emit_reward, value), "expected|finite") for value in NOT_NUMBERS),
        (lambda: emit_reward({"a": 1.0, "b": 2.0}), "primary_key"),
        (lambda: emit_reward({"a": 1.0, "b": 2.0}, primary_key="c"), "one of"),
        (lambda: emit_reward(1.0, primary_key="a"), "single reward"),
        (lambda: emit_object(object()), "JSON"),
        (lambda: emit_annotation({"loss": [0.1, math.nan]}), "finite"),
        (lambda: emit_annotation({"when": {1, 2}}), "attributes are"),
        (lambda: emit_annotation(CIRCLE), "hold themselves"),
        (lambda: emit_message(5), "emit_object"),  # type: ignore[arg-type]
        (lambda: emit_message(LOST), "not Unicode"),
        (lambda: emit_annotation({"file": LOST}), "not Unicode"),
        (lambda: emit_annotation({LOST: 1}), "not Unicode"),
    ],
)
def test_what_cannot_be_stored_is_refused_at_the_call(
    emit: Callable[[], object], says: str
) -> None:
    with recording() as tracer, pytest.raises(InvalidError, match=says):
        emit()
    assert tracer.get_last_trace() == []


def test_messages_objects_annotations_and_exceptions_have_spans_of_their_own() -> None:
    with recording():
        message = emit_message("hello")
        thing = emit_object({"rows": [1, None]})
        annotation = emit_annotation(
            {"a": {"b": 1}, "tags": ["x", "y"], "mixed": ["x", 2], "none": None}
        )
        try:
            raise ValueError("bad")
        except ValueError as error:
            exception = emit_exception(error)
    assert (message.name, message.attributes[semconv.MESSAGE_BODY]) == (semconv.MESSAGE, "hello")
    assert (thing.name, json.loads(str(thing.attributes[semconv.OBJECT_JSON]))) == (
        semconv.OBJECT,
        {"rows": [1, None]},
    )
    assert annotation.attributes == {"a.b": 1, "tags": ["x", "y"], "mixed.0": "x", "mixed.1": 2}
    assert exception.status.status_code == "ERROR"
    assert exception.attributes["exception.type"] == "ValueError"
    assert "test_emit.py" in str(exception.attributes["exception.stacktrace"])


def test_an_exception_whose_text_fails_is_recorded_all_the_same() -> None:
    class Odd(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    with recording():
        assert "cannot be shown" in str(emit_exception(Odd()).attributes["exception.message"])
        assert emit_exception(ValueError("file \udcff")).attributes["exception.message"] == "file ?"


def test_of_a_group_of_exceptions_the_first_one_is_told() -> None:
    """Of asyncio's task groups, whose own text says that something happened."""
    error: Exception = ValueError("no such flight")
    for _ in range(3):
        error = ExceptionGroup("unhandled errors in a TaskGroup", [error, OSError("gone")])
    assert shown_error(error).endswith("(2 sub-exceptions); ValueError: no such flight")


def test_odd_notes_and_groups_are_told_all_the_same() -> None:
    class Endless(ExceptionGroup):
        exceptions = ()

    odd = ValueError("no such flight")
    odd.__notes__ = 5  # type: ignore[assignment]
    assert "cannot be shown" in shown_error(odd)
    long = ValueError("no such flight")
    long.__notes__ = ["a note"] * 20_000
    assert len(shown_error(long)) < MAX_SHOWN + 10
    assert "cannot be shown" in shown_error(Endless("none", [odd]))
    endless = Endless("itself", [odd])
    Endless.exceptions = (endless,)
    assert "itself" in shown_error(endless)


def test_spans_are_drained_once_and_dropped_with_a_warning_after_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tracer = AttemptTracer("R", "A")
    with bind(tracer):
        first = emit_message("one")
        assert tracer.drain() == [first]
        assert tracer.drain() == []
        tracer.close()
        emit_message("late")
    assert tracer.drain() == []
    assert "after the attempt had ended" in caplog.text


def test_without_propagation_a_span_is_made_and_not_recorded() -> None:
    span = emit_reward(0.5, propagate=False)  # outside a rollout as well
    with recording() as tracer:
        assert (
            emit_message("quiet", propagate=False).attributes["agentlightning.message.body"]
            == "quiet"
        )
        assert tracer.get_last_trace() == []
        tracer.adopt(span)
    assert [one.attempt_id for one in tracer.get_last_trace()] == ["recording-1"]


def test_outside_a_rollout_an_emitter_says_so() -> None:
    with pytest.raises(ConfigError, match="outside a rollout"):
        emit_reward(1.0)
