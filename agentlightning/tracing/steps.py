"""Reads the spans of one attempt, from any instrumentation, as a list of steps: calls, tools and
agents.

Two reports of the same thing are one step: a call recorded by gateway and framework, a tool seen by
two instrumentations. This module only reads spans; it does not know the store, rewards or learning.
Its time is linear in the spans, whoever made them: around a span, only so many parents and calls
count."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Container, Sequence
from itertools import chain
from typing import Any, Final

import msgspec

from agentlightning import semconv
from agentlightning.tracing import dialects
from agentlightning.tracing.dialects import Kind
from agentlightning.tracing.tool_failures import tool_failed
from agentlightning.types import Span

_RESPONSE_ID: Final = re.compile(r"\b(?:chatcmpl|cmpl|resp|msg)[-_][\w-]+(?:\.[\w-]+)*")
_TOOL_CALL_ID: Final = re.compile(r'"(?:tool_call_id|call_id|tool_use_id)": ?"([^"]+)"')
_CALL_ID_NAMES: Final = ("gen_ai.tool.call.id", "tool_call.id", "tool.id")
DEPTH: Final = 100  # spans around a span
NEAREST: Final = 200  # calls, or requests for one tool, before a tool
# calls that began before a report, and as many after it, whose texts it is compared with
_ALIKE: Final = 32


class Step(msgspec.Struct, frozen=True):
    """One call, tool execution or agent of an attempt.

    `name` is the name of the tool, agent or model, or else of the span. `agent` is the agent it ran
    under. `arguments` and `result` are JSON or text; `duration` is in seconds. `call` is the
    gateway's span: of the call itself, or of the call that asked for the tool. If no answer asked
    for the tool (an agent may parse text), it is the call before it."""

    span: Span
    kind: Kind
    name: str
    agent: str | None
    tool_call_id: str | None
    arguments: str | None
    result: str | None
    failed: bool
    duration: float
    call: Span | None


class ToolRequest(msgspec.Struct, frozen=True):
    """A tool call in a model's answer."""

    call: Span
    id: str
    name: str


def read_steps(spans: Sequence[Span], failed_tool: str | None = None) -> list[Step]:
    """The steps of ONE attempt, by start time. Its spans may come in any order. `failed_tool` is
    your pattern for the results of failed tools (see `tracing.dialects`)."""
    return _Attempt(spans).steps(failed_tool)


def tool_requests(call: Span) -> list[ToolRequest]:
    """The tool calls in the answer of a gateway's call, in order; of several choices, the first."""
    answer = _first_message(call, semconv.GEN_AI_OUTPUT_MESSAGES)
    calls = [dialects.mapping(item) for item in dialects.items(answer.get("tool_calls"))]
    return [
        ToolRequest(
            call,
            str(item.get("id") or ""),
            str(dialects.mapping(item.get("function")).get("name") or ""),
        )
        for item in calls
    ]


class _Attempt:
    def __init__(self, spans: Sequence[Span]) -> None:
        self.spans = sorted(spans, key=lambda span: (span.start_time, span.sequence_id))
        self.by_id = {span.span_id: span for span in self.spans}
        self.above: dict[str, tuple[Span, ...]] = {}
        self.kinds: dict[str, Kind] = {span.span_id: dialects.kind_of(span) for span in self.spans}
        self.names = {
            span.span_id: dialects.name_of(span, self.kinds[span.span_id]) for span in self.spans
        }
        self.named = {
            span.span_id: dialects.names_agent(span, self.kinds[span.span_id])
            for span in self.spans
        }
        self.calls = [span for span in self.spans if dialects.is_gateway_call(span)]
        self.requests = [request for call in self.calls for request in tool_requests(call)]
        times_requested = Counter(request.id for request in self.requests)
        # Some servers count the ids of tool calls from 0 in each answer: these do not identify a
        # call.
        self.reused = {
            call_id for call_id, times in times_requested.items() if times > 1 or not call_id
        }
        tools = [span for span in self.spans if self.kinds[span.span_id] == "tool"]
        self.call_ids = {span.span_id: _tool_call_id(span, times_requested) for span in tools}
        executed = [
            (call_id, span_id) for span_id, call_id in reversed(self.call_ids.items()) if call_id
        ]
        self.first_of_id = {
            call_id: span_id for call_id, span_id in executed if call_id not in self.reused
        }
        self.agents = [
            span
            for span in self.spans
            if self.kinds[span.span_id] == "agent" and self.named[span.span_id]
        ]
        self.before_shorter = self._before_shorter()
        self.reports: dict[str, dict[str, Span]] = {call.span_id: {} for call in self.calls}
        self.linked: set[str] = set()
        # reports of one call or another, which say nothing about either
        self.guessed: set[str] = set()
        self._link()
        self.agent_of_call = {call.span_id: self._agent_of_call(call) for call in self.calls}
        # By the agent's clock, which its tools use, if there is a report: the gateway's may differ.
        self.inner = {
            call.span_id: max(self._sources(call)[1:] or [call], key=_start) for call in self.calls
        }
        self.within = self._calls_within()

    def steps(self, failed_tool: str | None) -> list[Step]:
        """One step per span, except spans that another one stands for."""
        heads: dict[str, list[Span]] = {}
        for span in self.spans:
            heads.setdefault(self._head(span), []).append(span)
        groups = [
            (self.by_id[head], group) for head, group in heads.items() if head not in self.linked
        ]
        claimed: set[int] = set()
        return [
            self._tool(span, group, claimed, failed_tool)
            if self.kinds[span.span_id] == "tool"
            else self._step(span)
            for span, group in sorted(
                groups, key=lambda pair: (pair[0].start_time, pair[0].sequence_id)
            )
        ]

    def _step(self, span: Span) -> Step:
        kind = self.kinds[span.span_id]
        gateway = span.span_id in self.agent_of_call
        if gateway:
            agent = self.agent_of_call[span.span_id]
        else:
            agent = self._agent_of_call(span) if kind == "call" else self._agent_around(span)
        return Step(
            span=span,
            kind=kind,
            name=self.names[span.span_id],
            agent=agent,
            tool_call_id=None,
            arguments=None if gateway else dialects.arguments_of(span),
            result=None if gateway else dialects.content_of(dialects.result_of(span)),
            failed=span.status.status_code == "ERROR",
            duration=span.end_time - span.start_time,
            call=span if gateway else None,
        )

    def _tool(
        self, span: Span, group: list[Span], claimed: set[int], failed_tool: str | None
    ) -> Step:
        """One execution, reported by `group`. `claimed` are the requests executed before."""
        name = self.names[span.span_id]
        around = self._agent_around(span)
        tool_call_id = next(
            (call_id for report in group if (call_id := self.call_ids[report.span_id])), None
        )
        request = self._request(span, name, tool_call_id, around, claimed)
        return Step(
            span=span,
            kind="tool",
            name=name,
            agent=(self.agent_of_call[request.call.span_id] if request else None) or around,
            tool_call_id=tool_call_id or (request.id if request else None),
            arguments=next(
                (text for report in group if (text := dialects.arguments_of(report))), None
            ),
            result=dialects.content_of(
                next((text for report in group if (text := dialects.result_of(report))), None)
            ),
            failed=any(tool_failed(report, failed_tool) for report in group),
            duration=span.end_time - span.start_time,
            call=request.call if request else self._call_before(span, around),
        )

    def _head(self, span: Span) -> str:
        """The id of the span that stands for this one: the outermost report of an agent, tool call
        or model call."""
        kind = self.kinds[span.span_id]
        if dialects.is_gateway_call(span) or kind == "other":
            return span.span_id
        head = self.by_id[self.first_of_id.get(self.call_ids.get(span.span_id) or "", span.span_id)]
        for outer in self._ancestors(head):
            if semconv.OPERATION_MCP in outer.attributes:
                continue  # between the reports of a framework and of the server
            if self.kinds[outer.span_id] != kind:
                break
            if kind != "call" and self.names[outer.span_id] != self.names[span.span_id]:
                break
            # a tool that calls itself
            if kind == "tool" and dialects.scope_of(outer) == dialects.scope_of(head):
                break
            head = outer
        return head.span_id

    def _link(self) -> None:
        """Find the other reports of each gateway call: by parents, the answer's id, the ids of
        requested tools, or else model, time and text."""
        above: dict[str, list[Span]] = {}
        for call in self.calls:
            for outer in self._ancestors(call):
                above.setdefault(outer.span_id, []).append(call)
        by_response = {
            dialects.text_of(call, semconv.GEN_AI_RESPONSE_ID): call for call in self.calls
        }
        by_request = {
            request.id: request.call for request in self.requests if request.id not in self.reused
        }
        unsure: list[Span] = []
        for span in self.spans:
            if self.kinds[span.span_id] != "call" or span.span_id in self.reports:
                continue
            named = [by_response[name] for name in _response_ids(span) if name in by_response]
            requesting = [by_request[name] for name in _requested_ids(span) if name in by_request]
            found = above.get(span.span_id) or named[:1] or requesting[:1]
            for call in found:
                self._report(call, span)
            if not found:
                unsure.append(span)
        if unsure:
            self._link_by_likeness(unsure)

    def _link_by_likeness(self, unsure: list[Span]) -> None:
        free = [call for call in self.calls if not self.reports[call.span_id]]
        starts = [call.start_time for call in free]
        texts = [_texts(call) for call in free]
        alike: dict[str, list[Span]] = {}
        for span in unsure:
            written = "\0".join(map(str, span.attributes.values()))
            at = bisect_right(starts, span.start_time)
            near = range(max(0, at - _ALIKE), min(len(free), at + _ALIKE))
            possible = [
                index
                for index in near
                if _overlap(span, free[index]) >= 0 and _same_model(span, free[index])
            ]
            held = {index: sum(text in written for text in texts[index]) for index in possible}
            alike[span.span_id] = [
                free[index] for index in possible if held[index] == max(held.values())
            ]
        sure = True
        # The sure ones leave less to guess; the inner ones report what is around them too.
        for span in sorted(unsure, key=lambda span: (len(alike[span.span_id]), -span.start_time)):
            left = [call for call in alike[span.span_id] if not self.reports[call.span_id]]
            if left and span.span_id not in self.linked:
                sure = sure and len(left) == 1
                self._report(max(left, key=lambda call: _overlap(span, call)), span, sure)

    def _report(self, call: Span, span: Span, sure: bool = True) -> None:
        """Record that `span`, and the reports around it, are about `call`."""
        reports = self.reports[call.span_id]
        for report in chain((span,), self._ancestors(span)):
            if (
                self.kinds[report.span_id] != "call"
                or report.span_id in self.reports
                or report.span_id in reports
            ):
                return
            reports[report.span_id] = report
            self.linked.add(report.span_id)
            if not sure:
                self.guessed.add(report.span_id)

    def _calls_within(self) -> dict[tuple[str | None, str], list[tuple[Span, int]]]:
        """The calls by the id of a span around them (None: any) and by what they asked for (`id:…`,
        `name:…`; all: no text), in the order they began, each with the index of that request."""
        wanted: dict[str, list[tuple[str, int]]] = {call.span_id: [("", -1)] for call in self.calls}
        for index, request in enumerate(self.requests):
            wanted[request.call.span_id] += [
                (f"id:{request.id}", index),
                (f"name:{request.name}", index),
            ]
        within: dict[tuple[str | None, str], list[tuple[Span, int]]] = {}
        for call in sorted(self.calls, key=lambda call: self.inner[call.span_id].start_time):
            around = {
                outer.span_id for source in self._sources(call) for outer in self._ancestors(source)
            }
            for place in (None, *around):
                for what, index in wanted[call.span_id]:
                    within.setdefault((place, what), []).append((call, index))
        return within

    def _request(
        self, tool: Span, name: str, tool_call_id: str | None, agent: str | None, claimed: set[int]
    ) -> ToolRequest | None:
        """The tool call that this execution answers, which is then claimed: the one with its id, or
        else one for this tool in an earlier call. Of several: the first not yet executed of the
        nearest, latest call."""
        what = f"id:{tool_call_id}"
        found = self.within.get((None, what), []) if tool_call_id is not None else []
        if len(found) != 1:
            near = self._nearest(tool, agent, what if found else f"name:{name}")
            free = [pair for pair in near if pair[1] not in claimed] or near
            ended = [
                pair for pair in free if self.inner[pair[0].span_id].end_time <= tool.start_time
            ] or free
            found = (
                [max(ended, key=lambda pair: self.inner[pair[0].span_id].start_time)]
                if ended
                else []
            )
        if not found:
            return None
        claimed.add(found[0][1])
        return self.requests[found[0][1]]

    def _call_before(self, tool: Span, agent: str | None) -> Span | None:
        """The nearest call before a tool, unless it is another agent's."""
        near = [call for call, _ in self._nearest(tool, agent, "")]
        ended = [
            call for call in near if self.inner[call.span_id].end_time <= tool.start_time
        ] or near
        call = ended[-1] if ended else None
        asked_by = self.agent_of_call[call.span_id] if call else None
        return call if agent is None or asked_by in (None, agent) else None

    def _nearest(self, tool: Span, agent: str | None, what: str) -> list[tuple[Span, int]]:
        """Those of `within` that began before the tool and share the innermost span with it; if
        some are of its agent, only these."""
        for place in chain((outer.span_id for outer in self._ancestors(tool)), (None,)):
            within = self.within.get((place, what), [])
            before = bisect_right(
                within, tool.start_time, key=lambda pair: self.inner[pair[0].span_id].start_time
            )
            if before:
                near = within[max(0, before - NEAREST) : before]
                return [
                    pair for pair in near if agent and self.agent_of_call[pair[0].span_id] == agent
                ] or near
        return []

    def _agent_of_call(self, call: Span) -> str | None:
        """The nearest span that names an agent, above the call or above another report of it; or
        else the agents at work at that time, if they are nested; or else what the call says."""
        sources = self._sources(call)
        for source in sources:
            for span in (source, *self._ancestors(source)):
                if name := self.named[span.span_id]:
                    return name
        return self._agent_at_work(call) or next(
            (
                name
                for span in sources
                if (name := dialects.text_of(span, semconv.GEN_AI_AGENT_NAME))
            ),
            None,
        )

    def _sources(self, call: Span) -> list[Span]:
        reports = self.reports.get(call.span_id, {})
        return [
            call,
            *(report for span_id, report in reports.items() if span_id not in self.guessed),
        ]

    def _before_shorter(self) -> list[int]:
        """For each agent, the index of the last one before it that ended later; −1 for none."""
        found: list[int] = []
        for index, agent in enumerate(self.agents):
            at = index - 1
            while at >= 0 and self.agents[at].end_time <= agent.end_time:
                at = found[at]
            found.append(at)
        return found

    def _agent_at_work(self, call: Span) -> str | None:
        at = bisect_right(self.agents, call.start_time, key=_start) - 1
        working: list[Span] = []
        while at >= 0 and len(working) <= DEPTH:
            if self.agents[at].end_time >= call.end_time:
                working.append(self.agents[at])
                at -= 1
            else:
                at = self.before_shorter[at]
        if not working:
            return None
        around = {working[0].span_id, *(outer.span_id for outer in self._ancestors(working[0]))}
        return (
            self.named[working[0].span_id]
            if all(agent.span_id in around for agent in working)
            else None
        )

    def _agent_around(self, span: Span) -> str | None:
        own = self.named[span.span_id] if self.kinds[span.span_id] != "agent" else None
        return own or next(
            (name for outer in self._ancestors(span) if (name := self.named[outer.span_id])), None
        )

    def _ancestors(self, span: Span) -> tuple[Span, ...]:
        """From the parent up, as far as known, at most DEPTH."""
        if (known := self.above.get(span.span_id)) is not None:
            return known
        found = []
        seen = {span.span_id}
        at = span
        while (
            (outer := self.by_id.get(at.parent_id or ""))
            and outer.span_id not in seen
            and len(found) < DEPTH
        ):
            seen.add(outer.span_id)
            found.append(outer)
            at = outer
        self.above[span.span_id] = tuple(found)
        return self.above[span.span_id]


def _start(span: Span) -> float:
    return span.start_time


def _tool_call_id(span: Span, requested: Container[str]) -> str | None:
    """The id in a span, or the one in its result that a model has `asked` with: tools have ids of
    their own."""
    if call_id := dialects.text_of(span, *_CALL_ID_NAMES):
        return call_id
    found = {
        call_id
        for call_id in _TOOL_CALL_ID.findall(dialects.result_of(span) or "")
        if call_id in requested
    }
    return found.pop() if len(found) == 1 else None


def _response_ids(span: Span) -> list[str]:
    response_id = dialects.text_of(span, semconv.GEN_AI_RESPONSE_ID)
    return [response_id] if response_id else _RESPONSE_ID.findall(dialects.result_of(span) or "")


def _requested_ids(span: Span) -> list[str]:
    return [
        value
        for name, value in span.attributes.items()
        if name.startswith("llm.output_messages.")
        and name.endswith("tool_call.id")
        and isinstance(value, str)
    ]


def _first_message(call: Span, name: str) -> dict[str, Any]:
    """The first message sent in a gateway call, or that of its first choice."""
    return dialects.mapping(dialects.first_item(dialects.text_of(call, name) or ""))


def _same_model(span: Span, call: Span) -> bool:
    models = {
        dialects.text_of(call, name)
        for name in (semconv.GEN_AI_REQUEST_MODEL, semconv.GEN_AI_RESPONSE_MODEL)
    }
    reported = dialects.name_of(span, "call")
    # LiteLLM's names begin with a provider's.
    return reported == span.name or any(
        reported == model or reported.endswith(f"/{model}") for model in models
    )


def _overlap(span: Span, call: Span) -> float:
    return min(span.end_time, call.end_time) - max(span.start_time, call.start_time)


def _texts(call: Span) -> list[str]:
    """A call's answer, and its first message, which distinguishes agents."""
    names = semconv.GEN_AI_OUTPUT_MESSAGES, semconv.GEN_AI_INPUT_MESSAGES
    return [
        text
        for name in names
        if isinstance(text := _first_message(call, name).get("content"), str) and text
    ]
