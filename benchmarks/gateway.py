"""What the gateway costs: calls per second with capture, added latency, streams, many calls at once, and memory.

    python benchmarks/gateway.py [--rounds 5] [--seconds 3] [--soak CALLS] [--directory DIR] [--json FILE]

The gateway (`agl server` as a user starts it) has one core for itself; this load generator and an upstream that answers
like vLLM in no time share another. What they do without it in the same run, and the processes' shares of their cores,
say whether they hold it up. Every captured call is attributed by its URL and key, and counted in the store afterwards.
The floor beside it forwards bytes and keeps them in SQLite, with the same HTTP server and client, and no more.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import aiohttp
from _load import Calls, call_each, call_for, call_in_turn, connect, post
from _upstream import EVENTS, LOGPROBS, PACES, PROMPT_TOKEN_IDS, TOKEN_IDS
from store import Server, client_of, fsync_milliseconds, median

from agentlightning.store.client import LightningStoreClient
from agentlightning.types import AttemptedRollout, EnqueueRolloutRequest

HERE: Final = Path(__file__).parent
CORES: Final = min(os.sched_getaffinity(0)), max(os.sched_getaffinity(0))  # of the server, of all others
OPEN_CALLS: Final = (32, 256, 1000)
LATENCIES: Final = 500  # of each kind in a round
CALLS_OF_AN_ATTEMPT: Final = 20  # in the soak
TEXT: Final = "Find a flight to Oslo in May, compare the departures of three airlines and reserve a seat by the aisle. "
MESSAGES: Final = [{"role": "system", "content": TEXT * 10}, {"role": "user", "content": TEXT * 10}]
TELLING: Final = TEXT + '{"key": "PROJ-12", "token": "may"}, as ada@example.com wrote at https://example.com:8000/a@b. '
TELLING_MESSAGES: Final = [{"role": "user", "content": TELLING * 10}]  # as long, and with what resembles secrets


@dataclass(frozen=True)
class World:
    """The processes of a run, and the store of the gateway."""

    gateway: Server
    floor: Server
    upstream: Server
    store: LightningStoreClient

    def cpu_seconds(self) -> dict[str, float]:
        """So far. Of the two servers, which share a core, only one is used at a time."""
        return {
            "server": self.gateway.cpu_seconds() + self.floor.cpu_seconds(),
            "upstream": self.upstream.cpu_seconds(),
            "load": time.process_time(),
        }

    async def spans(self) -> int:
        return (await self.store.statistics())["spans"]


@contextlib.contextmanager
def process(arguments: Sequence[str | Path], core: int, log: Path) -> Generator[Server]:
    """A process that is kept to a core, as soon as it says where it listens."""
    with log.open("wb") as output:
        running = subprocess.Popen([sys.executable, *arguments], stdout=output, stderr=output)
    os.sched_setaffinity(running.pid, {core})
    try:
        while " at http" not in log.read_text():
            assert running.poll() is None, log.read_text()
            time.sleep(0.05)
        yield Server(log.read_text().split(" at ")[1].split()[0], running.pid)
    finally:
        running.terminate()
        running.wait()


@contextlib.asynccontextmanager
async def world(directory: Path) -> AsyncGenerator[World]:
    """All processes, and the upstream registered with the gateway once for each pace."""
    ours, others = CORES
    with contextlib.ExitStack() as stack:
        upstream = stack.enter_context(process([HERE / "_upstream.py"], others, directory / "upstream.log"))
        command = ["-m", "agentlightning.cli.main", "server", "--port", "0", "--store", directory / "store.db"]
        gateway = stack.enter_context(process(command, ours, directory / "gateway.log"))
        command = [HERE / "_floor.py", upstream.url, directory / "floor.db"]
        floor = stack.enter_context(process(command, ours, directory / "floor.log"))
        os.sched_setaffinity(0, {others})
        async with client_of(gateway) as store, aiohttp.ClientSession() as session:
            for pace in PACES:
                url = f"{gateway.url}/api/v1/models/{pace}"
                async with session.put(url, json={"base_url": f"{upstream.url}/{pace}/v1"}) as answer:
                    assert answer.status == 200, await answer.text()
            yield World(gateway, floor, upstream, store)


# --- requests -----------------------------------------------------------------------------------------------------


def body(pace: str, *, stream: bool, exact: bool = False, telling: bool = False) -> bytes:
    """What an agent asks; `exact` as the gateway asks it of the upstream, `telling` with what resembles secrets."""
    asked = {
        "model": pace,
        "messages": TELLING_MESSAGES if telling else MESSAGES,
        "temperature": 1.0,
        "max_tokens": 128,
    }
    if stream:
        asked |= {"stream": True, "stream_options": {"include_usage": True}}
    if exact:
        asked |= {"logprobs": True, "return_token_ids": True}
    return json.dumps(asked, separators=(",", ":")).encode()


def direct(world: World, pace: str, *, stream: bool) -> bytes:
    return post(f"{world.upstream.url}/{pace}/v1/chat/completions", body(pace, stream=stream, exact=True))


def floor(world: World, way: str, pace: str, *, stream: bool) -> bytes:
    path = f"{way}/{pace}/v1/chat/completions"
    return post(f"{world.floor.url}/{path}", body(pace, stream=stream, exact=True))


def unattributed(world: World, pace: str, *, stream: bool) -> bytes:
    return post(f"{world.gateway.url}/v1/chat/completions", body(pace, stream=stream))


def attributed(world: World, rollout: AttemptedRollout, pace: str, *, stream: bool, telling: bool = False) -> bytes:
    path = f"rollout/{rollout.rollout_id}/attempt/{rollout.attempt.attempt_id}/v1/chat/completions"
    return post(f"{world.gateway.url}/{path}", body(pace, stream=stream, telling=telling), rollout.api_key or "none")


@contextlib.asynccontextmanager
async def attempts(store: LightningStoreClient, count: int) -> AsyncGenerator[list[AttemptedRollout]]:
    """As many running attempts, of a rollout each, which have succeeded at the end of the block."""
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input={"task": number}) for number in range(count)])
    leased = await store.dequeue_many_rollouts(count)
    assert len(leased) == count
    beating = asyncio.create_task(beat(store, leased))
    yield leased
    beating.cancel()
    ends = (
        store.update_attempt(one.rollout_id, one.attempt.attempt_id, status="succeeded", lease=token_of(one))
        for one in leased
    )
    await asyncio.gather(*ends)


async def beat(store: LightningStoreClient, leased: Sequence[AttemptedRollout]) -> None:
    """Keep the leases of what is measured for longer than they last."""
    while True:
        await asyncio.sleep(10)
        beats = (store.heartbeat(one.rollout_id, one.attempt.attempt_id, token_of(one)) for one in leased)
        await asyncio.gather(*beats)


def token_of(rollout: AttemptedRollout) -> int:
    assert rollout.lease is not None
    return rollout.lease.token


# --- measures -----------------------------------------------------------------------------------------------------


async def measure(world: World, calling: Awaitable[Calls]) -> dict[str, float]:
    """Calls per second, the server's CPU for each, and what share of its core each process took."""
    gc.collect()
    before = world.cpu_seconds()
    calls = await calling
    spent = {name: seconds - before[name] for name, seconds in world.cpu_seconds().items()}
    return {
        "calls": len(calls),
        "calls per second": len(calls) / calls.seconds,
        "server CPU ms per call": 1000 * spent["server"] / len(calls),
        **{f"{name} share": seconds / calls.seconds for name, seconds in spent.items()},
    }


async def settled(world: World) -> int:
    """How many spans are stored, once those that were queued are."""
    count, before = await world.spans(), -1
    while count != before:
        await asyncio.sleep(0.5)
        count, before = await world.spans(), count
    return count


async def captured(
    world: World, open_calls: int, seconds: float, pace: str = "at-once", *, stream: bool = False
) -> dict[str, float]:
    """So many attempts that call at once; AssertionError unless each call has left its span."""
    before = await settled(world)
    async with attempts(world.store, open_calls) as leased:
        requests = [attributed(world, rollout, pace, stream=stream) for rollout in leased]
        figures = await measure(world, call_for(seconds, world.gateway.url, requests))
    stored = await world.spans() - before
    assert stored == figures["calls"], f"{figures['calls']} calls were answered, {stored} captured"
    return figures


async def throughput(world: World, seconds: float) -> dict[str, dict[str, float]]:
    """All that is measured by calls per second; the first tells how fast the machine is at the moment."""
    requests = [b"GET /health HTTP/1.1\r\nhost: gateway\r\n\r\n"] * 32
    figures = {"nothing, 32 open": await measure(world, call_for(seconds, world.gateway.url, requests))}
    for stream in (False, True):
        kind = "streamed" if stream else "whole"
        requests = [direct(world, "at-once", stream=stream)] * 32
        figures[f"{kind}, direct, 32 open"] = await measure(world, call_for(seconds, world.upstream.url, requests))
        if not stream:
            requests = [floor(world, "captured", "at-once", stream=False)] * 32
            figures["whole, floor, 32 open"] = await measure(world, call_for(seconds, world.floor.url, requests))
        requests = [unattributed(world, "at-once", stream=stream)] * 32
        figures[f"{kind}, queued, 32 open"] = await measure(world, call_for(seconds, world.gateway.url, requests))
        for open_calls in OPEN_CALLS[: 1 if stream else None]:
            name = f"{kind}, captured, {open_calls} open"
            figures[name] = await captured(world, open_calls, seconds, stream=stream)
    figures["streamed, captured, 32 open, a token each 5 ms"] = await captured(
        world, 32, seconds, "typing", stream=True
    )
    for name, one in figures.items():
        if name.startswith("streamed"):
            one["server CPU us per event"] = 1000 * one["server CPU ms per call"] / EVENTS
    return figures


async def latency(world: World) -> dict[str, dict[str, float]]:
    """What one call at a time takes directly, and how much longer through the gateway and its floor, queued and
    captured, in turn: milliseconds to the whole answer, and to the first byte of a stream whose end comes 2 ms later.
    """
    figures: dict[str, dict[str, float]] = {}
    async with attempts(world.store, 1) as [rollout]:
        for pace, stream in (("at-once", False), ("first-token", True)):
            ways = {
                "direct": (world.upstream, direct(world, pace, stream=stream)),
                "queued": (world.gateway, unattributed(world, pace, stream=stream)),
                "captured": (world.gateway, attributed(world, rollout, pace, stream=stream)),
                "captured, keys and addresses": (
                    world.gateway,
                    attributed(world, rollout, pace, stream=stream, telling=True),
                ),
                "floor, queued": (world.floor, floor(world, "queued", pace, stream=stream)),
                "floor, captured": (world.floor, floor(world, "captured", pace, stream=stream)),
            }
            made = {way: Calls() for way in ways}
            callers = [await connect(server.url, request, made[way]) for way, (server, request) in ways.items()]
            await call_in_turn(LATENCIES, callers)
            for caller in callers:
                caller.close()
            times = {way: calls.first if stream else calls.whole for way, calls in made.items()}
            figures["to the first byte" if stream else "to the whole answer"] = added(times)
    return figures


def added(times: dict[str, list[float]]) -> dict[str, float]:
    """Median and 99th percentile in milliseconds, those of the gateway less the direct ones."""
    figures: dict[str, float] = {}
    for way, seconds in times.items():
        cuts = statistics.quantiles(seconds[len(seconds) // 10 :], n=100)  # without the first, which open connections
        for name, cut in (("p50", cuts[49]), ("p99", cuts[98])):
            less = 0.0 if way == "direct" else figures[f"direct {name} ms"]
            figures[f"{way} {name} ms" if way == "direct" else f"{way}, added {name} ms"] = 1000 * cut - less
    return figures


async def slow_calls(world: World) -> dict[str, float]:
    """Seconds until a thousand calls of 2 s each have been answered that connect and call at the same time."""
    alone = await call_each(1, world.upstream.url, [direct(world, "slow", stream=False)] * 1000)
    async with attempts(world.store, 1000) as leased:
        requests = [attributed(world, rollout, "slow", stream=False) for rollout in leased]
        through = await call_each(1, world.gateway.url, requests)
    return {"direct s": alone.seconds, "captured s": through.seconds}


async def soak(world: World, count: int) -> dict[str, object]:
    """The gateway's resident memory while attempts come and go, 32 at once, with 20 calls each."""
    batch = 32 * CALLS_OF_AN_ATTEMPT

    async def calls(batches: int) -> None:
        for _ in range(batches):
            async with attempts(world.store, 32) as leased:
                requests = [attributed(world, rollout, "at-once", stream=False) for rollout in leased]
                await call_each(CALLS_OF_AN_ATTEMPT, world.gateway.url, requests)

    await calls(3)  # until everything is loaded
    before, resident = await world.spans(), [resident_mb(world.gateway)]
    for _ in range(10):
        await calls(math.ceil(count / batch / 10))
        resident.append(resident_mb(world.gateway))
    return {
        "captured calls": await world.spans() - before,
        "resident, MB": resident,
        "growth, MB": round(resident[-1] - resident[0], 1),
    }


def resident_mb(server: Server) -> float:
    line = next(line for line in Path(f"/proc/{server.pid}/status").read_text().splitlines() if "VmRSS" in line)
    return round(int(line.split()[1]) / 1024, 1)


async def check_capture(world: World) -> None:
    """AssertionError unless a whole and a streamed call leave exactly the ids and logprobs that the upstream sent."""
    async with attempts(world.store, 1) as [rollout]:
        for stream in (False, True):
            await call_each(1, world.gateway.url, [attributed(world, rollout, "at-once", stream=stream)])
        for span in await world.store.query_spans(rollout.rollout_id):
            assert span.tokens is not None
            [choice] = span.tokens.choices
            assert span.tokens.prompt_token_ids == tuple(PROMPT_TOKEN_IDS)
            assert choice.token_ids == tuple(TOKEN_IDS)
            assert choice.logprobs == tuple(array("f", LOGPROBS)), "as they are stored: float32"


# --- the run ------------------------------------------------------------------------------------------------------


async def run(arguments: argparse.Namespace) -> dict[str, dict[str, object]]:
    results: dict[str, dict[str, object]] = {}
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        if arguments.soak:
            (Path(name) / "soak").mkdir()
            async with world(Path(name) / "soak") as soaked:
                results["soak"] = await soak(soaked, arguments.soak)
        async with world(Path(name)) as measured:
            await check_capture(measured)
            await captured(measured, 32, 1)  # warm
            rounds: dict[str, list[dict[str, float]]] = defaultdict(list)
            for _ in range(arguments.rounds):
                measures = await throughput(measured, arguments.seconds) | await latency(measured)
                measures["1,000 calls of 2 s"] = await slow_calls(measured)
                for part, figures in measures.items():
                    rounds[part].append(figures)
            results |= {part: dict(median(several)) for part, several in rounds.items()}
            results["run"] = {
                "rounds": arguments.rounds,
                "fsync, ms": round(fsync_milliseconds(Path(name)), 3),
                "most resident of the gateway, MB": round(measured.gateway.memory_mb()),
                "spans stored, each of a call": await measured.spans(),
            }
    return results


def show(results: dict[str, dict[str, object]]) -> None:
    """Figures with the same columns are a table."""
    header: list[str] = []
    for part, figures in results.items():
        columns = list(figures)
        if columns != header:
            header = columns
            print(f"\n{'':48}", *(f"{column:>{max(9, len(column))}}" for column in columns), sep="  ")
        cells = (f"{figures[column]!s:>{max(9, len(column))}}" for column in columns)
        print(f"{part:48}", *cells, sep="  ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measure of calls per second")
    parser.add_argument("--soak", type=int, default=0, metavar="CALLS", help="captured, to see memory grow: 100000")
    parser.add_argument("--directory", help="where the temporary directory is made")
    parser.add_argument("--json", type=Path, default=HERE / "results" / "gateway.json")
    arguments = parser.parse_args()
    import uvloop

    gc.disable()
    results = uvloop.run(run(arguments))
    show(results)
    arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
