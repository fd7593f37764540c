"""Whether each tool call succeeded or failed: the input of automatic intermediate rewards.

Read from tool spans or, in an attempt without any, from the results that the agent sent to the
model. Knows steps and the messages of the three protocols; no rewards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from agentlightning import semconv
from agentlightning.tracing.dialects import items, joined, json_of, mapping, text_of
from agentlightning.tracing.links import Links
from agentlightning.tracing.steps import Step, ToolRequest, tool_requests
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
    steps: Sequence[Step], links: Links, failed_tool: str | None = None
) -> dict[str, list[ToolStatus]]:
    """The tool calls of each gateway call of an attempt, by span id; calls without any are left
    out. `links` are those of the calls, `failed_tool` the pattern with which the steps were
    read."""
    tools = [step for step in steps if step.kind == "tool"]
    if not tools:
        calls = [step.span for step in steps if step.kind == "call" and step.call is not None]
        return _from_messages(calls, links, failed_tool)
    statuses: dict[str, list[ToolStatus]] = {}
    for step in tools:
        if step.call is not None:
            status = ToolStatus(step.name, -1 if step.failed else 1, step.duration)
            statuses.setdefault(step.call.span_id, []).append(status)
    return statuses


def _from_messages(
    calls: Sequence[Span], links: Links, failed_tool: str | None
) -> dict[str, list[ToolStatus]]:
    """Tool results that the agent sent to the model: each tool call is answered by the first later
    call that contains its result and, if its id was used again, goes on from it: some servers
    number from 0."""
    statuses: dict[str, list[ToolStatus]] = {}
    asked = [tool_requests(call) for call in calls]
    times_asked = Counter(request.id for requests in asked for request in requests)
    pending: list[ToolRequest] = []
    for call, requests in zip(calls, asked, strict=True):
        results = dict(_results(_new_messages(call, links)))
        unanswered: list[ToolRequest] = []
        for request in pending:
            result = results.get(request.id)
            if result is None or (
                times_asked[request.id] > 1 and not _goes_on(call, request.call, links)
            ):
                unanswered.append(request)
            else:
                status = ToolStatus(request.name, -1 if _failed(result, failed_tool) else 1, None)
                statuses.setdefault(request.call.span_id, []).append(status)
        pending = [*unanswered, *requests]
    return statuses


def _new_messages(call: Span, links: Links) -> list[Any]:
    """The messages of a call beyond those of the call that it goes on from, as far as it repeats
    these as they were: the history is not read again for each."""
    sent = text_of(call, semconv.GEN_AI_INPUT_MESSAGES) or ""
    earlier, _ = links.get(call.span_id, (call, None))
    before = (text_of(earlier, semconv.GEN_AI_INPUT_MESSAGES) or "").removesuffix("]")
    if earlier is not call and before and sent.startswith(before):
        sent = f"[{sent[len(before) :].lstrip().removeprefix(',')}"
    return items(json_of(sent))


def _goes_on(call: Span, earlier: Span, links: Links) -> bool:
    """Whether a call goes on from an earlier one, perhaps through others."""
    while call.span_id in links and call.span_id != earlier.span_id:
        call = links[call.span_id][0]
    return call.span_id == earlier.span_id


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
