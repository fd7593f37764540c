"""How long the adapters of Agent Lightning 0.3 take for the rollouts of a file. It runs in their
environment.

    .venv-agentlightning-0.3/bin/python -P benchmarks/_adapters_0_3.py FILE

Of each rollout the file holds a JSON line {adapter: [span, …]}: the spans in the words that each
adapter reads (after a comma, what is special about them). They are made into 0.3's `Span` before
the clock starts; only `adapt` is timed, in CPU seconds."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from agentlightning.adapter import LlmProxyTraceToTriplet, TracerTraceToTriplet  # type: ignore

from agentlightning.types import Span  # type: ignore

ADAPTERS = {
    "TracerTraceToTriplet": TracerTraceToTriplet,
    "LlmProxyTraceToTriplet": LlmProxyTraceToTriplet,
}


def main() -> None:
    rollouts = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    measured = {}
    for name in rollouts[0]:
        adapter = ADAPTERS[name.partition(",")[0]]()
        spans = [
            [Span.from_attributes(**span) for span in rollout[name]]
            for rollout in rollouts
            if name in rollout
        ]
        started = time.process_time()
        adapted = [adapter.adapt(rollout) for rollout in spans]
        seconds = time.process_time() - started
        tokens = [
            len(t.prompt["token_ids"]) + len(t.response["token_ids"])
            for rollout in adapted
            for t in rollout
        ]
        rewards = sum(any(triplet.reward is not None for triplet in rollout) for rollout in adapted)
        measured[name] = {
            "rollouts": len(spans),
            "triplets": len(tokens),
            "tokens": sum(tokens),
            "rewarded": rewards,
            "rollouts_per_cpu_second": len(spans) / seconds,
        }
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
