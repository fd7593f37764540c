"""Spans of ordinary OpenTelemetry exporters reach the attempt they belong to, and are never lost
for want of one."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib

import pytest
from google.rpc.status_pb2 import Status
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from agentlightning.semconv import ATTEMPT_ID, CALL_DISCARDS, ROLLOUT_ID, reward_name
from agentlightning.tracing.otlp import JSON, PROTOBUF, SCOPE_NAME, parse_request
from agentlightning.types import UNATTRIBUTED, AttemptedRollout, Span
from tests.server.conftest import ADMIN_KEY
from tests.server.exporters import export, ids, key_of

pytestmark = pytest.mark.anyio
ADMIN = {"authorization": f"Bearer {ADMIN_KEY}"}


def over_http(url: str, headers: dict[str, str]) -> OTLPSpanExporter:
    return OTLPSpanExporter(
        f"{url}/v1/traces", headers=headers, compression=Compression.Gzip, timeout=60
    )


def attempt_path(attempted: AttemptedRollout) -> str:
    return f"/rollout/{attempted.rollout_id}/attempt/{attempted.attempt.attempt_id}"


def posted(*, span_id: str = "b7ad6b7169203331", **attributes: str) -> dict:
    pairs = [{"key": name, "value": {"stringValue": value}} for name, value in attributes.items()]
    span = {
        "traceId": "0af7651916cd43dd8448eb211c80319c",
        "spanId": span_id,
        "name": "tool",
        "attributes": pairs,
    }
    return {
        "resourceSpans": [
            {"scopeSpans": [{"spans": [{**span, "startTimeUnixNano": "1760000000000000000"}]}]}
        ]
    }


async def issue(store, *, scopes: list[str]) -> dict[str, str]:
    issued = await store.issue_key(name="a key", scopes=scopes)
    return {"x-api-key": issued.api_key}


@pytest.fixture
async def attempted(store) -> AttemptedRollout:
    return await store.start_rollout({"city": "Köln"})


async def stored(store, attempted: AttemptedRollout) -> list[Span]:
    return await store.query_spans(attempted.rollout_id, attempted.attempt.attempt_id)


async def test_an_exporter_that_holds_an_attempts_key_needs_nothing_else(store, server, attempted):
    await asyncio.to_thread(
        export, over_http(server.url, key_of(attempted)), {"service.name": "travel"}
    )
    plan, search = await stored(store, attempted)
    assert (plan.name, search.name, search.parent_id) == ("plan", "search", plan.span_id)
    assert (search.attributes["city"], search.attributes[SCOPE_NAME]) == ("Köln", "travel")
    assert search.resource["service.name"] == "travel"
    assert sorted([plan.sequence_id, search.sequence_id]) == [1, 2]


async def test_the_resource_names_an_attempt_and_comes_before_the_url(store, server, attempted):
    other = await store.start_rollout("another task")
    await asyncio.to_thread(
        export, over_http(server.url + attempt_path(other), ADMIN), ids(attempted)
    )
    assert (len(await stored(store, attempted)), len(await stored(store, other))) == (2, 0)


@pytest.mark.parametrize("encoding", ["identity", "gzip", "Deflate"])
async def test_a_body_of_exactly_the_limit_inflates_whichever_way(store, http, encoding):
    """A span without ids is kept as unattributed, and the answer is in the encoding of the
    request."""
    body = json.dumps(posted()).encode().ljust(100_000)
    packed = {"gzip": gzip.compress, "Deflate": zlib.compress}.get(encoding, bytes)(body)
    headers = {**ADMIN, "content-type": JSON, "content-encoding": encoding}
    async with http.post("/v1/traces", data=packed, headers=headers) as answer:
        assert (answer.status, answer.content_type, await answer.json()) == (200, JSON, {})
    assert len(await store.query_spans(UNATTRIBUTED)) == 1


async def test_spans_with_unknown_ids_are_kept_with_what_they_claimed(store, http, attempted):
    body = posted(**ids(attempted))
    for number, path in enumerate(
        ["/rollout/gone/attempt/gone-1", f"/rollout/{attempted.rollout_id}/attempt/none"]
    ):
        body["resourceSpans"] += posted(span_id=f"{number + 1:016x}")["resourceSpans"]
        async with http.post(f"{path}/v1/traces", json=body, headers=ADMIN) as answer:
            assert (answer.status, await answer.read()) == (200, b"{}")
        del body["resourceSpans"][1:]
    kept = await store.query_spans(UNATTRIBUTED)
    assert [(span.attributes[ROLLOUT_ID], span.attributes[ATTEMPT_ID]) for span in kept] == [
        ("gone", "gone-1"),
        (attempted.rollout_id, "none"),
    ]
    assert len(await stored(store, attempted)) == 1


@pytest.mark.parametrize("refused", [reward_name(0), CALL_DISCARDS])
async def test_what_a_key_may_not_add_costs_the_spans_beside_it_nothing(
    store, http, attempted, refused
):
    body = posted()
    body["resourceSpans"] += posted(span_id="00f067aa0ba902b7", **{refused: "x"})["resourceSpans"]
    async with http.post("/v1/traces", json=body, headers=key_of(attempted)) as answer:
        told = (await answer.json())["partialSuccess"]
        assert (answer.status, told["rejectedSpans"]) == (200, "1") and "00f067aa0ba902b7" in told[
            "errorMessage"
        ]
    assert [span.span_id for span in await stored(store, attempted)] == ["b7ad6b7169203331"]
    headers, body = {**key_of(attempted), "content-type": PROTOBUF}, json.dumps(body).encode()
    async with http.post(
        "/v1/traces", data=parse_request(body, JSON).SerializeToString(), headers=headers
    ) as answer:
        told = ExportTraceServiceResponse.FromString(await answer.read()).partial_success
    assert told.rejected_spans == 1 and "00f067aa0ba902b7" in told.error_message


async def test_an_unknown_attempt_costs_the_spans_beside_it_nothing(store, http, attempted):
    headers = await issue(store, scopes=["worker"])
    body = posted(**ids(attempted))
    nowhere = {**ids(attempted), ROLLOUT_ID: "nowhere"}
    body["resourceSpans"] += posted(span_id="00f067aa0ba902b7", **nowhere)["resourceSpans"]
    async with http.post("/v1/traces", json=body, headers=headers) as answer:
        assert answer.status == 200
    (kept,) = await store.query_spans(UNATTRIBUTED)
    assert kept.attributes[ROLLOUT_ID] == "nowhere"
    assert len(await stored(store, attempted)) == 1


@pytest.mark.parametrize(
    ("headers", "body", "status", "code"),
    [
        (ADMIN, b"\xff" * 300, 400, 3),
        ({}, b"", 401, 16),
        ({**ADMIN, "content-encoding": "br"}, b"", 415, 3),
        (ADMIN, bytes(200_000), 413, 8),
        ({**ADMIN, "content-encoding": "gzip"}, gzip.compress(bytes(5_000_000), mtime=0), 413, 8),
        ({**ADMIN, "content-encoding": "gzip"}, gzip.compress(bytes(500), mtime=0)[:-1], 400, 3),
    ],
)
async def test_a_refusal_is_a_status_in_the_encoding_of_the_request(
    http, headers, body, status, code
):
    async with http.post(
        "/v1/traces", data=body, headers={**headers, "content-type": PROTOBUF}
    ) as answer:
        assert (answer.status, answer.content_type) == (status, PROTOBUF)
        refusal = Status.FromString(await answer.read())
    async with http.post(
        "/v1/traces", data=body, headers={**headers, "content-type": JSON}
    ) as answer:
        assert (answer.status, answer.content_type) == (status, JSON)
        told = await answer.json()
    assert refusal.code == told["code"] == code
    assert refusal.message and told["message"]


async def test_a_store_that_is_closed_asks_to_come_again(store, http):
    await store.close()
    async with http.post("/v1/traces", json=posted(), headers=ADMIN) as answer:
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
