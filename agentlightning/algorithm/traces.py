"""The conversation of a rollout, message by message."""

from __future__ import annotations

from typing import Any

import msgspec

from agentlightning import semconv
from agentlightning.types import Span


def conversation(spans: tuple[Span, ...]) -> list[dict[str, Any]]:
    """The messages of the longest conversation in the trace, the last answer included; empty without a call."""
    longest: list[dict[str, Any]] = []
    for span in spans:
        sent, answered = (
            span.attributes.get(name) for name in (semconv.GEN_AI_INPUT_MESSAGES, semconv.GEN_AI_OUTPUT_MESSAGES)
        )
        if isinstance(sent, str) and isinstance(answered, str):
            messages = [*msgspec.json.decode(sent), *msgspec.json.decode(answered)[:1]]
            if len(messages) >= len(longest):
                longest = messages
    return longest


def first_tool(spans: tuple[Span, ...]) -> str | None:
    """The name of the first tool the agent's model called, or None."""
    for message in conversation(spans):
        for call in message.get("tool_calls") or []:
            return str(call["function"]["name"])
    return None


def render_message(message: dict[str, Any]) -> str:
    """`assistant → search({"from": "Oslo"})` or `user: Find a flight.`"""
    calls = [f"{call['function']['name']}({call['function']['arguments']})" for call in message.get("tool_calls") or []]
    role = str(message.get("role"))
    said = message.get("content")
    text = said if isinstance(said, str) else "" if said is None else msgspec.json.encode(said).decode()
    return " ".join([f"{role}:", text] if text or not calls else [role]) + "".join(f" → {call}" for call in calls)
