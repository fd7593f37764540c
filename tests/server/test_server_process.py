"""`agl server` as a process: what it acknowledged outlives SIGTERM, and its options do what they
say."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Generator
from pathlib import Path

import pytest

from agentlightning.errors import ConfigError, UnavailableError
from agentlightning.server.app import ServerSettings
from agentlightning.server.server_process import retain, running_server
from agentlightning.store.base import LightningStore
from agentlightning.store.client import LightningStoreClient
from agentlightning.store.sql import SqlStore
from agentlightning.types import Rollout
from tests.server.conftest import until
from tests.store.conftest import span_of

pytestmark = pytest.mark.anyio
ROOT = Path(__file__).parents[2]
KEY = "the-admin-key"


@contextlib.contextmanager
def server_process(directory: Path, *options: str) -> Generator[tuple[subprocess.Popen[str], str]]:
    """`agl server` on a free port, and its URL; killed at the end if it still runs."""
    command = [
        sys.executable,
        "-c",
        "from agentlightning.cli.main import main; main()",
        "server",
        "--port",
        "0",
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "AGL_KEY": KEY}
    with subprocess.Popen(
        [*command, *options], cwd=directory, env=environment, text=True, stderr=subprocess.PIPE
    ) as process:
        try:
            assert process.stderr is not None
            greeting = process.stderr.readline()
            found = re.search(r" at (https?://\S+?)(,|$)", greeting)
            assert found, greeting + process.stderr.read()
            yield process, found[1]
        finally:
            process.kill()


async def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    """The exit code of a process that is ending, and the rest of what it said."""
    _, err = await asyncio.to_thread(process.communicate, None, 60)
    return process.returncode, err


async def write_until_refused(url: str, acknowledged: list[Rollout]) -> None:
    client = LightningStoreClient(url, KEY, patience=0.1)
    with contextlib.suppress(UnavailableError):
        while True:
            acknowledged.append(await client.enqueue_rollout(len(acknowledged)))
    await client.close()


@pytest.mark.slow
async def test_sigterm_loses_nothing_and_lets_nobody_hang(tmp_path):
    acknowledged: list[Rollout] = []
    with server_process(tmp_path, "--store", "store.db") as (process, url):
        poller = LightningStoreClient(url, KEY, patience=0.1)
        never = await poller.enqueue_rollout("nobody runs it")
        poll = asyncio.create_task(poller.wait_for_rollouts([never.rollout_id], timeout=60))
        writers = [asyncio.create_task(write_until_refused(url, acknowledged)) for _ in range(8)]

        async def many_are_acknowledged() -> bool:
            assert process.poll() is None
            return len(acknowledged) >= 200

        await until(many_are_acknowledged)
        process.send_signal(signal.SIGTERM)
        code, err = await finish(process)
        await asyncio.gather(*writers)
        with pytest.raises(UnavailableError):
            await poll
        await poller.close()
    assert (code, err) == (0, "stopping\n")
    store = await SqlStore.open(tmp_path / "store.db")
    stored = {rollout.rollout_id for rollout in await store.query_rollouts()}
    assert {rollout.rollout_id for rollout in acknowledged} <= stored
    await store.close()


async def test_a_hook_sees_each_span_before_it_is_written(tmp_path):
    (tmp_path / "hook.py").write_text(
        "def quiet(span):\n    return None if span.name == 'private' else span\n"
    )
    with server_process(tmp_path, "--redact", "hook.py:quiet", "--capture", "tokens") as (_, url):
        client = LightningStoreClient(url, KEY)
        started = await client.start_rollout(1)
        for name in ("private", "public"):
            await client.add_span(span_of(started, name, name=name))
        assert [span.name for span in await client.query_spans(started.rollout_id)] == ["public"]
        await client.close()


async def test_what_cannot_be_served_leaves_nothing_open(tmp_path):
    path = str(tmp_path / "store.db")
    with pytest.raises(ConfigError, match="key"):
        async with running_server(ServerSettings(store=path, host="0.0.0.0")):
            pass
    with pytest.raises(ConfigError, match="rate limit"):
        async with running_server(ServerSettings(store=path, rate_limit=0.0)):
            pass
    async with running_server(ServerSettings(store=path)):
        pass


# --- retention ------------------------------------------------------------------------------------


async def ended(store: LightningStore) -> str:
    rollout = await store.start_rollout("a task")
    await store.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status="succeeded")
    return rollout.rollout_id


@contextlib.asynccontextmanager
async def retaining(store: LightningStore, older_than: float, **options) -> AsyncIterator[None]:
    task = asyncio.create_task(retain(store, older_than, **options))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()


async def until_gone(store: SqlStore, rollout_id: str) -> None:
    async def gone() -> bool:
        return await store.get_rollout_by_id(rollout_id) is None

    await until(gone)


async def test_what_is_old_goes_at_once_and_again_and_again(store, caplog):
    caplog.set_level(logging.INFO, "agentlightning")
    first, unfinished = await ended(store), await store.start_rollout("at work")
    async with retaining(store, 1e-6, every_seconds=0.01):
        await until_gone(store, first)
        await until_gone(store, await ended(store))
        assert await store.get_rollout_by_id(unfinished.rollout_id) is not None
    assert "removed 1 rollouts" in caplog.text
    assert "delete_rollouts by retention" in caplog.text


async def test_what_is_young_by_the_stores_clock_stays(caplog):
    """That of a machine which slept for a day is a day behind."""
    caplog.set_level(logging.INFO, "agentlightning.audit")
    store = await SqlStore.open(":memory:", clock=lambda: time.time() - 86_400)
    young = await ended(store)

    async def looked() -> bool:
        return len(caplog.records) >= 2

    async with retaining(store, 3600, every_seconds=0.001):
        await until(looked)
    assert await store.get_rollout_by_id(young) is not None
    await store.close()


async def test_a_store_that_is_away_is_tried_again(store, caplog, monkeypatch):
    rollout_id, perform, lost = await ended(store), store.perform, iter(range(3))

    async def flaky(call):
        if call.method == "get_time" and next(lost, None) is not None:
            raise UnavailableError("the database is away")
        return await perform(call)

    monkeypatch.setattr(store, "perform", flaky)
    async with retaining(store, 1e-6, every_seconds=0.01):
        await until_gone(store, rollout_id)
    assert "trying again in 0.01 s: the database is away" in caplog.text
