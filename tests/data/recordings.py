"""Recorded rollouts made by hand, call by call, as the gateway records them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from agentlightning import semconv
from agentlightning.data.recordings import Recorded
from agentlightning.data.transitions import TracedRollout, trace_rollout
from agentlightning.store.rollouts import final_reward
from agentlightning.types import Rollout, SampledChoice, Span, TokenCapture

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "search", "parameters": {"type": "object"}},
}
SYSTEM: dict[str, Any] = {"role": "system", "content": "Be brief."}


def says(role: str, text: str | None, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": text, **more}


def asks_for(call_id: str, arguments: str = '{"q": "sun"}') -> dict[str, Any]:
    call = {
        "id": call_id,
        "type": "function",
        "function": {"name": "search", "arguments": arguments},
    }
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def tool_says(call_id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def span(
    name: str,
    start: float,
    end: float,
    parent: str | None = None,
    *,
    tokens: TokenCapture | None = None,
    attempt: str = "a",
    **attributes: Any,
) -> Span:
    return Span(
        rollout_id="r",
        attempt_id=attempt,
        sequence_id=int(start * 10),
        trace_id="0" * 32,
        span_id=name,
        parent_id=parent,
        name=name,
        start_time=start,
        end_time=end,
        attributes=attributes,
        tokens=tokens,
    )


def sampled(*prompt: int, choices: int = 1, **changes: Any) -> TokenCapture:
    """Two sampled tokens for each choice."""
    fields = {
        "token_ids": (7, 8),
        "logprobs": (-0.5, -0.25),
        "finish_reason": "stop",
        "versions": ((3, 1), (4, 1)),
    }
    return TokenCapture(
        prompt_token_ids=prompt, choices=(SampledChoice(**fields | changes),) * choices
    )


def call(index: int, messages: Any, answer: Any, *, tokens: bool = True, **attributes: Any) -> Span:
    """A call of the gateway's; `attributes` by their constant's name in `semconv`."""
    values = {
        "GEN_AI_RESPONSE_MODEL": "policy",
        "GEN_AI_FINISH_REASONS": ["stop"],
        "GEN_AI_INPUT_MESSAGES": json.dumps(messages),
        "GEN_AI_OUTPUT_MESSAGES": json.dumps([answer]),
        "CALL_INDEX": index,
        "CALL_ENDPOINT": "chat/completions",
    }
    named = {
        getattr(semconv, name): value
        for name, value in (values | attributes).items()
        if value is not None
    }
    capture = sampled(1, 2, index) if tokens else None
    return span(f"call{index}", float(index), index + 0.5, tokens=capture, **named)


def reward(
    value: float, at: float = 90.0, parent: str | None = None, *, final: bool = True, **more: Any
) -> Span:
    about = {semconv.reward_name(0): "primary", semconv.reward_value(0): value}
    return span(
        f"reward{at}",
        at,
        at,
        parent,
        **about,
        **({} if final else {semconv.REWARD_FINAL: False}),
        **more,
    )


def as_stored(rollout: Rollout, spans: Sequence[Span]) -> Rollout:
    """The rollout with the reward that a store notes from its last attempt's spans; numbers beyond
    the largest it refuses."""
    starts = {one.attempt_id: one.start_time for one in sorted(spans, key=_start, reverse=True)}
    last = max(starts, key=starts.__getitem__, default=None)
    own = [one for one in spans if one.attempt_id == last]
    found = [reward for one in own if (reward := final_reward(one.attributes, one.start_time))]
    usable = [reward for reward in found if abs(reward.value) <= semconv.LARGEST_REWARD]
    counts = max(usable, key=lambda reward: (reward.returned, reward.time), default=None)
    return msgspec.structs.replace(rollout, reward=counts.value if counts else None)


def _start(span: Span) -> float:
    return span.start_time


def trace_stored(rollout: Rollout, spans: Sequence[Span], **how: Any) -> TracedRollout:
    """`trace_rollout` of a rollout whose spans are stored."""
    return trace_rollout(as_stored(rollout, spans), spans, **how)


def recorded(
    *spans: Span, index: int = 0, group: str | None = "g", status: Any = "succeeded"
) -> Recorded:
    made = Rollout(
        rollout_id=f"r{index}",
        input={"task": 1},
        start_time=0.0,
        status=status,
        group_id=group,
        group_index=None if group is None else index,
    )
    return Recorded(as_stored(made, spans), spans)
