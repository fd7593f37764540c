"""Reports of a runner to the store about an attempt: spans, the end, the lease.

A store that is away for a moment costs no attempt its reports."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from agentlightning.data.clocks import align_clocks
from agentlightning.errors import (
    AgentLightningError,
    ConflictError,
    InvalidError,
    NotFoundError,
    UnavailableError,
)
from agentlightning.runner.clients import lost_connection
from agentlightning.runner.execution import AttemptEnd, RunningAttempt
from agentlightning.semconv import CALL_INDEX, HTTP_STATUS
from agentlightning.store import codec
from agentlightning.store.base import LightningStore
from agentlightning.store.lifecycle import TERMINAL
from agentlightning.tracing.dialects import speaks_for_gateway
from agentlightning.tracing.recorded import RecordedOperation, fullest, read_operations
from agentlightning.types import Attempt, AttemptedRollout, Span

logger = logging.getLogger(__name__)

T = TypeVar("T")

_chance = random.Random()  # agents seed the one of the module
DEFECT_TRIES = 5  # of spans at which the server fails, before they count as refused
FIRST_RETRY_SECONDS = 0.1
LAST_RETRY_SECONDS = 5.0  # pauses while the store is away
CHUNK = 8 << 20  # characters and parts of spans in one call; a server takes 64 MiB


async def recorded_operations(
    store: LightningStore, rollout: AttemptedRollout
) -> list[RecordedOperation]:
    """The operations whose recorded results this attempt gets. NotFoundError if what it walks again
    was deleted."""
    every = rollout.config.tools == "recorded"
    walked: list[list[RecordedOperation]] = []
    if (source := rollout.source) is not None:
        spans, _ = align_clocks(await store.query_spans(source.rollout_id, source.attempt_id))
        calls = (span for span in spans if span.attributes.get(CALL_INDEX) == source.at)
        until = next((span.start_time for span in calls), 0.0)
        walked.append(read_operations(spans, every=every, until=until))
    if rollout.attempt.sequence_id > 1 and rollout.config.retry == "replay":
        for earlier in await store.query_attempts(rollout.rollout_id):
            if earlier.sequence_id < rollout.attempt.sequence_id:
                spans = await store.query_spans(rollout.rollout_id, earlier.attempt_id)
                walked.append(read_operations(spans, every=every))
    return fullest(walked)


async def send(store: LightningStore, running: RunningAttempt) -> None:
    """Store the spans recorded since the last call."""

    async def add(spans: Sequence[Span]) -> None:
        if spans:
            await store.store_spans(spans)

    await _deliver(store, running, add)


async def end(store: LightningStore, running: RunningAttempt, outcome: AttemptEnd) -> None:
    """Store the last spans of an attempt and end it, in one transaction. If it is no longer this
    runner's, its spans are stored (ConflictError)."""
    if running.ended_by_store:
        await send(store, running)
        return

    async def add_and_end(spans: Sequence[Span]) -> None:
        await store.end_attempt(
            *running.ids,
            outcome.status,
            spans,
            metadata={"reason": outcome.reason} if outcome.reason else None,
            lease=running.lease_token,
        )

    try:
        await _deliver(store, running, add_and_end)
    except ConflictError:
        await send(store, running)
        raise


async def _deliver(
    store: LightningStore,
    running: RunningAttempt,
    last: Callable[[Sequence[Span]], Awaitable[None]],
) -> None:
    """Store the spans recorded since the last call, the last piece of them by `last`. They are
    dropped if the store refuses them, or its server fails on them repeatedly (InvalidError)."""
    async with running.sending:
        # no agent may
        running.unsent += [span for span in running.tracer.drain() if not speaks_for_gateway(span)]
        try:
            while codec.larger(running.unsent, CHUNK) and len(running.unsent) > 1:
                piece = running.unsent
                while codec.larger(piece, CHUNK) and len(piece) > 1:
                    piece = piece[: len(piece) // 2]
                await store.store_spans(piece)
                del running.unsent[: len(piece)]
            await last(running.unsent)
        except AgentLightningError as error:
            if not running.unsent:
                raise
            running.defects += is_defect(error)
            if running.defects == DEFECT_TRIES:
                error = InvalidError(f"the server failed at them {DEFECT_TRIES} times: {error}")
            if isinstance(error, InvalidError | NotFoundError):
                running.refusal = error
                running.unsent = []
                running.defects = 0
            raise error
        running.unsent = []
        running.defects = 0


async def infrastructure_fault(
    store: LightningStore, running: RunningAttempt, outcome: AttemptEnd
) -> str | None:
    """The fault that kept the agent of a failed attempt from its model; None if nothing did, and
    the agent failed itself."""
    if store.away_at > running.started:
        return "the store could not be reached while the agent ran"
    if lost_connection(outcome.error):
        return "the connection to its model's URL broke"
    spans = await store.query_spans(*running.ids)
    calls = [span for span in spans if speaks_for_gateway(span)]
    status = calls[-1].attributes.get(HTTP_STATUS) if calls else None
    if isinstance(status, int) and status >= 500:
        return f"its last call of a model was not answered: {calls[-1].status.description}"
    return None


async def held_seconds(store: LightningStore, running: RunningAttempt) -> float:
    """Seconds for which the attempt's calls were held; 0 if the store cannot say."""
    try:
        latest = await _latest(store, running)
    except AgentLightningError as error:
        logger.warning("attempt %s ends at its timeout: %s", running.ids[1], error)
        return 0.0
    return 0.0 if latest is None else latest.held_seconds


async def _latest(store: LightningStore, running: RunningAttempt) -> Attempt | None:
    """The stored attempt; None if its rollout has a later one."""
    latest = await store.get_latest_attempt(running.ids[0])
    return latest if latest is not None and latest.attempt_id == running.ids[1] else None


async def is_revivable(store: LightningStore, running: RunningAttempt) -> bool:
    """Whether an unresponsive attempt is still the newest of its rollout."""
    rollout = await store.get_rollout_by_id(running.ids[0])
    is_open = rollout is not None and rollout.status not in TERMINAL
    return is_open and await _latest(store, running) is not None


async def patiently(call: Callable[[], Awaitable[T]], seconds: float) -> T:
    """Repeat an idempotent call while the store cannot be reached or fails; after that time,
    UnavailableError."""
    deadline = time.monotonic() + seconds
    pause = FIRST_RETRY_SECONDS
    while True:
        try:
            return await call()
        except AgentLightningError as error:
            if not (isinstance(error, UnavailableError) or is_defect(error)):
                raise
            if time.monotonic() + pause > deadline:
                raise UnavailableError(
                    f"it did not answer for {seconds:g} s: {error}. Running attempts will be "
                    "retried once it is back"
                ) from error
        await asyncio.sleep(pause * _chance.uniform(0.5, 1.0))
        pause = min(2 * pause, LAST_RETRY_SECONDS)


def is_defect(error: AgentLightningError) -> bool:
    """Whether the server itself failed (HTTP 500), which may pass."""
    return type(error) is AgentLightningError
