"""Records what Agent Lightning 0.3's adapters make of random traces, for
`tests/v03/test_adapters.py` to compare with.

    scripts/environment.sh agentlightning-0.3 .venv .venv-agentlightning-0.3/bin/python -P
    scripts/record_adapters_0_3.py tests/oracles/adapters_0_3.json

A trace is rows of (id, kind, start, end, parent, agent or value). Where `first_sibling` is recorded
no span is beside one that encloses it: 0.3 moves such spans to the end of a list, and what is last
in it depends on that."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from agentlightning.adapter import LlmProxyTraceToTriplet, TracerTraceToTriplet  # type: ignore

from agentlightning.types import Span  # type: ignore

OPTIONS: dict[str, dict[str, Any]] = {
    "first_occurrence": {},
    "first_sibling": {"reward_match": "first_sibling"},
    "agent_match": {"agent_match": "^(re)?writer"},
    "judged_too": {"exclude_llm_call_in_reward": False},
}
TRACES = 40


class Trace:
    """A random trace, one agent after the other; `tidy` ones have every span below what encloses
    it."""

    def __init__(self, seed: int, tidy: bool) -> None:
        self.random = random.Random(seed)
        self.tidy = tidy
        self.rows: list[list[Any]] = []
        self.now = 0.0
        self.root = (
            self.add("run", 0.0, 1000.0, None) if tidy or self.random.random() < 0.5 else None
        )
        for _ in range(self.random.randint(1, 3)):
            self.agent(self.random.choice(["writer", "rewriter", "Critic", None]))
        for _ in range(self.random.randint(0, 2)):
            self.reward(self.root)

    def add(self, kind: str, start: float, end: float, parent: str | None, more: Any = None) -> str:
        self.rows.append([f"s{len(self.rows)}", kind, round(start, 3), round(end, 3), parent, more])
        return self.rows[-1][0]

    def reward(self, parent: str | None) -> None:
        self.add("reward", self.now, self.now, parent, round(self.random.random(), 2))
        self.now += 0.1

    def agent(self, name: str | None) -> None:
        end = self.now + 20
        inside = self.add("agent", self.now, end, self.root, name) if name else self.root
        self.now += 0.1
        for _ in range(self.random.randint(0, 3)):
            parent = self.root if not self.tidy and self.random.random() < 0.3 else inside
            self.add("call", self.now, self.now + 0.5, parent)
            self.now += 0.6
            if self.random.random() < 0.5:
                self.reward(
                    parent if self.tidy else self.random.choice([parent, inside, self.root])
                )
            if self.random.random() < 0.15:
                judged = self.add(
                    "judged", self.now, self.now + 1.0, inside, round(self.random.random(), 2)
                )
                self.add("call", self.now + 0.1, self.now + 0.6, judged)
                self.now += 1.1
        self.now = end + 0.1 if name else self.now


def span(row: list[Any], number: int, *, proxied: bool) -> Span:
    """The row as 0.3's tracer writes it, or its proxy."""
    span_id, kind, start, end, parent, more = row
    rewarded = {"agentlightning.reward.0.name": "primary", "agentlightning.reward.0.value": more}
    traced = {"gen_ai.response.id": span_id, "prompt_token_ids": [1, 2], "response_token_ids": [3]}
    literal = {"id": span_id, "prompt_token_ids": "[1, 2]", "response_token_ids": "[[3]]"}
    name, attributes = {
        "run": ("run", {}),
        "agent": ("agent", {"agent.name": more}),
        "reward": ("agentlightning.annotation", rewarded),
        "judged": (
            "agentlightning.operation",
            rewarded | {"agentlightning.operation.name": "agentlightning.reward"},
        ),
        "call": ("openai.chat.completion", traced),
    }[kind]
    if kind == "call" and proxied:
        name, attributes = (
            "raw_gen_ai_request",
            {f"llm.hosted_vllm.{key}": value for key, value in literal.items()},
        )
    return Span.from_attributes(
        rollout_id="r",
        attempt_id="a",
        sequence_id=number,
        trace_id="0" * 32,
        span_id=span_id,
        parent_id=parent,
        name=name,
        attributes=attributes,
        start_time=start,
        end_time=end,
    )


def recorded(rows: list[list[Any]], *, tidy: bool) -> dict[str, Any]:
    made: dict[str, Any] = {"spans": rows}
    for name, options in OPTIONS.items():
        if tidy or name != "first_sibling":
            triplets = TracerTraceToTriplet(**options).adapt(
                [span(row, i, proxied=False) for i, row in enumerate(rows)]
            )
            made[name] = [
                [t.metadata["response_id"], t.metadata["agent_name"], t.reward] for t in triplets
            ]
    proxied = LlmProxyTraceToTriplet().adapt(
        [span(row, i, proxied=True) for i, row in enumerate(rows)]
    )
    made["proxy"] = [[t.metadata["response_id"], t.reward] for t in proxied]
    return made


def main() -> None:
    traces = [(Trace(seed, tidy=seed % 2 == 0).rows, seed % 2 == 0) for seed in range(TRACES)]
    lines = [
        json.dumps(recorded(sorted(rows, key=lambda row: row[3]), tidy=tidy))
        for rows, tidy in traces
        if rows
    ]
    Path(sys.argv[1]).write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
