"""What the store costs over HTTP: whole lives of rollouts, spans in bulk, how fast a waiter is
woken, and how all of that holds when there are a million spans and more in it.

    python benchmarks/store.py [--rounds 5] [--rollouts 3200] [--spans 1000000] [--store PATH|URL] [--json FILE]

The server has one core for itself, this load generator another. Beside the figures stand the floors
of the same run: the cost of one fsync on this disk, a request that does nothing, and SQLite alone
with the same rows."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from agentlightning.store.client import LightningStoreClient
from agentlightning.types import AttemptedRollout, EnqueueRolloutRequest, FinishedRollouts, Span

WORKERS = 32
SPANS = 6
BULK = 500  # spans in one request
TEXT = "the quick brown fox jumps over the lazy dog " * 43  # with the rest about 2 kB


def span_of(rollout: AttemptedRollout, number: int) -> Span:
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
            "gen_ai.input.messages": TEXT,
        },
    )


@dataclass(frozen=True)
class Server:
    """`agl server` in a process and on a core of its own."""

    url: str
    pid: int

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory_mb(self) -> float:
        """The most it ever had resident."""
        line = next(
            line
            for line in Path(f"/proc/{self.pid}/status").read_text().splitlines()
            if "VmHWM" in line
        )
        return int(line.split()[1]) / 1024


@contextlib.contextmanager
def server(store: str, directory: Path) -> Iterator[Server]:
    log = directory / "server.log"
    command = [
        sys.executable,
        "-m",
        "agentlightning.cli.main",
        "server",
        "--port",
        "0",
        "--store",
        store,
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stderr=output, stdout=output)
    os.sched_setaffinity(process.pid, {min(os.sched_getaffinity(0))})
    try:
        while " at http" not in log.read_text():
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        yield Server(log.read_text().split(" at ")[1].split()[0], process.pid)
    finally:
        process.terminate()
        process.wait()


async def measure(
    server: Server, count: int, work: Callable[[], Awaitable[None]]
) -> dict[str, float]:
    """Items per second, and the server's and the client's CPU per item, in milliseconds."""
    at_server, here, begin = server.cpu_seconds(), time.process_time(), time.perf_counter()
    await work()
    seconds = time.perf_counter() - begin
    return {
        "per_second": count / seconds,
        "server_cpu_ms": 1000 * (server.cpu_seconds() - at_server) / count,
        "client_cpu_ms": 1000 * (time.process_time() - here) / count,
    }


async def full_life(server: Server, store: LightningStoreClient, rollouts: int) -> dict[str, float]:
    """Enqueue, lease, six spans in one batch, succeeded, each a request of its own, by 32 workers
    at once; and a waiter who follows the feed of finished rollouts until it has seen them all."""
    each = rollouts // WORKERS
    cursor = (await newest(store)).cursor
    seen = 0

    async def worker() -> None:
        for index in range(each):
            await store.enqueue_many_rollouts([EnqueueRolloutRequest(input={"task": index})])
            rollout = await store.dequeue_rollout(timeout=5)
            assert rollout is not None and rollout.lease is not None
            await store.add_many_spans([span_of(rollout, number) for number in range(SPANS)])
            await store.update_attempt(
                rollout.rollout_id,
                rollout.attempt.attempt_id,
                status="succeeded",
                lease=rollout.lease.token,
            )

    async def waiter() -> None:
        nonlocal cursor, seen
        while seen < each * WORKERS:
            page = await store.finished_after(cursor, timeout=5)
            cursor, seen = page.cursor, seen + len(page.rollouts)

    async def everybody() -> None:
        await asyncio.gather(waiter(), *(worker() for _ in range(WORKERS)))

    return await measure(server, each * WORKERS, everybody)


async def newest(store: LightningStoreClient) -> FinishedRollouts:
    """The end of the feed."""
    page = await store.finished_after(0, limit=1)
    while page.rollouts:
        last = page
        page = await store.finished_after(page.cursor, limit=1000)
        if not page.rollouts:
            return last
    return page


async def bulk(server: Server, store: LightningStoreClient, spans: int) -> dict[str, float]:
    """Spans in requests of 500, four at once."""
    leased = [await store.start_rollout({"bulk": index}) for index in range(4)]

    async def sender(rollout: AttemptedRollout) -> None:
        for first in range(0, spans // 4, BULK):
            await store.add_many_spans([span_of(rollout, first + number) for number in range(BULK)])

    async def all_senders() -> None:
        await asyncio.gather(*(sender(rollout) for rollout in leased))

    figures = await measure(server, spans // 4 // BULK * BULK * 4, all_senders)
    for rollout in leased:
        await store.update_attempt(
            rollout.rollout_id, rollout.attempt.attempt_id, status="succeeded"
        )
    return figures


async def waking(server: Server, store: LightningStoreClient, count: int) -> dict[str, float]:
    """From sending the call that finishes a rollout to its waiter's answer."""
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
    return {"p50_ms": delays[len(delays) // 2], "p99_ms": delays[int(0.99 * (len(delays) - 1))]}


async def nothing(server: Server, count: int) -> dict[str, float]:
    """The floor of HTTP: requests that are answered without looking at anything."""
    async with aiohttp.ClientSession() as session:

        async def worker() -> None:
            for _ in range(count // WORKERS):
                async with session.get(f"{server.url}/health") as answer:
                    await answer.read()

        async def all_workers() -> None:
            await asyncio.gather(*(worker() for _ in range(WORKERS)))

        return await measure(server, count // WORKERS * WORKERS, all_workers)


def fsync_milliseconds(directory: Path) -> float:
    """The median time of writing 4 kB and syncing it to this disk."""
    times: list[float] = []
    with (directory / "fsync").open("wb") as file:
        for _ in range(200):
            begin = time.perf_counter()
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
            times.append(time.perf_counter() - begin)
    return 1000 * statistics.median(times)


def sqlite_alone(directory: Path) -> float:
    """Rows of 2 kB per second into a bare SQLite table with one index, 500 to a durable commit."""
    connection = sqlite3.connect(directory / "alone.db", isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("CREATE TABLE spans (attempt INTEGER, span_id TEXT, attributes TEXT)")
    connection.execute("CREATE UNIQUE INDEX one ON spans (attempt, span_id)")
    begin = time.perf_counter()
    for batch in range(40):
        connection.execute("BEGIN")
        rows = [(1, f"{batch * BULK + number:016x}", TEXT) for number in range(BULK)]
        connection.executemany("INSERT INTO spans VALUES (?, ?, ?)", rows)
        connection.execute("COMMIT")
    connection.close()
    return 40 * BULK / (time.perf_counter() - begin)


async def fill(store: LightningStoreClient, spans: int) -> None:
    """Bring the store to this many spans, as finished rollouts of 100 spans each."""
    missing = spans - (await store.statistics())["spans"]

    async def sender(share: int) -> None:
        for _ in range(share // 100):
            rollout = await store.start_rollout({"filler": True})
            await store.add_many_spans([span_of(rollout, number) for number in range(100)])
            await store.update_attempt(
                rollout.rollout_id, rollout.attempt.attempt_id, status="succeeded"
            )

    await asyncio.gather(*(sender(missing // 8) for _ in range(8)))


def median(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(one[name] for one in rounds), 3) for name in rounds[0]}


async def measured(
    server: Server, store: LightningStoreClient, rounds: int, rollouts: int
) -> dict[str, object]:
    lives, bulks = [], []
    for _ in range(rounds):
        lives.append(await full_life(server, store, rollouts))
        bulks.append(await bulk(server, store, 20_000))
    return {
        "full life": median(lives),
        "bulk spans": median(bulks),
        "waking": {
            name: round(value, 2) for name, value in (await waking(server, store, 300)).items()
        },
        "spans stored": (await store.statistics())["spans"],
        "server memory, MB": round(server.memory_mb()),
    }


@contextlib.asynccontextmanager
async def client_of(server: Server) -> AsyncIterator[LightningStoreClient]:
    store = LightningStoreClient(server.url)
    try:
        yield store
    finally:
        await store.close()


async def run(arguments: argparse.Namespace) -> dict[str, object]:
    results: dict[str, object] = {}
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        directory = Path(name)
        with server(arguments.store or str(directory / "store.db"), directory) as one:
            os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
            results["fsync, ms"] = round(fsync_milliseconds(directory), 3)
            results["SQLite alone, spans/s"] = round(sqlite_alone(directory))
            results["empty request"] = median([await nothing(one, 6400) for _ in range(3)])
            async with client_of(one) as store:
                await full_life(one, store, 320)  # warm
                results["new store"] = await measured(
                    one, store, arguments.rounds, arguments.rollouts
                )
                if arguments.spans:
                    await fill(store, arguments.spans)
                    results["full store"] = await measured(
                        one, store, arguments.rounds, arguments.rollouts
                    )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rollouts", type=int, default=3200, help="in each round")
    parser.add_argument(
        "--spans", type=int, default=1_000_000, help="stored before the second half; 0 for none"
    )
    parser.add_argument(
        "--store", help="a file or postgresql:// URL; default: a file in a temporary directory"
    )
    parser.add_argument("--directory", help="where the temporary directory is made")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    import uvloop

    results = uvloop.run(run(arguments))
    for part, figures in results.items():
        if isinstance(figures, dict):
            print(part)
            for name, value in figures.items():
                print(f"  {name:22}", value)
        else:
            print(f"{part:24}", figures)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
