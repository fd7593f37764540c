"""What it costs to find the earlier call that a call goes on from: microseconds of CPU for each of
an attempt's calls.

    python benchmarks/links.py

`crafted` prompts are what an agent could send to hold up the gateway: each of a hundred calls
resembles all others, up to its end."""

from __future__ import annotations

import gc
import json
import random
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

from _real_prompts import Messages, conversation

from agentlightning import semconv
from agentlightning.tracing.links import AttemptLinks
from agentlightning.types import SampledChoice, Span, TokenCapture

ROUNDS: Final = 10
CALLS: Final = 100
ANSWER: Final = [{"role": "assistant", "content": "The earliest flight leaves at seven."}]
TEXT: Final = "Find a flight to Oslo in May, and compare the departures of three airlines. " * 10
_random: Final = random.Random(0)


def ids(count: int) -> tuple[int, ...]:
    return tuple(_random.choices(range(1_000, 150_000), k=count))


def call(messages: Messages, prompt: Sequence[int], answer: Sequence[int]) -> Span:
    """What the gateway captures of a call."""
    choice = SampledChoice(token_ids=answer, logprobs=[-0.5] * len(answer), finish_reason="stop")
    return Span(
        rollout_id="ro-1",
        attempt_id="at-1",
        sequence_id=0,
        trace_id="",
        span_id="call",
        name="chat policy",
        start_time=0.0,
        end_time=1.0,
        attributes={
            semconv.GEN_AI_OPERATION: "chat",
            semconv.GEN_AI_INPUT_MESSAGES: json.dumps(messages),
            semconv.GEN_AI_OUTPUT_MESSAGES: json.dumps(ANSWER),
        },
        tokens=TokenCapture(prompt_token_ids=prompt, choices=(choice,)),
    )


def said(text: str) -> Messages:
    return [{"role": "user", "content": text}]


def turns() -> list[Span]:
    """A conversation of 30 turns, whose tokens go on from one another."""
    made: list[Span] = []
    prompt = ids(200)
    for messages in conversation():
        answer = ids(60)
        made.append(call(messages, prompt, answer))
        prompt += answer + ids(500)
    return made


def attempts() -> dict[str, list[Span]]:
    same = call([{"role": "system", "content": TEXT}, *said(TEXT)], ids(512), ids(128))
    begun = ids(400)
    numbers = range(CALLS)
    many = [message for number in range(20_000) for message in said(str(number))]
    return {
        "the same request": [same] * CALLS,
        "30 turns, up to 74 kB": turns(),
        "100 starts with one system prompt": [
            call([*said(TEXT), *said(f"task {number}")], begun + ids(50), ids(40))
            for number in numbers
        ],
        "crafted: ids of 1 MB that differ near their ends": [
            call(said(str(number)), (7,) * (250_000 - 100 * number) + (number,) + (7,) * 99, (7,))
            for number in reversed(numbers)
        ],
        "crafted: 20,000 messages, rotated": [
            call(many[number:] + many[:number], (number,), (3,)) for number in numbers
        ],
        "crafted: 20,000 messages, the last differs": [
            call([*many, *said(f"task {number}")], (number,), (3,)) for number in numbers
        ],
    }


def microseconds(calls: Sequence[Span]) -> tuple[float, float]:
    """For each call on average, and for the dearest."""
    links = AttemptLinks()
    gc.collect()
    gc.disable()
    times = [time.process_time_ns()]
    for index, span in enumerate(calls):
        links.add(span, index)
        times.append(time.process_time_ns())
    gc.enable()
    took = [(end - start) / 1000 for start, end in pairwise(times)]
    return sum(took) / len(took), max(took)


def main() -> None:
    results: dict[str, dict[str, float]] = {}
    print(f"{'':50} {'µs a call':>12} {'dearest':>12}")
    for name, calls in attempts().items():
        rounds = 1 if "crafted" in name else ROUNDS
        average, dearest = min(microseconds(calls) for _ in range(rounds))
        results[name] = {"µs per call": average, "dearest call, µs": dearest}
        print(f"{name:50} {average:12,.1f} {dearest:12,.1f}")
    path = Path(__file__).parent / "results" / "links.json"
    path.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
