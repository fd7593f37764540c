"""Common steps of routes: find out who asks, read what is asked, answer in JSON; and the form of an
error over HTTP. No traceback ever leaves a server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive

from agentlightning.arrays import plain
from agentlightning.errors import (
    AgentLightningError,
    BackendError,
    ConfigError,
    ConflictError,
    ForbiddenError,
    InvalidError,
    NotFoundError,
    UnavailableError,
)
from agentlightning.server.access import Access, Principal, UnauthenticatedError
from agentlightning.server.request_log import CLIENT_GONE, note_caller
from agentlightning.shortages import lacking
from agentlightning.store.calls import ErrorBody, ErrorReply
from agentlightning.tracing.otlp import UnsupportedMediaError


class TooLargeError(AgentLightningError):
    """The body is longer than this server takes (HTTP 413)."""


class ClientGoneError(AgentLightningError):
    """The client no longer listens for the answer; its status is for the log and the metrics."""


class Failure(NamedTuple):
    """The report of an error: by an HTTP status and a name; in OTLP by a status and a code of
    `google.rpc.Status`."""

    status: int
    name: str
    otlp_status: int
    code: int


_FAILURES: Final[Sequence[tuple[type[AgentLightningError], Failure]]] = (
    (UnauthenticatedError, Failure(401, "unauthenticated", 401, 16)),
    (ForbiddenError, Failure(403, "forbidden", 403, 7)),
    (NotFoundError, Failure(404, "not_found", 404, 5)),
    (ConflictError, Failure(409, "conflict", 500, 13)),
    (TooLargeError, Failure(413, "too_large", 413, 8)),
    (UnsupportedMediaError, Failure(415, "unsupported_media", 415, 3)),
    (InvalidError, Failure(422, "invalid", 400, 3)),
    (ConfigError, Failure(422, "invalid", 500, 13)),
    (UnavailableError, Failure(503, "unavailable", 503, 14)),
    (ClientGoneError, Failure(CLIENT_GONE, "client_gone", 500, 13)),
)
_OTHER: Final = Failure(500, "error", 500, 13)


def failure_of(error: AgentLightningError) -> Failure:
    if isinstance(error, BackendError):
        return _OTHER._replace(status=error.status, name="backend")
    return next((failure for kind, failure in _FAILURES if isinstance(error, kind)), _OTHER)


def failure(error: AgentLightningError) -> Response:
    """The answer to a call that raised `error`."""
    how = failure_of(error)
    return refusal(how.status, how.name, str(error))


def defect(error: Exception) -> Response:
    """The answer to a call that failed because the server lacks a resource, or met a defect: what
    it was stands in its log."""
    resource = lacking(error)
    if resource is not None:
        message = f"the server has no more {resource} at present; try again later"
        return refusal(503, "unavailable", message, {"retry-after": "10"})
    return refusal(500, "internal", "the server failed at this request; its log says why")


def refusal(
    status: int, kind: str, message: str, headers: Mapping[str, str] | None = None
) -> Response:
    body = msgspec.json.encode(ErrorReply(error=ErrorBody(message=message, type=kind)))
    return Response(body, status_code=status, media_type="application/json", headers=headers)


async def caller_of(request: Request, access: Access) -> Principal:
    """Who asks, also noted for the log; see `Access.scope`."""
    scope = await access.scope(request.headers)
    note_caller(request.scope, scope.name)
    return scope


def in_json(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """The answer that is this value."""
    body = msgspec.json.encode(value, enc_hook=plain)
    return Response(body, status_code=status, media_type="application/json", headers=headers)


async def receive_body(receive: Receive, limit: int) -> bytes:
    """The whole body; TooLargeError once it exceeds `limit` bytes, ClientGoneError if the client
    leaves."""
    parts: list[bytes] = []
    size = 0
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError("the client left before its request was complete")
        part: bytes = message.get("body", b"")
        parts.append(part)
        size += len(part)
        if size > limit:
            raise TooLargeError(
                f"the body is longer than the {limit} bytes this server takes; send it in parts"
            )
        more = message.get("more_body", False)
    return parts[0] if len(parts) == 1 else b"".join(parts)
