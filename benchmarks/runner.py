"""What the runner costs: rollouts per second of one process, how soon the first one starts, and
what tracing adds.

    python benchmarks/runner.py [--rounds 3] [--rollouts 1500] [--json FILE]

The runner (`agl runner` as a user starts it) has one core for itself; server, gateway and an
upstream that answers in no time share another with this script. Rollouts of three calls each run
500 at once. The floor makes the same calls from the same agent with no runner around it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.metadata
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Final

import aiohttp
from gateway import CORES, HERE, process
from store import Server, client_of, median

from agentlightning.store.client import LightningStoreClient
from agentlightning.types import LLM, EnqueueRolloutRequest

CONCURRENCY: Final = 500
AGENTS: Final = {  # what is measured: (agent, tracer)
    "three calls by aiohttp": ("bare", "light"),
    "and three spans of ours": ("traced", "light"),
    "the SDK listening, no spans": ("bare", "opentelemetry"),
    "and three spans of the SDK": ("traced_by_sdk", "opentelemetry"),
    "three calls by the OpenAI SDK": ("openai_sdk", "light"),
}
STARTS: Final = 30
ALONE: Final = 400
_FLOOR: Final = """
import asyncio, sys, time
import uvloop
sys.path.insert(0, {here!r})
import _agents
import agentlightning as agl

async def main():
    llm = agl.LLM(endpoint={endpoint!r}, model="at-once", api_key="none")
    task = {{"question": "?"}}
    async def worker(count):
        for _ in range(count):
            await _agents.bare(task, llm)
    await worker(20)
    began, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(worker({rollouts} // {workers}) for _ in range({workers})))
    await _agents.close()
    print((time.process_time() - cpu) / {rollouts} * 1000, {rollouts} / (time.perf_counter() - began))

uvloop.run(main())
"""


@contextlib.contextmanager
def runner(
    agent: str, tracer: str, server: Server, directory: Path, concurrency: int = CONCURRENCY
) -> Generator[Server]:
    """`agl runner` on the first core, until the end of the block."""
    log = directory / f"runner-{agent}-{tracer}.log"
    command = [
        sys.executable,
        "-m",
        "agentlightning.cli.main",
        "runner",
        f"{HERE}/_agents.py:{agent}",
        "--server",
    ]
    with log.open("wb") as output:
        switched = {"OTEL_SDK_DISABLED": "true"} if tracer == "light" else {}
        running = subprocess.Popen(
            [*command, server.url, "--concurrency", str(concurrency)],
            stdout=output,
            stderr=output,
            env=os.environ | switched,
        )
    os.sched_setaffinity(running.pid, {CORES[0]})
    try:
        yield Server("", running.pid)
    finally:
        running.terminate()
        running.wait()


async def finished(store: LightningStoreClient, cursor: int, count: int) -> int:
    """The cursor behind `count` more finished rollouts, all of which succeeded."""
    while count > 0:
        page = await store.finished_after(cursor, limit=min(500, count), timeout=20)
        assert all(rollout.status == "succeeded" for rollout in page.rollouts), (
            "a rollout failed; see the runner's log"
        )
        cursor, count = page.cursor, count - len(page.rollouts)
    return cursor


async def throughput(
    agent: str,
    tracer: str,
    server: Server,
    store: LightningStoreClient,
    directory: Path,
    rollouts: int,
) -> dict[str, float]:
    """Rollouts per second while 500 run, and the runner's CPU for each."""
    cursor = (await store.finished_after(0, limit=1_000_000, timeout=0)).cursor
    with runner(agent, tracer, server, directory) as running:
        requests = [
            EnqueueRolloutRequest(input={"question": "?"})
            for _ in range(rollouts + 2 * CONCURRENCY)
        ]
        await store.enqueue_many_rollouts(requests)
        cursor = await finished(store, cursor, CONCURRENCY)  # until everything is loaded
        began, cpu, served = time.perf_counter(), running.cpu_seconds(), server.cpu_seconds()
        cursor = await finished(store, cursor, rollouts)
        seconds, cpu = time.perf_counter() - began, running.cpu_seconds() - cpu
        served = server.cpu_seconds() - served
        await finished(store, cursor, CONCURRENCY)
        return {
            "rollouts per second": rollouts / seconds,
            "runner CPU ms per rollout": 1000 * cpu / rollouts,
            "runner share": cpu / seconds,
            "server share": served / seconds,
            "most resident, MB": running.memory_mb(),
        }


def floor(server: Server, rollouts: int) -> dict[str, float]:
    """The same calls, attributed to nobody, by the same agent in a process without a runner."""
    code = _FLOOR.format(here=str(HERE), endpoint=f"{server.url}/v1", rollouts=rollouts, workers=50)
    running = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    os.sched_setaffinity(running.pid, {CORES[0]})
    output, _ = running.communicate()
    cpu, rate = map(float, output.split())
    return {"rollouts per second": rate, "runner CPU ms per rollout": cpu}


async def starts(server: Server, store: LightningStoreClient, directory: Path) -> dict[str, float]:
    """Milliseconds from before a rollout is enqueued to the agent's first line, one at a time."""
    waited: list[float] = []
    with runner("when_started", "light", server, directory):
        for number in range(STARTS + 3):
            began = time.time()
            rollout = await store.enqueue_rollout({"question": "?"})
            [ended] = await store.wait_for_rollouts([rollout.rollout_id], timeout=20)
            assert ended.status == "succeeded"
            spans = await store.query_spans(rollout.rollout_id)
            [reward] = [
                value
                for span in spans
                if (value := span.attributes.get("agentlightning.reward.0.value"))
            ]
            if number >= 3:
                waited.append(1000 * (float(reward) - began))
            await asyncio.sleep(0.05)
    cuts = statistics.quantiles(waited, n=20)
    return {"p50 ms": statistics.median(waited), "p95 ms": cuts[18]}


async def alone(server: Server, store: LightningStoreClient, directory: Path) -> dict[str, float]:
    """Milliseconds that an attempt takes, one at a time, without and with a span of ours around
    each call, in turn."""
    taken: dict[bool, list[float]] = {False: [], True: []}
    with runner("traced_if_asked", "light", server, directory, concurrency=1):
        inputs = [{"question": "?", "spans": number % 2 == 1} for number in range(ALONE + 40)]
        rollouts = await store.enqueue_many_rollouts(
            [EnqueueRolloutRequest(input=one) for one in inputs]
        )
        ended = await store.wait_for_rollouts(
            [rollout.rollout_id for rollout in rollouts], timeout=120
        )
        assert all(rollout.status == "succeeded" for rollout in ended) and len(ended) == len(
            rollouts
        )
    for one, rollout in list(zip(inputs, rollouts, strict=True))[40:]:
        [attempt] = await store.query_attempts(rollout.rollout_id)
        assert attempt.end_time is not None
        taken[bool(one["spans"])].append(1000 * (attempt.end_time - attempt.start_time))
    without, traced = (statistics.median(times) for times in taken.values())
    return {
        "p50 ms": without,
        "with spans, p50 ms": traced,
        "added, %": 100 * (traced / without - 1),
    }


def imported() -> dict[str, float]:
    """`import agentlightning`: the median of ten in processes of their own, and what it has
    resident; the packages that an agent's environment gets with it."""
    code = (
        "import time; b = time.perf_counter(); import agentlightning; s = time.perf_counter() - b\n"
        "print(s, next(l.split()[1] for l in open('/proc/self/status') if l.startswith('VmRSS')))"
    )
    runs = [
        subprocess.check_output([sys.executable, "-c", code], text=True).split() for _ in range(10)
    ]
    return {
        "import, ms": 1000 * statistics.median(float(seconds) for seconds, _ in runs),
        "resident, MB": statistics.median(int(kib) / 1024 for _, kib in runs),
        "packages brought": len(packages("agent-lightning-next")) - 1,
    }


def packages(name: str) -> set[str]:
    """The distribution and all that it needs without extras."""
    found = {name}
    for requirement in importlib.metadata.requires(name) or ():
        needed, _, marker = requirement.partition(";")
        needed = re.split(r"[\s<>=!~\[(]", needed.strip())[0].lower().replace("_", "-")
        if "extra ==" in marker or needed in found:
            continue
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found |= packages(needed)
    return found


async def run(arguments: argparse.Namespace) -> dict[str, dict[str, object]]:
    rounds: dict[str, list[dict[str, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        directory = Path(name)
        upstream = stack.enter_context(
            process([HERE / "_upstream.py"], CORES[1], directory / "upstream.log")
        )
        command = [
            "-m",
            "agentlightning.cli.main",
            "server",
            "--port",
            "0",
            "--store",
            directory / "store.db",
        ]
        server = stack.enter_context(process(command, CORES[1], directory / "server.log"))
        os.sched_setaffinity(0, {CORES[1]})
        async with client_of(server) as store, aiohttp.ClientSession() as session:
            url = f"{server.url}/api/v1/models/at-once"
            async with session.put(url, json={"base_url": f"{upstream.url}/at-once/v1"}) as answer:
                assert answer.status == 200, await answer.text()
            await store.add_resources({"llm": LLM(endpoint=f"{server.url}/v1", model="at-once")})
            for _ in range(arguments.rounds):
                for part, (agent, tracer) in AGENTS.items():
                    figures = await throughput(
                        agent, tracer, server, store, directory, arguments.rollouts
                    )
                    rounds[part].append(figures)
                rounds["floor: the calls alone"].append(floor(server, arguments.rollouts))
                rounds["first line of the agent after enqueuing"].append(
                    await starts(server, store, directory)
                )
                rounds["one rollout at a time"].append(await alone(server, store, directory))
                rounds["agentlightning in an agent's environment"].append(imported())
    return {part: dict(median(several)) for part, several in rounds.items()}


def show(results: dict[str, dict[str, object]]) -> None:
    for part, figures in results.items():
        print(f"{part:42}", *(f"{name}: {value}" for name, value in figures.items()), sep="  ")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--rollouts", type=int, default=1500, help="of each measure, besides a thousand around them"
    )
    parser.add_argument("--json", type=Path, default=HERE / "results" / "runner.json")
    arguments = parser.parse_args()
    results = asyncio.run(run(arguments))
    show(results)
    arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
