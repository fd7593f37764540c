"""Recorded rollouts made by hand, call by call, as the gateway records them."""

from __future__ import annotations

import json
from typing import Any

from agentlightning import semconv
from agentlightning.data.recordings import Recorded
from agentlightning.types import Rollout, SampledChoice, Span, TokenCapture

TOOL: dict[str, Any] = {"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}
SYSTEM: dict[str, Any] = {"role": "system", "content": "Be brief."}


def says(role: str, text: str | None, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": text, **more}


def asks_for(call_id: str, arguments: str = '{"q": "sun"}') -> dict[str, Any]:
    call = {"id": call_id, "type": "function", "function": {"name": "search", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def tool_says(call_id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def call(index: int, messages: Any, answer: Any, *, tokens: bool = True, **attributes: Any) -> Span:
    """A call of the gateway's; `attributes` by their constant's name in `semconv`."""
    choice = SampledChoice(token_ids=(7, 8), logprobs=(-0.5, -0.25), finish_reason="stop", versions=((3, 1), (4, 1)))
    told = {
        "GEN_AI_RESPONSE_MODEL": "policy",
        "GEN_AI_FINISH_REASONS": ["stop"],
        "GEN_AI_INPUT_MESSAGES": json.dumps(messages),
        "GEN_AI_OUTPUT_MESSAGES": json.dumps([answer]),
        "CALL_INDEX": index,
        "CALL_ENDPOINT": "chat/completions",
    }
    return Span(
        rollout_id="r", attempt_id="a", sequence_id=index + 1, trace_id="0" * 32, span_id=f"call{index}",
        name="chat policy", start_time=float(index), end_time=index + 0.5,
        attributes={getattr(semconv, name): value for name, value in (told | attributes).items() if value is not None},
        tokens=TokenCapture(prompt_token_ids=(1, 2, index), choices=(choice,)) if tokens else None,
    )  # fmt: skip


def reward(value: float) -> Span:
    return Span(
        rollout_id="r", attempt_id="a", sequence_id=99, trace_id="0" * 32, span_id="reward", name=semconv.ANNOTATION,
        start_time=90.0, end_time=90.0,
        attributes={semconv.reward_name(0): "primary", semconv.reward_value(0): value},
    )  # fmt: skip


def recorded(*spans: Span, index: int = 0, group: str | None = "g", status: Any = "succeeded") -> Recorded:
    made = Rollout(
        rollout_id=f"r{index}", input={"task": 1}, start_time=0.0, status=status, group_id=group,
        group_index=None if group is None else index,
    )  # fmt: skip
    return Recorded(made, spans)
