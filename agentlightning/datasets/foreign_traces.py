"""Converts traces of other tools, as OTLP JSON or as tables of spans, to finished rollouts, as if
their agents had run here.

This module knows trace files and rollouts, but not the store. Ids are derived from the traces' ids,
so the same traces always become the same rollouts."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from agentlightning import semconv
from agentlightning.datasets.record_files import encoding_of, not_text, read_records
from agentlightning.datasets.span_rows import is_span_row, span_of_row
from agentlightning.errors import ConfigError, InvalidError, nearest
from agentlightning.store.transfer import Record
from agentlightning.tracing.dialects import (
    INPUTS,
    first_text,
    input_messages,
    model_name,
    output_messages,
    scope_of,
    token_counts,
)
from agentlightning.tracing.otlp import JSON, decode_traces
from agentlightning.tracing.rewards import find_final_reward, reward_attributes
from agentlightning.types import Attempt, Attributes, Mode, Rollout, Span

_INPUTS: Final = (semconv.GEN_AI_INPUT_MESSAGES, "langfuse.trace.input", *INPUTS)
_TABLES: Final = (".csv", ".parquet")
_TRACES: Final = frozenset({"resourceSpans", "resource_spans"})
_SIGNALS: Final = _TRACES | {"resourceMetrics", "resourceLogs", "resource_metrics", "resource_logs"}
_EVALUATION_NAME: Final = "gen_ai.evaluation.name"
_EVALUATION_SCORE: Final = "gen_ai.evaluation.score.value"
_MALFORMED: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_BYTE: Final = re.compile(r"\(byte (\d+)\)")
_NUMBERED: Final = re.compile(r"\.\d")
_SHOWN: Final = 3  # of many, in a warning


# --- files ----------------------------------------------------------------------------------------


def read_traces(path: Path) -> list[Span]:
    """The spans in a file: JSON with an `ExportTraceServiceRequest` or a span (`span_rows`), a list
    of these, or one per line, as the OpenTelemetry Collector writes it; or a table with a span per
    row. ConfigError if the file cannot be read; InvalidError names a malformed part."""
    if path.suffix.lower() in _TABLES:
        rows = [
            (f"{path}, row {number}", row) for number, row in enumerate(read_records(path), start=1)
        ]
    else:
        rows = _documents(path, _utf8(path))
    spans: list[Span] = []
    for place, document in rows:
        if is_span_row(document):
            spans.append(span_of_row(document, place))
        elif not isinstance(document, dict) or not _SIGNALS.intersection(document):
            raise InvalidError(
                f"{place}: it has no field resourceSpans, and no ids of a span; nothing was stored"
            )
        elif _TRACES.intersection(document):  # collectors may write all their signals into one file
            try:
                spans += decode_traces(msgspec.json.encode(document), JSON)
            except InvalidError as error:
                raise InvalidError(f"{place}: {error}; nothing was stored") from None
    return spans


def _utf8(path: Path) -> bytes:
    """The text of a file in any encoding that `records` reads, as UTF-8 without a mark. Bytes that
    are none stay: they are an error of their line."""
    try:
        encoding = encoding_of(path)
        body = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    if encoding == "utf-8":
        return body
    try:
        return body.decode(encoding).encode()
    except UnicodeDecodeError as error:
        raise ConfigError(not_text(path, error)) from None


def _documents(path: Path, body: bytes) -> Iterator[tuple[str, Any]]:
    """Each request of a file, with its place."""
    try:
        whole: Any = msgspec.json.decode(body)
        if isinstance(whole, list):
            yield from (
                (f"{path}, entry {number}", document)
                for number, document in enumerate(whole, start=1)
            )
        else:
            yield str(path), whole
        return
    except _MALFORMED as error:
        byte = _BYTE.search(str(error))
        line = body.count(b"\n", 0, int(byte[1]) if byte else len(body)) + 1
        why = f"{path}, line {line}: {error}"
    for number, text in enumerate(body.splitlines(), start=1):
        if text.strip():
            try:
                yield f"{path}, line {number}", msgspec.json.decode(text)
            except _MALFORMED as error:
                # If the first line is not JSON, the file was meant as a whole.
                why = why if number == 1 else f"{path}, line {number}: {error}"
                break
    else:
        if body.strip():
            return
    raise InvalidError(f"{why}; nothing was stored: give OTLP's JSON, whole or one object a line")


# --- rollouts -------------------------------------------------------------------------------------


def rollouts_of(
    spans: Sequence[Span], *, by: str | None = None, reward: str | None = None, mode: Mode = "train"
) -> list[Record]:
    """A finished rollout with one attempt per trace or, with `by`, per value of that attribute (of
    a session, say). Traces without it stay rollouts of their own.

    The input is that of the root span, or else the messages of the first LLM call. The status is
    that of the last root. The reward is the newest attribute or evaluation called `reward`, or else
    the score of the only kind of evaluation. InvalidError if there are several kinds, or no span
    has `by` or `reward`."""
    if by is not None:
        _check_name(
            "the attribute",
            by,
            {name for span in spans for name in (*span.attributes, *span.resource)},
        )
    if reward is not None:
        _check_name(
            "a number as",
            reward,
            {name for attributes in _attributes(spans) for name in _scores(attributes)},
        )
    traces: dict[str, list[Span]] = {}
    for span in spans:
        traces.setdefault(span.trace_id, []).append(span)
    grouped: dict[str, list[Span]] = {}
    for trace_id, members in traces.items():
        value = None if by is None else _value(members, by)
        name = f"trace-{trace_id}" if value is None else f"session-{_digest(f'{by}={value}')[:32]}"
        grouped.setdefault(name, []).extend(members)
    return [_record(name, members, reward, mode) for name, members in grouped.items()]


def without_messages(records: Sequence[Record]) -> str | None:
    """A warning that names the traces with no messages in any span, and what their spans are
    instead; None without such traces."""
    names = {semconv.GEN_AI_INPUT_MESSAGES, semconv.GEN_AI_OUTPUT_MESSAGES}
    silent = [
        record
        for record in records
        if not any(names.intersection(span.attributes) for span in record.spans)
    ]
    if not silent:
        return None
    spans = [span for record in silent for span in record.spans]
    kinds = Counter(f"{span.name!r:.60} of {scope_of(span) or 'no scope'}" for span in spans)
    shown = ", ".join(record.rollout.rollout_id for record in silent[:_SHOWN])
    more = f" and {len(silent) - _SHOWN} more" if len(silent) > _SHOWN else ""
    found = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(_SHOWN))
    return (
        f"no span of {len(silent)} of {len(records)} traces has messages of a model, so nothing "
        f"can be learned from them: {shown}{more}. Their spans: {found}. Does the tool record "
        "contents? Many leave them out by default"
    )


def _check_name(what: str, name: str, known: set[str]) -> None:
    if known and name not in known:
        short = {each for each in known if not _NUMBERED.search(each)}
        raise InvalidError(f"no span has {what} {name!r}; {nearest(name, short)}")


def _value(spans: Sequence[Span], attribute: str) -> str | None:
    for span in sorted(spans, key=lambda span: span.start_time):
        value = span.attributes.get(attribute, span.resource.get(attribute))
        if value is not None:
            return str(value)
    return None


def _record(rollout_id: str, members: list[Span], reward: str | None, mode: Mode) -> Record:
    attempt_id = f"{rollout_id}-1"
    unique = {span.span_id: span for span in members}
    ordered = sorted(
        unique.values(), key=lambda span: (span.start_time, span.sequence_id, span.span_id)
    )
    roots = [span for span in ordered if span.parent_id not in unique]
    failed = bool(roots) and roots[-1].status.status_code == "ERROR"
    start = ordered[0].start_time
    end = max(span.end_time for span in ordered)
    spans = [
        msgspec.structs.replace(
            span,
            rollout_id=rollout_id,
            attempt_id=attempt_id,
            sequence_id=number,
            attributes=_normalised(span.attributes),
        )
        for number, span in enumerate(ordered, start=1)
    ]
    scored = _score(rollout_id, ordered, reward)
    if scored is not None:
        rewarding = Span(
            rollout_id=rollout_id,
            attempt_id=attempt_id,
            sequence_id=len(spans) + 1,
            trace_id=ordered[0].trace_id,
            span_id=_digest(f"{rollout_id}/reward")[:16],
            name=semconv.ANNOTATION,
            start_time=end,
            end_time=end,
            attributes=reward_attributes({scored[0]: scored[1]}),
        )
        spans.append(rewarding)
    rollout = Rollout(
        rollout_id=rollout_id,
        input=_input(roots, spans),
        start_time=start,
        end_time=end,
        status="failed" if failed else "succeeded",
        mode=mode,
        metadata={"imported": sorted({span.trace_id for span in ordered})},
    )
    attempt = Attempt(
        rollout_id=rollout_id,
        attempt_id=attempt_id,
        sequence_id=1,
        start_time=start,
        end_time=end,
        status="failed" if failed else "succeeded",
        metadata={"reason": roots[-1].status.description}
        if failed and roots[-1].status.description
        else {},
    )
    return Record(rollout=rollout, attempts=[attempt], spans=spans)


def _normalised(attributes: Attributes) -> Attributes:
    """The spans with messages, model and token counts under our names."""
    added: Attributes = {}
    for name, messages in (
        (semconv.GEN_AI_INPUT_MESSAGES, input_messages(attributes)),
        (semconv.GEN_AI_OUTPUT_MESSAGES, output_messages(attributes)),
    ):
        if messages:
            added[name] = msgspec.json.encode(messages).decode()
    model = model_name(attributes)
    counts = token_counts(attributes)
    if model is not None:
        added[semconv.GEN_AI_RESPONSE_MODEL] = model
    if counts is not None:
        added[semconv.GEN_AI_INPUT_TOKENS], added[semconv.GEN_AI_OUTPUT_TOKENS] = counts
    return {**attributes, **added}


def _input(roots: Sequence[Span], spans: Sequence[Span]) -> Any:
    """The agent's input, as JSON if it is JSON; None if no span has it."""
    for root in roots:
        for name in _INPUTS:
            if value := first_text(root, name):
                return _parsed(value)
    return next((messages for span in spans if (messages := input_messages(span.attributes))), None)


def _parsed(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text


def _score(rollout_id: str, spans: Sequence[Span], wanted: str | None) -> tuple[str, float] | None:
    """(name, value) of the reward, if there is no reward span."""
    scores: dict[str, float] = {}
    for attributes in _attributes(spans):
        scores |= _scores(attributes, every=wanted is not None)
    if wanted is not None:
        return (wanted, scores[wanted]) if wanted in scores else None
    if find_final_reward(spans) is not None:
        return None
    if len(scores) > 1:
        raise InvalidError(
            f"{rollout_id} has scores of several evaluations ({', '.join(sorted(scores))}); say "
            "which is the reward with --reward"
        )
    return next(iter(scores.items()), None)


def _attributes(spans: Sequence[Span]) -> list[Attributes]:
    return [span.attributes for span in spans] + [
        event.attributes for span in spans for event in span.events
    ]


def _scores(attributes: Attributes, *, every: bool = True) -> dict[str, float]:
    """The score of the evaluation in these attributes, by name; with `every`, all other numbers
    too."""
    name = str(attributes.get(_EVALUATION_NAME, _EVALUATION_SCORE))
    found = dict(attributes) if every else {}
    if _EVALUATION_SCORE in attributes:
        found[name] = attributes[_EVALUATION_SCORE]
    scores: dict[str, float] = {}
    for key, value in found.items():
        # no number; some tools write numbers as texts
        with contextlib.suppress(ValueError, TypeError):
            if abs(number := float(value)) <= semconv.LARGEST_REWARD:  # pyright: ignore[reportArgumentType]
                scores[key] = number
    return scores


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()
