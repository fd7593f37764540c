"""LLM calls answered by gateway processes beside the server that owns the store."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Generator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from agentlightning import semconv
from agentlightning.data.call_filter import call_order
from agentlightning.errors import ForbiddenError
from agentlightning.prompts.components import write_candidate
from agentlightning.prompts.replacing import as_sent, record_of
from agentlightning.server.app import ServerSettings
from agentlightning.server.following import running_gateway
from agentlightning.server.model_calls import HoldModel, RegisterModel, ReleaseModel, RemoveModel
from agentlightning.store.client import LightningStoreClient
from agentlightning.types import AttemptedRollout, PromptCandidate, PromptText, Span
from tests.gateway.upstream import Server
from tests.server.conftest import until
from tests.server.test_forwarder import collecting
from tests.server.test_server_process import server_process
from tests.store.server_process import ServerProcess, free_port

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
KEY = "the-admin-key"
HELD = 0.5  # seconds after which a call that is not answered is taken to wait


@contextlib.contextmanager
def gateway_process(server: str, *options: str) -> Generator[tuple[subprocess.Popen[str], str]]:
    """`agl server --gateway-of` on a free port, and its URL; killed at the end if it still runs."""
    program = "from agentlightning.cli.main import main; main()"
    command = [sys.executable, "-c", program, "server", "--port", "0", "--gateway-of", server]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "AGL_KEY": KEY}
    with subprocess.Popen(
        [*command, *options], env=environment, text=True, stderr=subprocess.PIPE
    ) as process:
        try:
            assert process.stderr is not None
            said = ""
            while not (found := re.search(r"gateway of .+ at (https?://\S+)$", said)):
                line = process.stderr.readline()
                assert line, said
                said += line
            yield process, found[1]
        finally:
            process.kill()


@pytest.fixture
async def upstream() -> AsyncIterator[Server]:
    server = Server()
    async with server.http:
        yield server


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[ServerProcess]:
    monkeypatch.setenv("AGL_KEY", KEY)
    with ServerProcess(tmp_path / "store.sqlite", tmp_path / "log") as running:
        yield running


@pytest.fixture
async def client(server: ServerProcess) -> AsyncIterator[LightningStoreClient]:
    opened = LightningStoreClient(server.url, KEY)
    yield opened
    await opened.close()


def model(upstream: Server, name: str = "m") -> RegisterModel:
    return RegisterModel(name=name, base_url=upstream.url, check=False, train=None, val=None)


async def say(http: aiohttp.ClientSession, url: str, begun: AttemptedRollout, **more: Any) -> Any:
    """The status and answer of a call of this attempt at the gateway with this URL."""
    path = f"rollout/{begun.rollout_id}/attempt/{begun.attempt.attempt_id}/v1/chat/completions"
    asked = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **more}
    headers = {"authorization": f"Bearer {begun.api_key}"}
    async with http.post(f"{url}/{path}", json=asked, headers=headers) as answer:
        return answer.status, await answer.json()


async def ask(http: aiohttp.ClientSession, url: str, begun: AttemptedRollout, **more: Any) -> int:
    return (await say(http, url, begun, **more))[0]


async def calls_of(client: LightningStoreClient, begun: AttemptedRollout) -> list[Span]:
    spans = await client.query_spans(begun.rollout_id)
    return [span for span in spans if semconv.CALL_INDEX in span.attributes]


def indices(spans: list[Span]) -> list[int]:
    return sorted(int(str(span.attributes[semconv.CALL_INDEX])) for span in spans)


async def test_models_come_and_go_and_are_held_and_updated_at_each_gateway(
    server, client, upstream
):
    begun = await client.start_rollout({})
    with gateway_process(server.url) as (_, one), gateway_process(server.url) as (_, other):
        async with aiohttp.ClientSession() as http:
            urls = (one, other)
            assert [await ask(http, url, begun) for url in urls] == [404, 404]
            await client.perform(model(upstream))
            assert [await ask(http, url, begun) for url in urls] == [200, 200]

            await client.perform(HoldModel(name="m"))
            asked = [asyncio.create_task(ask(http, url, begun)) for url in urls]
            await asyncio.wait(asked, timeout=HELD)
            assert not any(task.done() for task in asked) and len(upstream.asked) == 2
            await client.perform(ReleaseModel(name="m", policy_version=3))
            assert await asyncio.gather(*asked) == [200, 200]
            spans = await calls_of(client, begun)
            assert [span.attributes[semconv.CALL_FIRST_VERSION] for span in spans] == [0, 0, 3, 3]

            upstream.hold()
            asked = [asyncio.create_task(ask(http, url, begun)) for url in urls]
            await until(lambda: _true(upstream.running == 2))
            await client.perform(model(upstream, "other"))
            await client.perform(RemoveModel(name="m"))
            upstream.release()  # calls under way are answered by the model they began with
            assert await asyncio.gather(*asked) == [200, 200]
            for url in urls:
                status, answer = await say(http, url, begun, model="m")
                assert (status, answer["model"]) == (200, "other")
            await client.perform(RemoveModel(name="other"))
            assert [await ask(http, url, begun) for url in urls] == [404, 404]
    assert indices(await calls_of(client, begun)) == list(range(8))


async def _true(value: bool) -> bool:
    return value


async def test_calls_of_one_attempt_at_several_gateways_are_numbered_apart(
    server, client, upstream
):
    begun = [await client.start_rollout({"n": n}) for n in range(4)]
    await client.perform(model(upstream))
    with gateway_process(server.url) as (_, one), gateway_process(server.url) as (_, other):
        async with aiohttp.ClientSession() as http:
            urls = (one, other, server.url)
            asked = [say(http, url, each) for _ in range(10) for url in urls for each in begun]
            answers = await asyncio.gather(*asked)
    assert Counter(status for status, _ in answers) == {200: 120}
    assert len({answer["id"] for _, answer in answers}) == 120
    for each in begun:
        spans = await calls_of(client, each)
        assert indices(spans) == list(range(30))
        assert len({span.span_id for span in spans}) == 30


async def test_a_gateway_of_another_server_puts_in_prompts_and_candidates(
    server, client, upstream, tmp_path
):
    def candidate(new: str) -> PromptCandidate:
        text = PromptText(place="system", sent="You are the writer.", text=new)
        return PromptCandidate(components={"writer.system": text})

    write_candidate(candidate("PRODUCTION"), tmp_path / "prompts.json")
    await client.perform(model(upstream))
    stored = await client.add_resources({"prompts": candidate("CANDIDATE")})
    plain = await client.start_rollout({})
    named = await client.start_rollout({}, resources_id=stored.resources_id)
    messages = [{"role": "system", "content": "You are the writer."}]
    options = ("--prompts", str(tmp_path))
    with gateway_process(server.url, *options) as (_, url):
        async with aiohttp.ClientSession() as http:
            for begun in (plain, named):
                assert await ask(http, url, begun, messages=messages) == 200
    assert [each["messages"][0]["content"] for each in upstream.asked] == [
        "PRODUCTION",
        "CANDIDATE",
    ]
    (span,) = await calls_of(client, plain)
    record = record_of(span)
    assert record is not None
    kept = await client.get_resources_by_id(record.resources_id)
    assert kept is not None
    production = {kept.resources_id: kept.resources["prompts"]}
    assert as_sent(span, production).messages == messages


async def test_links_are_not_recorded_of_calls_that_no_process_sees_all_of(
    server, client, upstream
):
    begun = await client.start_rollout({})
    await client.perform(model(upstream))
    with gateway_process(server.url) as (_, one), gateway_process(server.url) as (_, other):
        async with aiohttp.ClientSession() as http:
            for url in (one, one, other, one, server.url, one):
                assert await ask(http, url, begun) == 200
    spans = sorted(await calls_of(client, begun), key=call_order)
    linked = [semconv.CALL_CONTINUES in span.attributes for span in spans]
    assert linked == [True, True, False, False, False, False]


async def test_clients_that_leave_at_any_time_leave_no_number_out(server, client, upstream):
    begun = await client.start_rollout({})
    await client.perform(model(upstream))
    chance = random.Random(0)
    with gateway_process(server.url) as (_, url):
        async with aiohttp.ClientSession() as http:

            async def leave() -> None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(chance.uniform(0.001, 0.05)):
                        await ask(http, url, begun)

            for _ in range(10):
                await asyncio.gather(*(leave() for _ in range(20)))
            assert await ask(http, url, begun) == 200
        await until(lambda: _numbered_without_a_gap(client, begun))


async def _numbered_without_a_gap(client: LightningStoreClient, begun: AttemptedRollout) -> bool:
    found = indices(await calls_of(client, begun))
    return found == list(range(len(found)))


async def test_a_gateway_that_is_killed_loses_no_answered_call_and_another_goes_on(
    server, client, upstream
):
    begun = [await client.start_rollout({"n": n}) for n in range(8)]
    await client.perform(model(upstream))
    answered: Counter[str] = Counter()
    stop = asyncio.Event()
    with gateway_process(server.url) as (process, one), gateway_process(server.url) as (_, other):
        urls = [one]

        async def go_on_asking(each: AttemptedRollout) -> None:
            async with aiohttp.ClientSession() as http:
                while not stop.is_set():
                    with contextlib.suppress(aiohttp.ClientError, OSError):
                        answered[each.rollout_id] += await ask(http, urls[0], each) == 200
                    await asyncio.sleep(0.001)

        asking = [asyncio.create_task(go_on_asking(each)) for each in begun]
        await until(lambda: _true(len(answered) == 8 and min(answered.values()) > 5))
        process.kill()
        before = {each.rollout_id: len(await calls_of(client, each)) for each in begun}
        await asyncio.sleep(HELD)  # which a proxy takes to send calls elsewhere
        urls[0] = other
        counts = dict(answered)
        await until(
            lambda: _true(all(answered[name] > count + 3 for name, count in counts.items()))
        )
        stop.set()
        await asyncio.gather(*asking)
    for each in begun:
        spans = await calls_of(client, each)
        assert before[each.rollout_id] >= counts[each.rollout_id]
        assert len(spans) >= answered[each.rollout_id]
        assert indices(spans) == list(range(len(spans)))


async def test_a_server_may_restart_under_its_gateways(server, client, upstream):
    begun = [await client.start_rollout({"n": n}) for n in range(4)]
    await client.perform(model(upstream))
    with gateway_process(server.url) as (_, one), gateway_process(server.url) as (_, other):
        async with aiohttp.ClientSession() as http:
            pairs = [(url, each) for url in (one, other) for each in begun]
            assert {await ask(http, *pair) for pair in pairs} == {200}
            upstream.hold()
            running = [asyncio.create_task(ask(http, *pair)) for pair in pairs]
            await until(lambda: _true(upstream.running == len(pairs)))
            await asyncio.to_thread(server.kill)
            upstream.release()
            waiting = [asyncio.create_task(ask(http, *pair)) for pair in pairs]
            await asyncio.wait([*running, *waiting], timeout=HELD)
            assert not any(task.done() for task in running), "they are answered once stored"
            await asyncio.to_thread(server.start)
            await client.perform(model(upstream))  # as its trainer does
            assert set(await asyncio.gather(*running)) == {200}
            # those that came before the model did were refused, as the server would have
            assert set(await asyncio.gather(*waiting)) <= {200, 404}
            assert {await ask(http, *pair) for pair in pairs} == {200}
    for each in begun:
        spans = await calls_of(client, each)
        assert len(spans) >= 6 and indices(spans) == list(range(len(spans)))


async def test_an_attempt_that_has_ended_is_told_to_stop(server, client, upstream):
    begun = await client.start_rollout({})
    await client.perform(model(upstream))
    with gateway_process(server.url) as (_, url):
        async with aiohttp.ClientSession() as http:
            assert await ask(http, url, begun) == 200
            await client.update_attempt(
                begun.rollout_id, begun.attempt.attempt_id, status="succeeded"
            )
            status, answer = await say(http, url, begun)
            assert (status, answer["error"]["code"]) == (403, "attempt_ended")


async def test_spans_are_redacted_and_forwarded_as_the_server_says(tmp_path, upstream):
    (tmp_path / "hook.py").write_text(
        "import msgspec\ndef quiet(span):\n    return msgspec.structs.replace(span, name='quiet')\n"
    )
    said = [{"role": "user", "content": "my key is sk-abcdefghijklmnopqrstuvwxyz0123456789"}]
    async with collecting() as collector:
        hook = ("--redact", "hook.py:quiet", "--otlp-forward", collector.url)
        for number, options in enumerate((("--capture", "tokens"), hook)):
            store = ("--store", f"{number}.db")
            with (
                server_process(tmp_path, *store, *options) as (_, server),
                gateway_process(server) as (_, url),
            ):
                client = LightningStoreClient(server, KEY)
                await client.perform(model(upstream))
                begun = await client.start_rollout({})
                async with aiohttp.ClientSession() as http:
                    assert await ask(http, url, begun, messages=said) == 200
                (span,) = await calls_of(client, begun)
                assert "sk-abc" not in str(span) and span.tokens is not None
                hidden = semconv.GEN_AI_INPUT_MESSAGES not in span.attributes
                assert (hidden, span.name == "quiet") == (not number, bool(number))
                await collector.until(spans=number)
                await client.close()
    assert [sent.span_id for sent in collector.spans] == [span.span_id]


@contextlib.contextmanager
def nginx_before(folder: Path, servers: dict[str, str]) -> Generator[str]:
    """The URL of nginx with the configuration of `deploy`, before servers with these names."""
    conf = (ROOT / "deploy" / "nginx.conf").read_text()
    for name, url in servers.items():
        conf = conf.replace(f"server {name}:8123;", f"server {url.removeprefix('http://')};")
    port = free_port()
    conf = conf.replace("listen 80;", f"listen 127.0.0.1:{port};")
    (folder / "nginx.conf").write_text(
        f"daemon off; pid {folder}/pid; events {{}}\nhttp {{ access_log off; {conf} }}\n"
    )
    command = ["nginx", "-p", str(folder), "-c", "nginx.conf", "-e", str(folder / "errors")]
    with subprocess.Popen(command) as process:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")
async def test_nginx_sends_an_attempts_calls_to_one_gateway_and_all_else_to_the_server(
    server, client, upstream, tmp_path
):
    begun = [await client.start_rollout({"n": n}) for n in range(12)]
    await client.perform(model(upstream))
    with (
        gateway_process(server.url) as (_, one),
        gateway_process(server.url) as (_, other),
        nginx_before(tmp_path, {"server": server.url, "gateway1": one, "gateway2": other}) as url,
    ):
        through = LightningStoreClient(url, KEY)
        assert (await through.statistics())["rollouts"] == 12
        await through.close()
        async with aiohttp.ClientSession() as http:
            runs = Counter[str]()
            for each in begun:
                ids = [(await say(http, url, each))[1]["id"] for _ in range(3)]
                (run,) = {id_.rpartition("-")[2] for id_ in ids}
                runs[run] += 1
            assert len(runs) == 2, "each process has a name of its own in the ids of its answers"
            asked = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
            for each in begun:
                headers = {"authorization": f"Bearer {each.api_key}"}
                answers = [
                    await http.post(f"{url}/v1/chat/completions", json=asked, headers=headers)
                    for _ in range(2)
                ]
                ids = [(await answer.json())["id"].rpartition("-")[2] for answer in answers]
                assert len(set(ids)) == 1 and ids[0] in runs
            browser = await http.post(f"{url}/v1/chat/completions", json=asked)
            assert browser.status == 401
            async with http.get(
                f"{url}/metrics", headers={"authorization": f"Bearer {KEY}"}
            ) as said:
                assert "agl_gateways 2.0" in await said.text()


async def test_a_gateway_has_no_store_and_says_whether_it_can_work(server, upstream):
    admin = {"authorization": f"Bearer {KEY}"}
    with gateway_process(server.url) as (process, url):
        async with aiohttp.ClientSession(headers=admin) as http:
            for path in ("api/v1/statistics", "v1/traces", "rewards/key"):
                assert (await http.post(f"{url}/{path}")).status == 404
            for path in ("health", "ready", "metrics", "v1/models"):
                assert (await http.get(f"{url}/{path}")).status == 200
            await asyncio.to_thread(server.kill)
            assert (await http.get(f"{url}/health")).status == 200
            assert (await http.get(f"{url}/ready")).status == 503
            process.terminate()
            assert await asyncio.to_thread(process.wait, 60) == 0
    given = gateway_process(server.url, "--store", "a.db")
    with pytest.raises(AssertionError, match="--store is for the server itself"), given:
        pass


async def test_a_gateway_needs_the_servers_key(server, client):
    lesser = await client.issue_key("a trainer's", ["trainer"])
    for key in ("another key", lesser.api_key):
        with pytest.raises(ForbiddenError):
            async with running_gateway(server.url, ServerSettings(store="", key=key)):
                pass
