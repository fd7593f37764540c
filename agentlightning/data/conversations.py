"""The calls of an attempt as conversations, in the form of OpenAI's chat completions.

A conversation is a chain of calls, each of which repeats all messages of the call before it, answer
included."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import msgspec

from agentlightning import semconv
from agentlightning.data.agents import agent_of, chosen
from agentlightning.data.call_filter import (
    FROZEN,
    HOUSEKEEPING,
    NOT_RECEIVED,
    OTHER_AGENT,
    OTHER_MODEL,
    TRUNCATED,
    call_index,
    call_order,
    discarded_calls,
)
from agentlightning.tracing.dialects import (
    finish_reasons,
    input_messages,
    items,
    json_of,
    mapping,
    model_name,
    output_messages,
    text_of,
)
from agentlightning.tracing.links import read_links
from agentlightning.tracing.steps import Step, read_steps
from agentlightning.types import Span

Message: TypeAlias = dict[str, Any]

# Why the answer of a call cannot be learned from, in addition to the reasons of `call_filter`.
NOT_RECORDED: Final = "messages were not recorded"
EARLIER_ELSEWHERE: Final = "only its server knows the earlier messages"
FAILED: Final = "call failed"

_CALL_FAILED: Final = (FAILED, "client disconnected")  # the gateway's flags of an unusable answer
_NO_CALL: Final = ("embeddings", "messages/count_tokens")


@dataclass(frozen=True)
class ChatCall:
    """One call: the messages sent, the tools offered and the first choice of the answer.
    `unlearnable` is why the answer cannot be learned from, or None; `continues` the span id of the
    call that it goes on from.

    `sent` and `answered` identify messages for comparison: one text per message, with tool-call ids
    numbered from the start of the conversation, since every rollout draws new ones."""

    messages: list[Message]
    tools: list[dict[str, Any]]
    answer: Message
    unlearnable: str | None
    sent: tuple[str, ...]
    answered: str
    span: Span
    continues: str | None


def read_calls(
    spans: Sequence[Span],
    models: frozenset[str] | None = None,
    agents: re.Pattern[str] | None = None,
) -> tuple[list[ChatCall], list[str]]:
    """The calls of ONE attempt in order, and for each unreadable call the reason.

    `models` are those to learn from, frozen or not (None: all that are not frozen); `agents` the
    agents to learn from (None: all)."""
    steps = [step for step in read_steps(spans) if step.kind == "call"]
    steps = [
        step for step in steps if step.span.attributes.get(semconv.CALL_ENDPOINT) not in _NO_CALL
    ]
    discarded = discarded_calls(spans)
    calls: list[ChatCall] = []
    unread: list[str] = []
    steps.sort(key=lambda step: call_order(step.span))
    links = read_links([step.span for step in steps])
    for step in steps:
        attributes = step.span.attributes
        messages = _sent(step.span)
        answers = chat_messages(output_messages(attributes)[:1], answer=True)
        if not messages or not answers:
            unread.append(FAILED if step.failed else NOT_RECORDED)
        elif _continues_elsewhere(step.span):
            unread.append(EARLIER_ELSEWHERE)
        else:
            received = call_index(step.span) not in discarded
            reason = _unlearnable(step, models, agents) if received else NOT_RECEIVED
            tools = chat_tools(step.span)
            signatures = _signatures([*messages, *answers[:1]])
            sent = (msgspec.json.encode(tools, order="sorted").decode(), *signatures[:-1])
            continues = links[step.span.span_id][0].span_id if step.span.span_id in links else None
            calls.append(
                ChatCall(
                    messages, tools, answers[0], reason, sent, signatures[-1], step.span, continues
                )
            )
    return calls, unread


def conversations(calls: Sequence[ChatCall]) -> list[list[ChatCall]]:
    """The chains of an attempt's calls: A1 S1 A2, where A2 repeats A1's messages and answer → A1
    A2, S1.

    A call starts a chain if it goes on from none, if another goes on from the same, or if it edits
    what it repeats."""
    chains: list[list[ChatCall]] = []
    ends: dict[str | None, list[ChatCall]] = {}  # chains by their last call
    for call in calls:
        chain = ends.get(call.continues)
        if chain is None or call.sent[: len(chain[-1].sent) + 1] != (
            *chain[-1].sent,
            chain[-1].answered,
        ):
            chain = []
            chains.append(chain)
        else:
            del ends[call.continues]
        chain.append(call)
        ends[call.span.span_id] = chain
    return chains


def _unlearnable(
    step: Step, models: frozenset[str] | None, agents: re.Pattern[str] | None
) -> str | None:
    attributes = step.span.attributes
    if step.failed or attributes.get(semconv.CALL_FLAG) in _CALL_FAILED:
        return FAILED
    if not chosen(agents, agent := agent_of(step)):
        return HOUSEKEEPING if agent.housekeeping else OTHER_AGENT
    if models is None and attributes.get(semconv.CALL_TRAINABLE) is False:
        return FROZEN
    if models is not None and model_name(attributes) not in models:
        return OTHER_MODEL
    return TRUNCATED if finish_reasons(attributes)[:1] == ["length"] else None


def _sent(span: Span) -> list[Message]:
    """All messages of a request, including a system prompt that the protocol keeps in a separate
    field."""
    messages = chat_messages(input_messages(span.attributes))
    request = mapping(json_of(text_of(span, semconv.CALL_REQUEST)))
    system = _content(request.get("system") or request.get("instructions"))
    first = messages[0] if messages else {}
    if not system or (
        first.get("role") in ("system", "developer") and first.get("content") == system
    ):
        return messages
    return [{"role": "system", "content": system}, *messages]


def _continues_elsewhere(span: Span) -> bool:
    """Whether the request refers to an earlier response whose messages this gateway never saw."""
    request = mapping(json_of(text_of(span, semconv.CALL_REQUEST)))
    named = request.get("previous_response_id") or request.get("conversation")
    return bool(named) and semconv.CALL_RESPONSE in span.attributes


def chat_messages(recorded: Iterable[Mapping[str, Any]], *, answer: bool = False) -> list[Message]:
    """Messages of any of the three protocols as chat-completions messages, with only the fields of
    that form: reasoning is dropped. A message of none of them keeps its role, which is then
    unknown."""
    messages: list[Message] = []
    for source in recorded:
        kind = source.get("type") or "message"
        if kind in ("function_call", "custom_tool_call"):
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            call = _tool_call(source.get("call_id"), source.get("name"), _arguments(source))
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind in ("function_call_output", "custom_tool_call_output"):
            messages.append(_tool_result(source.get("call_id"), source.get("output")))
        elif kind == "message":
            role = "assistant" if answer else source.get("role")
            messages += [_of_assistant(source)] if role == "assistant" else _of_others(source, role)
        elif kind != "reasoning":
            messages.append({"role": str(kind), "content": None})
    return messages


def _arguments(call: Mapping[str, Any]) -> object:
    """The arguments of a function; the text that a custom tool is given is the one argument
    `input`."""
    return {"input": call["input"]} if isinstance(call.get("input"), str) else call.get("arguments")


def _of_assistant(source: Mapping[str, Any]) -> Message:
    message: Message = {"role": "assistant", "content": _content(source.get("content")) or None}
    calls = [
        _tool_call(call.get("id"), function.get("name"), _arguments(function))
        for call in map(mapping, items(source.get("tool_calls")))
        for function in [mapping(call.get("custom") or call.get("function"))]
    ]
    for block in map(mapping, items(source.get("content"))):
        if block.get("type") == "tool_use":
            calls.append(_tool_call(block.get("id"), block.get("name"), block.get("input")))
    if calls:
        message["tool_calls"] = calls
    elif message["content"] is None:
        message["content"] = ""
    return message


def _of_others(source: Mapping[str, Any], role: object) -> list[Message]:
    if role == "tool":
        return [_tool_result(source.get("tool_call_id"), source.get("content"))]
    blocks = [mapping(block) for block in items(source.get("content"))]
    results = [
        _tool_result(
            block.get("tool_use_id"), block.get("content"), failed=block.get("is_error") is True
        )
        for block in blocks
        if block.get("type") == "tool_result"
    ]
    content = _content(source.get("content"))
    if results and not content:
        return results
    message: Message = {"role": str(role), "content": content}
    return [
        *results,
        message | ({"name": source["name"]} if isinstance(source.get("name"), str) else {}),
    ]


def _tool_call(call_id: object, name: object, arguments: object) -> dict[str, Any]:
    text = (
        arguments if isinstance(arguments, str) else msgspec.json.encode(arguments or {}).decode()
    )
    return {
        "id": str(call_id or ""),
        "type": "function",
        "function": {"name": str(name or ""), "arguments": text},
    }


def _tool_result(call_id: object, content: object, *, failed: bool = False) -> Message:
    """A failed call's result starts with `Error: `, as in the gateway: this form has no failure
    flag."""
    text = _content(content)
    if failed:
        text = (
            f"Error: {text}"
            if isinstance(text, str)
            else [{"type": "text", "text": "Error: "}, *text]
        )
    return {"role": "tool", "tool_call_id": str(call_id or ""), "content": text}


def _content(content: object) -> str | list[dict[str, Any]]:
    """A text unchanged, a single text part as its text, several parts as parts."""
    if isinstance(content, str) or content is None:
        return content or ""
    if not isinstance(content, list):
        return msgspec.json.encode(content).decode()
    parts = [part for block in map(mapping, items(content)) if (part := _part(block))]
    if not parts:
        return ""
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _part(block: Mapping[str, Any]) -> dict[str, Any] | None:
    """One part of the content; None if it belongs elsewhere in a chat, or nowhere."""
    match block:
        case {"type": "text" | "input_text" | "output_text", "text": str(text)}:
            return {"type": "text", "text": text}
        case {"type": "refusal", "refusal": str(text)}:
            return {"type": "text", "text": text}
        case {"type": "image_url", "image_url": dict(image)}:
            return {"type": "image_url", "image_url": dict(image)}
        case {"type": "input_image" | "image_url", "image_url": str(url)}:
            return {"type": "image_url", "image_url": {"url": url}}
        case {
            "type": "image",
            "source": {"type": "base64", "media_type": str(kind), "data": str(data)},
        }:
            return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}
        case {"type": "image", "source": {"type": "url", "url": str(url)}}:
            return {"type": "image_url", "image_url": {"url": url}}
        case {"type": "tool_use" | "tool_result" | "thinking" | "redacted_thinking"}:
            return None
        case _:
            return {"type": str(block.get("type"))}


def chat_tools(span: Span) -> list[dict[str, Any]]:
    """The tools offered by a request, in the form of chat completions; a tool without such a form
    stays unchanged."""
    definitions = items(json_of(text_of(span, semconv.GEN_AI_TOOL_DEFINITIONS)))
    # OpenInference numbers them
    for index in range(len(span.attributes) if not definitions else 0):
        definition = mapping(json_of(text_of(span, f"llm.tools.{index}.tool.json_schema")))
        if not definition:
            break
        definitions.append(definition)
    return [_tool(mapping(tool)) for tool in definitions]


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    known = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "strict": tool.get("strict"),
    }
    known["parameters"] = tool.get("parameters") or tool.get("input_schema")
    if (
        "function" in tool
        or known["name"] is None
        or tool.get("type") not in (None, "function", "custom")
    ):
        return dict(tool)
    return {
        "type": "function",
        "function": {name: value for name, value in known.items() if value is not None},
    }


def _signatures(messages: Iterable[Message]) -> list[str]:
    """Texts that identify messages, with tool-call ids numbered in order."""
    numbers: dict[str, int] = {}
    texts: list[str] = []
    for message in messages:
        calls = [
            (
                numbers.setdefault(call["id"], len(numbers)),
                call["function"]["name"],
                _plain(call["function"]),
            )
            for call in message.get("tool_calls", ())
        ]
        answers = numbers.get(message["tool_call_id"], -1) if "tool_call_id" in message else None
        signature = (message["role"], message.get("name"), message["content"] or "", calls, answers)
        texts.append(msgspec.json.encode(signature, order="sorted").decode())
    return texts


def _plain(function: Mapping[str, Any]) -> Any:
    """Arguments without white space, which frameworks reformat."""
    try:
        return msgspec.json.decode(function["arguments"])
    except (ValueError, RecursionError):
        return function["arguments"]


def conversation(spans: Sequence[Span]) -> list[dict[str, Any]]:
    """The messages of the longest conversation in the trace, the last answer included; empty
    without a call."""
    longest = max(reversed(read_calls(spans)[0]), key=lambda call: len(call.messages), default=None)
    return [] if longest is None else [*longest.messages, longest.answer]


def first_tool(spans: Sequence[Span]) -> str | None:
    """The name of the first tool the agent's model called, or None."""
    for message in conversation(spans):
        for call in message.get("tool_calls") or []:
            return str(call["function"]["name"])
    return None


def render_message(message: Mapping[str, Any]) -> str:
    """`assistant → search({"from": "Oslo"})` or `user: Find a flight.`"""
    calls = [
        f"{call['function']['name']}({call['function']['arguments']})"
        for call in message.get("tool_calls") or []
    ]
    role = str(message.get("role"))
    content = message.get("content")
    text = content or ""
    if not isinstance(text, str):
        text = msgspec.json.encode(content).decode()
    return " ".join([f"{role}:", text] if text or not calls else [role]) + "".join(
        f" → {call}" for call in calls
    )


def render_conversations(spans: Sequence[Span], characters: int) -> str:
    """The conversations of ONE attempt as text, of which the middle is left out beyond so many
    characters."""
    lines: list[str] = []
    for chain in conversations(read_calls(spans)[0]):
        lines += map(render_message, (*chain[-1].messages, chain[-1].answer))
    text = "\n".join(lines)
    left_out = len(text) - characters
    if left_out <= 0:
        return text
    half = characters // 2
    return f"{text[:half]}\n[… {left_out:,} characters left out …]\n{text[-half:]}"
