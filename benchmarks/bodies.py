"""What large requests take of a server's memory: attempts that each send one call of many
megabytes, all at once.

    python benchmarks/bodies.py [--attempts 50] [--megabytes 60] [--before WORKTREE]

The model answers after two seconds. Who is told that the server has no room asks again after as
many seconds as the answer says, as SDKs do."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Final

import aiohttp
from aiohttp import web

from agentlightning.store.client import LightningStoreClient
from agentlightning.types import AttemptedRollout, EnqueueRolloutRequest

HERE: Final = Path(__file__).parent
KEY: Final = "an-admin-key"
ANSWER: Final = {
    "id": "c",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [
        {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "yes"}}
    ],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}


@contextlib.contextmanager
def server(directory: Path, root: Path) -> Generator[tuple[str, int]]:
    """The URL and process id of a server of the package in `root`, as soon as it says where it
    listens."""
    log = directory / "log"
    command = [
        sys.executable,
        "-m",
        "agentlightning.cli.main",
        "server",
        "--port",
        "0",
        "--key",
        KEY,
    ]
    with log.open("wb") as output:
        environment = {**os.environ, "PYTHONPATH": str(root)}
        running = subprocess.Popen(
            [*command, "--store", directory / "store.db"],
            stdout=output,
            stderr=output,
            env=environment,
            cwd=root,
        )
    try:
        while " at http" not in log.read_text():
            assert running.poll() is None, log.read_text()
            time.sleep(0.05)
        yield log.read_text().split(" at ")[1].split()[0], running.pid
    finally:
        running.terminate()
        running.wait()


async def answer(request: web.Request) -> web.Response:
    async for _ in request.content.iter_any():
        pass
    await asyncio.sleep(2)
    return web.json_response(ANSWER)


async def call(
    session: aiohttp.ClientSession,
    url: str,
    rollout: AttemptedRollout,
    body: bytes,
    told: Counter[int],
):
    path = f"{url}/rollout/{rollout.rollout_id}/attempt/{rollout.attempt.attempt_id}/v1/chat/completions"
    headers = {"Authorization": f"Bearer {rollout.api_key}", "Content-Type": "application/json"}
    while True:
        async with session.post(path, data=body, headers=headers) as answered:
            await answered.read()
            told[answered.status] += 1
            if answered.status not in (429, 503):
                return
            await asyncio.sleep(float(answered.headers.get("retry-after", "1")))


async def beat(store: LightningStoreClient, leased: Sequence[AttemptedRollout]) -> None:
    """Keep the leases of what takes longer than they last."""
    while True:
        await asyncio.sleep(5)
        beats = (
            store.heartbeat(one.rollout_id, one.attempt.attempt_id, token_of(one)) for one in leased
        )
        await asyncio.gather(*beats, return_exceptions=True)  # some may find the server busy


def token_of(rollout: AttemptedRollout) -> int:
    assert rollout.lease is not None
    return rollout.lease.token


def most_resident_mb(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) // 1024


async def measure(root: Path, attempts: int, megabytes: int, kind: str) -> dict[str, object]:
    model = web.Application(client_max_size=1 << 30)
    model.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(model)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    upstream = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    content = "x" * (megabytes * 1_000_000)
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": content}]}).encode()
    told = Counter[int]()
    with tempfile.TemporaryDirectory() as directory, server(Path(directory), root) as (url, pid):
        store = LightningStoreClient(url, KEY)
        admin = {"Authorization": f"Bearer {KEY}"}
        timeout = aiohttp.ClientTimeout(total=3600)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            registration = {"base_url": upstream, "kind": kind, "trainable": False}
            async with session.put(
                f"{url}/api/v1/models/m", json=registration, headers=admin
            ) as answered:
                assert answered.status == 200, await answered.text()
            await store.enqueue_many_rollouts(
                [EnqueueRolloutRequest(input=number) for number in range(attempts)]
            )
            leased = await store.dequeue_many_rollouts(attempts)
            before = most_resident_mb(pid)
            beating = asyncio.create_task(beat(store, leased))
            began = time.monotonic()
            await asyncio.gather(*(call(session, url, one, body, told) for one in leased))
            seconds = time.monotonic() - began
            beating.cancel()
        await store.close()
        most = most_resident_mb(pid)
    await runner.cleanup()
    return {
        "before, MB": before,
        "most, MB": most,
        "seconds": round(seconds, 1),
        "answers": dict(told),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--attempts", type=int, default=50)
    parser.add_argument("--megabytes", type=int, default=60)
    parser.add_argument(
        "--kind",
        default="vllm",
        help="of the model: vllm, or openai, which is asked in the agent's words",
    )
    parser.add_argument(
        "--before", type=Path, metavar="WORKTREE", help="of an earlier commit, measured first"
    )
    arguments = parser.parse_args()
    for name, root in {"before": arguments.before, "now": HERE.parent}.items():
        if root is not None:
            print(
                name,
                asyncio.run(
                    measure(
                        root.absolute(), arguments.attempts, arguments.megabytes, arguments.kind
                    )
                ),
                flush=True,
            )


if __name__ == "__main__":
    main()
