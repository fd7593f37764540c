"""How the tool calls that a model asked for went: what automatic intermediate rewards are made of.

Read from the spans of tools or, in an attempt that has none, from what the agent told the model of their results. Knows
steps and the messages of the three protocols; no rewards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from agentlightning import semconv
from agentlightning.tracing.dialects import items, json_of, mapping, says_failure, text_of
from agentlightning.tracing.steps import Step, tool_requests
from agentlightning.types import Span

# How the gateway marks a failed result of Anthropic's protocol in a chat, and LangGraph one of its own; what the OpenAI
# Agents SDK says of every error.
_ERRORS: Final = ("Error: ", "An error occurred while running the tool")


@dataclass(frozen=True)
class ToolStatus:
    """One tool call: +1 it returned, −1 it failed. `duration` is in seconds, None where no span tells it."""

    tool: str
    status: Literal[1, -1]
    duration: float | None


def tool_statuses(steps: Sequence[Step]) -> dict[str, list[ToolStatus]]:
    """The tool calls of each gateway call of an attempt, by its span id; calls that made none are left out."""
    tools = [step for step in steps if step.kind == "tool"]
    calls = [step for step in steps if step.kind == "call" and step.call is not None]
    if not tools:
        return _told([step.span for step in calls])
    statuses: dict[str, list[ToolStatus]] = {}
    for step in tools:
        call = step.call or _before(step, calls)
        if call is not None:
            status = ToolStatus(step.name, -1 if step.failed else 1, step.duration)
            statuses.setdefault(call.span_id, []).append(status)
    return statuses


def _before(tool: Step, calls: Sequence[Step]) -> Span | None:
    """The last call before a tool that no answer asks for (an agent that reads tool calls out of the text): of the
    tool's agent, if that made one."""
    earlier = [call for call in calls if call.span.start_time <= tool.span.start_time]
    own = [call for call in earlier if call.agent == tool.agent] or earlier
    return own[-1].span if own else None


def _told(calls: Sequence[Span]) -> dict[str, list[ToolStatus]]:
    statuses: dict[str, list[ToolStatus]] = {}
    results: dict[str, dict[str, bool]] = {}  # of each request, decoded once and only if it is needed
    for index, call in enumerate(calls):
        for request in tool_requests(call):
            for later in calls[index + 1 :]:
                if later.span_id not in results:
                    results[later.span_id] = dict(_results(later))
                failed = results[later.span_id].get(request.id)
                if failed is not None:
                    statuses.setdefault(call.span_id, []).append(ToolStatus(request.name, -1 if failed else 1, None))
                    break
    return statuses


def _results(call: Span) -> Iterator[tuple[str, bool]]:
    """(id of the tool call, whether it failed) for each tool result a request holds, in order."""
    for message in map(mapping, items(json_of(text_of(call, semconv.GEN_AI_INPUT_MESSAGES)))):
        if message.get("role") == "tool":
            yield str(message.get("tool_call_id")), _failed(message.get("content"))
        elif message.get("type") == "function_call_output":
            yield str(message.get("call_id")), _failed(message.get("output"))
        else:
            for block in map(mapping, items(message.get("content"))):
                if block.get("type") == "tool_result":
                    yield str(block.get("tool_use_id")), block.get("is_error") is True or _failed(block.get("content"))


def _failed(content: Any) -> bool:
    parts = [mapping(part).get("text") for part in items(content)]
    text = "".join(part for part in parts if isinstance(part, str)) if parts else content
    return text is None or (
        isinstance(text, str) and (text == "null" or text.startswith(_ERRORS) or says_failure(text))
    )
