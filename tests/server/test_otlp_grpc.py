"""Exporters that speak gRPC meet the same rules as those that speak HTTP."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

from agentlightning.errors import ConfigError
from agentlightning.server.access import Access
from agentlightning.server.otlp_grpc import OtlpGrpcServer
from agentlightning.tracing.otlp import encode_traces
from agentlightning.types import UNATTRIBUTED, AttemptedRollout, Span
from tests.server.conftest import ADMIN_KEY
from tests.server.exporters import export, ids, key_of

pytestmark = pytest.mark.anyio
EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
ADMIN = {"authorization": f"Bearer {ADMIN_KEY}"}


@pytest.fixture
async def grpc_server(store) -> AsyncIterator[OtlpGrpcServer]:
    server = OtlpGrpcServer(store, Access(store, ADMIN_KEY), port=0, body_limit=100_000)
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def attempted(store) -> AttemptedRollout:
    return await store.start_rollout({"city": "Köln"})


def over_grpc(server: OtlpGrpcServer, headers: dict[str, str], **options) -> OTLPSpanExporter:
    return OTLPSpanExporter(server.endpoint, headers=headers, compression=grpc.Compression.Gzip, timeout=60, **options)


async def refusal(server: OtlpGrpcServer, body: bytes, headers: dict[str, str]) -> tuple[grpc.StatusCode, str]:
    address = server.endpoint.removeprefix("http://")
    async with grpc.aio.insecure_channel(address, compression=grpc.Compression.Gzip) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await channel.unary_unary(EXPORT)(body, metadata=list(headers.items()), timeout=60)
    return refused.value.code(), refused.value.details() or ""


async def test_an_exporter_that_holds_an_attempts_key_needs_nothing_else(store, grpc_server, attempted):
    await asyncio.to_thread(export, over_grpc(grpc_server, key_of(attempted)), {})
    plan, search = await store.query_spans(attempted.rollout_id)
    assert (plan.name, search.name, search.parent_id) == ("plan", "search", plan.span_id)


async def test_the_resource_names_an_attempt_or_nobody(store, grpc_server, attempted):
    await asyncio.to_thread(export, over_grpc(grpc_server, {"x-api-key": ADMIN_KEY}), ids(attempted))
    await asyncio.to_thread(export, over_grpc(grpc_server, ADMIN), {})
    assert len(await store.query_spans(attempted.rollout_id)) == 2
    assert len(await store.query_spans(UNATTRIBUTED)) == 2


async def test_a_refusal_has_its_code_and_says_why(store, grpc_server, attempted):
    assert (await refusal(grpc_server, b"", {}))[0] == grpc.StatusCode.UNAUTHENTICATED
    code, why = await refusal(grpc_server, b"\xff" * 300, ADMIN)
    assert code == grpc.StatusCode.INVALID_ARGUMENT and "not an OTLP trace request" in why
    code, _ = await refusal(grpc_server, bytes(50_000_000), ADMIN)  # 50 kB as it travels
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
    others = Span(
        rollout_id="other" * 10_000,
        attempt_id="other",
        sequence_id=0,
        trace_id="0af7651916cd43dd8448eb211c80319c",
        span_id="b7ad6b7169203331",
        name="tool",
        start_time=1.0,
        end_time=1.0,
    )
    code, why = await refusal(grpc_server, encode_traces([others]), key_of(attempted))
    assert code == grpc.StatusCode.PERMISSION_DENIED and attempted.rollout_id in why
    assert await store.query_spans(attempted.rollout_id) == []
    await store.close()
    assert (await refusal(grpc_server, encode_traces([others]), ADMIN))[0] == grpc.StatusCode.UNAVAILABLE


async def test_without_an_admin_key_programs_of_this_machine_send_as_they_like(store, attempted):
    server = OtlpGrpcServer(store, Access(store, None), port=0)
    await server.start()
    await asyncio.to_thread(export, over_grpc(server, {}), ids(attempted))
    await server.stop()
    assert len(await store.query_spans(attempted.rollout_id)) == 2


async def test_a_port_that_is_taken_is_said_so(store, grpc_server):
    port = int(grpc_server.endpoint.rpartition(":")[2])
    with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
        await OtlpGrpcServer(store, Access(store, None), port=port).start()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
async def test_with_a_certificate_the_port_speaks_tls(store, attempted, tmp_path):
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    )
    await asyncio.to_thread(
        subprocess.run, [*command.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True
    )
    server = OtlpGrpcServer(store, Access(store, ADMIN_KEY), port=0, tls=(certificate, key))
    await server.start()
    trusted = grpc.ssl_channel_credentials(certificate.read_bytes())
    await asyncio.to_thread(export, over_grpc(server, key_of(attempted), credentials=trusted), {})
    await server.stop()
    assert len(await store.query_spans(attempted.rollout_id)) == 2
    with pytest.raises(ConfigError, match="certificate"):
        await OtlpGrpcServer(store, Access(store, None), port=0, tls=(tmp_path / "none", key)).start()
