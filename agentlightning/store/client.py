"""The store over HTTP: the same interface, spoken to an `agl server`.

One connection pool, made inside the event loop that first uses it. Calls that may be repeated are repeated with
jitter while the server cannot be reached; what a status code means is turned back into the typed error. This module
knows neither SQL nor what the server is made of.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Mapping
from types import NoneType
from typing import Any, Final, TypeVar, cast, get_args
from urllib.parse import quote

import aiohttp
import msgspec

from agentlightning.errors import (
    AgentLightningError,
    ConfigError,
    ConflictError,
    ForbiddenError,
    InvalidError,
    NotFoundError,
    UnavailableError,
)
from agentlightning.store import calls
from agentlightning.store.base import LightningStore
from agentlightning.store.calls import Call
from agentlightning.store.codec import new_id
from agentlightning.types import EnqueueRolloutRequest, FinishedRollouts

T = TypeVar("T")

_POLL_SECONDS: Final = 25.0  # one long poll; shorter than the idle limits of common proxies
_ANSWER_SECONDS: Final = 60.0  # a server that is silent for longer counts as unreachable
_FIRST_PAUSE: Final = 0.1
_LONGEST_PAUSE: Final = 2.0
_AGAIN: Final = (429, 503)
_MSGPACK: Final = "application/msgpack"
_ERRORS: Final[Mapping[int, type[AgentLightningError]]] = {
    401: ForbiddenError,
    403: ForbiddenError,
    404: NotFoundError,
    409: ConflictError,
    413: InvalidError,
    422: InvalidError,
    429: UnavailableError,
    502: UnavailableError,
    503: UnavailableError,
    504: UnavailableError,
}


class LightningStoreClient(LightningStore):
    """A store behind `url`. `api_key` is a key of the server, or an attempt's own; `patience` is for how many
    seconds a call is repeated while the server cannot be reached, before it is an UnavailableError."""

    def __init__(self, url: str, api_key: str | None = None, *, patience: float = 60.0) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"the store's URL is {url!r}; it must begin with http:// or https://")
        self.url = url.rstrip("/").removesuffix("/api/v1")
        self._headers = {"Accept": _MSGPACK, "Content-Type": _MSGPACK}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._patience = patience
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def perform(self, call: Call[T]) -> T:
        call = cast(Call[T], _named(call))
        give_up = time.monotonic() + _patience_of(call)
        while True:
            remaining = max(0.0, give_up - time.monotonic())
            if "timeout" in call.__struct_fields__:
                call = msgspec.structs.replace(call, timeout=min(_POLL_SECONDS, remaining))
            answer = await self._send_until_answered(call)
            if time.monotonic() >= give_up or _is_complete(call, answer):
                return answer

    async def _send_until_answered(self, call: Call[T]) -> T:
        request = Wire.of(call)
        patience = time.monotonic() + self._patience
        pause = _FIRST_PAUSE
        while True:
            try:
                status, answer = await self._send(request)
                if status not in _AGAIN:
                    return _decode(status, answer, type(call).returns())
                fault, certain = _error(status, answer), True
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                reason = str(error) or type(error).__name__
                fault = UnavailableError(f"the server at {self.url} cannot be reached ({reason}); is it running?")
                certain = isinstance(error, aiohttp.ClientConnectorError)
            pause_now = pause * random.uniform(0.5, 1.0)
            if not (call.repeatable or certain) or time.monotonic() + pause_now > patience:
                raise fault
            await asyncio.sleep(pause_now)
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _send(self, request: Wire) -> tuple[int, bytes]:
        if self._session is None:
            self._session = aiohttp.ClientSession(headers=self._headers, connector=aiohttp.TCPConnector(limit=0))
        limit = aiohttp.ClientTimeout(
            total=None, sock_connect=_ANSWER_SECONDS, sock_read=request.wait + _ANSWER_SECONDS
        )
        url = f"{self.url}/api/v1{request.path}"
        async with self._session.request(
            request.method, url, data=request.body, params=request.query, timeout=limit
        ) as response:
            return response.status, await response.read()


class Wire(msgspec.Struct, frozen=True):
    """A call as an HTTP request: what its route names in the path, the rest in the body or, of a GET, the query."""

    method: str
    path: str
    query: dict[str, str] | None
    body: bytes | None
    wait: float

    @classmethod
    def of(cls, call: Call[Any]) -> Wire:
        method, _, path = call.route.partition(" ")
        fields = {name: getattr(call, name) for name in call.__struct_fields__}
        in_path = {name: quote(str(fields.pop(name)), safe="") for name in calls.path_fields(path)}
        wait = fields.get("timeout") or 0.0
        if in_path:
            path = path.format_map(in_path)
        if method == "GET":
            query = {name: str(value) for name, value in fields.items() if value is not None}
            return cls(method, path, query or None, None, wait)
        return cls(method, path, None, msgspec.msgpack.encode(fields), wait)


def _named(call: Any) -> Any:
    """The call with every id given here that the server would make up, so that it can be repeated when its answer was
    lost and nothing is doubled."""

    def named(request: EnqueueRolloutRequest) -> EnqueueRolloutRequest:
        return msgspec.structs.replace(request, rollout_id=_given(request.rollout_id, "ro"))

    replace = msgspec.structs.replace
    match call:
        case calls.EnqueueRollouts():
            return replace(call, requests=[named(request) for request in call.requests])
        case calls.StartRollout():
            return replace(call, request=named(call.request), attempt_id=_given(call.attempt_id, "at"))
        case calls.StartAttempt():
            return replace(call, attempt_id=_given(call.attempt_id, "at"))
        case calls.LeaseRollouts():
            return replace(call, lease_id=_given(call.lease_id, "at"))
        case calls.StartRun():
            return replace(call, run_id=_given(call.run_id, "run"))
        case calls.CreateGroup():
            return replace(call, group_id=_given(call.group_id, "gr"))
        case calls.AddResources():
            return replace(call, resources_id=_given(call.resources_id, "rs"))
        case _:
            return call


def _given(name: str | None, kind: str) -> str:
    return new_id(kind) if name is None else name


def _patience_of(call: Call[Any]) -> float:
    """For how many seconds the caller wants to wait, however many long polls that takes."""
    timeout: float | None = getattr(call, "timeout", 0.0)
    if timeout is not None and math.isnan(timeout):
        raise InvalidError("timeout is not a number; give the seconds to wait")
    return math.inf if timeout is None else timeout


def _is_complete(call: Call[Any], answer: Any) -> bool:
    """Whether an answer is what its caller waits for, rather than the end of one long poll."""
    match call:
        case calls.WaitForRollouts():
            return len(answer) == len(set(call.rollout_ids))
        case calls.LeaseRollouts() | calls.CompleteGroupsAfter():
            return bool(answer)
        case calls.FinishedAfter():
            assert isinstance(answer, FinishedRollouts)
            return bool(answer.rollouts)
        case _:
            return True


def _decode(status: int, answer: bytes, returns: Any) -> Any:
    if status == 404 and NoneType in get_args(returns):
        return None
    if status >= 400:
        raise _error(status, answer)
    return msgspec.msgpack.decode(answer, type=returns)


def _error(status: int, answer: bytes) -> AgentLightningError:
    """The typed error of an answer, which a proxy in between may also have made in its own format."""
    try:
        message = msgspec.json.decode(answer, type=calls.ErrorReply).error.message
    except (msgspec.DecodeError, UnicodeDecodeError):
        message = f"the server answered {status}: {answer[:200]!r}"
    return _ERRORS.get(status, AgentLightningError)(message)
