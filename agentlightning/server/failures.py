"""What an error looks like over HTTP: its status, and a body that says what to do. No traceback ever leaves a server.

This module knows errors and answers; it does not know routes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
from starlette.responses import Response

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
from agentlightning.server.access import UnauthenticatedError
from agentlightning.server.observing import CLIENT_GONE
from agentlightning.store.calls import ErrorBody, ErrorReply


class TooLargeError(AgentLightningError):
    """The body is longer than this server takes (HTTP 413)."""


class ClientGoneError(AgentLightningError):
    """The client no longer listens for the answer; its status is for the log and the metrics."""


_STATUS: Final[Sequence[tuple[type[AgentLightningError], int, str]]] = (
    (UnauthenticatedError, 401, "unauthenticated"),
    (ForbiddenError, 403, "forbidden"),
    (NotFoundError, 404, "not_found"),
    (ConflictError, 409, "conflict"),
    (TooLargeError, 413, "too_large"),
    (InvalidError, 422, "invalid"),
    (ConfigError, 422, "invalid"),
    (UnavailableError, 503, "unavailable"),
    (ClientGoneError, CLIENT_GONE, "client_gone"),
)


def failure(error: AgentLightningError) -> Response:
    """The answer to a call that raised `error`."""
    if isinstance(error, BackendError):
        return refusal(error.status, "backend", str(error))
    for kind, status, name in _STATUS:
        if isinstance(error, kind):
            return refusal(status, name, str(error))
    return refusal(500, "error", str(error))


def defect() -> Response:
    """The answer to a call that met a defect of the server: what it was stands in its log."""
    return refusal(500, "internal", "the server failed at this request; its log says why")


def refusal(status: int, kind: str, message: str, headers: Mapping[str, str] | None = None) -> Response:
    body = msgspec.json.encode(ErrorReply(error=ErrorBody(message=message, type=kind)))
    return Response(body, status_code=status, media_type="application/json", headers=headers)
