"""What it costs to answer a call from the record: milliseconds of each replayed call, and a thousand
forks of one rollout.

    python benchmarks/replay.py [--rounds 5] [--forks 1000]

A conversation of 18 calls with a tiny policy is recorded and walked again by forks at its last
call, whole (from the recorded messages) and streamed (from the recorded tokens). "Without HTTP" the
ASGI application is called in this process; beside it are a request that does nothing (`GET
/v1/models`), and the same calls sampled. The store is SQLite on disk, with its usual fsync and
without."""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import aiohttp

from agentlightning.engine.engine import Engine
from agentlightning.engine.service import EngineService
from agentlightning.gateway.backend import Sampling
from agentlightning.gateway.chat.template import ChatTemplate
from agentlightning.gateway.chat.token_backend import TokenBackend
from agentlightning.gateway.gateway import Gateway
from agentlightning.gateway.models import ModelEntry, ModelTable
from agentlightning.learner.tiny import make_policy
from agentlightning.server.app import create_app
from agentlightning.server.serve import HttpServer
from agentlightning.store.sources import forked
from agentlightning.store.sql import SqlStore
from agentlightning.types import AttemptedRollout, EnqueueRolloutRequest, ForkSource

CALLS: Final = 18
AT_ONCE: Final = 50
ANSWER: Final = "The earliest flight leaves at seven, and the latest at nine."
RESULTS: Final = Path(__file__).parent / "results" / "replay.json"
Messages = list[dict[str, Any]]


class Caller:
    """Calls the application as an agent would: through ASGI, or over HTTP."""

    def __init__(self, app: Any, url: str) -> None:
        self.app = app
        self.url = url

    async def direct(self, method: str, path: str, key: str, body: bytes) -> bytes:
        received: list[bytes] = []
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [
                (b"authorization", f"Bearer {key}".encode()),
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
            ],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
            "scheme": "http",
            "http_version": "1.1",
            "root_path": "",
        }
        asked = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            return asked.pop() if asked else await asyncio.get_running_loop().create_future()

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                assert message["status"] == 200, message
            received.append(message.get("body", b""))

        await self.app(scope, receive, send)
        return b"".join(received)

    async def over_http(
        self, session: aiohttp.ClientSession, path: str, key: str, body: bytes
    ) -> bytes:
        headers = {"authorization": f"Bearer {key}"}
        async with session.post(self.url + path, data=body, headers=headers) as response:
            text = await response.read()
            assert response.status == 200, text
            return text


def path_of(attempted: AttemptedRollout) -> str:
    attempt = attempted.attempt.attempt_id
    return f"/rollout/{attempted.rollout_id}/attempt/{attempt}/v1/chat/completions"


def bodies(answers: Sequence[str], stream: bool) -> list[bytes]:
    """The requests of the conversation in which the policy says this."""
    messages: Messages = []
    made: list[bytes] = []
    for number in range(CALLS):
        messages.append({"role": "user", "content": f"Flight {number}?"})
        asked = {"model": "policy", "messages": messages, "stream": stream}
        made.append(json.dumps(asked).encode())
        if number < len(answers):
            messages.append({"role": "assistant", "content": answers[number]})
    return made


async def lease(store: SqlStore, request: EnqueueRolloutRequest) -> AttemptedRollout:
    await store.enqueue_many_rollouts([request])
    leased = await store.dequeue_rollout()
    assert leased is not None
    return leased


async def measure(arguments: argparse.Namespace, synchronous: str) -> dict[str, float]:
    shown = [
        {
            "messages": [
                {"role": "user", "content": "Which?"},
                {"role": "assistant", "content": ANSWER},
            ]
        }
    ]
    policy = make_policy(shown * 50, seed=0, steps=60)
    end = policy.tokenizer.eos_token_id
    service = EngineService(
        Engine(policy.model, eos_token_ids=[end], max_sequence_length=1024, slots=16)
    )
    service.start()
    folder = tempfile.TemporaryDirectory()
    store = await SqlStore.open(
        Path(folder.name) / "store.sqlite", synchronous=synchronous, lease_seconds=600
    )
    chat = ChatTemplate.from_pretrained(policy.tokenizer)
    backend = TokenBackend(chat, service, name="embedded", max_sequence_length=1024)
    greedy = Sampling(temperature=0.0, max_tokens=16)
    gateway = Gateway(ModelTable([ModelEntry("policy", backend, train=greedy)]), store)
    app = create_app(store, gateway=gateway)
    figures: dict[str, list[float]] = {}
    async with HttpServer(app) as http, aiohttp.ClientSession() as session:
        caller = Caller(app, http.url)
        first = await lease(store, EnqueueRolloutRequest(input="task"))
        answers: list[str] = []
        started = time.perf_counter()
        for number in range(CALLS):
            body = bodies(answers, False)[number]
            said = json.loads(
                await caller.direct("POST", path_of(first), first.api_key or "", body)
            )
            answers.append(said["choices"][0]["message"]["content"])
        live = (time.perf_counter() - started) / CALLS * 1e3
        attempt = first.attempt.attempt_id
        await store.update_attempt(first.rollout_id, attempt, status="succeeded")
        source = ForkSource(rollout_id=first.rollout_id, at=CALLS - 1)
        recorded = await store.get_rollout_by_id(first.rollout_id)
        assert recorded is not None

        async def walk(stream: bool, http: bool, number: int) -> float:
            """Milliseconds of a replayed call, with the reading of the record in the first."""
            fork = await lease(store, forked(recorded, source, number))
            asked = bodies(answers, stream)[: CALLS - 1]
            began = time.perf_counter()
            for body in asked:
                key = fork.api_key or ""
                if http:
                    await caller.over_http(session, path_of(fork), key, body)
                else:
                    await caller.direct("POST", path_of(fork), key, body)
            return (time.perf_counter() - began) / len(asked) * 1e3

        idle = await lease(store, EnqueueRolloutRequest(input="nothing"))
        models = path_of(idle).replace("chat/completions", "models")
        await walk(False, False, 0)
        for number in range(arguments.rounds):
            for http in (False, True):
                where = "over HTTP" if http else "without HTTP"
                for stream in (False, True):
                    kind = "streamed" if stream else "whole"
                    taken = await walk(stream, http, number + 1)
                    figures.setdefault(f"{kind}, {where}", []).append(taken)
            began = time.perf_counter()
            for _ in range(CALLS):
                await caller.direct("GET", models, idle.api_key or "", b"")
            figures.setdefault("nothing, without HTTP", []).append(
                (time.perf_counter() - began) / CALLS * 1e3
            )
        result = {name: round(statistics.median(taken), 3) for name, taken in figures.items()}
        result["sampled, without HTTP"] = round(live, 3)
        if synchronous == "NORMAL":
            result |= await thousand(arguments.forks, store, walk, Path(folder.name))
    await gateway.close()
    await store.close()
    service.close()
    folder.cleanup()
    return result


def stored_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


async def thousand(count: int, store: SqlStore, walk: Any, folder: Path) -> dict[str, float]:
    """Many forks at once: time of a call, growth of memory, bytes stored."""
    size = stored_bytes(folder)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> None:
        async with gate:
            await walk(False, True, 1000 + number)

    began = time.perf_counter()
    await asyncio.gather(*(one(number) for number in range(count)))
    calls = count * (CALLS - 1)
    taken = (time.perf_counter() - began) / calls * 1e3
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) / 1024
    stored = (stored_bytes(folder) - size) / calls
    return {
        "forks": count,
        "ms a call, 50 forks at once": round(taken, 3),
        "MiB more at most": round(grown, 1),
        "bytes stored a call": round(stored),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--forks", type=int, default=1000)
    arguments = parser.parse_args()
    results = {
        f"synchronous={synchronous}": asyncio.run(measure(arguments, synchronous))
        for synchronous in ("NORMAL", "FULL")
    }
    for name, figures in results.items():
        print(f"\n{name}: milliseconds a call")
        for what, value in figures.items():
            print(f"  {what:<28} {value:>10}")
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
