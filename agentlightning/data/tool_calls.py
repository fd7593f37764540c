"""How the tool calls that a model asked for went: what automatic intermediate rewards are made of.

Read from the spans of tools or, in an attempt that has none, from the results that the agent sent to the model. Knows
steps and the messages of the three protocols; no rewards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from agentlightning import semconv
from agentlightning.tracing.dialects import items, joined, json_of, mapping, text_of
from agentlightning.tracing.steps import Step, tool_requests
from agentlightning.tracing.tool_failures import says_failure
from agentlightning.types import Span


@dataclass(frozen=True)
class ToolStatus:
    """One tool call: +1 it returned, −1 it failed. `duration` is in seconds, None where no span tells it."""

    tool: str
    status: Literal[1, -1]
    duration: float | None


def tool_statuses(steps: Sequence[Step], failed_tool: str | None = None) -> dict[str, list[ToolStatus]]:
    """The tool calls of each gateway call of an attempt, by its span id; calls that made none are left out.
    `failed_tool` is the pattern that the steps were read with."""
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
    statuses: dict[str, list[ToolStatus]] = {}
    results: dict[str, dict[str, bool]] = {}  # of each request, decoded once and only if it is needed
    asked = [tool_requests(call) for call in calls]
    times_asked = Counter(request.id for requests in asked for request in requests)
    for index, call in enumerate(calls):
        for request in asked[index]:
            for later in calls[index + 1 :]:
                if times_asked[request.id] > 1 and not _continues(later, call):
                    continue  # the id may be of another conversation: some servers count from 0 in each answer
                if later.span_id not in results:
                    results[later.span_id] = dict(_results(later, failed_tool))
                failed = results[later.span_id].get(request.id)
                if failed is not None:
                    statuses.setdefault(call.span_id, []).append(ToolStatus(request.name, -1 if failed else 1, None))
                    break
    return statuses


def _continues(later: Span, call: Span) -> bool:
    """Whether what `later` was sent begins with all that `call` was sent."""
    sent, before = (text_of(one, semconv.GEN_AI_INPUT_MESSAGES) or "" for one in (later, call))
    return sent.startswith(before.removesuffix("]"))


def _results(call: Span, failed_tool: str | None) -> Iterator[tuple[str, bool]]:
    """(id of the tool call, whether it failed) for each tool result a request holds, in order."""
    for message in map(mapping, items(json_of(text_of(call, semconv.GEN_AI_INPUT_MESSAGES)))):
        if message.get("role") == "tool":
            yield str(message.get("tool_call_id")), _failed(message.get("content"), failed_tool)
        elif message.get("type") == "function_call_output":
            yield str(message.get("call_id")), _failed(message.get("output"), failed_tool)
        else:
            for block in map(mapping, items(message.get("content"))):
                if block.get("type") == "tool_result":
                    failed = block.get("is_error") is True or _failed(block.get("content"), failed_tool)
                    yield str(block.get("tool_use_id")), failed


def _failed(content: Any, failed_tool: str | None) -> bool:
    text = joined(content) if items(content) else content
    return text is None or (isinstance(text, str) and (text == "null" or says_failure(text, failed_tool)))
