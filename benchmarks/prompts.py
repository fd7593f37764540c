"""What a candidate costs a call at the gateway, beside reading the request, which every call pays.

    python benchmarks/prompts.py [--calls 400]

`known`: the texts came in an earlier call, as they do from the second call of any rollout of a
candidate on; `new`: they come for the first time. Without a candidate a call costs one comparison
with None. Medians; the reading is measured in turn with the rest."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from agentlightning.gateway.endpoints.completions import ChatCompletions
from agentlightning.gateway.request import OBJECT, check_parts
from agentlightning.prompts.replacing import Replacer
from agentlightning.types import PromptCandidate, PromptText

RESULTS: Final = Path(__file__).parent / "results" / "prompts.json"
BODIES: Final = ((2, 0, 1), (2, 20, 40), (10, 0, 1), (10, 20, 40), (100, 0, 1), (100, 20, 40))
"""Kilobytes of system prompt, tools, turns."""


def request(kilobytes: int, tools: int, turns: int) -> tuple[bytes, PromptCandidate]:
    """A chat request, and a candidate that replaces its prompt and the descriptions of its
    tools."""
    rules = "".join(f"- rule {number} says what to do\n" for number in range(kilobytes * 36))
    prompt = "You are the writer. Today is {hole1}.\n" + rules
    texts = {"writer.system": PromptText(place="system", sent=prompt, text=f"Be brief.\n{prompt}")}
    described: list[dict[str, Any]] = []
    for number in range(tools):
        name = f"tool_{number}"
        place = f"tools.{name}.description"
        sent = f"Looks up the {number}th thing that the user asks for."
        texts[place] = PromptText(place=place, sent=sent, text=f"{sent} Use it early.")
        properties = {"q": {"type": "string", "description": "What is looked up."}}
        schema = {"type": "object", "properties": properties}
        function = {"name": name, "description": sent, "parameters": schema}
        described.append({"type": "function", "function": function})
    messages = [{"role": "system", "content": prompt.replace("{hole1}", "May 3")}]
    for turn in range(turns):
        role = "assistant" if turn % 2 else "user"
        messages.append({"role": role, "content": f"Turn {turn} says something. " * 8})
    body: dict[str, Any] = {"model": "m", "messages": messages}
    return json.dumps(body | ({"tools": described} if tools else {})).encode(), PromptCandidate(
        components=texts
    )


def put(replacer: Replacer, body: bytes) -> None:
    check_parts(body)
    assert replacer.replaced(OBJECT.decode(body)) is not None


def timed(works: dict[str, Callable[[], Any]], calls: int) -> dict[str, float]:
    """Median microseconds of each, taken in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(calls):
        for name, work in works.items():
            began = time.perf_counter()
            work()
            seconds[name].append(time.perf_counter() - began)
    return {name: statistics.median(each) * 1e6 for name, each in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=400)
    calls = parser.parse_args().calls
    endpoint = ChatCompletions()
    rows: list[dict[str, Any]] = []
    print(f"{'prompt':>8} {'tools':>6} {'turns':>6} {'read µs':>8} {'known µs':>9} {'new µs':>8}")
    for kilobytes, tools, turns in BODIES:
        body, candidate = request(kilobytes, tools, turns)
        replacer = Replacer(candidate, "rs")
        works: dict[str, Callable[[], Any]] = {
            "read": lambda body=body: endpoint.read(body),
            "known": lambda replacer=replacer, body=body: put(replacer, body),
        }
        found = timed(works, calls)
        found |= timed({"new": lambda body=body, c=candidate: put(Replacer(c, "rs"), body)}, 50)
        rows.append({"kilobytes": kilobytes, "tools": tools, "turns": turns, **found})
        print(
            f"{kilobytes:>6}kB {tools:>6} {turns:>6} {found['read']:>8.0f} {found['known']:>9.0f} "
            f"{found['new']:>8.0f}"
        )
    RESULTS.write_text(json.dumps({"calls": calls, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
