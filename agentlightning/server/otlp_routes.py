"""OTLP over HTTP at `/v1/traces`, and at the same path under an attempt's URL. The answer counts
spans that a key may not add; those that name no attempt of the store go to the rollout
`unattributed`."""

from __future__ import annotations

import asyncio
import zlib
from contextlib import suppress
from typing import Final

import msgspec
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTracePartialSuccess
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from agentlightning.errors import AgentLightningError, ForbiddenError, InvalidError, NotFoundError
from agentlightning.semconv import ATTEMPT_ID, ROLLOUT_ID
from agentlightning.server.access import Access, Principal
from agentlightning.server.requests import TooLargeError, failure_of, receive_body
from agentlightning.store.base import CALLS, LightningStore
from agentlightning.tracing.otlp import (
    JSON,
    PROTOBUF,
    UnsupportedMediaError,
    decode_traces,
    encode_response,
    resolve,
)
from agentlightning.types import UNATTRIBUTED, Span

_RETRY_AFTER_SECONDS: Final = 1
_WINDOW_BITS: Final = {"gzip": 31, "deflate": 15}  # which header zlib expects


def otlp_routes(store: LightningStore, access: Access, body_limit: int) -> list[BaseRoute]:
    """The two paths of OTLP/HTTP over one store. `body_limit` is in bytes, before and after
    decompression."""

    async def export(request: Request) -> Response:
        content_type = request.headers.get("content-type", "")
        answer_type = PROTOBUF if PROTOBUF in content_type.lower() else JSON
        ids = request.path_params
        try:
            caller = await access.scope(request.headers)
            caller.require(CALLS["store_spans"])
            limit = caller.body_limit(body_limit)
            body = await receive_body(request.receive, limit)
            encoding = request.headers.get("content-encoding", "")
            url_ids = (ids["rollout_id"], ids["attempt_id"]) if ids else None
            # In a thread: a large batch takes long to decode, and LLM calls go on meanwhile.
            inflated = await asyncio.to_thread(inflate, body, encoding, limit)
            access.count_sent(caller, len(inflated))
            spans, refused = await asyncio.to_thread(_read, inflated, content_type, caller, url_ids)
            access.count_sent(caller, spans=len(spans))
            await _store(store, caller, spans)
        except AgentLightningError as error:
            return _refusal(error, answer_type)
        return Response(
            encode_response(refused, answer_type), headers={"content-type": answer_type}
        )

    paths = ("/v1/traces", "/rollout/{rollout_id}/attempt/{attempt_id}/v1/traces")
    return [Route(path, export, methods=["POST"]) for path in paths]


def _read(
    body: bytes, content_type: str, caller: Principal, url_ids: tuple[str, str] | None
) -> tuple[list[Span], list[str]]:
    """The spans of an export under the attempts they belong to, but for those whose content the
    caller may not add; why not, of each of these. ForbiddenError where that is all of them.

    An attempt's key decides: a span without ids is that attempt's, a span of another attempt is a
    ForbiddenError. Otherwise a span belongs to whom it names."""
    nobody = caller.attempt or (UNATTRIBUTED, UNATTRIBUTED)
    spans: list[Span] = []
    refused: list[str] = []
    for span in decode_traces(body, content_type):
        reason = caller.refuses(span)
        if reason is None:
            spans.append(_assigned(span, resolve(span, url_ids) or nobody))
        else:
            refused.append(reason)
    if refused and not spans:
        raise ForbiddenError(refused[0])
    caller.check_spans(spans)
    return spans, refused


async def _store(store: LightningStore, caller: Principal, spans: list[Span]) -> None:
    """Store spans, all or none. What names an attempt that the store does not know is kept as
    unattributed, with the names it gave as attributes."""
    try:
        if spans:
            await store.store_spans(spans)
    except NotFoundError:
        if caller.attempt is not None:
            raise
        known = await _known(store, {span.rollout_id for span in spans})
        await store.store_spans(
            [span if _ids(span) in known else _unattributed(span) for span in spans]
        )


async def _known(store: LightningStore, rollout_ids: set[str]) -> set[tuple[str, str]]:
    """The attempts of those rollouts that the store knows."""
    known = {(UNATTRIBUTED, UNATTRIBUTED)}  # also before the store has made it
    for rollout_id in rollout_ids:
        with suppress(NotFoundError):
            known |= {
                (rollout_id, attempt.attempt_id)
                for attempt in await store.query_attempts(rollout_id)
            }
    return known


def _ids(span: Span) -> tuple[str, str]:
    return span.rollout_id, span.attempt_id


def _assigned(span: Span, ids: tuple[str, str]) -> Span:
    return msgspec.structs.replace(span, rollout_id=ids[0], attempt_id=ids[1])


def _unattributed(span: Span) -> Span:
    claimed = {ROLLOUT_ID: span.rollout_id, ATTEMPT_ID: span.attempt_id}
    # Numbers were given within different attempts; the store gives new ones.
    renamed = msgspec.structs.replace(
        span, attributes={**span.attributes, **claimed}, sequence_id=0
    )
    return _assigned(renamed, (UNATTRIBUTED, UNATTRIBUTED))


def inflate(body: bytes, encoding: str, limit: int) -> bytes:
    """The body behind a `Content-Encoding`: gzip, deflate or none. TooLargeError as soon as it
    would exceed `limit` bytes, however small it came; InvalidError if it is damaged."""
    encoding = encoding.strip().lower()
    if encoding in ("", "identity"):
        return body
    if encoding not in _WINDOW_BITS:
        raise UnsupportedMediaError(
            f"the content encoding is {encoding[:100]!r}; send gzip, deflate or identity"
        )
    stream = zlib.decompressobj(_WINDOW_BITS[encoding])
    try:
        inflated = stream.decompress(body, limit + 1)
    except zlib.error as error:
        raise InvalidError(f"the body is not {encoding}: {error}") from None
    if len(inflated) > limit:
        raise TooLargeError(
            f"the body inflates to more than the {limit} bytes this server takes; send it in parts"
        )
    if not stream.eof or stream.unused_data:
        raise InvalidError(
            f"the body is not one whole {encoding} stream; it is truncated or has trailing bytes"
        )
    return inflated


def _refusal(error: AgentLightningError, answer_type: str) -> Response:
    failure = failure_of(error)
    headers = {"content-type": answer_type}
    if failure.otlp_status == 503:
        headers["retry-after"] = str(_RETRY_AFTER_SECONDS)
    if answer_type == PROTOBUF:
        # What google.rpc.Status begins with has the numbers and types of these fields: an integer,
        # and a text.
        status = ExportTracePartialSuccess(rejected_spans=failure.code)
        status.error_message = str(error).encode(errors="replace").decode()
        body = status.SerializeToString()
    else:
        body = msgspec.json.encode({"code": failure.code, "message": str(error)})
    return Response(body, status_code=failure.otlp_status, headers=headers)
