"""What the store costs: CPU and time per span, the whole life of a rollout, and how fast a waiter is woken.

    python benchmarks/store.py [--rollouts 300] [--json FILE]

The cost of one fsync on the disk is printed beside the figures, since an acknowledged write waits for one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from agentlightning.server.app import create_app
from agentlightning.server.serve import HttpServer
from agentlightning.store.base import LightningStore
from agentlightning.store.client import LightningStoreClient
from agentlightning.store.sql import SqlStore
from agentlightning.types import AttemptedRollout, EnqueueRolloutRequest, SampledChoice, Span, TokenCapture

WORKERS = 32
SPANS = 6
TEXT = "the quick brown fox jumps over the lazy dog " * 60  # 2.6 kB, as a short conversation


def span_of(rollout: AttemptedRollout, number: int) -> Span:
    """A span of about 3 kB with 100 prompt and 50 response tokens."""
    return Span(
        rollout_id=rollout.rollout_id,
        attempt_id=rollout.attempt.attempt_id,
        sequence_id=0,
        trace_id="0af7651916cd43dd8448eb211c80319c",
        span_id=f"{number:016x}",
        name="chat m",
        start_time=1.0 + number,
        end_time=2.0 + number,
        attributes={
            "gen_ai.operation.name": "chat",
            "gen_ai.request.model": "m",
            "gen_ai.usage.input_tokens": 100,
            "gen_ai.usage.output_tokens": 50,
            "gen_ai.request.temperature": 1.0,
            "gen_ai.input.messages": TEXT,
        },
        tokens=TokenCapture(
            prompt_token_ids=tuple(range(100)),
            choices=(
                SampledChoice(
                    token_ids=tuple(range(50)), logprobs=(-0.25,) * 50, finish_reason="stop", versions=((1, 50),)
                ),
            ),
        ),
    )


def fsync_milliseconds(directory: Path) -> float:
    """The median time of writing 4 kB and syncing it to this disk."""
    times: list[float] = []
    with (directory / "fsync").open("wb") as file:
        for _ in range(100):
            begin = time.perf_counter()
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
            times.append(time.perf_counter() - begin)
    return 1000 * statistics.median(times)


async def measure(count: int, work: Callable[[], Awaitable[None]]) -> dict[str, float]:
    """CPU and wall time of `work`, in milliseconds per item."""
    cpu, wall = time.process_time(), time.perf_counter()
    await work()
    return {
        "cpu_ms": round(1000 * (time.process_time() - cpu) / count, 4),
        "wall_ms": round(1000 * (time.perf_counter() - wall) / count, 4),
        "per_second": round(count / (time.perf_counter() - wall), 1),
    }


async def spans_one_by_one(store: LightningStore, rollouts: int) -> dict[str, float]:
    """Each span in a call of its own from 32 concurrent agents, as the gateway writes them."""
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=i) for i in range(WORKERS)])
    leased = await store.dequeue_many_rollouts(WORKERS)
    each = rollouts * SPANS // WORKERS
    spans = [[span_of(rollout, number) for number in range(each)] for rollout in leased]

    async def agent(own: list[Span]) -> None:
        for span in own:
            await store.add_span(span)

    async def all_agents() -> None:
        await asyncio.gather(*(agent(own) for own in spans))

    return await measure(each * WORKERS, all_agents)


async def full_life(store: LightningStore, rollouts: int) -> dict[str, float]:
    """Enqueue, lease, six spans in one batch, succeeded, seen by a waiter; 32 workers."""

    async def worker() -> None:
        while (rollout := await store.dequeue_rollout()) is not None:
            await store.add_many_spans([span_of(rollout, number) for number in range(SPANS)])
            await store.update_attempt(
                rollout.rollout_id, rollout.attempt.attempt_id, status="succeeded", lease=rollout.lease.token
            )

    async def everything() -> None:
        queued = await store.enqueue_many_rollouts([EnqueueRolloutRequest(input={"task": i}) for i in range(rollouts)])
        waiting = asyncio.create_task(store.wait_for_rollouts([rollout.rollout_id for rollout in queued]))
        await asyncio.gather(*(worker() for _ in range(WORKERS)))
        assert len(await waiting) == rollouts

    return await measure(rollouts, everything)


async def look_ups(store: LightningStore, count: int) -> dict[str, float]:
    """A rollout and its latest attempt, as the gateway asks for them at every call."""
    rollout = await store.start_rollout({"question": "2+2"})

    async def ask() -> None:
        for _ in range(count):
            await store.get_rollout_by_id(rollout.rollout_id)
            await store.get_latest_attempt(rollout.rollout_id)

    return await measure(count, ask)


async def waking(store: LightningStore, count: int) -> dict[str, float]:
    """From the call that finishes a rollout to its waiter's answer, in milliseconds."""
    delays: list[float] = []
    for _ in range(count):
        rollout = await store.start_rollout(1)
        waiting = asyncio.create_task(store.wait_for_rollouts([rollout.rollout_id]))
        await asyncio.sleep(0.005)
        begin = time.perf_counter()
        ending = asyncio.create_task(
            store.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status="succeeded")
        )
        await waiting
        delays.append(1000 * (time.perf_counter() - begin))
        await ending
    delays.sort()
    return {"p50_ms": round(delays[len(delays) // 2], 3), "p99_ms": round(delays[int(0.99 * (len(delays) - 1))], 3)}


@contextlib.asynccontextmanager
async def stores(directory: Path) -> AsyncIterator[dict[str, LightningStore]]:
    """The store in process and the same kind of store over HTTP (client and server share this process)."""
    local = await SqlStore.open(directory / "local.db")
    served = await SqlStore.open(directory / "served.db")
    async with HttpServer(create_app(served)) as server:
        client = LightningStoreClient(server.url)
        yield {"in process": local, "over HTTP": client}
        await client.close()
    await served.close()
    await local.close()


async def run(rollouts: int) -> dict[str, object]:
    results: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as name:
        results["fsync_ms"] = round(fsync_milliseconds(Path(name)), 3)
        async with stores(Path(name)) as both:
            for kind, store in both.items():
                results[f"span, {kind}"] = await spans_one_by_one(store, rollouts)
                results[f"full life, {kind}"] = await full_life(store, rollouts)
                results[f"look-ups, {kind}"] = await look_ups(store, rollouts)
                results[f"waking, {kind}"] = await waking(store, 50)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=300)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = asyncio.run(run(arguments.rollouts))
    for name, figures in results.items():
        print(f"{name:24}", figures)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
