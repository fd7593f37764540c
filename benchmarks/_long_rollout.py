"""Part `long`: one rollout of 100 calls, whose prompts grow to 64,000 tokens, from spans in memory
to transitions.

The agent sends the results of its tools in its messages, and no span tells of a tool. Spans hold
tokens as they are read from a store."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np

from agentlightning import semconv
from agentlightning.data.continuity import find_breaks
from agentlightning.data.transitions import trace_rollout
from agentlightning.store import codec
from agentlightning.types import Rollout, SampledChoice, Span, TokenCapture

CALLS, TOKENS, ROUNDS = 100, 64_000, 15
ANSWER = TOKENS // CALLS // 3
RESULT = TOKENS // CALLS - ANSWER
ROLLOUT = Rollout(
    rollout_id="ro", input=1, start_time=0.0, end_time=2.0 * CALLS, status="succeeded", mode="train"
)


def words(token_ids: np.ndarray) -> str:
    return " ".join(format(token_id % 4096, "x") for token_id in token_ids.tolist())


def spans() -> list[Span]:
    random = np.random.default_rng(0)
    history = random.integers(1000, 150_000, TOKENS // CALLS).astype(np.int32)
    messages: list[dict[str, Any]] = [{"role": "system", "content": words(history)}]
    found: list[Span] = []
    for call in range(CALLS):
        answer, result = (
            random.integers(1000, 150_000, size).astype(np.int32) for size in (ANSWER, RESULT)
        )
        asked = {
            "id": f"call_{call}",
            "type": "function",
            "function": {"name": "search", "arguments": "{}"},
        }
        said = {"role": "assistant", "content": words(answer), "tool_calls": [asked]}
        found.append(_span(call, messages, said, history, answer))
        messages = [
            *messages,
            said,
            {"role": "tool", "tool_call_id": f"call_{call}", "content": words(result)},
        ]
        history = np.concatenate([history, answer, result])
    return found


def _span(
    call: int, messages: list[Any], said: Any, history: np.ndarray, answer: np.ndarray
) -> Span:
    choice = SampledChoice(
        token_ids=tuple(answer.tolist()),
        logprobs=(-0.5,) * ANSWER,
        finish_reason="tool_calls",
        versions=((1, ANSWER),),
    )
    tokens = TokenCapture(prompt_token_ids=tuple(history.tolist()), choices=(choice,))
    return Span(
        rollout_id="ro",
        attempt_id="at",
        sequence_id=call + 1,
        trace_id="t",
        span_id=f"{call:016x}",
        name="chat policy",
        start_time=float(call),
        end_time=call + 0.5,
        attributes={
            semconv.GEN_AI_REQUEST_MODEL: "policy",
            semconv.GEN_AI_RESPONSE_MODEL: "policy",
            semconv.CALL_ENDPOINT: "chat/completions",
            semconv.CALL_INDEX: call,
            semconv.GEN_AI_INPUT_MESSAGES: json.dumps(messages),
            semconv.GEN_AI_OUTPUT_MESSAGES: json.dumps([said]),
        },
        tokens=codec.tokens_from_columns(codec.token_columns(tokens)),
    )


def run() -> dict[str, float]:
    """Milliseconds, the best of some rounds."""
    recorded = spans()
    trace, follow = list[float](), list[float]()
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        traced = trace_rollout(ROLLOUT, recorded)
        middle = time.perf_counter()
        find_breaks(traced.transitions, recorded)
        trace.append(middle - begin)
        follow.append(time.perf_counter() - middle)
    assert sum(len(one.tools) for one in traced.transitions) == CALLS - 1
    figures = {
        "trace, ms": round(1000 * min(trace), 1),
        "continuity, ms": round(1000 * min(follow), 1),
    }
    print(f"{CALLS} calls, prompts up to {TOKENS:,} tokens:", figures)
    return figures
