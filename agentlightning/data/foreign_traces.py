"""Traces that other tools exported as OTLP's JSON → finished rollouts, as if their agents had run here.

This module knows files of traces and what a rollout is made of. It does not know the store. Ids are derived from those
of the traces, so that the same traces always become the same rollouts.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from agentlightning import semconv
from agentlightning.errors import ConfigError, InvalidError, nearest
from agentlightning.store.transfer import Record
from agentlightning.tracing.dialects import said
from agentlightning.tracing.messages import input_messages, model_name, output_messages, token_counts
from agentlightning.tracing.otlp import JSON, decode_traces
from agentlightning.tracing.rewards import find_final_reward, reward_attributes
from agentlightning.types import Attempt, Attributes, Mode, Rollout, Span

_INPUTS: Final = ("input.value", semconv.GEN_AI_INPUT_MESSAGES, "traceloop.entity.input", semconv.OPERATION_INPUT)
_OTHER_SIGNALS: Final = frozenset({"resourceMetrics", "resourceLogs", "resource_metrics", "resource_logs"})
_EVALUATION_NAME: Final = "gen_ai.evaluation.name"
_EVALUATION_SCORE: Final = "gen_ai.evaluation.score.value"
_BYTE: Final = re.compile(r"\(byte (\d+)\)")
_NUMBERED: Final = re.compile(r"\.\d")


# --- files -------------------------------------------------------------------------------------------------------


@dataclass
class TraceFile:
    """The spans of a file, and in words where it could not be read."""

    spans: list[Span] = field(default_factory=list[Span])
    problems: list[str] = field(default_factory=list[str])


def read_traces(path: Path) -> TraceFile:
    """The spans in a file of one `ExportTraceServiceRequest` in JSON, a list of these, or one a line, as the
    OpenTelemetry Collector writes it. What cannot be read is told and passed over. ConfigError without such a file."""
    try:
        body = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    found = TraceFile()
    for place, document in _documents(path, body, found.problems):
        if isinstance(document, dict) and _OTHER_SIGNALS.intersection(document):
            continue  # collectors may write all their signals into one file
        try:
            found.spans += decode_traces(msgspec.json.encode(document), JSON)
        except InvalidError as error:
            spans = list(_single_spans(document))
            if not spans:
                found.problems.append(f"{place}: {error}")
            for where, single in spans:
                try:
                    found.spans += decode_traces(msgspec.json.encode(single), JSON)
                except InvalidError as reason:
                    found.problems.append(f"{place}, {where}: {_why(reason)}")
    return found


def _why(error: InvalidError) -> str:
    """The innermost field that is named, and what is wrong with it."""
    said = str(error).partition(f"{JSON}: ")[2] or str(error)
    return said.rpartition("Failed to parse ")[2]


def _documents(path: Path, body: bytes, problems: list[str]) -> Iterator[tuple[str, Any]]:
    """Each request of a file with the place where it is."""
    try:
        whole: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        yield from _lines(path, body, error, problems)
        return
    documents: list[Any] = whole if isinstance(whole, list) else [whole]
    for index, document in enumerate(documents):
        place = f"{path}, entry {index + 1}" if isinstance(whole, list) else str(path)
        if _checked(document, place, problems):
            yield place, document


def _lines(path: Path, body: bytes, error: Exception, problems: list[str]) -> Iterator[tuple[str, Any]]:
    """The lines of a file that is not JSON as a whole; where not one line is, the file was not meant to be read so."""
    read: list[tuple[str, Any]] = []
    broken: list[str] = []
    for number, line in enumerate(body.splitlines(), start=1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        try:
            document: Any = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as reason:
            broken.append(f"{place}: {reason}")
            continue
        if isinstance(document, dict) and _checked(document, place, broken):
            read.append((place, document))
    if read:
        problems += broken
    else:
        byte = _BYTE.search(str(error))
        line = body.count(b"\n", 0, int(byte[1]) if byte else len(body)) + 1
        problems.append(f"{path}, line {line}: {error}; it must be OTLP's JSON, whole or one object a line")
    yield from read


def _checked(document: Any, place: str, problems: list[str]) -> bool:
    if isinstance(document, dict) and ({"resourceSpans", "resource_spans"} | _OTHER_SIGNALS).intersection(document):
        return True
    problems.append(f"{place}: it has no field resourceSpans; it must be an ExportTraceServiceRequest in JSON")
    return False


def _single_spans(document: Any) -> Iterator[tuple[str, Any]]:
    """A request of its own for each span of one, with the place of the span."""
    for i, resource in enumerate(_below(document, "resourceSpans", "resource_spans")):
        for j, scope in enumerate(_below(resource, "scopeSpans", "scope_spans")):
            for k, span in enumerate(_below(scope, "spans")):
                alone = {"scope": scope.get("scope"), "spans": [span]}
                single = {"resourceSpans": [{"resource": resource.get("resource"), "scopeSpans": [alone]}]}
                yield f"resourceSpans[{i}].scopeSpans[{j}].spans[{k}]", single


def _below(node: Any, *names: str) -> list[Any]:
    """The list under one of the names, which only an object has."""
    found: Any = next((node[name] for name in names if name in node), None) if isinstance(node, dict) else None
    return found if isinstance(found, list) else []


# --- rollouts ----------------------------------------------------------------------------------------------------


def rollouts_of(
    spans: Sequence[Span], *, by: str | None = None, reward: str | None = None, mode: Mode = "train"
) -> list[Record]:
    """One finished rollout with one attempt per trace or, where `by` names an attribute, per value of it (of a session,
    say); traces that lack it stay rollouts of their own.

    The input is the root span's, else the messages of the first LLM call. Status is the last root's. The reward is the
    newest value of the attribute, or the evaluation, that is called `reward`; without it the score of the only kind of
    evaluation there is. InvalidError where several kinds leave it open, and for a `by` or `reward` that no span has."""
    if by is not None:
        _check_name("the attribute", by, {name for span in spans for name in (*span.attributes, *span.resource)})
    if reward is not None:
        _check_name("a number as", reward, {name for attributes in _said(spans) for name in _scores(attributes)})
    traces: dict[str, list[Span]] = {}
    for span in spans:
        traces.setdefault(span.trace_id, []).append(span)
    grouped: dict[str, list[Span]] = {}
    for trace_id, members in traces.items():
        value = None if by is None else _value(members, by)
        name = f"trace-{trace_id}" if value is None else f"session-{_digest(f'{by}={value}')[:32]}"
        grouped.setdefault(name, []).extend(members)
    return [_record(name, members, reward, mode) for name, members in grouped.items()]


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
    ordered = sorted(unique.values(), key=lambda span: (span.start_time, span.sequence_id, span.span_id))
    roots = [span for span in ordered if span.parent_id not in unique]
    failed = bool(roots) and roots[-1].status.status_code == "ERROR"
    start, end = ordered[0].start_time, max(span.end_time for span in ordered)
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
        metadata={"reason": roots[-1].status.description} if failed and roots[-1].status.description else {},
    )
    return Record(rollout=rollout, attempts=[attempt], spans=spans)


def _normalised(attributes: Attributes) -> Attributes:
    """With messages, model and token counts under the names that the rest of the house reads."""
    added: Attributes = {}
    for name, messages in (
        (semconv.GEN_AI_INPUT_MESSAGES, input_messages(attributes)),
        (semconv.GEN_AI_OUTPUT_MESSAGES, output_messages(attributes)),
    ):
        if messages:
            added[name] = msgspec.json.encode(messages).decode()
    model, counts = model_name(attributes), token_counts(attributes)
    if model is not None:
        added[semconv.GEN_AI_RESPONSE_MODEL] = model
    if counts is not None:
        added[semconv.GEN_AI_INPUT_TOKENS], added[semconv.GEN_AI_OUTPUT_TOKENS] = counts
    return {**attributes, **added}


def _input(roots: Sequence[Span], spans: Sequence[Span]) -> Any:
    """What the agent was asked, as JSON where it is JSON; None where no span says."""
    for root in roots:
        for name in _INPUTS:
            if value := said(root, name):
                return _parsed(value)
    return next((messages for span in spans if (messages := input_messages(span.attributes))), None)


def _parsed(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text


def _score(rollout_id: str, spans: Sequence[Span], wanted: str | None) -> tuple[str, float] | None:
    """(name, value) of the reward that no reward span says yet."""
    scores: dict[str, float] = {}
    for attributes in _said(spans):
        scores |= _scores(attributes, every=wanted is not None)
    if wanted is not None:
        return (wanted, scores[wanted]) if wanted in scores else None
    if find_final_reward(spans) is not None:
        return None
    if len(scores) > 1:
        raise InvalidError(
            f"{rollout_id} has scores of several evaluations ({', '.join(sorted(scores))}); say which is the reward "
            "with --reward"
        )
    return next(iter(scores.items()), None)


def _said(spans: Sequence[Span]) -> list[Attributes]:
    return [span.attributes for span in spans] + [event.attributes for span in spans for event in span.events]


def _scores(attributes: Attributes, *, every: bool = True) -> dict[str, float]:
    """The score of the evaluation that these attributes tell, by its name; with `every` all other numbers too."""
    name = str(attributes.get(_EVALUATION_NAME, _EVALUATION_SCORE))
    found = dict(attributes) if every else {}
    if _EVALUATION_SCORE in attributes:
        found[name] = attributes[_EVALUATION_SCORE]
    scores: dict[str, float] = {}
    for key, value in found.items():
        with contextlib.suppress(ValueError, TypeError):  # no number; some tools write numbers as texts
            if math.isfinite(number := float(value)):  # pyright: ignore[reportArgumentType]
                scores[key] = number
    return scores


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()
