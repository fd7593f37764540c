"""What a server stores goes on to a collector of the user's own, and costs the store nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from click.testing import CliRunner
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

from agentlightning.cli.server_commands import server
from agentlightning.errors import ConfigError
from agentlightning.gateway.models import ModelEntry
from agentlightning.semconv import ATTEMPT_ID, GEN_AI_INPUT_TOKENS, GEN_AI_OUTPUT_TOKENS
from agentlightning.server import forwarder as forwarding
from agentlightning.server.app import ServerSettings
from agentlightning.server.forwarder import Forwarder, traces_url
from agentlightning.server.server_process import Running, running_server
from agentlightning.store.client import LightningStoreClient
from agentlightning.tracing.otlp import PROTOBUF, decode_traces
from agentlightning.types import AttemptedRollout, SampledChoice, Span, TokenCapture
from tests.gateway.world import GREEDY, talking
from tests.server.conftest import until
from tests.server.exporters import export, key_of
from tests.store.conftest import span_of

pytestmark = pytest.mark.anyio


class CollectorStandIn:
    """Takes OTLP over HTTP as collectors do; `answers` are what it says, one after the other, then
    200."""

    def __init__(self) -> None:
        self.url = ""
        self.spans: list[Span] = []
        self.headers: list[Any] = []
        self.answers: list[web.Response] = []
        self.awake = asyncio.Event()
        self.awake.set()
        self._changed = asyncio.Event()

    async def take(self, request: web.Request) -> web.Response:
        body = await request.read()  # aiohttp inflates it
        await self.awake.wait()
        self.headers.append(request.headers)
        answer = self.answers.pop(0) if self.answers else web.Response(content_type=PROTOBUF)
        if answer.status == 200:
            self.spans += decode_traces(body, request.headers["content-type"])
        self._changed.set()
        return answer

    async def until(self, spans: int) -> None:
        async with asyncio.timeout(60):
            while len(self.spans) < spans:
                self._changed.clear()
                await self._changed.wait()


@asynccontextmanager
async def collecting(port: int = 0) -> AsyncIterator[CollectorStandIn]:
    collector = CollectorStandIn()
    application = web.Application(client_max_size=100_000_000)
    application.router.add_post("/v1/traces", collector.take)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    collector.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield collector
    finally:
        collector.awake.set()
        await runner.cleanup()


@pytest.fixture
async def collector(anyio_backend) -> AsyncIterator[CollectorStandIn]:
    async with collecting() as running:
        yield running


@asynccontextmanager
async def forwarding_server(
    collector: CollectorStandIn, models: Sequence[ModelEntry] = (), **settings: Any
) -> AsyncIterator[tuple[Running, LightningStoreClient, AttemptedRollout]]:
    async with running_server(
        ServerSettings(":memory:", otlp_forward=collector.url, **settings), models
    ) as running:
        store = LightningStoreClient(running.url)
        yield running, store, await store.start_rollout("task")
        await store.close()


def span(attempted: AttemptedRollout | None = None, number: int = 1, **fields: Any) -> Span:
    times = {"start_time": 1.5, "end_time": 2.5}
    return span_of(attempted or ("r", "a"), f"{number:016x}", name="tool", **times, **fields)


async def test_spans_of_every_way_in_reach_the_collector(collector):
    async with (
        talking() as (backend, _),
        forwarding_server(collector, [ModelEntry("policy", backend, train=GREEDY)]) as (
            running,
            store,
            mine,
        ),
    ):
        await store.add_span(span(mine, attributes={"city": "Köln"}))
        exporter = OTLPSpanExporter(f"{running.url}/v1/traces", headers=key_of(mine))
        await asyncio.to_thread(export, exporter, {"service.name": "travel"})
        path = f"{running.url}/rollout/{mine.rollout_id}/attempt/{mine.attempt.attempt_id}/v1/chat/completions"
        request = {
            "model": "policy",
            "messages": [{"role": "user", "content": "hello"}],
            "max_tokens": 3,
        }
        async with aiohttp.ClientSession() as http, http.post(path, json=request) as answer:
            assert answer.status == 200, await answer.text()
        await collector.until(spans=4)
        stored = {one.span_id: one for one in await store.query_spans(mine.rollout_id)}
    assert {one.span_id for one in collector.spans} == set(stored)
    for one in collector.spans:
        assert one.resource[ATTEMPT_ID] == mine.attempt.attempt_id
        kept = stored[one.span_id]
        assert (one.name, one.parent_id, one.start_time) == (
            kept.name,
            kept.parent_id,
            kept.start_time,
        )
    services = {one.name: one.resource["service.name"] for one in collector.spans}
    assert (services["plan"], services["tool"]) == ("travel", "agentlightning")


async def test_token_ids_stay_and_their_counts_go(collector):
    choice = SampledChoice(token_ids=(7, 8), logprobs=(-0.1, -0.2), finish_reason="stop")
    tokens = TokenCapture(prompt_token_ids=(1, 2, 3), choices=(choice, choice))
    async with forwarding_server(collector) as (_, store, mine):
        await store.add_span(span(mine, tokens=tokens))
    (call,) = collector.spans
    assert call.tokens is None
    assert (call.attributes[GEN_AI_INPUT_TOKENS], call.attributes[GEN_AI_OUTPUT_TOKENS]) == (3, 4)


async def test_headers_go_to_the_collector_alone_also_where_it_points_elsewhere(collector):
    async with collecting() as other:
        collector.answers = [
            web.Response(status=307, headers={"location": f"{other.url}/v1/traces"})
        ]
        headers = (("authorization", "Bearer k"),)
        async with forwarding_server(collector, otlp_forward_headers=headers) as (_, store, mine):
            await store.add_span(span(mine))
        assert other.headers == []
    assert collector.headers[0]["authorization"] == "Bearer k"


async def test_a_collector_that_does_not_answer_holds_the_end_up_for_a_few_seconds_at_most(
    collector, monkeypatch, caplog
):
    monkeypatch.setattr(forwarding, "CLOSE_SECONDS", 0.3)
    collector.awake.clear()
    forwarder = Forwarder(traces_url(collector.url), linger=0.01)
    forwarder.take([span()])
    async with asyncio.timeout(5):
        await forwarder.close()
    assert "1 of 1 spans did not reach" in caplog.text


async def test_metrics_count_what_was_sent_and_dropped(collector):
    collector.answers = [web.Response(status=400)]
    async with (
        forwarding_server(collector) as (running, store, mine),
        aiohttp.ClientSession() as http,
    ):
        await store.add_span(span(mine))
        counted = {
            "agl_forward_taken_spans_total 1.0",
            "agl_forward_dropped_spans_total 1.0",
            "agl_forward_sent_spans_total 0.0",
        }

        async def shown() -> bool:
            async with http.get(f"{running.url}/metrics") as answer:
                return counted <= set((await answer.text()).splitlines())

        await until(shown)


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("http://collector:4318", "http://collector:4318/v1/traces"),
        ("http://collector:4318/", "http://collector:4318/v1/traces"),
        ("https://host/api/public/otel", "https://host/api/public/otel/v1/traces"),
        ("https://host/v1/traces", "https://host/v1/traces"),
    ],
)
async def test_the_path_of_the_protocol_is_appended_unless_it_is_there(given, used):
    assert str(traces_url(given)) == used


@pytest.mark.parametrize(
    "address", ["collector:4318", "grpc://collector:4317", "http://", "http://a..b:4318", ""]
)
async def test_what_is_no_address_is_refused(address):
    with pytest.raises(ConfigError, match="http://localhost:4318"):
        traces_url(address)


async def test_a_server_does_not_forward_to_itself():
    settings = ServerSettings(":memory:", port=4318, otlp_forward="http://localhost:4318")
    with pytest.raises(ConfigError, match="this server itself"):
        async with running_server(settings):
            pass


@pytest.mark.parametrize("header", ["authorization", "=x", "a b=c", "a=b\r\nc: d"])
def test_a_header_that_cannot_be_one_is_refused_on_the_command_line(header):
    options = ["--otlp-forward", "http://localhost:1", "--otlp-forward-header", header]
    result = CliRunner().invoke(server, options)
    assert result.exit_code == 2
    assert "NAME=VALUE" in result.output
