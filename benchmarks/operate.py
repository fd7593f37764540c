"""What an operator plans with: bytes of a rollout, and the seconds of a restart, a backup, an
export and an import.

    python benchmarks/operate.py [--rollouts 10000] [--out benchmarks/results/operate.json]

A rollout has six spans of 2 kB, like those of benchmarks/store.py. The floor of the same run is a
copy of the store's file, synchronised to the disk."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from agentlightning.store.sql import SqlStore
from agentlightning.tracing.context import AttemptTracer
from agentlightning.types import EnqueueRolloutRequest

SPANS = 6
SPAN_BYTES = 2000
RESTARTS = 5


async def fill(path: Path, count: int) -> None:
    """A store with `count` finished rollouts."""
    store = await SqlStore.open(path)
    for start in range(0, count, 500):
        batch = [
            EnqueueRolloutRequest(input={"n": n}) for n in range(start, min(count, start + 500))
        ]
        await store.enqueue_many_rollouts(batch)
        for leased in await store.dequeue_many_rollouts(len(batch)):
            tracer = AttemptTracer(leased.rollout_id, leased.attempt.attempt_id)
            spans = [
                tracer.record("work", {"text": secrets.token_hex(SPAN_BYTES // 2)})
                for _ in range(SPANS)
            ]
            await store.add_many_spans(spans)
            await store.update_attempt(
                leased.rollout_id, leased.attempt.attempt_id, status="succeeded"
            )
    await store.close()


def seconds(work: Callable[[], object]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


def agl(*arguments: object) -> None:
    command = [sys.executable, "-m", "agentlightning.cli.main", *map(str, arguments)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def start(store: Path, port: int) -> subprocess.Popen[bytes]:
    """A server, as soon as it is ready."""
    command = [
        sys.executable,
        "-m",
        "agentlightning.cli.main",
        "server",
        "--store",
        str(store),
        "--port",
        str(port),
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=1):
                return process
        except (urllib.error.URLError, OSError):
            assert process.poll() is None, "the server has ended"
            time.sleep(0.01)


def restart_seconds(store: Path) -> float:
    """The median time from SIGTERM to a server that is ready again."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process, took = start(store, port), []
    for _ in range(RESTARTS):
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        process.wait()
        process = start(store, port)
        took.append(time.monotonic() - began)
    process.terminate()
    process.wait()
    return sorted(took)[RESTARTS // 2]


def synchronised_copy(source: Path, target: Path) -> None:
    with source.open("rb") as read, target.open("wb") as write:
        while part := read.read(1 << 20):
            write.write(part)
        write.flush()
        os.fsync(write.fileno())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rollouts", type=int, default=10_000)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/operate.json"))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        store, exported = here / "store.sqlite", here / "rollouts.jsonl.gz"
        asyncio.run(fill(store, given.rollouts))
        size = store.stat().st_size
        rows = {
            "bytes of a rollout": size / given.rollouts,
            "restart, seconds": restart_seconds(store),
            "copy of the file (floor), seconds": seconds(
                lambda: synchronised_copy(store, here / "copy")
            ),
            "backup, seconds": seconds(
                lambda: agl("store", "backup", here / "backup.sqlite", "--store", store)
            ),
            "export, seconds": seconds(
                lambda: agl("export", exported, "--format", "rollouts", "--store", store)
            ),
            "import, seconds": seconds(
                lambda: agl("import", exported, "--store", here / "new.sqlite")
            ),
        }
    print(
        f"| {given.rollouts:,} rollouts of {SPANS} spans of {SPAN_BYTES / 1000:g} kB | |\n|---|---|"
    )
    for name, value in rows.items():
        print(f"| {name} | {value:,.2f} |")
    given.out.write_text(json.dumps({"rollouts": given.rollouts, **rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
