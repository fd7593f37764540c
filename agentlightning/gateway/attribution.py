"""Finds the attempt that a call belongs to: by its path, by its API key, or by both in
agreement."""

from __future__ import annotations

import asyncio
import functools
import hmac
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, NoReturn, TypeAlias
from urllib.parse import urlsplit

from agentlightning import semconv
from agentlightning.errors import ConflictError, ForbiddenError
from agentlightning.gateway.recordings import Records
from agentlightning.gateway.replay import Replay, replay_of
from agentlightning.gateway.request import CallRefused
from agentlightning.prompts.replacing import Replacer
from agentlightning.proxies import is_loopback
from agentlightning.store.base import LightningStore
from agentlightning.store.lifecycle import ENDS, TERMINAL
from agentlightning.tracing.context import AttemptTracer
from agentlightning.tracing.links import AttemptLinks
from agentlightning.types import (
    LLM,
    UNATTRIBUTED,
    Attempt,
    Credential,
    Mode,
    NamedResources,
    PromptCandidate,
    Rollout,
)

_ENDED = ENDS - {"unresponsive"}  # which a call revives while its retry has not started
_ADMIN: Final = Credential(name="the admin key", scopes=("admin",))
_LINKING: Final = 2000  # attempts whose calls are remembered for links, the latest
_CANDIDATES: Final = 32  # whose texts are remembered, the latest used
# scopes whose keys may call without an attempt
_CALLERS: Final = frozenset({"worker", "trainer", "admin"})


@dataclass
class Caller:
    """The attempt a call belongs to, with what its rollout says about sampling; numbers the
    attempt's calls.

    `mode` is None for calls that no attempt made. `sample` names the rollout within its run: what
    the algorithm called it (`metadata["sample"]`), so that a repeated run draws the same random
    numbers, or else its id. `attempt` is (rollout_id, attempt_id), None for nobody's. `links` finds
    what its calls go on from, None if earlier ones were not captured here or are forgotten. `lost`
    are the numbers of calls that may be stored and whose answers were not sent: the next call says
    so. `refused` counts requests that became no calls. In a `deterministic` run every backend is
    given seeds. `models` are those that its resources name, `prompts` puts their candidate into
    its calls. `replay` answers calls of a fork or a retry from the record."""

    rollout_id: str
    attempt_id: str
    trace_id: str
    mode: Mode | None
    models: frozenset[str] = frozenset()
    run_seed: int = 0
    sample: str = ""
    deterministic: bool = False
    prompts: Replacer | None = field(default=None, repr=False)
    replay: Replay | None = field(default=None, repr=False)
    running: int = 0
    refused: int = 0
    lost: list[int] = field(default_factory=list[int], repr=False)
    links: AttemptLinks | None = field(default=None, repr=False)
    next_index: int = field(default=0, repr=False)
    # other gateways whose calls of this attempt are numbered here
    gateways: set[str] = field(default_factory=set[str], repr=False)

    def __post_init__(self) -> None:
        self.attempt = None if self.mode is None else (self.rollout_id, self.attempt_id)

    def take_lost(self) -> list[int]:
        lost = self.lost
        self.lost = []
        return lost


NOBODY: Final = Caller(
    UNATTRIBUTED, UNATTRIBUTED, AttemptTracer(UNATTRIBUTED, UNATTRIBUTED).trace_id, None
)
"""Makes the calls that name no attempt."""

Numbers: TypeAlias = Callable[[Caller], Awaitable[int | None]]
"""Gives the number of a caller's next call; None if its attempt may make no more."""


class Attributor:
    """Resolves calls to attempts. Remembers up to `remembered` attempts, least recently used out,
    save those with running calls.

    With an `admin_key` a call needs a key: the admin key itself or, with a store, its attempt's or
    one issued with the scope worker, trainer or admin. Without, a path that names the attempt is
    enough and foreign keys are ignored, as agents carry placeholders such as `EMPTY`; with
    `local_only` these calls must come from this machine's own programs.

    Where several processes answer an attempt's calls, one of them numbers these, and looks at the
    attempt each time: the others are given its `numbers`."""

    def __init__(
        self,
        store: LightningStore | None,
        *,
        admin_key: str | None = None,
        remembered: int = 10_000,
        numbers: Numbers | None = None,
    ) -> None:
        self._numbers = numbers
        self._store = store
        self._admin_key = admin_key
        self.local_only = False
        # of a browser's cookie
        self.key_of_session: Callable[[Mapping[str, str]], str | None] = lambda headers: None
        self._remembered = remembered
        self._callers: OrderedDict[tuple[str, str], Caller] = OrderedDict()
        self._keys: OrderedDict[str, Credential] = OrderedDict()
        self._replacers: OrderedDict[str, Replacer] = OrderedDict()
        self._linking: deque[Caller] = deque()
        self._records = None if store is None else Records(store)
        self._meeting = asyncio.Lock()

    async def attribute(
        self, path_ids: tuple[str, str] | None, headers: Mapping[str, str]
    ) -> tuple[Caller, Credential | None]:
        """The caller, `UNATTRIBUTED` for a call that names no attempt, and without a store; and
        what its key allows. `headers` has lower-case names.

        CallRefused: as `check_key`, 403 for a key of another attempt, an attempt that has ended or
        a rollout that is terminal, 404 for ids the store does not know, 409 for the key of a worker
        that holds no attempt, or several."""
        credential = await self.check_key(headers)
        if self._store is None:
            return NOBODY, credential
        key_ids = credential.attempt if credential else None
        if path_ids and key_ids and path_ids != key_ids:
            _refuse(
                403,
                "wrong_attempt",
                "the API key belongs to another attempt than the URL names; use one of them",
            )
        ids = path_ids or key_ids
        if ids is None:
            return NOBODY, credential
        return await self._caller(self._store, *ids), credential

    async def number(self, caller: Caller) -> int:
        """The number of the caller's next call. CallRefused as `attribute`."""
        if self._numbers is None:
            return _next_index(caller)
        number = await self._numbers(caller)
        if number is None:
            ids = (caller.rollout_id, caller.attempt_id)
            self._callers.pop(ids, None)
            assert self._store is not None
            await self._caller(self._store, *ids)  # says why
            _refuse(403, "attempt_ended", f"attempt {ids[1]} has ended; stop this agent")
        return number

    async def may_call(self, rollout_id: str, attempt_id: str) -> Caller | None:
        """An attempt whose calls another gateway answers; None if it may make none."""
        assert self._store is not None
        try:
            return await self._caller(self._store, rollout_id, attempt_id)
        except CallRefused:
            return None

    async def catch_up(self, caller: Caller) -> None:
        """Let the walk of a caller go on behind the calls that other gateways answered."""
        if caller.replay is not None and (self._numbers is not None or caller.gateways):
            assert self._store is not None
            ids = (caller.rollout_id, caller.attempt_id)
            caller.replay.restore(await self._store.query_spans(*ids))

    async def unreceived(self, caller: Caller, model: str, key: bytes, before: float) -> list[int]:
        """The number of the latest call that asked this of a model and was answered before a time,
        if nothing goes on from it: the client that repeats it had no answer. Of agents side by side
        that ask the same, it may be the other one's."""
        if self._records is None:
            return []
        record = await self._records.read(caller.rollout_id, caller.attempt_id)
        equal = [
            call.index
            for call in record.calls
            if call.key == key
            and call.last
            and call.span.attributes.get(semconv.GEN_AI_REQUEST_MODEL) == model
            and call.span.end_time < before
        ]
        return equal[-1:]

    def numbered(self) -> list[tuple[str, str, int]]:
        """The attempts of running calls, and the number of the next call of each."""
        return [
            (*ids, caller.next_index) for ids, caller in self._callers.items() if caller.running
        ]

    def number_for(self, gateway: str, caller: Caller, least: int) -> int:
        """The number, `least` or above, of a call that another gateway answers."""
        caller.gateways.add(gateway)
        caller.links = None  # it does not see them all
        caller.next_index = max(caller.next_index, least)
        return _next_index(caller)

    def forget(self, gateway: str) -> None:
        """Number anew, behind what is stored, the attempts of a gateway that has ended: the calls
        that it was answering will never be stored."""
        for ids, caller in list(self._callers.items()):
            if caller.gateways == {gateway} and not caller.running:
                del self._callers[ids]

    async def check_key(self, headers: Mapping[str, str]) -> Credential | None:
        """The rights of the caller's key, None for a foreign one. CallRefused (401, 403) where
        one is required, and 403 where none is and a caller without must be of this machine."""
        try:
            api_key = api_key_of(headers) or self.key_of_session(headers)
            admin_key = self._admin_key
        except ForbiddenError as error:
            _refuse(403, "other_site", str(error))
        if (
            api_key
            and admin_key is not None
            and hmac.compare_digest(api_key.encode(), admin_key.encode())
        ):
            return _ADMIN
        credential = (
            await self._credential(self._store, api_key)
            if api_key and self._store is not None
            else None
        )
        may_call = credential is not None and _may_call(credential)
        if admin_key is None:
            if self.local_only and not may_call and (reason := why_elsewhere(headers)) is not None:
                _refuse(403, "not_of_this_machine", reason)
            return credential
        if credential is None:
            _refuse(
                401,
                "invalid_api_key",
                "the API key is missing or was not issued here; use the attempt's own key",
            )
        if not may_call:
            _refuse(
                403,
                "key_scope",
                f"the key {credential.name} may not call models; it needs the scope worker",
            )
        return credential

    async def _credential(self, store: LightningStore, api_key: str) -> Credential | None:
        """Keys of attempts are remembered; others can be revoked, or stand for another attempt the
        next time."""
        if api_key in self._keys:
            self._keys.move_to_end(api_key)
            return self._keys[api_key]
        try:
            credential = await store.find_key(api_key)
        except ConflictError as error:
            _refuse(409, "worker_attempt", str(error))
        if (
            credential is not None
            and credential.attempt is not None
            and credential.worker_id is None
        ):
            self._keys[api_key] = credential
            if len(self._keys) > self._remembered:
                self._keys.popitem(last=False)
        return credential

    async def _caller(self, store: LightningStore, rollout_id: str, attempt_id: str) -> Caller:
        caller = self._callers.get((rollout_id, attempt_id))
        if caller is not None and self._numbers is not None:
            self._callers.move_to_end((rollout_id, attempt_id))
            return caller
        attempt = await store.get_latest_attempt(rollout_id)
        caller = self._callers.get((rollout_id, attempt_id))
        if attempt is None:
            _refuse(
                404,
                "attempt_not_found",
                f"there is no rollout {rollout_id!r} with an attempt; check the URL",
            )
        if attempt.attempt_id != attempt_id:
            _refuse(
                403,
                "attempt_superseded",
                f"attempt {attempt_id} is not its rollout's latest; stop this agent",
            )
        if attempt.status in _ENDED:
            _refuse(
                403,
                "attempt_ended",
                f"attempt {attempt_id} has ended ({attempt.status}); stop this agent",
            )
        if caller is None or attempt.status == "unresponsive":
            rollout = await store.get_rollout_by_id(rollout_id)
            if rollout is None:
                _refuse(
                    404,
                    "rollout_not_found",
                    f"there is no rollout {rollout_id!r}; check the URL or key",
                )
            if rollout.status in TERMINAL:
                _refuse(
                    403,
                    "rollout_ended",
                    f"rollout {rollout_id} is {rollout.status}; stop this agent",
                )
            caller = await self._meet(store, rollout, attempt)
        self._callers.move_to_end((rollout_id, attempt_id))
        return caller

    async def _meet(self, store: LightningStore, rollout: Rollout, attempt: Attempt) -> Caller:
        """Remember an attempt. Its numbering goes on behind calls stored earlier, as before a
        restart."""
        ids = (rollout.rollout_id, attempt.attempt_id)
        async with self._meeting:
            if ids in self._callers:
                return self._callers[ids]
            next_index = 0
            assert self._records is not None
            replay = await replay_of(self._records, rollout, attempt)
            # the first span moves it on, so a preparing attempt has none
            if attempt.status != "preparing":
                spans = await store.query_spans(*ids)
                indices = [span.attributes.get(semconv.CALL_INDEX) for span in spans]
                next_index = 1 + max(
                    (index for index in indices if isinstance(index, int)), default=-1
                )
                if replay is not None:
                    replay.restore(spans)
            seed = rollout.metadata.get("seed")
            resources: NamedResources = {}
            # Without an explicit id an agent gets the latest, which may be half-tested prompts.
            if rollout.resources_id is not None:
                given = await store.get_resources_by_id(rollout.resources_id)
                resources = given.resources if given else {}
            caller = Caller(
                rollout_id=rollout.rollout_id,
                attempt_id=attempt.attempt_id,
                trace_id=AttemptTracer(*ids).trace_id,  # the runner's spans and ours make one trace
                mode=rollout.mode,
                models=frozenset(
                    each.model
                    for each in resources.values()
                    if isinstance(each, LLM) and each.gateway
                ),
                prompts=self._replacer(rollout.resources_id, resources),
                replay=replay,
                run_seed=seed if isinstance(seed, int) else 0,
                sample=str(rollout.metadata.get("sample", rollout.rollout_id)),
                deterministic=rollout.metadata.get("deterministic") is True,
                links=None if next_index else AttemptLinks(),
                next_index=next_index,
            )
            self._callers[ids] = caller
            self._linking.append(caller)
            if len(self._linking) > _LINKING:
                self._linking.popleft().links = None
            if len(self._callers) > self._remembered:
                # An attempt with a running call stays: its numbers are not in the store yet.
                oldest = next(
                    (name for name, known in self._callers.items() if not known.running), ids
                )
                if oldest != ids:
                    del self._callers[oldest]
            return caller

    def _replacer(self, resources_id: str | None, resources: NamedResources) -> Replacer | None:
        """What puts the candidate among these resources into calls: one for all rollouts that name
        them, as they repeat the same texts."""
        prompts = [each for each in resources.values() if isinstance(each, PromptCandidate)]
        if not prompts or resources_id is None:
            return None
        if resources_id not in self._replacers:
            self._replacers[resources_id] = Replacer(prompts[0], resources_id)
            if len(self._replacers) > _CANDIDATES:
                self._replacers.popitem(last=False)
        self._replacers.move_to_end(resources_id)
        return self._replacers[resources_id]


def _next_index(caller: Caller) -> int:
    index = caller.next_index
    caller.next_index += 1
    return index


def api_key_of(headers: Mapping[str, str]) -> str | None:
    """The key in `Authorization: Bearer …`, `x-api-key` or `x-goog-api-key`; `headers` has
    lower-case names."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    return headers.get("x-api-key") or headers.get("x-goog-api-key") or None


def is_worker(credential: Credential | None) -> bool:
    """Whether the key has a scope that agents do not get: worker or higher."""
    return credential is not None and not _CALLERS.isdisjoint(credential.scopes)


def _may_call(credential: Credential) -> bool:
    return credential.attempt is not None or is_worker(credential)


def _refuse(status: int, code: str, message: str) -> NoReturn:
    raise CallRefused(message, status=status, code=code)


def why_elsewhere(headers: Mapping[str, str]) -> str | None:
    """Why a request does not count as one of this machine's programs, and what to do; None if it
    does. `headers` has lower-case names. A local connection proves little: a web page can send
    requests to any port, and a proxy forwards from anywhere."""
    if "forwarded" in headers or "x-forwarded-for" in headers:
        return (
            "this request came through a proxy, from who knows where; a server behind one needs "
            "an admin key"
        )
    # A browser names the page that asks in `Origin`, and in `Host` the name that led it here.
    origin = headers.get("origin")
    if origin is None and headers.get("sec-fetch-site") == "cross-site":
        origin = "another site's page"  # as of an image or a link, for which no `Origin` is sent
    for caller in (f"//{headers.get('host', '')}", origin or "//localhost"):
        if not _is_here(caller):
            return (
                "a server without an admin key answers only this machine's own programs, not "
                f"{caller!r}; set one, or send a key that was issued here"
            )
    return None


@functools.lru_cache(maxsize=256)
def _is_here(url: str) -> bool:
    try:
        return is_loopback(urlsplit(url).hostname)
    except ValueError:
        return False
