"""The conversation of a rollout, message by message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from agentlightning.data.conversations import read_calls
from agentlightning.types import Span


def conversation(spans: Sequence[Span]) -> list[dict[str, Any]]:
    """The messages of the longest conversation in the trace, the last answer included; empty without a call."""
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
    calls = [f"{call['function']['name']}({call['function']['arguments']})" for call in message.get("tool_calls") or []]
    role = str(message.get("role"))
    said = message.get("content")
    text = said if isinstance(said, str) else "" if said is None else msgspec.json.encode(said).decode()
    return " ".join([f"{role}:", text] if text or not calls else [role]) + "".join(f" → {call}" for call in calls)
