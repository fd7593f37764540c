"""Which attempt a call belongs to: by the path it came on, by the API key it carries, or by both in agreement.

Knows the store's rollouts, attempts and keys, and numbers each attempt's calls. Knows no models and no HTTP server.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NoReturn

from agentlightning import semconv
from agentlightning.errors import ConfigError
from agentlightning.gateway.openai import CallRefused
from agentlightning.store.base import LightningStore
from agentlightning.store.lifecycle import ENDS, TERMINAL
from agentlightning.tracing.context import AttemptTracer
from agentlightning.types import Attempt, Mode, Rollout

_ENDED = ENDS - {"unresponsive"}  # which a call revives while its retry has not started


@dataclass
class Caller:
    """The attempt a call belongs to, with what its rollout says about sampling; numbers the attempt's calls.

    `sample` names the rollout within its run: what the algorithm called it (`metadata["sample"]`), so that a repeated
    run draws the same random numbers, or else its id."""

    rollout_id: str
    attempt_id: str
    trace_id: str
    mode: Mode
    run_seed: int
    sample: str
    _next_index: int = field(default=0, repr=False)

    def take_call_index(self) -> int:
        """0, 1, 2 …, each given once."""
        index = self._next_index
        self._next_index += 1
        return index


class Attributor:
    """Resolves calls to attempts. Remembers up to `remembered` attempts and as many keys, least recently used out.

    With `require_key` a call needs a key signed by the store; without, a path that names the attempt is enough and
    foreign keys are ignored, as agents carry placeholders such as `EMPTY`."""

    def __init__(self, store: LightningStore | None, *, require_key: bool = False, remembered: int = 10_000) -> None:
        if require_key and store is None:
            raise ConfigError("require_key needs a store: keys are signed by it; give the gateway its store")
        self._store = store
        self._require_key = require_key
        self._remembered = remembered
        self._callers: OrderedDict[tuple[str, str], Caller] = OrderedDict()
        self._keys: OrderedDict[str, tuple[str, str]] = OrderedDict()
        self._meeting = asyncio.Lock()

    async def attribute(self, path_ids: tuple[str, str] | None, api_key: str | None) -> Caller | None:
        """The caller, or None for a call that names no attempt.

        CallRefused: 401 without a key where one is required, 403 for a key of another attempt, an attempt that has
        ended or a rollout that is terminal, 404 for ids the store does not know."""
        key_ids = await self.check_key(api_key)
        if self._store is None:
            return None
        if path_ids and key_ids and path_ids != key_ids:
            _refuse(403, "wrong_attempt", "the API key belongs to another attempt than the URL names; use one of them")
        ids = path_ids or key_ids
        return await self._caller(self._store, *ids) if ids else None

    async def check_key(self, api_key: str | None) -> tuple[str, str] | None:
        """The ids of the attempt whose key this is, None for a foreign one. CallRefused (401) where one is required."""
        key_ids = await self._key_ids(self._store, api_key) if self._store is not None and api_key else None
        if self._require_key and key_ids is None:
            _refuse(401, "invalid_api_key", "the API key is missing or was not issued here; use the attempt's own key")
        return key_ids

    async def _key_ids(self, store: LightningStore, api_key: str) -> tuple[str, str] | None:
        if api_key in self._keys:
            self._keys.move_to_end(api_key)
            return self._keys[api_key]
        ids = await store.verify_api_key(api_key)
        if ids is not None:
            self._keys[api_key] = ids
            if len(self._keys) > self._remembered:
                self._keys.popitem(last=False)
        return ids

    async def _caller(self, store: LightningStore, rollout_id: str, attempt_id: str) -> Caller:
        attempt = await store.get_latest_attempt(rollout_id)
        caller = self._callers.get((rollout_id, attempt_id))
        if attempt is None or (attempt.attempt_id != attempt_id and caller is None):
            await self._check_known(store, rollout_id, attempt_id)
        if attempt is None or attempt.attempt_id != attempt_id:
            _refuse(403, "attempt_superseded", f"attempt {attempt_id} was replaced by a newer one; stop this agent")
        if attempt.status in _ENDED:
            _refuse(403, "attempt_ended", f"attempt {attempt_id} has ended ({attempt.status}); stop this agent")
        if caller is None or attempt.status == "unresponsive":
            rollout = await store.get_rollout_by_id(rollout_id)
            if rollout is None:
                _refuse(404, "rollout_not_found", f"there is no rollout {rollout_id!r}; check the URL or key")
            if rollout.status in TERMINAL:
                _refuse(403, "rollout_ended", f"rollout {rollout_id} is {rollout.status}; stop this agent")
            caller = await self._meet(store, rollout, attempt)
        self._callers.move_to_end((rollout_id, attempt_id))
        return caller

    @staticmethod
    async def _check_known(store: LightningStore, rollout_id: str, attempt_id: str) -> None:
        if all(attempt.attempt_id != attempt_id for attempt in await store.query_attempts(rollout_id)):
            _refuse(404, "attempt_not_found", f"rollout {rollout_id!r} has no attempt {attempt_id!r}; check the URL")

    async def _meet(self, store: LightningStore, rollout: Rollout, attempt: Attempt) -> Caller:
        """Remember an attempt. Its numbering goes on behind calls stored earlier, as before a restart."""
        ids = (rollout.rollout_id, attempt.attempt_id)
        async with self._meeting:
            if ids in self._callers:
                return self._callers[ids]
            next_index = 0
            if attempt.status != "preparing":  # the first span moves it on, so a preparing attempt has none
                spans = await store.query_spans(*ids)
                indices = [span.attributes.get(semconv.CALL_INDEX) for span in spans]
                next_index = 1 + max((index for index in indices if isinstance(index, int)), default=-1)
            seed = rollout.metadata.get("seed")
            caller = Caller(
                rollout_id=rollout.rollout_id,
                attempt_id=attempt.attempt_id,
                trace_id=AttemptTracer(*ids).trace_id,  # the runner's spans and ours make one trace
                mode=rollout.mode,
                run_seed=seed if isinstance(seed, int) else 0,
                sample=str(rollout.metadata.get("sample", rollout.rollout_id)),
                _next_index=next_index,
            )
            self._callers[ids] = caller
            if len(self._callers) > self._remembered:
                self._callers.popitem(last=False)
            return caller


def api_key_of(headers: Mapping[str, str]) -> str | None:
    """The key in `Authorization: Bearer …` or `x-api-key`; `headers` has lower-case names."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    return headers.get("x-api-key") or None


def _refuse(status: int, code: str, message: str) -> NoReturn:
    raise CallRefused(message, status=status, code=code)
