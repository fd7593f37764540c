"""The REST interface as any HTTP client sees it: JSON, keys, and errors that explain themselves."""

from __future__ import annotations

import gzip

import aiohttp
import msgspec
import pytest

from agentlightning.gateway.gateway import Gateway
from agentlightning.gateway.models import ModelTable
from agentlightning.server import rest
from agentlightning.server.app import create_app
from agentlightning.server.serve import HttpServer
from agentlightning.store.client import LightningStoreClient
from tests.server.conftest import ADMIN_KEY

pytestmark = pytest.mark.anyio

ADMIN = {"Authorization": f"Bearer {ADMIN_KEY}"}


def span_json(rollout_id: str, attempt_id: str, **fields) -> bytes:
    span = {
        "rollout_id": rollout_id,
        "attempt_id": attempt_id,
        "sequence_id": 0,
        "trace_id": "t",
        "span_id": "s",
        "name": "n",
        "start_time": 0,
        "end_time": 1,
        **fields,
    }
    return msgspec.json.encode({"spans": [span]})


async def error_of(answer) -> str:
    body = await answer.json()
    assert set(body) == {"error"}
    assert "Traceback" not in body["error"]["message"]
    return body["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "message"),
    [
        ("GET", "/rollouts/ro-nowhere", None, 404, "ro-nowhere"),
        ("GET", "/nowhere", None, 404, "/api/v1/nowhere; /docs"),
        ("DELETE", "/rollouts", None, 405, "DELETE"),
        ("POST", "/rollouts", b"[{", 422, "/api/v1/rollouts"),
        ("POST", "/rollouts", b'{"requests": [{"inputs": 1}]}', 422, "inputs"),
        ("POST", "/rollouts", b'{"requests": [{"input": 1, "mode": "practice"}]}', 422, "practice"),
        ("POST", "/rollouts/lease", b'{"limit": 0}', 422, "limit"),
        ("POST", "/rollouts", b'{"requests": [{"input": "\xff"}]}', 422, "utf-8"),
        ("POST", "/rollouts", b'{"requests": [{"input": ' + b"[" * 20_000, 422, "recursion"),
        ("GET", "/runs/run-1/complete-groups?timeout=nan", None, 422, "timeout"),
        ("POST", "/spans", b" " * 100_001, 413, "100000"),
        ("POST", "/spans", span_json("ro-1", "at-1", sequence_id=2**65), 422, "sequence_id"),
    ],
)
async def test_what_is_wrong_with_a_request_is_said(http, method, path, body, status, message):
    answer = await http.request(method, f"/api/v1{path}", data=body, headers=ADMIN)
    assert answer.status == status
    assert message in await error_of(answer)


async def test_a_body_in_an_encoding_that_is_not_read_is_refused(http):
    headers = {"Content-Encoding": "gzip", **ADMIN}
    answer = await http.post(
        "/api/v1/rollouts", data=gzip.compress(b'{"requests": []}'), headers=headers
    )
    assert answer.status == 422
    assert "'gzip'" in await error_of(answer)


async def test_ids_in_urls_are_decoded_once(server, store):
    client = LightningStoreClient(server.url, ADMIN_KEY)
    worker = await client.update_worker("host/1 ü%2F", {"load": 1})
    assert (
        [w.worker_id for w in await client.query_workers()] == [worker.worker_id] == ["host/1 ü%2F"]
    )
    await client.close()


async def test_no_web_page_of_elsewhere_is_let_in(http):
    origin = {"Origin": "https://evil.example", "Access-Control-Request-Method": "GET"}
    for method, path in (
        ("OPTIONS", "/api/v1/statistics"),
        ("GET", "/api/v1/statistics"),
        ("GET", "/health"),
    ):
        answer = await http.request(method, path, headers={**ADMIN, **origin})
        assert not [name for name in answer.headers if name.lower().startswith("access-control")]


async def test_a_poll_is_answered_before_a_proxy_would_cut_it(store, monkeypatch):
    monkeypatch.setattr(rest, "LONGEST_POLL", 0.05)
    app = create_app(store)
    rollout = await store.enqueue_rollout("nobody runs it")
    async with HttpServer(app) as server, aiohttp.ClientSession(server.url) as http:
        for timeout in (1e308, 3600, None):
            body = {"rollout_ids": [rollout.rollout_id], "timeout": timeout}
            answer = await http.post("/api/v1/rollouts/wait", json=body)
            assert (answer.status, await answer.json()) == (200, [])


@pytest.mark.parametrize(
    ("method", "path", "status", "says"),
    [
        ("POST", "/v1/chat/completions", 404, "no model is called"),
        ("POST", "/rollout/none/attempt/none/v1/chat/completions", 404, "there is no rollout"),
        ("POST", "/rollout/none/attempt//v1/chat/completions", 404, "/docs"),
        ("POST", "/rollout/a/attempt/b/c/v1/chat/completions", 404, "/docs"),
        ("GET", "/v1/chat/completions", 405, "GET"),
        ("POST", "/v1/models", 405, "POST"),
    ],
)
async def test_a_path_is_understood_as_the_framework_does(
    store, method: str, path: str, status: int, says: str
):
    app = create_app(store, gateway=Gateway(ModelTable(), store))
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    async with HttpServer(app) as server, aiohttp.ClientSession(server.url) as http:
        async with http.request(method, path, json=body) as answer:
            assert answer.status == status
            assert says in await answer.text()
        async with http.get("/metrics") as answer:
            text = await answer.text()
    template = "/rollout/{rollout_id}/attempt/{attempt_id}/v1/chat/completions"
    assert (f'route="{template}"' in text) == ("no rollout" in says)
