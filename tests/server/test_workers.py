"""LLM calls answered by several processes beside the one that owns the store."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from agentlightning import semconv
from agentlightning.errors import ConfigError
from agentlightning.server.app import ServerSettings
from agentlightning.server.handover import OWNER, Place
from agentlightning.server.models import (
    HoldModel,
    ListModels,
    RegisterModel,
    ReleaseModel,
    RemoveModel,
)
from agentlightning.server.service import Running, running_server
from agentlightning.store.client import LightningStoreClient
from agentlightning.types import AttemptedRollout, Span
from tests.gateway.upstream import Server
from tests.server.conftest import until
from tests.server.test_forwarder import collecting

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
KEY = "a key of the admin"


@asynccontextmanager
async def serving(
    folder: Path, upstream: Server, **settings: Any
) -> AsyncIterator[tuple[Running, LightningStoreClient]]:
    registered = RegisterModel(name="m", base_url=upstream.url, check=False, train=None, val=None)
    given = {"workers": 2, "key": KEY, "registrations": (registered,)} | settings
    async with running_server(
        ServerSettings(store=str(folder / "store.sqlite"), **given)
    ) as running:
        client = LightningStoreClient(running.url, KEY)
        try:
            yield running, client
        finally:
            await client.close()


@pytest.fixture
async def upstream() -> AsyncIterator[Server]:
    server = Server()
    async with server.http:
        yield server


def path_of(begun: AttemptedRollout) -> str:
    return f"/rollout/{begun.rollout_id}/attempt/{begun.attempt.attempt_id}/v1/chat/completions"


def headers_of(begun: AttemptedRollout) -> dict[str, str]:
    return {"authorization": f"Bearer {begun.api_key}"}


def asking(said: str = "Hi") -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": said}]}


async def ask(http: aiohttp.ClientSession, begun: AttemptedRollout, **more: Any) -> int:
    """The status of a call of this attempt."""
    async with http.post(path_of(begun), json=asking() | more, headers=headers_of(begun)) as answer:
        await answer.read()
        return answer.status


async def calls_of(client: LightningStoreClient, begun: AttemptedRollout) -> list[Span]:
    spans = await client.query_spans(begun.rollout_id)
    return [span for span in spans if semconv.CALL_INDEX in span.attributes]


def workers() -> list[int]:
    """The workers that this process has started."""
    found: list[int] = []
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            if (
                parent == os.getpid()
                and b"agentlightning.server.worker" in (process / "cmdline").read_bytes()
            ):
                found.append(int(process.name))
    return found


async def test_one_connection_carries_calls_of_several_attempts_and_the_stores_calls(
    tmp_path, upstream
):
    async with serving(tmp_path, upstream) as (running, client):
        begun = [await client.start_rollout({"n": n}) for n in range(6)]
        connector = aiohttp.TCPConnector(limit=1)
        async with aiohttp.ClientSession(running.url, connector=connector) as http:
            for turn in range(3):
                for one in begun:
                    by_path = (
                        (path_of(one), {})
                        if turn == 1
                        else ("/v1/chat/completions", headers_of(one))
                    )
                    url, headers = by_path[0], by_path[1] or {"authorization": f"Bearer {KEY}"}
                    async with http.post(url, json=asking(), headers=headers) as answer:
                        assert answer.status == 200, await answer.text()
                        assert (await answer.json())["choices"][0]["message"]["content"]
                async with http.get(
                    "/api/v1/statistics", headers={"authorization": f"Bearer {KEY}"}
                ) as answer:
                    assert (await answer.json())["rollouts"] == 6
        for one in begun:
            indices = [span.attributes[semconv.CALL_INDEX] for span in await calls_of(client, one)]
            assert sorted(indices) == [0, 1, 2]


async def test_an_attempts_calls_at_once_are_numbered_apart_and_counted_together(
    tmp_path, upstream
):
    async with serving(tmp_path, upstream) as (running, client):
        begun = [await client.start_rollout({"n": n}) for n in range(8)]
        async with aiohttp.ClientSession(running.url) as http:
            said = [asking("x" * size) for size in (1, 10, 1_000, 100_000, 2_000_000)]
            statuses = await asyncio.gather(
                *(ask(http, one, **body) for body in said for one in begun)
            )
            assert Counter(statuses) == {200: 40}

            async def counted() -> bool:
                async with http.get(
                    "/metrics", headers={"authorization": f"Bearer {KEY}"}
                ) as answer:
                    return 'calls_total{model="m",outcome="answered"} 40.0' in await answer.text()

            await until(counted)
        for one in begun:
            indices = [span.attributes[semconv.CALL_INDEX] for span in await calls_of(client, one)]
            assert sorted(indices) == [0, 1, 2, 3, 4]


async def test_an_attempt_that_has_ended_is_told_to_stop(tmp_path, upstream):
    async with serving(tmp_path, upstream) as (running, client):
        begun = await client.start_rollout({})
        async with aiohttp.ClientSession(running.url) as http:
            assert await ask(http, begun) == 200
            await client.update_attempt(
                begun.rollout_id, begun.attempt.attempt_id, status="succeeded"
            )

            async def refused() -> bool:
                return await ask(http, begun) == 403

            await until(refused)


async def test_models_are_held_released_updated_and_changed_in_every_worker(tmp_path, upstream):
    async with serving(tmp_path, upstream) as (running, client):
        begun = [await client.start_rollout({"n": n}) for n in range(6)]
        async with aiohttp.ClientSession(running.url) as http:
            await client.perform(HoldModel(name="m"))
            asked = [asyncio.create_task(ask(http, one)) for one in begun]

            async def waiting() -> bool:
                (model,) = await client.perform(ListModels())
                return model.waiting == 6

            await until(waiting)
            assert upstream.asked == []
            await client.perform(ReleaseModel(name="m", policy_version=3))
            assert await asyncio.gather(*asked) == [200] * 6
            versions = {
                span.attributes[semconv.CALL_FIRST_VERSION]
                for one in begun
                for span in await calls_of(client, one)
            }
            assert versions == {3}

            upstream.hold()
            asked = [asyncio.create_task(ask(http, one)) for one in begun]
            await until(lambda: _true(upstream.running == 6))
            async with asyncio.timeout(20):  # a model is replaced while its calls are answered
                await client.perform(
                    RegisterModel(
                        name="m", base_url=upstream.url, check=False, train=None, val=None
                    )
                )
            upstream.release()
            assert await asyncio.gather(*asked) == [200] * 6

            await client.perform(RegisterModel(name="other", base_url=upstream.url, check=False))
            await client.perform(RemoveModel(name="m"))
            body = asking() | {"model": "other"}
            for one in begun:
                async with http.post(path_of(one), json=body, headers=headers_of(one)) as answer:
                    assert (await answer.json())["model"] == "other"


async def _true(value: bool) -> bool:
    return value


async def test_a_worker_that_is_killed_loses_nothing_and_another_takes_its_place(
    tmp_path, upstream
):
    async with serving(tmp_path, upstream) as (running, client):
        begun = [await client.start_rollout({"n": n}) for n in range(8)]
        answered: Counter[str] = Counter()
        stop = asyncio.Event()

        async def go_on_asking(one: AttemptedRollout) -> None:
            async with aiohttp.ClientSession(running.url) as http:
                while not stop.is_set():
                    with contextlib.suppress(aiohttp.ClientError, OSError):
                        answered[one.rollout_id] += await ask(http, one) == 200
                    await asyncio.sleep(0.001)

        asking_all = [asyncio.create_task(go_on_asking(one)) for one in begun]
        await until(lambda: _true(len(+answered) == 8))
        before = workers()
        assert len(before) == 2
        os.kill(before[0], signal.SIGKILL)
        await until(lambda: _true(len(workers()) == 2 and before[0] not in workers()))
        counts = dict(answered)
        await until(
            lambda: _true(all(answered[name] > count + 3 for name, count in counts.items()))
        )
        stop.set()
        await asyncio.gather(*asking_all)
        for one in begun:
            spans = await calls_of(client, one)
            assert len(spans) >= answered[one.rollout_id]
            assert len({span.span_id for span in spans}) == len(spans)
    assert workers() == []


async def test_a_worker_that_dies_while_calls_are_held_comes_back_and_holds_them(
    tmp_path, upstream
):
    async with serving(tmp_path, upstream) as (running, client):
        begun = await client.start_rollout({})
        before = workers()
        await client.perform(HoldModel(name="m", seconds=60))
        for worker in before:
            os.kill(worker, signal.SIGKILL)
        async with aiohttp.ClientSession(running.url) as http:

            async def answered() -> bool:
                with contextlib.suppress(aiohttp.ClientError):
                    return (await http.get("/v1/models", headers=headers_of(begun))).status == 200
                return False

            await until(lambda: _true(not set(before) & set(workers())))
            await until(answered)
            asked = asyncio.create_task(ask(http, begun))
            await asyncio.wait([asked], timeout=3)
            assert not asked.done()
            await client.perform(ReleaseModel(name="m"))
            assert await asked == 200


async def test_spans_are_redacted_by_whoever_answers_and_forwarded(tmp_path, upstream):
    hook = tmp_path / "hook.py"
    hook.write_text(
        "import msgspec\ndef quiet(span):\n    return msgspec.structs.replace(span, name='quiet')\n"
    )
    settings = {"hook": f"{hook}:quiet", "capture": "tokens"}
    async with (
        collecting() as collector,
        serving(tmp_path, upstream, otlp_forward=collector.url, **settings) as (running, client),
    ):
        begun = await client.start_rollout({})
        async with aiohttp.ClientSession(running.url) as http:
            said = asking("my key is sk-abcdefghijklmnopqrstuvwxyz0123456789")
            assert await ask(http, begun, **said) == 200
        (span,) = await calls_of(client, begun)
        assert span.name == "quiet" and "sk-abc" not in str(span) and span.tokens is not None
        await collector.until(spans=1)
    (sent,) = collector.spans
    assert sent.span_id == span.span_id and "sk-abc" not in str(sent)


async def test_a_request_that_another_process_answers_is_not_answered_behind_another(
    tmp_path, upstream
):
    def request(line: str, key: str = KEY, body: dict[str, Any] | None = None) -> bytes:
        data = json.dumps(body).encode() if body else b""
        return (
            f"{line} HTTP/1.1\r\nauthorization: Bearer {key}\r\ncontent-length: {len(data)}\r\n\r\n"
        ).encode() + data

    async with serving(tmp_path, upstream) as (running, client):
        address = urlsplit(running.url)

        async def ask(*parts: bytes) -> tuple[bytes, bool]:
            """What is answered to parts that come apart, and whether the connection ends then."""
            reader, writer = await asyncio.open_connection(address.hostname, address.port)
            for part in parts:
                writer.write(part)
                await asyncio.sleep(0.2)
            try:
                return await asyncio.wait_for(reader.read(), 1), True
            except TimeoutError:
                return b"", False
            finally:
                writer.close()

        begun = [await client.start_rollout({"n": n}) for n in range(20)]
        place = Place(OWNER, 2, tmp_path)
        own, other = (
            next(one for one in begun if place.of_call(None, headers_of(one)) == index)
            for index in (1, 2)
        )
        calls = [
            request("POST /v1/chat/completions", one.api_key, asking()) for one in (own, other)
        ]
        assert await ask(calls[1]) == (b"", False)  # its worker numbers its calls from here on
        for _ in range(2):
            for behind in (
                calls[1],
                request("GET /api/v1/statistics"),
                request("GET /metrics", "nobody"),
            ):
                answered, ended = await ask(calls[0] + behind)
                assert (
                    ended
                    and answered.count(b"HTTP/1.1 ") == 1
                    and answered.startswith(b"HTTP/1.1 200 ")
                )
            answered, ended = await ask(calls[0] + calls[1][:40], calls[1][40:])
            assert (
                ended
                and answered.count(b"HTTP/1.1 ") == 1
                and answered.startswith(b"HTTP/1.1 200 ")
            )
            assert await ask(calls[1][:40], calls[1][40:]) == (b"", False)
            assert await ask(calls[1] * 2) == (b"", False)
        indices = [span.attributes[semconv.CALL_INDEX] for span in await calls_of(client, other)]
        assert sorted(indices) == list(range(7))


async def test_workers_know_sessions_of_browsers(tmp_path, upstream):
    async with serving(tmp_path, upstream, rate_limit=100) as (running, _):
        connector, jar = aiohttp.TCPConnector(force_close=True), aiohttp.CookieJar(unsafe=True)
        async with aiohttp.ClientSession(
            running.url, connector=connector, cookie_jar=jar
        ) as browser:
            await browser.post("/api/v1/dashboard/session", json={"key": KEY})
            said = [
                (await browser.post("/v1/chat/completions", json=asking())).status for _ in range(6)
            ]
            assert Counter(said) == {200: 6}


async def test_what_workers_cannot_share_is_refused(tmp_path, upstream):
    with pytest.raises(ConfigError, match="TLS"):
        async with serving(tmp_path, upstream, tls_cert="c", tls_key="k"):
            pass
    async with serving(tmp_path, upstream) as (running, _):
        port = int(running.url.rpartition(":")[2])
        with pytest.raises(ConfigError, match="taken"):
            async with serving(tmp_path / "..", upstream, port=port):
                pass
