"""What the gateway costs: calls per second with capture, added latency, streams, many calls at
once, and memory.

    python benchmarks/gateway.py [--rounds 5] [--seconds 3] [--before WORKTREE] [--soak CALLS] [--directory DIR]

With `--before` the gateway of another worktree is measured beside this one's, in turn, and the
ratios are those of each round.

The gateway (`agl server` as a user starts it) has one core for itself; this load generator and an
upstream that answers like vLLM in no time share another. What they do without it in the same run,
and the processes' shares of their cores, say whether they hold it up. Every captured call is
attributed by its URL and key, and counted in the store afterwards. The floor beside it reads HTTP
on bare sockets, forwards bytes and keeps them in SQLite, and no more."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import math
import os
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import aiohttp
from _load import Calls, call_each, call_for, call_in_turn, connect, post
from _real_prompts import TURNS, Messages, conversation, history, screenshot
from _upstream import LOGPROBS, PACES, PROMPT_TOKEN_IDS, TOKEN_IDS
from store import Server, client_of, fsync_milliseconds, median

from agentlightning.store.client import LightningStoreClient
from agentlightning.types import AttemptedRollout, EnqueueRolloutRequest

HERE: Final = Path(__file__).parent
# of the server, of all others
CORES: Final = min(os.sched_getaffinity(0)), max(os.sched_getaffinity(0))
OPEN_CALLS: Final = (32, 256, 1000)
LATENCIES: Final = 500  # of each kind in a round
CALLS_OF_AN_ATTEMPT: Final = 20  # in the soak
TEXT: Final = (
    "Find a flight to Oslo in May, compare the departures of three airlines and reserve a seat by "
    "the aisle. "
)
MESSAGES: Final[Messages] = [
    {"role": "system", "content": TEXT * 10},
    {"role": "user", "content": TEXT * 10},
]
TELLING: Final = TEXT + (
    '{"key": "PROJ-12", "token": "may"}, as ada@example.com wrote at https://example.com:8000/a@b. '
)
# as long, and resembling secrets
TELLING_MESSAGES: Final[Messages] = [{"role": "user", "content": TELLING * 10}]
HISTORY, SCREENSHOT, CONVERSATION = history(), screenshot(), conversation()


@dataclass(frozen=True)
class World:
    """The processes of a run, and the store of the gateway."""

    gateway: Server
    floor: Server
    upstream: Server
    store: LightningStoreClient
    directory: Path

    def cpu_seconds(self) -> dict[str, float]:
        """So far. Of the two servers, which share a core, only one is used at a time."""
        return {
            "server": self.gateway.cpu_seconds() + self.floor.cpu_seconds(),
            "upstream": self.upstream.cpu_seconds(),
            "load": time.process_time(),
        }

    async def spans(self) -> int:
        return (await self.store.statistics())["spans"]

    def stored_bytes(self) -> int:
        """What is in the store's files. The log of writes is folded into the database from time to
        time."""
        with contextlib.closing(sqlite3.connect(self.directory / "store.db")) as connection:
            names = ("page_size", "page_count", "freelist_count")
            size, pages, free = (
                connection.execute(f"PRAGMA {name}").fetchone()[0] for name in names
            )
            return size * (pages - free)


@contextlib.contextmanager
def process(
    arguments: Sequence[str | Path], core: int | None, log: Path, root: Path = HERE.parent
) -> Generator[Server]:
    """A process of the package in `root`, kept to a core if one is given, as soon as it says where
    it listens."""
    environment = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, *arguments]
    with log.open("wb") as output:
        running = subprocess.Popen(command, stdout=output, stderr=output, env=environment, cwd=root)
    if core is not None:
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
async def world(directory: Path, root: Path = HERE.parent) -> AsyncGenerator[World]:
    """All processes, the gateway's from `root`, and the upstream registered with it once for each
    pace."""
    ours, others = CORES
    with contextlib.ExitStack() as stack:
        upstream = stack.enter_context(
            process([HERE / "_upstream.py"], others, directory / "upstream.log")
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
        gateway = stack.enter_context(process(command, ours, directory / "gateway.log", root))
        command = [HERE / "_floor.py", upstream.url, directory / "floor.db"]
        floor = stack.enter_context(process(command, ours, directory / "floor.log"))
        os.sched_setaffinity(0, {others})
        async with client_of(gateway) as store, aiohttp.ClientSession() as session:
            for pace in PACES:
                url = f"{gateway.url}/api/v1/models/{pace}"
                async with session.put(
                    url, json={"base_url": f"{upstream.url}/{pace}/v1"}
                ) as answer:
                    assert answer.status == 200, await answer.text()
            yield World(gateway, floor, upstream, store, directory)


# --- requests -------------------------------------------------------------------------------------


def body(pace: str, *, stream: bool, exact: bool = False, messages: Messages = MESSAGES) -> bytes:
    """What an agent asks; `exact` as the gateway asks it of the upstream."""
    asked = {"model": pace, "messages": messages, "temperature": 1.0, "max_tokens": 128}
    if stream:
        asked |= {"stream": True, "stream_options": {"include_usage": True}}
    if exact:
        asked |= {"logprobs": True, "return_token_ids": True}
    return json.dumps(asked, separators=(",", ":")).encode()


def direct(world: World, pace: str, *, stream: bool) -> bytes:
    return post(
        f"{world.upstream.url}/{pace}/v1/chat/completions", body(pace, stream=stream, exact=True)
    )


def floor(world: World, way: str, pace: str, *, stream: bool) -> bytes:
    path = f"{way}/{pace}/v1/chat/completions"
    return post(f"{world.floor.url}/{path}", body(pace, stream=stream, exact=True))


def unattributed(world: World, pace: str, *, stream: bool) -> bytes:
    return post(f"{world.gateway.url}/v1/chat/completions", body(pace, stream=stream))


def attributed(
    world: World,
    rollout: AttemptedRollout,
    pace: str,
    *,
    stream: bool,
    messages: Messages = MESSAGES,
) -> bytes:
    path = f"rollout/{rollout.rollout_id}/attempt/{rollout.attempt.attempt_id}/v1/chat/completions"
    return post(
        f"{world.gateway.url}/{path}",
        body(pace, stream=stream, messages=messages),
        rollout.api_key or "none",
    )


@contextlib.asynccontextmanager
async def attempts(
    store: LightningStoreClient, count: int
) -> AsyncGenerator[list[AttemptedRollout]]:
    """As many running attempts, of a rollout each, which have succeeded at the end of the block."""
    await store.enqueue_many_rollouts(
        [EnqueueRolloutRequest(input={"task": number}) for number in range(count)]
    )
    leased = await store.dequeue_many_rollouts(count)
    assert len(leased) == count
    beating = asyncio.create_task(beat(store, leased))
    yield leased
    beating.cancel()
    ends = (
        store.update_attempt(
            one.rollout_id, one.attempt.attempt_id, status="succeeded", lease=token_of(one)
        )
        for one in leased
    )
    await asyncio.gather(*ends)


async def beat(store: LightningStoreClient, leased: Sequence[AttemptedRollout]) -> None:
    """Keep the leases of what is measured for longer than they last."""
    while True:
        await asyncio.sleep(10)
        beats = (
            store.heartbeat(one.rollout_id, one.attempt.attempt_id, token_of(one)) for one in leased
        )
        await asyncio.gather(*beats)


def token_of(rollout: AttemptedRollout) -> int:
    assert rollout.lease is not None
    return rollout.lease.token


# --- measures -------------------------------------------------------------------------------------


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
    world: World,
    open_calls: int,
    seconds: float,
    pace: str = "at-once",
    *,
    stream: bool = False,
    messages: Messages = MESSAGES,
) -> dict[str, float]:
    """So many attempts that call at once; AssertionError unless each call has left its span."""
    before = await settled(world)
    async with attempts(world.store, open_calls) as leased:
        requests = [
            attributed(world, rollout, pace, stream=stream, messages=messages) for rollout in leased
        ]
        figures = await measure(world, call_for(seconds, world.gateway.url, requests))
    stored = await world.spans() - before
    assert stored == figures["calls"], f"{figures['calls']} calls were answered, {stored} captured"
    return figures


async def conversations(world: World, rollouts: int = 32) -> dict[str, float]:
    """As many agents at once whose turns each repeat the history, and what the store's files grow
    by for each call."""
    before, size = await settled(world), world.stored_bytes()
    async with attempts(world.store, rollouts) as leased:
        requests = [
            [
                attributed(world, rollout, "at-once", stream=False, messages=turn)
                for turn in CONVERSATION
            ]
            for rollout in leased
        ]
        figures = await measure(world, call_each(TURNS, world.gateway.url, requests))
    assert await world.spans() - before == figures["calls"]
    return {
        **figures,
        "stored kB per call": (world.stored_bytes() - size) / 1000 / figures["calls"],
    }


async def slow_readers(world: World) -> dict[str, float]:
    """A thousand streams at once, of clients that read 4 kB or so every tenth of a second."""
    before, resident = await settled(world), resident_mb(world.gateway)
    async with attempts(world.store, 1000) as leased:
        requests = [attributed(world, rollout, "at-once", stream=True) for rollout in leased]
        figures = await measure(world, call_each(1, world.gateway.url, requests, pause=0.1))
    assert await world.spans() - before == 1000
    return {**figures, "resident MB more": resident_mb(world.gateway) - resident}


async def captures(world: World, seconds: float) -> dict[str, dict[str, float]]:
    """Every kind of captured call."""
    figures = {
        f"whole, captured, {open_calls} open": await captured(world, open_calls, seconds)
        for open_calls in OPEN_CALLS
    }
    for name, messages in (
        ("100 kB with keys and addresses", HISTORY),
        ("an image of 100 kB", SCREENSHOT),
    ):
        figures[f"whole, captured, 32 open, {name}"] = await captured(
            world, 32, seconds, messages=messages
        )
    figures["whole, captured, 32 open, 30 turns"] = await conversations(world)
    figures["streamed, captured, 32 open"] = await captured(world, 32, seconds, stream=True)
    figures["streamed, captured, 32 open, a token each 5 ms"] = await captured(
        world, 32, seconds, "typing", stream=True
    )
    figures["streamed, captured, 1000 slow readers"] = await slow_readers(world)
    return figures


async def throughput(world: World, seconds: float) -> dict[str, dict[str, float]]:
    """All that is measured by calls per second; the first tells how fast the machine is at the
    moment."""
    requests = [b"GET /health HTTP/1.1\r\nhost: gateway\r\n\r\n"] * 32
    figures = {
        "nothing, 32 open": await measure(world, call_for(seconds, world.gateway.url, requests))
    }
    for stream in (False, True):
        kind = "streamed" if stream else "whole"
        requests = [direct(world, "at-once", stream=stream)] * 32
        figures[f"{kind}, direct, 32 open"] = await measure(
            world, call_for(seconds, world.upstream.url, requests)
        )
        requests = [floor(world, "captured", "at-once", stream=stream)] * 32
        figures[f"{kind}, floor, 32 open"] = await measure(
            world, call_for(seconds, world.floor.url, requests)
        )
        requests = [unattributed(world, "at-once", stream=stream)] * 32
        figures[f"{kind}, queued, 32 open"] = await measure(
            world, call_for(seconds, world.gateway.url, requests)
        )
    return figures


async def latency(world: World) -> dict[str, dict[str, float]]:
    """What one call at a time takes directly, and how much longer through the gateway and its
    floor, queued and captured, in turn: milliseconds to the whole answer, and to the first byte of
    a stream whose end comes 2 ms later."""
    figures: dict[str, dict[str, float]] = {}
    async with attempts(world.store, 1) as [rollout]:
        for pace, stream in (("at-once", False), ("first-token", True)):
            ways = {
                "direct": (world.upstream, direct(world, pace, stream=stream)),
                "queued": (world.gateway, unattributed(world, pace, stream=stream)),
                "captured": (world.gateway, attributed(world, rollout, pace, stream=stream)),
                "captured, keys and addresses": (
                    world.gateway,
                    attributed(world, rollout, pace, stream=stream, messages=TELLING_MESSAGES),
                ),
                "floor, queued": (world.floor, floor(world, "queued", pace, stream=stream)),
                "floor, captured": (world.floor, floor(world, "captured", pace, stream=stream)),
            }
            made = {way: Calls() for way in ways}
            callers = [
                await connect(server.url, request, made[way])
                for way, (server, request) in ways.items()
            ]
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
        # without the first, which open connections
        cuts = statistics.quantiles(seconds[len(seconds) // 10 :], n=100)
        for name, cut in (("p50", cuts[49]), ("p99", cuts[98])):
            less = 0.0 if way == "direct" else figures[f"direct {name} ms"]
            figures[f"{way} {name} ms" if way == "direct" else f"{way}, added {name} ms"] = (
                1000 * cut - less
            )
    return figures


async def slow_calls(world: World) -> dict[str, float]:
    """Seconds until a thousand calls of 2 s each have been answered that connect and call at the
    same time."""
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
                requests = [
                    attributed(world, rollout, "at-once", stream=False) for rollout in leased
                ]
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
    line = next(
        line
        for line in Path(f"/proc/{server.pid}/status").read_text().splitlines()
        if "VmRSS" in line
    )
    return round(int(line.split()[1]) / 1024, 1)


async def check_capture(world: World) -> None:
    """AssertionError unless a whole and a streamed call leave exactly the ids and logprobs that the
    upstream sent."""
    async with attempts(world.store, 1) as [rollout]:
        for stream in (False, True):
            await call_each(
                1, world.gateway.url, [attributed(world, rollout, "at-once", stream=stream)]
            )
        for span in await world.store.query_spans(rollout.rollout_id):
            assert span.tokens is not None
            [choice] = span.tokens.choices
            assert span.tokens.prompt_token_ids == tuple(PROMPT_TOKEN_IDS)
            assert choice.token_ids == tuple(TOKEN_IDS)
            assert choice.logprobs == tuple(array("f", LOGPROBS)), "as they are stored: float32"


# --- the run --------------------------------------------------------------------------------------


async def run(arguments: argparse.Namespace) -> dict[str, dict[str, object]]:
    results: dict[str, dict[str, object]] = {}
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        if arguments.soak:
            async with world(made(Path(name) / "soak")) as soaked:
                results["soak"] = await soak(soaked, arguments.soak)
        async with contextlib.AsyncExitStack() as stack:
            measured = await stack.enter_async_context(world(made(Path(name) / "here")))
            worlds = {"": measured}
            if arguments.before is not None:
                worlds["before: "] = await stack.enter_async_context(
                    world(made(Path(name) / "before"), arguments.before)
                )
            for one in worlds.values():
                await check_capture(one)
                await captured(one, 32, 1)  # warm
            rounds: dict[str, list[dict[str, float]]] = defaultdict(list)
            for _ in range(arguments.rounds):
                measures = await throughput(measured, arguments.seconds)
                for which, one in worlds.items():
                    found = await captures(one, arguments.seconds) | await latency(one)
                    measures |= {which + part: figures for part, figures in found.items()}
                measures["1,000 calls of 2 s"] = await slow_calls(measured)
                for part, figures in measures.items():
                    rounds[part].append(figures)
            results |= {part: dict(median(several)) for part, several in rounds.items()}
            if arguments.before is not None:
                results |= gained(rounds)
            results["run"] = {
                "rounds": arguments.rounds,
                "fsync, ms": round(fsync_milliseconds(Path(name)), 3),
                "most resident of the gateway, MB": round(measured.gateway.memory_mb()),
                "spans stored, each of a call": await measured.spans(),
            }
    return results


def made(directory: Path) -> Path:
    directory.mkdir()
    return directory


def gained(rounds: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, dict[str, object]]:
    """How many times the server's CPU a call took before, by kind: the median of the rounds'
    ratios."""
    cpu, ratios = "server CPU ms per call", dict[str, dict[str, object]]()
    for part, several in rounds.items():
        if f"before: {part}" in rounds and cpu in several[0]:
            pairs = zip(rounds[f"before: {part}"], several, strict=True)
            ratio = statistics.median(before[cpu] / now[cpu] for before, now in pairs)
            ratios[f"gained: {part}"] = {"CPU before / now": round(ratio, 3)}
    return ratios


def show(results: dict[str, dict[str, object]]) -> None:
    """Figures with the same columns are a table."""
    header: list[str] = []
    for part, figures in results.items():
        columns = list(figures)
        if columns != header:
            header = columns
            print(
                f"\n{'':48}", *(f"{column:>{max(9, len(column))}}" for column in columns), sep="  "
            )
        cells = (f"{figures[column]!s:>{max(9, len(column))}}" for column in columns)
        print(f"{part:48}", *cells, sep="  ")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="of each measure of calls per second"
    )
    parser.add_argument(
        "--before",
        type=Path,
        metavar="WORKTREE",
        help="of an earlier commit, measured beside this one",
    )
    parser.add_argument(
        "--soak", type=int, default=0, metavar="CALLS", help="captured, to see memory grow: 100000"
    )
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
