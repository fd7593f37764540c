"""Prints one attempt as a tree (agents as branches with calls, tools, rewards and errors), or on
one axis of time.

It knows steps and the line for each. It knows neither the store nor the terminal: each text is one
line, which wraps."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
from rich.text import Text
from rich.tree import Tree

from agentlightning import semconv
from agentlightning.tracing.dialects import (
    content_text,
    finish_reasons,
    items,
    mapping,
    model_name,
    output_messages,
    token_counts,
)
from agentlightning.tracing.rewards import (
    find_final_reward,
    get_reward_value,
    get_rewards_from_span,
    is_final_reward,
)
from agentlightning.tracing.steps import DEPTH, Step, read_steps
from agentlightning.types import Attempt, Attributes, Rollout, Span

LINES: Final = 200
_PASSED: Final = (semconv.OPERATION_INPUT, semconv.OPERATION_OUTPUT)
_TEXT: Final = 160  # characters of an answer, an argument or a result
_NOT_STEPS: Final = frozenset({semconv.LOG, semconv.UNDELIVERED})


@dataclass(frozen=True)
class Totals:
    """Calls and tokens of an attempt."""

    calls: int
    tokens_read: int
    tokens_written: int

    def words(self) -> str:
        """`2 calls  1,203 → 211 tokens`."""
        return (
            f"{self.calls} call{'s' * (self.calls != 1)}  "
            f"{_tokens((self.tokens_read, self.tokens_written))}"
        )


def totals(steps: Iterable[Step]) -> Totals:
    counts = [
        token_counts((step.call or step.span).attributes) or (0, 0)
        for step in steps
        if step.kind == "call"
    ]
    return Totals(
        len(counts), sum(read for read, _ in counts), sum(written for _, written in counts)
    )


def rollout_tree(rollout: Rollout, spans: Sequence[Span], *, limit: int = LINES) -> Tree:
    """The tree of one attempt's spans under a line about its rollout. Steps beyond `limit` are
    counted."""
    steps = [step for step in read_steps(spans) if step.span.name not in _NOT_STEPS]
    reward = find_final_reward(spans)
    style = {"succeeded": "green", "failed": "red"}.get(rollout.status, "yellow")
    head = Text.assemble((rollout.rollout_id, "bold"), "  ", (rollout.status, style))
    head.append(f"  reward {'none' if reward is None else f'{reward:g}'}  {totals(steps).words()}")
    if rollout.end_time is not None:
        head.append(f"  {_seconds(rollout.end_time - rollout.start_time)}")
    tree = Tree(head, guide_style="dim")
    if rollout.input is not None:
        tree.add(Text.assemble(("input  ", "dim"), one_line(content_text(rollout.input))))
    _grow(tree, steps, spans, limit)
    logged: Counter[str] = Counter()
    for log in (span.attributes for span in spans if span.name == semconv.LOG):
        logged[str(log.get(semconv.LOG_STREAM))] += len(
            str(log.get(semconv.LOG_TEXT, "")).splitlines()
        )
    for stream, lines in logged.items():
        tree.add(Text(f"{one_line(stream)}: {lines} line{'s' * (lines != 1)}", "dim"))
    return tree


def printable(text: str) -> str:
    """The text with spaces for all characters that a terminal acts on, except line ends."""
    return "".join(c if c.isprintable() or c == "\n" else " " for c in text)


def traceback_of(spans: Iterable[Span]) -> str | None:
    """The traceback of the last recorded exception, in a span or a span's event."""
    places = (place.attributes for span in spans for place in (span, *span.events))
    found = [
        text
        for attributes in places
        if (text := attributes.get(semconv.EXCEPTION_STACKTRACE)) is not None
    ]
    return str(found[-1]) if found else None


def one_line(text: str, limit: int = _TEXT) -> str:
    """Printable text without line ends, of at most `limit` characters."""
    flat = " ".join(printable(text[: 4 * limit]).split())
    return flat if len(flat) <= limit else f"{flat[: limit - 1]}…"


def _grow(tree: Tree, steps: Sequence[Step], spans: Sequence[Span], limit: int) -> None:
    shown = arranged(steps, spans)
    branches: list[Tree] = []
    for step, place in shown[:limit]:
        line = _line(step)
        line.plain = printable(line.plain.replace("\n", " "))  # names, too, come from the agent
        branches.append((tree if place is None else branches[place]).add(line))
    if len(shown) > limit:
        tree.add(Text(f"… and {len(shown) - limit} more", "bold"))


def arranged(steps: Sequence[Step], spans: Sequence[Span]) -> list[tuple[Step, int | None]]:
    """The steps worth a line, each with the index of its parent in this list: the nearest earlier
    step whose span contains it, or else the agent it ran under; None if there is none."""
    above = {span.span_id: span.parent_id for span in spans}
    inner = set(above.values())
    shown: dict[str, int | None] = {}
    found: list[tuple[Step, int | None]] = []
    # what is not worth a line of its own, by what it is shown below
    folded: dict[int | None, list[Step]] = {}
    working: dict[str, list[Span]] = {}  # by the agent's name; the span that began last is the last
    for step in steps:
        span = step.span
        place = _nearest(span, above, shown)
        if step.kind == "agent":
            working.setdefault(step.name, []).append(span)
        elif place is None and step.agent is not None:
            around = working.get(step.agent, [])
            # and so before every later step
            while around and around[-1].end_time < span.start_time:
                around.pop()
            place = around[-1].span_id if around else None
        below = None if place is None else shown[place]
        if step.kind == "other" and not step.failed and not _has_a_line(span):
            if span.span_id in inner:
                shown[span.span_id] = below  # a wrapper: what it holds says more
                continue
            several = folded.setdefault(below, [])
            several.append(step)
            if len(several) > 1:
                continue
        shown[span.span_id] = len(found)
        found.append((step, below))
    for below, several in folded.items():
        if len(several) > 1:
            names = ", ".join(
                name for name, _ in Counter(step.name for step in several).most_common(3)
            )
            line = msgspec.structs.replace(
                several[0], name=f"{len(several)} other spans: {names} …", duration=0.0
            )
            found[shown[several[0].span.span_id] or 0] = line, below
    return found


def _has_a_line(span: Span) -> bool:
    """Whether a span that is no call, tool or agent is worth a line."""
    kind = span.attributes.get("openinference.span.kind", "CHAIN")
    return _is_ours(span) or kind not in ("CHAIN", "LLM") or get_reward_value(span) is not None


def _nearest(
    span: Span, above: Mapping[str, str | None], shown: Mapping[str, int | None]
) -> str | None:
    """The nearest shown span above this one."""
    passed = {span.span_id}
    at = span.parent_id
    while at is not None and at not in shown and at not in passed and len(passed) <= DEPTH:
        passed.add(at)
        at = above.get(at)
    return at if at in shown else None


def _line(step: Step) -> Text:
    span = step.span
    if get_reward_value(span) is not None:
        named = ", ".join(
            f"{reward.name} {reward.value:g}" for reward in get_rewards_from_span(span)
        )
        line = Text.assemble(("reward ", "dim"), (named, "yellow"))
        return line if is_final_reward(span) else line.append("  intermediate", "dim")
    if span.name == semconv.EXCEPTION:
        kind, message = (
            span.attributes.get(key, "")
            for key in (semconv.EXCEPTION_TYPE, semconv.EXCEPTION_MESSAGE)
        )
        return Text(f"! {str(kind).rpartition('.')[2]}: {one_line(str(message))}", "red")
    if step.kind == "call":
        return _call(step)
    line = Text() if step.kind == "other" else Text(f"{step.kind} ", "dim")
    line = Text.assemble(line, (step.name, {"agent": "bold", "tool": "cyan"}.get(step.kind, "dim")))
    line.append(f"  {_seconds(step.duration)}" * (step.duration > 0))
    if step.kind == "tool":
        line.append("  ").append(
            "failed" if step.failed else "ok", "red" if step.failed else "green"
        )
    elif step.kind == "other" and _is_ours(span):
        line.append(f"  {one_line(_attributes_line(span))}")
    if step.kind == "tool" or span.name == semconv.OPERATION:
        line.append(f"  {one_line(step.arguments or '')}").append(
            f" → {one_line(step.result)}" if step.result else ""
        )
    return _with_failure(line, step)


def _call(step: Step) -> Text:
    attributes = (step.call or step.span).attributes
    line = Text.assemble(("call ", "dim"), (model_name(attributes) or step.name, "magenta"))
    counts = token_counts(attributes)
    line.append(f"  {_tokens(counts)}" if counts else "").append(f"  {_seconds(step.duration)}")
    line.append(f"  {', '.join(finish_reasons(attributes))}", "dim")
    named = [
        attributes[name]
        for name in (semconv.GEN_AI_AGENT_NAME, semconv.CALL_HOUSEKEEPING)
        if name in attributes
    ]
    line.append(f"  {one_line(': '.join(map(str, named)))}" if named else "", "bold")
    line.append_text(answers(attributes))
    return _with_failure(line, step)


def answers(attributes: Attributes) -> Text:
    """What a call answered, in a line: texts, and the calls of tools."""
    line = Text()
    for message in output_messages(attributes):
        text = one_line(content_text(message.get("content")))
        line.append(f"  “{text}”" if text else "")
        for call in items(message.get("tool_calls")):
            function = mapping(mapping(call).get("function"))
            arguments = function.get("arguments")
            line.append("  → ").append(str(function.get("name")), "cyan")
            line.append(f"({one_line('' if arguments is None else str(arguments))})")
    return line


def own_answer(spans: Sequence[Span]) -> str | None:
    """What the first call of a fork's own answered; None if it came to none."""
    for span in spans:
        flag = span.attributes.get(semconv.CALL_FLAG)
        own = semconv.CALL_INDEX in span.attributes and flag != semconv.REPLAYED
        if own and span.status.status_code != "ERROR":
            return answers(span.attributes).plain.strip()
    return None


def refusal_of(spans: Sequence[Span]) -> str | None:
    """Why the gateway refused a call of an attempt, the first if it refused several."""
    refused = (span.status.description for span in spans if span.name == semconv.CALL_REFUSED)
    return next(refused, None)


def _attributes_line(span: Span) -> str:
    shown = {name: value for name, value in span.attributes.items() if not name.startswith(_PASSED)}
    return ", ".join(f"{name.rpartition('.')[2]}={value}" for name, value in shown.items())


def _with_failure(line: Text, step: Step) -> Text:
    if step.failed:
        raised = (event.attributes for event in step.span.events if event.name == "exception")
        message = str(next(raised, {}).get(semconv.EXCEPTION_MESSAGE, ""))
        line.append(f"  ! {one_line(step.span.status.description or message)}", "red")
    return line


def _is_ours(span: Span) -> bool:
    return span.name.startswith("agentlightning.")


def _tokens(counts: tuple[int, int]) -> str:
    return f"{counts[0]:,} → {counts[1]:,} tokens"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.0f} s"


# --- an axis of time: when nothing was recorded, and where it stood at last -----------------------

_GAP: Final = 0.05  # of the whole: shorter ones are not worth a word
_WIDTH: Final = 40  # characters of the axis in a terminal
_MARKS: Final = {"call": "█", "tool": "▓", "gap": "░"}


class Gap(msgspec.Struct, frozen=True):
    start_time: float
    end_time: float


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """In `gaps` no call, tool or other innermost step was going on. `stood` says how an attempt
    that did not succeed ended, or how long it has been running, and its last step, which is the
    span `last_span`."""

    start: float
    end: float
    gaps: list[Gap]
    stood: str | None
    last_span: str | None


def timeline(attempt: Attempt, steps: Sequence[Step], now: float) -> Timeline:
    """The axis also holds steps that were recorded before the attempt's start or after its end."""
    end = now if attempt.end_time is None else attempt.end_time
    start = min([attempt.start_time, *(step.span.start_time for step in steps)])
    last_end = max([end, *(step.span.end_time for step in steps)])
    around = {step.span.parent_id for step in steps}
    did = [
        step
        for step in steps
        if step.kind != "agent" and step.span.name not in (semconv.EXCEPTION, semconv.LOG)
    ]
    inner = [step.span for step in did if step.span.span_id not in around]
    last = max(did, key=lambda step: step.span.end_time, default=None)
    return Timeline(
        start=start,
        end=last_end,
        gaps=list(_gaps([(span.start_time, span.end_time) for span in inner], start, last_end)),
        stood=None if attempt.status == "succeeded" else _stood(attempt, end, last),
        last_span=None if last is None or attempt.status == "succeeded" else last.span.span_id,
    )


def _gaps(busy: Sequence[tuple[float, float]], start: float, end: float) -> Iterator[Gap]:
    reached = start
    for began, ended in [*sorted(busy), (end, end)]:
        if began - reached >= max(_GAP * (end - start), math.ulp(end)):
            yield Gap(reached, began)
        reached = max(reached, ended)


def _stood(attempt: Attempt, end: float, last: Step | None) -> str:
    """`timeout 30.0 s after its start, 18.6 s after its last recorded step: tool search`."""
    text = f"{attempt.status} {end - attempt.start_time:.1f} s after its start"
    if attempt.end_time is None:
        text = f"{attempt.status} for {end - attempt.start_time:.1f} s"
    if last is None:
        return f"{text}; no step was recorded"
    what = last.name if last.kind == "other" else f"{last.kind} {last.name}"
    return (
        f"{text}, {max(0.0, end - last.span.end_time):.1f} s after its last recorded step: "
        f"{one_line(what)}"
    )


def drawn(found: Timeline, steps: Sequence[Step]) -> Iterator[str]:
    """Lines for a terminal, by time: when something began, how long it took, a bar on the axis, and
    what it was."""
    rows = [(step.span.start_time, step.span.end_time, step.kind, _named(step)) for step in steps]
    rows += [(gap.start_time, gap.end_time, "gap", "nothing recorded") for gap in found.gaps]
    for began, ended, kind, what in sorted(rows, key=lambda row: row[:2])[:LINES]:
        yield (
            f"+{began - found.start:7.2f} s {ended - began:7.2f} s  "
            f"{_bar(found, began, ended, kind)}  {what}"
        )
    if len(rows) > LINES:
        yield f"… and {len(rows) - LINES} more"
    mark = "┤" if found.stood else "│"
    yield (
        f"+{found.end - found.start:7.2f} s {'':9}  {'─' * _WIDTH}{mark} "
        f"{found.stood or 'succeeded'}"
    )


def _bar(found: Timeline, began: float, ended: float, kind: str) -> str:
    whole = found.end - found.start or 1.0
    first, last = (round((at - found.start) / whole * _WIDTH) for at in (began, ended))
    first = min(first, _WIDTH - 1)
    return f"{'·' * first}{_MARKS.get(kind, '▒') * max(1, last - first)}".ljust(_WIDTH, "·")


def _named(step: Step) -> str:
    if rewards := get_rewards_from_span(step.span):
        return f"reward {one_line(rewards[0].name)} {rewards[0].value:g}"
    if step.span.name == semconv.LOG:
        return f"log {one_line(str(step.span.attributes.get(semconv.LOG_STREAM)))}"
    if step.span.name == semconv.EXCEPTION:
        return f"! {one_line(str(step.span.attributes.get(semconv.EXCEPTION_TYPE, 'exception')))}"
    failed = "  failed" * step.failed
    return f"{step.name if step.kind == 'other' else f'{step.kind} {one_line(step.name)}'}{failed}"
