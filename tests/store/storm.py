"""A storm of writes on a store, which keeps account of what was asked and of what was acknowledged.

Its clients name everything they write, and repeat a call until it is answered, as every client
should. Afterwards `check` compares a store with the account. This module does not know what goes
wrong meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence

from agentlightning.errors import UnavailableError
from agentlightning.store.base import CALLS, LightningStore
from agentlightning.store.calls import StoreCall
from agentlightning.store.codec import new_id
from agentlightning.types import AttemptedRollout, EnqueueRolloutRequest, Rollout, Span
from tests.store.conftest import span_of

BATCH = 3
TERMINAL = {"succeeded", "failed", "cancelled"}


class Storm:
    """Clients at work on `stores`, which are several ways to the same one. Used in an `async with`
    block."""

    def __init__(self, stores: Sequence[LightningStore], *, clients: int = 4) -> None:
        self._stores = stores
        self._clients = clients
        self._work: list[asyncio.Task[None]] = []
        self._counted = asyncio.Condition()
        self._stopping = False
        self.acknowledged = 0  # writes
        self.unavailable = 0  # answers that said so
        self.asked: set[str] = set()  # batches of rollouts
        self.enqueued: set[str] = set()
        self.spans: dict[str, set[str]] = {}  # batches of spans, by attempt
        self.ended: dict[str, str] = {}  # attempt by rollout
        self.feed: list[str] = []
        self.leased: list[tuple[str, int]] = []  # rollout and fencing token

    async def __aenter__(self) -> Storm:
        for number in range(self._clients):
            store = self._stores[number % len(self._stores)]
            self._work += [
                asyncio.create_task(self._enqueue(store, number)),
                asyncio.create_task(self._run(store)),
            ]
        self._work.append(asyncio.create_task(self._follow(self._stores[-1])))
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._stopping = True
        for task in self._work:
            task.cancel()
        await asyncio.wait(self._work)

    async def blow(self, writes: int) -> None:
        """Return once that many further writes have been acknowledged."""
        wanted = self.acknowledged + writes
        async with asyncio.timeout(90), self._counted:
            while self.acknowledged < wanted:
                for task in self._work:
                    if task.done():
                        task.result()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._counted.wait(), 1)

    async def calm(self) -> None:
        """Let the clients finish what they are at, and all rollouts be run."""
        self._stopping = True
        async with self._counted:
            self._counted.notify_all()
        async with asyncio.timeout(90):
            await asyncio.gather(*self._work)

    async def _insist(self, store: LightningStore, call: StoreCall) -> object:
        while True:
            try:
                answer = await store.perform(call)
            except UnavailableError:
                self.unavailable += 1
                await asyncio.sleep(0.01)
                continue
            self.acknowledged += 1
            async with self._counted:
                self._counted.notify_all()
            return answer

    async def _enqueue(self, store: LightningStore, client: int) -> None:
        number = 0
        while not self._stopping:
            name = f"{client}-{number}"
            number += 1
            self.asked.add(name)
            requests = [
                EnqueueRolloutRequest(input=i, rollout_id=f"{name}-{i}") for i in range(BATCH)
            ]
            await self._insist(store, CALLS["enqueue_many_rollouts"](requests=requests))
            self.enqueued.add(name)
            async with self._counted:  # the others catch up
                await self._counted.wait_for(
                    lambda: self._stopping or len(self.enqueued) * BATCH <= len(self.ended) + 50
                )

    async def _run(self, store: LightningStore) -> None:
        while not self._stopping or len(self.ended) < BATCH * len(self.asked):
            lease = CALLS["dequeue_many_rollouts"](limit=2, timeout=0.2, lease_id=new_id("lease"))
            for leased in await self._insist(store, lease):
                self.leased.append((leased.rollout_id, leased.lease.token))
                await self._run_one(store, leased)

    async def _run_one(self, store: LightningStore, leased: AttemptedRollout) -> None:
        attempt_id = leased.attempt.attempt_id
        first, last = ([span_of(leased, f"{batch}-{i}") for i in range(BATCH)] for batch in "01")
        await self._insist(store, CALLS["store_spans"](spans=first))
        self.spans.setdefault(attempt_id, set()).add("0")
        end = CALLS["end_attempt"](
            rollout_id=leased.rollout_id,
            attempt_id=attempt_id,
            status="succeeded",
            spans=last,
            lease=leased.lease.token,
        )
        await self._insist(store, end)
        self.spans[attempt_id].add("1")
        assert leased.rollout_id not in self.ended, "nothing is run twice"
        self.ended[leased.rollout_id] = attempt_id

    async def _follow(self, store: LightningStore) -> None:
        async for rollout in follow(
            store, lambda: self._stopping and len(self.feed) >= BATCH * len(self.asked)
        ):
            self.feed.append(rollout.rollout_id)

    async def check(self, store: LightningStore) -> None:
        """What `store` holds agrees with the account."""
        assert await store.check_store() == []
        stored = {rollout.rollout_id: rollout for rollout in await store.query_rollouts()}
        batches: dict[str, int] = {}
        for rollout_id in stored:
            name = rollout_id.rpartition("-")[0]
            batches[name] = batches.get(name, 0) + 1
        assert self.enqueued <= set(batches) <= self.asked, (
            "what was acknowledged is there, and nothing else"
        )
        assert set(batches.values()) <= {BATCH}, "no batch of rollouts is half there"
        for rollout_id, attempt_id in self.ended.items():
            assert stored[rollout_id].status == "succeeded"
            attempts = await store.query_attempts(rollout_id)
            assert [attempt.attempt_id for attempt in attempts] == [attempt_id], (
                "no attempt is doubled"
            )
        kept: dict[str, list[Span]] = {}
        cursor = None
        while True:
            page = await store.page_spans(limit=1000, cursor=cursor)
            for span in page.items:
                kept.setdefault(span.attempt_id, []).append(span)
            if (cursor := page.next_cursor) is None:
                break
        for spans in kept.values():
            assert len(spans) % BATCH == 0, "no batch of spans is half there"
            assert sorted(span.sequence_id for span in spans) == list(range(1, len(spans) + 1))
        for attempt_id, acknowledged in self.spans.items():
            assert {f"{batch}-{i}" for batch in acknowledged for i in range(BATCH)} <= {
                s.span_id for s in kept[attempt_id]
            }
        assert len(self.feed) == len(set(self.feed)), "the feed shows nothing twice"
        assert len(self.leased) == len(set(self.leased)), "nothing is leased twice"


async def follow(store: LightningStore, done: Callable[[], bool]) -> AsyncIterator[Rollout]:
    """The feed of finished rollouts from its beginning, until `done`."""
    cursor = 0
    while not done():
        try:
            page = await store.finished_after(cursor, limit=20, timeout=0.2)
        except UnavailableError:
            await asyncio.sleep(0.01)
            continue
        cursor = page.cursor
        for rollout in page.rollouts:
            yield rollout
