"""What an attempt writes is kept beside its calls: bounded, its own, and not in the way of anybody
else's logging."""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager

import pytest

from agentlightning.semconv import LOG, LOG_STREAM, LOG_TEXT
from agentlightning.tracing.context import AttemptTracer, recording
from agentlightning.tracing.logs import AttemptLogs, Excerpt, record_log

logger = logging.getLogger("travel")


@contextmanager
def plain_logging() -> Generator[logging.Logger]:
    """The root logger as a plain program has it, without pytest's handlers, which come only once a
    test runs."""
    root = logging.getLogger()
    before = root.handlers[:]
    root.handlers[:] = []
    logger.setLevel(logging.INFO)
    try:
        yield root
    finally:
        root.handlers[:] = before
        logger.setLevel(logging.NOTSET)


def logs(tracer: AttemptTracer) -> list[str]:
    return [str(span.attributes[LOG_TEXT]) for span in tracer.get_last_trace() if span.name == LOG]


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_of_a_flood_the_beginning_and_the_end_are_kept_and_the_rest_is_counted(size: int) -> None:
    written = b"".join(b"%09d\n" % number for number in range(1000))
    excerpt = Excerpt(40)
    for start in range(0, len(written), size):
        excerpt.write(written[start : start + size])
    assert excerpt.text() == (
        "000000000\n000000001\n\n… 9960 bytes left out …\n000000998\n000000999\n"
    )


def test_records_of_an_attempt_become_one_span_and_those_of_others_none() -> None:
    handler = AttemptLogs()
    with plain_logging() as root, recording() as tracer, handler.installed():
        with handler.open(tracer):
            logger.info("looking for %s", "Köln")
            logger.debug("too detailed")
            with recording("another"):
                logger.info("not of this attempt")
            logger.info("found")
        logger.info("too late")
    (text,) = logs(tracer)
    assert [line.partition("INFO ")[2] for line in text.splitlines()] == [
        "travel: looking for Köln",
        "travel: found",
    ]
    assert handler not in root.handlers


@pytest.mark.parametrize("own", [False, True])
def test_what_python_says_on_stderr_is_said_once_unless_the_user_has_a_handler(
    capsys: pytest.CaptureFixture[str], own: bool
) -> None:
    handler = logging.NullHandler()
    first, second = AttemptLogs(), AttemptLogs()  # of two runners in one process
    with plain_logging(), first.installed(), second.installed():
        if own:
            logger.addHandler(handler)
        logger.warning("low on fuel")
        logger.info("on course")
        logger.removeHandler(handler)
    assert capsys.readouterr().err == ("" if own else "low on fuel\n")


def test_a_log_is_a_span_from_its_first_write_to_its_last_whatever_it_holds() -> None:
    excerpt = Excerpt()
    assert excerpt.times == (None, None)
    excerpt.write(b"")
    excerpt.write(b"one\n")
    first = excerpt.times[0]
    excerpt.write(b"two\n")
    with recording() as tracer:
        record_log(tracer, "stdout", "half \ud83d of a pair", excerpt.times)
    (span,) = tracer.get_last_trace()
    assert span.attributes == {LOG_STREAM: "stdout", LOG_TEXT: "half ? of a pair"}
    assert first is not None and (span.start_time, span.end_time) == excerpt.times
    assert span.start_time == first <= span.end_time
