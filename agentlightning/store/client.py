"""The store over HTTP: the same interface, spoken to an `agl server`.

One connection pool, made inside the event loop that first uses it. Calls that may be repeated are repeated with
jitter while the server cannot be reached; what a status code means is turned back into the typed error. This module
knows neither SQL nor what the server is made of.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar
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
from agentlightning.store import requests
from agentlightning.store.base import LightningStore
from agentlightning.store.codec import new_id
from agentlightning.types import (
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    EnqueueRolloutRequest,
    Group,
    Heartbeat,
    Metrics,
    Mode,
    NamedResources,
    ResourcesUpdate,
    Rollout,
    RolloutConfig,
    RolloutStatus,
    Run,
    RunStatus,
    Span,
    Worker,
)

T = TypeVar("T")

_POLL_SECONDS: Final = 25.0  # one long poll; shorter than the idle limits of common proxies
_ANSWER_SECONDS: Final = 60.0  # a server that is silent for longer counts as unreachable
_FIRST_PAUSE: Final = 0.1
_LONGEST_PAUSE: Final = 2.0
_MSGPACK: Final = "application/msgpack"
_ERRORS: Final[Mapping[int, type[AgentLightningError]]] = {
    401: ForbiddenError,
    403: ForbiddenError,
    404: NotFoundError,
    409: ConflictError,
    413: InvalidError,
    422: InvalidError,
    502: UnavailableError,
    503: UnavailableError,
    504: UnavailableError,
}


class LightningStoreClient(LightningStore):
    """A store behind `url`. `api_key` is the server's admin key, or an attempt's own; `patience` is for how many
    seconds a call is repeated while the server cannot be reached, before it is an UnavailableError."""

    def __init__(self, url: str, api_key: str | None = None, *, patience: float = 10.0) -> None:
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

    # --- calls ---

    async def _call(
        self,
        method: str,
        path: str,
        returns: type[T] | Any,
        body: Any = None,
        *,
        query: Mapping[str, str] | None = None,
        wait: float = 0.0,
        repeatable: bool = True,
    ) -> T:
        """One call of the REST interface. `wait` is how long the server may hold the answer back. A call that is not
        `repeatable` is only sent again when the server certainly did not get it."""
        data = None if body is None else msgspec.msgpack.encode(body)
        give_up = time.monotonic() + self._patience
        pause = _FIRST_PAUSE
        while True:
            try:
                status, answer = await self._send(method, path, data, query, wait)
                if status != 503:
                    return _decode(status, answer, returns)
                fault, certain = _error(status, answer), True
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                reason = str(error) or type(error).__name__
                fault = UnavailableError(f"the server at {self.url} cannot be reached ({reason}); is it running?")
                certain = isinstance(error, aiohttp.ClientConnectorError)
            pause_now = pause * random.uniform(0.5, 1.0)
            if not (repeatable or certain) or time.monotonic() + pause_now > give_up:
                raise fault
            await asyncio.sleep(pause_now)
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _send(
        self, method: str, path: str, data: bytes | None, query: Mapping[str, str] | None, wait: float
    ) -> tuple[int, bytes]:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers=self._headers, connector=aiohttp.TCPConnector(limit=0), auto_decompress=True
            )
        limit = aiohttp.ClientTimeout(total=None, sock_connect=_ANSWER_SECONDS, sock_read=wait + _ANSWER_SECONDS)
        url = f"{self.url}/api/v1{path}"
        async with self._session.request(method, url, data=data, params=query, timeout=limit) as response:
            return response.status, await response.read()

    async def _find(self, path: str, returns: type[T]) -> T | None:
        """What is at `path`, or None where there is nothing."""
        try:
            return await self._call("GET", path, returns)
        except NotFoundError:
            return None

    # --- rollouts ---

    async def enqueue_many_rollouts(self, requests: Sequence[EnqueueRolloutRequest]) -> list[Rollout]:
        # Ids are given here, so that a request whose answer was lost can be repeated without doubling rollouts.
        named = [
            request if request.rollout_id is not None else msgspec.structs.replace(request, rollout_id=new_id("ro"))
            for request in requests
        ]
        return await self._call("POST", "/rollouts", list[Rollout], named)

    async def start_rollout(
        self,
        input: Any,
        mode: Mode = "train",
        resources_id: str | None = None,
        config: RolloutConfig | None = None,
        metadata: Mapping[str, Any] | None = None,
        worker_id: str | None = None,
    ) -> AttemptedRollout:
        body = requests.StartRollout(
            input=input,
            mode=mode,
            resources_id=resources_id,
            config=config,
            metadata=_dict(metadata),
            worker_id=worker_id,
        )
        return await self._call("POST", "/rollouts/start", AttemptedRollout, body, repeatable=False)

    async def dequeue_many_rollouts(
        self, limit: int = 1, worker_id: str | None = None, timeout: float = 0.0
    ) -> list[AttemptedRollout]:
        give_up = time.monotonic() + timeout
        while True:
            wait = min(_POLL_SECONDS, max(0.0, give_up - time.monotonic()))
            body = requests.LeaseRollouts(limit=limit, worker_id=worker_id, timeout=wait)
            leased = await self._call(
                "POST", "/rollouts/lease", list[AttemptedRollout], body, wait=wait, repeatable=False
            )
            if leased or time.monotonic() >= give_up:
                return leased

    async def start_attempt(self, rollout_id: str, worker_id: str | None = None) -> AttemptedRollout:
        body = requests.StartAttempt(worker_id=worker_id)
        path = f"/rollouts/{_quoted(rollout_id)}/attempts"
        return await self._call("POST", path, AttemptedRollout, body, repeatable=False)

    async def cancel_rollout(self, rollout_id: str) -> Rollout:
        return await self._call("POST", f"/rollouts/{_quoted(rollout_id)}/cancel", Rollout)

    async def query_rollouts(
        self,
        *,
        rollout_id_in: Sequence[str] | None = None,
        status_in: Sequence[RolloutStatus] | None = None,
        mode_in: Sequence[Mode] | None = None,
        run_id: str | None = None,
        group_id: str | None = None,
        limit: int | None = None,
        offset: int = 0,
    ) -> list[Rollout]:
        body = requests.QueryRollouts(
            rollout_id_in=_list(rollout_id_in),
            status_in=_list(status_in),
            mode_in=_list(mode_in),
            run_id=run_id,
            group_id=group_id,
            limit=limit,
            offset=offset,
        )
        return await self._call("POST", "/rollouts/query", list[Rollout], body)

    async def get_rollout_by_id(self, rollout_id: str) -> Rollout | None:
        return await self._find(f"/rollouts/{_quoted(rollout_id)}", Rollout)

    async def update_rollout(
        self,
        rollout_id: str,
        *,
        status: RolloutStatus | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Rollout:
        body = requests.UpdateRollout(status=status, metadata=_dict(metadata))
        return await self._call("PATCH", f"/rollouts/{_quoted(rollout_id)}", Rollout, body)

    async def wait_for_rollouts(self, rollout_ids: Sequence[str], timeout: float | None = None) -> list[Rollout]:
        rollout_ids = list(dict.fromkeys(rollout_ids))
        give_up = None if timeout is None else time.monotonic() + timeout
        while True:
            wait = _POLL_SECONDS if give_up is None else min(_POLL_SECONDS, max(0.0, give_up - time.monotonic()))
            body = requests.WaitForRollouts(rollout_ids=rollout_ids, timeout=wait)
            terminal = await self._call("POST", "/rollouts/wait", list[Rollout], body, wait=wait)
            out_of_time = give_up is not None and time.monotonic() >= give_up
            if len(terminal) == len(rollout_ids) or out_of_time:
                return terminal

    # --- attempts ---

    async def query_attempts(self, rollout_id: str) -> list[Attempt]:
        return await self._call("GET", f"/rollouts/{_quoted(rollout_id)}/attempts", list[Attempt])

    async def get_latest_attempt(self, rollout_id: str) -> Attempt | None:
        return await self._find(f"/rollouts/{_quoted(rollout_id)}/attempts/latest", Attempt)

    async def update_attempt(
        self,
        rollout_id: str,
        attempt_id: str,
        *,
        status: AttemptStatus | None = None,
        metadata: Mapping[str, Any] | None = None,
        lease: int | None = None,
    ) -> Attempt:
        body = requests.UpdateAttempt(status=status, metadata=_dict(metadata), lease=lease)
        return await self._call("PATCH", _attempt_path(rollout_id, attempt_id), Attempt, body)

    async def heartbeat(self, rollout_id: str, attempt_id: str, lease: int) -> Heartbeat:
        path = f"{_attempt_path(rollout_id, attempt_id)}/heartbeat"
        return await self._call("POST", path, Heartbeat, requests.BeatHeart(lease=lease))

    # --- spans ---

    async def add_many_spans(self, spans: Sequence[Span]) -> list[Span]:
        return await self._call("POST", "/spans", list[Span], list(spans))

    async def get_next_span_sequence_id(self, rollout_id: str, attempt_id: str) -> int:
        return await self._call("POST", f"{_attempt_path(rollout_id, attempt_id)}/next-span-sequence-id", int)

    async def query_spans(self, rollout_id: str, attempt_id: str | None = None) -> list[Span]:
        query = None if attempt_id is None else {"attempt_id": attempt_id}
        return await self._call("GET", f"/rollouts/{_quoted(rollout_id)}/spans", list[Span], query=query)

    # --- resources ---

    async def add_resources(
        self, resources: NamedResources, metadata: Mapping[str, Any] | None = None
    ) -> ResourcesUpdate:
        body = requests.AddResources(resources=resources, metadata=_dict(metadata))
        return await self._call("POST", "/resources", ResourcesUpdate, body, repeatable=False)

    async def update_resources(self, resources_id: str, resources: NamedResources) -> ResourcesUpdate:
        body = requests.UpdateResources(resources=resources)
        return await self._call("PUT", f"/resources/{_quoted(resources_id)}", ResourcesUpdate, body)

    async def query_resources(self) -> list[ResourcesUpdate]:
        return await self._call("GET", "/resources", list[ResourcesUpdate])

    async def get_resources_by_id(self, resources_id: str) -> ResourcesUpdate | None:
        return await self._find(f"/resources/{_quoted(resources_id)}", ResourcesUpdate)

    async def get_latest_resources(self) -> ResourcesUpdate | None:
        return await self._find("/latest-resources", ResourcesUpdate)

    # --- runs and groups ---

    async def start_run(self, kind: str, manifest: Mapping[str, Any], run_id: str | None = None) -> Run:
        body = requests.StartRun(kind=kind, manifest=dict(manifest), run_id=run_id or new_id("run"))
        return await self._call("POST", "/runs", Run, body)

    async def update_run(self, run_id: str, status: RunStatus) -> Run:
        return await self._call("PATCH", f"/runs/{_quoted(run_id)}", Run, requests.UpdateRun(status=status))

    async def query_runs(self) -> list[Run]:
        return await self._call("GET", "/runs", list[Run])

    async def add_metrics(self, metrics: Metrics) -> None:
        await self._call("POST", "/metrics", None, metrics)

    async def query_metrics(self, run_id: str) -> list[Metrics]:
        return await self._call("GET", f"/runs/{_quoted(run_id)}/metrics", list[Metrics])

    async def next_policy_version(self, run_id: str) -> int:
        # Repeating it after a lost answer skips a number, which harms nobody; no number is given twice.
        return await self._call("POST", f"/runs/{_quoted(run_id)}/next-policy-version", int)

    async def create_group(self, size: int, run_id: str | None = None, group_id: str | None = None) -> Group:
        body = requests.CreateGroup(size=size, run_id=run_id, group_id=group_id or new_id("gr"))
        return await self._call("POST", "/groups", Group, body)

    async def get_group(self, group_id: str) -> Group | None:
        return await self._find(f"/groups/{_quoted(group_id)}", Group)

    async def complete_groups_after(
        self, run_id: str, cursor: int, limit: int = 100, timeout: float = 0.0
    ) -> list[Group]:
        give_up = time.monotonic() + timeout
        while True:
            wait = min(_POLL_SECONDS, max(0.0, give_up - time.monotonic()))
            query = {"cursor": str(cursor), "limit": str(limit), "timeout": str(wait)}
            path = f"/runs/{_quoted(run_id)}/complete-groups"
            groups = await self._call("GET", path, list[Group], query=query, wait=wait)
            if groups or time.monotonic() >= give_up:
                return groups

    # --- workers and the whole ---

    async def update_worker(self, worker_id: str, heartbeat_stats: Mapping[str, Any] | None = None) -> Worker:
        body = requests.UpdateWorker(heartbeat_stats=_dict(heartbeat_stats))
        return await self._call("PUT", f"/workers/{_quoted(worker_id)}", Worker, body)

    async def query_workers(self) -> list[Worker]:
        return await self._call("GET", "/workers", list[Worker])

    async def statistics(self) -> dict[str, int]:
        return await self._call("GET", "/statistics", dict[str, int])

    async def verify_api_key(self, api_key: str) -> tuple[str, str] | None:
        body = requests.VerifyKey(api_key=api_key)
        return await self._call("POST", "/keys/verify", tuple[str, str] | None, body)


def _decode(status: int, answer: bytes, returns: Any) -> Any:
    if status >= 400:
        raise _error(status, answer)
    return msgspec.msgpack.decode(answer, type=returns)


def _error(status: int, answer: bytes) -> AgentLightningError:
    """The typed error of an answer, which a proxy in between may also have made in its own format."""
    try:
        message = msgspec.json.decode(answer, type=requests.ErrorReply).error.message
    except (msgspec.DecodeError, UnicodeDecodeError):
        message = f"the server answered {status}: {answer[:200]!r}"
    return _ERRORS.get(status, AgentLightningError)(message)


def _quoted(name: str) -> str:
    return quote(name, safe="")


def _attempt_path(rollout_id: str, attempt_id: str) -> str:
    return f"/rollouts/{_quoted(rollout_id)}/attempts/{_quoted(attempt_id)}"


def _dict(mapping: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return None if mapping is None else dict(mapping)


def _list(values: Sequence[T] | None) -> list[T] | None:
    return None if values is None else list(values)
