"""Whether each tool call succeeded or failed: the input of automatic intermediate rewards.

Read from tool spans or, in an attempt without any, from the results that the agent sent to the
model. Knows steps and the messages of the three protocols; no rewards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from agentlightning import semconv
from agentlightning.tracing.dialects import items, joined, json_of, mapping, text_of
from agentlightning.tracing.steps import Step, tool_requests
from agentlightning.tracing.tool_failures import says_failure
from agentlightning.types import Span


@dataclass(frozen=True)
class ToolStatus:
    """One tool call: +1 returned, −1 failed. `duration` is in seconds; None without a span."""

    tool: str
    status: Literal[1, -1]
    duration: float | None


class _Result(NamedTuple):
    content: Any
    is_error: bool = False


def tool_statuses(
    steps: Sequence[Step], failed_tool: str | None = None
) -> dict[str, list[ToolStatus]]:
    """The tool calls of each gateway call of an attempt, by span id; calls without any are left
    out. `failed_tool` is the pattern with which the steps were read."""
    tools = [step for step in steps if step.kind == "tool"]
    if not tools:
        calls = [step.span for step in steps if step.kind == "call" and step.call is not None]
        return _from_messages(calls, failed_tool)
    statuses: dict[str, list[ToolStatus]] = {}
    for step in tools:
        if step.call is not None:
            status = ToolStatus(step.name, -1 if step.failed else 1, step.duration)
            statuses.setdefault(step.call.span_id, []).append(status)
    return statuses


def _from_messages(calls: Sequence[Span], failed_tool: str | None) -> dict[str, list[ToolStatus]]:
    """Tool results that the agent sent to the model: each tool call is answered by the first later
    call that contains its result."""
    statuses: dict[str, list[ToolStatus]] = {}
    asked = [tool_requests(call) for call in calls]
    times_asked = Counter(request.id for requests in asked for request in requests)
    added: dict[str, dict[str, _Result]] = {}  # by the call that sent them, read on demand
    for index, call in enumerate(calls):
        for request in asked[index]:
            for before, later in pairwise(calls[index:]):
                if times_asked[request.id] > 1 and not _continues(later, call):
                    continue  # may be another conversation's: some servers number from 0
                if later.span_id not in added:
                    added[later.span_id] = dict(_results(_new_messages(later, before)))
                result = added[later.span_id].get(request.id)
                if result is not None:
                    status = ToolStatus(
                        request.name, -1 if _failed(result, failed_tool) else 1, None
                    )
                    statuses.setdefault(call.span_id, []).append(status)
                    break
    return statuses


def _new_messages(later: Span, before: Span) -> list[Any]:
    """The messages of `later` beyond those of `before`, or all if it does not continue that. Most
    calls of a long attempt continue the one before, so the history is not read again for each."""
    sent = text_of(later, semconv.GEN_AI_INPUT_MESSAGES) or ""
    if _continues(later, before):
        rest = sent[len(text_of(before, semconv.GEN_AI_INPUT_MESSAGES) or "") - 1 :].lstrip()
        if rest.startswith(","):
            sent = f"[{rest[1:]}"
    return items(json_of(sent))


def _continues(later: Span, call: Span) -> bool:
    """Whether the messages of `later` start with all messages of `call`."""
    sent, before = (text_of(span, semconv.GEN_AI_INPUT_MESSAGES) or "" for span in (later, call))
    return sent.startswith(before.removesuffix("]"))


def _results(messages: Sequence[Any]) -> Iterator[tuple[str, _Result]]:
    """(tool-call id, result) for each tool result in a request's messages, in order."""
    for message in map(mapping, messages):
        if message.get("role") == "tool":
            yield str(message.get("tool_call_id")), _Result(message.get("content"))
        elif message.get("type") == "function_call_output":
            yield str(message.get("call_id")), _Result(message.get("output"))
        else:
            for block in map(mapping, items(message.get("content"))):
                if block.get("type") == "tool_result":
                    yield (
                        str(block.get("tool_use_id")),
                        _Result(block.get("content"), block.get("is_error") is True),
                    )


def _failed(result: _Result, failed_tool: str | None) -> bool:
    text = joined(result.content) if items(result.content) else result.content
    failure = isinstance(text, str) and (text == "null" or says_failure(text, failed_tool))
    return result.is_error or text is None or failure
