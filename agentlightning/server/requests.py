"""What most routes do with a request: find out who asks, read what is asked, answer in JSON.

This module does not know what is asked for, nor who may ask.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive

from agentlightning.errors import InvalidError
from agentlightning.server.access import Access, Scope
from agentlightning.server.failures import ClientGoneError, TooLargeError
from agentlightning.server.observing import note_caller
from agentlightning.store import codec

T = TypeVar("T")


async def caller_of(request: Request, access: Access) -> Scope:
    """Who asks, which the log is told too; see `Access.scope`."""
    scope = await access.scope(request.headers)
    note_caller(request.scope, scope.name)
    return scope


async def asked_of(request: Request, kind: type[T], limit: int) -> T:
    """The JSON body, of at most `limit` bytes; none stands for `{}`. InvalidError unless it is of this kind."""
    body = await receive_body(request.receive, limit)
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidError(f"the body is not as it should be: {error}") from None


def in_json(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """The answer that is this value."""
    body = msgspec.json.encode(value, enc_hook=codec.plain)
    return Response(body, status_code=status, media_type="application/json", headers=headers)


async def receive_body(receive: Receive, limit: int) -> bytes:
    """The whole body; TooLargeError once it exceeds `limit` bytes, ClientGoneError if the client leaves."""
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
            raise TooLargeError(f"the body is longer than the {limit} bytes this server takes; send it in parts")
        more = message.get("more_body", False)
    return parts[0] if len(parts) == 1 else b"".join(parts)
