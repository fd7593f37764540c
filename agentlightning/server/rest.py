"""The store as REST: one table of method, path and call, and the few lines that run any row of it.

Bodies are JSON or msgpack, by `Content-Type`; answers by `Accept`. This module does not decide anything: what is
allowed is decided by `access` and by the store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from agentlightning.errors import AgentLightningError, InvalidError, NotFoundError, UnavailableError
from agentlightning.server.access import Access, Scope
from agentlightning.store import requests
from agentlightning.store.base import LightningStore
from agentlightning.types import EnqueueRolloutRequest, Metrics, Span

Path: TypeAlias = Mapping[str, str]
Call: TypeAlias = Callable[[LightningStore, Path, Any], Awaitable[Any]]

_MSGPACK: Final = "application/msgpack"


class TooLargeError(AgentLightningError):
    """The body is longer than this server takes (HTTP 413)."""


@dataclass(frozen=True)
class Row:
    """One row of the table. `takes` is the type of the body (of the query for GET); `waits` marks long polls."""

    method: str
    path: str
    call: Call
    takes: Any = None
    waits: bool = False
    open_to_attempts: bool = False


def _fields(body: msgspec.Struct | None) -> dict[str, Any]:
    """The fields of a request as keyword arguments, an absent body standing for one with nothing in it."""
    return {} if body is None else {name: getattr(body, name) for name in body.__struct_fields__}


async def _found(answer: Awaitable[Any], what: str) -> Any:
    value = await answer
    if value is None:
        raise NotFoundError(f"there is no {what}")
    return value


_ROLLOUT: Final = "/rollouts/{rollout_id}"
_ATTEMPT: Final = "/rollouts/{rollout_id}/attempts/{attempt_id}"

TABLE: Final[Sequence[Row]] = (
    Row("POST", "/rollouts", lambda s, p, b: s.enqueue_many_rollouts(b), list[EnqueueRolloutRequest]),
    Row("POST", "/rollouts/start", lambda s, p, b: s.start_rollout(**_fields(b)), requests.StartRollout),
    Row(
        "POST",
        "/rollouts/lease",
        lambda s, p, b: s.dequeue_many_rollouts(**_fields(b)),
        requests.LeaseRollouts,
        waits=True,
    ),
    Row("POST", "/rollouts/query", lambda s, p, b: s.query_rollouts(**_fields(b)), requests.QueryRollouts),
    Row(
        "POST",
        "/rollouts/wait",
        lambda s, p, b: s.wait_for_rollouts(**_fields(b)),
        requests.WaitForRollouts,
        waits=True,
    ),
    Row(
        "GET",
        _ROLLOUT,
        lambda s, p, b: _found(s.get_rollout_by_id(p["rollout_id"]), f"rollout {p['rollout_id']!r}"),
    ),
    Row("PATCH", _ROLLOUT, lambda s, p, b: s.update_rollout(p["rollout_id"], **_fields(b)), requests.UpdateRollout),
    Row("POST", f"{_ROLLOUT}/cancel", lambda s, p, b: s.cancel_rollout(p["rollout_id"])),
    Row(
        "POST",
        f"{_ROLLOUT}/attempts",
        lambda s, p, b: s.start_attempt(p["rollout_id"], **_fields(b)),
        requests.StartAttempt,
    ),
    Row("GET", f"{_ROLLOUT}/attempts", lambda s, p, b: s.query_attempts(p["rollout_id"])),
    Row(
        "GET",
        f"{_ROLLOUT}/attempts/latest",
        lambda s, p, b: _found(s.get_latest_attempt(p["rollout_id"]), f"attempt of a rollout {p['rollout_id']!r}"),
    ),
    Row(
        "GET",
        f"{_ROLLOUT}/spans",
        lambda s, p, b: s.query_spans(p["rollout_id"], **_fields(b)),
        requests.QuerySpans,
    ),
    Row(
        "PATCH",
        _ATTEMPT,
        lambda s, p, b: s.update_attempt(p["rollout_id"], p["attempt_id"], **_fields(b)),
        requests.UpdateAttempt,
    ),
    Row(
        "POST",
        f"{_ATTEMPT}/heartbeat",
        lambda s, p, b: s.heartbeat(p["rollout_id"], p["attempt_id"], **_fields(b)),
        requests.BeatHeart,
    ),
    Row(
        "POST",
        f"{_ATTEMPT}/next-span-sequence-id",
        lambda s, p, b: s.get_next_span_sequence_id(p["rollout_id"], p["attempt_id"]),
    ),
    Row("POST", "/spans", lambda s, p, b: s.add_many_spans(b), list[Span], open_to_attempts=True),
    Row("GET", "/resources", lambda s, p, b: s.query_resources()),
    Row("POST", "/resources", lambda s, p, b: s.add_resources(**_fields(b)), requests.AddResources),
    Row("GET", "/latest-resources", lambda s, p, b: _found(s.get_latest_resources(), "resources yet")),
    Row(
        "GET",
        "/resources/{resources_id}",
        lambda s, p, b: _found(s.get_resources_by_id(p["resources_id"]), f"resources {p['resources_id']!r}"),
    ),
    Row(
        "PUT",
        "/resources/{resources_id}",
        lambda s, p, b: s.update_resources(p["resources_id"], **_fields(b)),
        requests.UpdateResources,
    ),
    Row("GET", "/runs", lambda s, p, b: s.query_runs()),
    Row("POST", "/runs", lambda s, p, b: s.start_run(**_fields(b)), requests.StartRun),
    Row("PATCH", "/runs/{run_id}", lambda s, p, b: s.update_run(p["run_id"], **_fields(b)), requests.UpdateRun),
    Row("POST", "/runs/{run_id}/next-policy-version", lambda s, p, b: s.next_policy_version(p["run_id"])),
    Row("GET", "/runs/{run_id}/metrics", lambda s, p, b: s.query_metrics(p["run_id"])),
    Row("POST", "/metrics", lambda s, p, b: s.add_metrics(b), Metrics),
    Row(
        "GET",
        "/runs/{run_id}/complete-groups",
        lambda s, p, b: s.complete_groups_after(p["run_id"], **_fields(b)),
        requests.CompleteGroups,
        waits=True,
    ),
    Row("POST", "/groups", lambda s, p, b: s.create_group(**_fields(b)), requests.CreateGroup),
    Row("GET", "/groups/{group_id}", lambda s, p, b: _found(s.get_group(p["group_id"]), f"group {p['group_id']!r}")),
    Row("GET", "/workers", lambda s, p, b: s.query_workers()),
    Row(
        "PUT",
        "/workers/{worker_id:path}",
        lambda s, p, b: s.update_worker(p["worker_id"], **_fields(b)),
        requests.UpdateWorker,
    ),
    Row("GET", "/statistics", lambda s, p, b: s.statistics()),
    Row("POST", "/keys/verify", lambda s, p, b: s.verify_api_key(**_fields(b)), requests.VerifyKey),
)


class StoreRoutes:
    """The routes of one store. `stop_waiting` answers all long polls at once, so that a server can stop."""

    def __init__(self, store: LightningStore, access: Access, body_limit: int) -> None:
        self._store = store
        self._access = access
        self._body_limit = body_limit
        self._stopping = asyncio.Event()

    def routes(self) -> list[BaseRoute]:
        return [Route(row.path, self._endpoint(row), methods=[row.method]) for row in TABLE]

    def stop_waiting(self) -> None:
        self._stopping.set()

    def _endpoint(self, row: Row) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        async def answer(request: Request) -> Response:
            scope = await self._access.scope(request.headers)
            if not row.open_to_attempts:
                scope.require_admin()
            body = await self._body(request, row, scope)
            call = row.call(self._store, request.path_params, body)
            return _answer(request, await (self._until_gone(request, call) if row.waits else call))

        return answer

    async def _body(self, request: Request, row: Row, scope: Scope) -> Any:
        """The decoded body or query of a call. InvalidError says where it is malformed."""
        if row.takes is None:
            return None
        try:
            if row.method == "GET":
                return msgspec.convert(dict(request.query_params), row.takes, strict=False)
            data = await read_body(request, self._body_limit)
            decode = msgspec.msgpack.decode if _MSGPACK in request.headers.get("content-type", "") else _decode_json
            body = decode(data, type=row.takes)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidError(f"{row.method} {request.url.path}: {error}") from None
        if row.open_to_attempts:
            scope.require_attempts(body)
        return body

    async def _until_gone(self, request: Request, call: Awaitable[Any]) -> Any:
        """A long poll's result. Given up when its client has gone, who then must not be leased anything, or when the
        server stops: the client asks again."""
        work = asyncio.ensure_future(call)
        gone = asyncio.ensure_future(_disconnected(request))
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait([work, gone, stopping], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, gone, stopping):
                task.cancel()
            await asyncio.wait([work, gone, stopping])
        if not work.cancelled():
            return work.result()
        raise UnavailableError("the server is stopping; ask again in a moment")


def _decode_json(data: bytes, *, type: Any) -> Any:
    # A request whose fields all have defaults may leave its body out.
    return msgspec.json.decode(data or b"{}", type=type)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body; TooLargeError once it exceeds `limit` bytes."""
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > limit:
            raise TooLargeError(f"the body is longer than the {limit} bytes this server takes; send it in parts")
    return bytes(data)


def _answer(request: Request, value: Any) -> Response:
    if _MSGPACK in request.headers.get("accept", ""):
        return Response(msgspec.msgpack.encode(value), media_type=_MSGPACK)
    return Response(msgspec.json.encode(value), media_type="application/json")
