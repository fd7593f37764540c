"""Groups in progress: started while they can still be fresh at training, and delivered when
complete.

At most as many groups are in progress as (K + 1) steps consume, where K is the allowed staleness. A
group started now is then trained, in order of completion, about K publications later. This is
AReaL's capacity rule (arXiv:2505.24298) without a counter: a group that was trained, dropped or
failed is no longer in progress, so no capacity is lost."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import msgspec
import numpy as np

from agentlightning.algorithm.base import RunContext
from agentlightning.algorithm.budget import OutOfBudget, Spending, usage_of
from agentlightning.algorithm.evaluation import refuse_uncalled
from agentlightning.algorithm.rl.forks import fork_requests
from agentlightning.algorithm.rl.judging import judge_group
from agentlightning.algorithm.rl.sampling import SamplerState, TaskSampler
from agentlightning.algorithm.rl.settings import RLSettings
from agentlightning.data.continuity import find_breaks
from agentlightning.data.credit import RewardedGroup
from agentlightning.data.recordings import rewarded_group
from agentlightning.data.transitions import TracedRollout, compare_costs, trace_rollout
from agentlightning.errors import ConflictError
from agentlightning.store.base import LightningStore
from agentlightning.store.sources import forks_group
from agentlightning.types import EnqueueRolloutRequest, Group, Rollout, RolloutStatus

# How many steps' worth of consecutive useless groups are replaced before a step trains without
# them.
USELESS_STEPS: Final = 10

STALE: Final = "stale"
UNFINISHED: Final[list[RolloutStatus]] = ["queuing", "requeuing", "preparing", "running"]


class Ticket(msgspec.Struct, frozen=True):
    """A group that was started: the position of its task, the newest policy version then, and the
    task's index if the algorithm picked it."""

    position: int
    version: int
    index: int | None = None


class GroupsState(msgspec.Struct):
    """The groups' part of a checkpoint: the sampler's state, groups started but not trained, the
    `cursor` up to which complete groups are done, and the versions of this run's weights that may
    still occur, oldest first."""

    sampler: SamplerState = msgspec.field(default_factory=SamplerState)
    tickets: tuple[Ticket, ...] = ()
    cursor: int = 0
    lineage: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class CompleteGroup:
    """A group whose rollouts have all ended, and the rewards of those that count. `staleness` is
    how many publications ago the oldest token of each rollout was sampled, at delivery;
    `agreement` that of a judge with itself."""

    ticket: Ticket
    finished_index: int
    rollouts: tuple[TracedRollout, ...]
    rewarded: RewardedGroup
    staleness: tuple[int, ...] = ()
    agreement: float | None = None


@dataclass
class Dropped:
    """Drops since the last step: groups, each with the reason, and rollouts, counted by reason.
    Groups that are not `STALE` had no two different rewards."""

    groups: list[tuple[str, CompleteGroup]] = field(default_factory=list[tuple[str, CompleteGroup]])
    rollouts: Counter[str] = field(default_factory=Counter[str])

    @property
    def useless(self) -> list[CompleteGroup]:
        return [group for reason, group in self.groups if reason != STALE]

    @property
    def reasons(self) -> Counter[str]:
        return Counter(reason for reason, _ in self.groups)


async def trace_group(
    store: LightningStore,
    rollout_ids: Sequence[str],
    algorithm: RLSettings,
    models: Iterable[str],
    spending: Spending | None = None,
) -> list[TracedRollout]:
    """These finished rollouts from the store, as `algorithm` sees them when it trains `models`.
    They are counted in `spending`."""
    rollouts = {
        rollout.rollout_id: rollout
        for rollout in await store.query_rollouts(rollout_id_in=rollout_ids)
    }
    calls = algorithm.call_filter(*models)
    traced = list[TracedRollout]()
    for name in rollout_ids:
        spans = await store.query_spans(name, "latest")
        if spending is not None:
            spending.add_rollout(name, await asyncio.to_thread(usage_of, spans))
        rollout = await asyncio.to_thread(
            trace_rollout, rollouts[name], spans, calls=calls, reward=algorithm.reward
        )
        breaks = await asyncio.to_thread(find_breaks, rollout.transitions, spans)
        traced.append(replace(rollout, breaks=breaks))
    return compare_costs(traced, algorithm.reward)


class Groups:
    """The groups of one run. `collect` runs beside the loop, which alternates `take` and
    `trained`."""

    def __init__(self, algorithm: RLSettings, context: RunContext) -> None:
        self.algorithm = algorithm
        self.context = context
        self.sampler = TaskSampler(
            context.train_tasks,
            context.seed,
            algorithm.curriculum_function,
            algorithm.difficulty,
            algorithm.next_task if algorithm.picks_tasks else None,
        )
        self.steps_left = algorithm.steps
        self._dropped = Dropped()
        self._started: dict[str, Ticket] = {}
        self._enqueued: set[str] = set()
        self._forked: dict[str, list[TracedRollout]] = {}  # groups that wait for their forks
        self._ready: list[CompleteGroup] = []
        self._taken: list[CompleteGroup] = []
        self._cursor = 0
        self._lineage: list[int] = [0]
        self._changed = asyncio.Event()
        # of the first step, until one is known to call the model
        self._first: list[TracedRollout] | None = []
        self._failure: BaseException | None = None

    @property
    def state(self) -> GroupsState:
        complete = [*self._ready, *self._taken]
        cursor = min([self._cursor, *(group.finished_index - 1 for group in complete)])
        tickets = (*self._started.values(), *(group.ticket for group in complete))
        return GroupsState(self.sampler.state, tickets, cursor, tuple(self._lineage))

    def restore(self, state: GroupsState) -> None:
        self.sampler.state = state.sampler
        self._started = {self.name(ticket): ticket for ticket in state.tickets}
        self._cursor = state.cursor
        self._lineage = list(state.lineage)

    def restart(self, version: int) -> None:
        """Forget every group that was not trained, and restart from their tasks under another
        version."""
        positions = [ticket.position for ticket in self.state.tickets]
        self.sampler.state.position = min([self.sampler.state.position, *positions])
        self._started = {}
        self._forked = {}
        self._ready = []
        self._taken = []
        self._publish(version)

    def name(self, ticket: Ticket) -> str:
        return f"{self.context.run.run_id}-{ticket.position}-v{ticket.version}"

    def awaits(self, group_id: str | None) -> bool:
        """Whether this group is in progress, or may be started before the weights change. After
        skipped steps or replaced groups there are more of these than one step takes."""
        if group_id is None:
            return False
        group_id = group_id.removesuffix(forks_group(""))
        if group_id in self._started:
            return True
        version = self._lineage[-1]
        position = group_id.removeprefix(f"{self.context.run.run_id}-").removesuffix(f"-v{version}")
        if not position.isdecimal() or int(position) < self.sampler.state.position:
            return False
        return group_id == self.name(Ticket(int(position), version))

    async def take(self) -> tuple[list[CompleteGroup], Dropped]:
        """The groups of the next step in the order of their tasks, and what was dropped since the
        step before.

        Waits for as many as a step trains on. If useless groups are not replaced, these are all
        that were started; if they are, fewer only after `USELESS_STEPS` times as many were
        useless."""
        progress = self.context.progress
        size = self.algorithm.rollouts_per_group
        progress.phase("rollouts", self.algorithm.tasks_per_step * size)
        while not self._enough():
            if self._failure is not None:  # it may have occurred while nothing waited
                raise self._failure
            self._changed.clear()
            await self._begin_groups()  # dropped stale groups made room
            await self._changed.wait()
            progress.advance(len(self._ready) * size)
        count = self.algorithm.tasks_per_step
        self._taken = self._ready[:count]
        self._ready = self._ready[count:]
        dropped = self._dropped
        self._dropped = Dropped()
        return sorted(self._taken, key=lambda group: group.ticket.position), dropped

    async def trained(self, version: int | None) -> None:
        """The taken groups are done; the weights are now called `version`, or are unchanged
        (None)."""
        self._taken = []
        self.steps_left -= 1
        if version is not None:
            self._publish(version)
        if self.algorithm.max_staleness:
            await self._begin_groups()

    async def withdraw(self) -> None:
        """Cancel every group in progress: no step is left for it."""
        names = {name for group in self._started for name in (group, forks_group(group))}
        self._started = {}
        self._forked = {}
        self._ready = []
        await withdraw_rollouts(self.context, lambda rollout: rollout.group_id in names)

    def _publish(self, version: int) -> None:
        self._lineage = [*self._lineage, version][-1 - self.algorithm.max_staleness :]

    def _enough(self) -> bool:
        if not self.algorithm.refills and self._started:
            return False
        self._ready = [group for group in map(self._fresh, self._ready) if group is not None]
        if not self.algorithm.refills:
            return bool(self._ready or self._dropped.groups)
        per_step = self.algorithm.tasks_per_step
        return len(self._ready) >= per_step or len(self._dropped.groups) >= USELESS_STEPS * per_step

    def _fresh(self, group: CompleteGroup) -> CompleteGroup | None:
        """The group without rollouts that have become stale; None if too little is left."""
        allowed = self.algorithm.max_staleness
        staleness = [self.staleness(traced, group.ticket) for traced in group.rollouts]
        kept = [index for index, age in enumerate(staleness) if age <= allowed]
        if len(kept) == len(staleness):
            return replace(group, staleness=tuple(staleness))
        self._dropped.rollouts[STALE] += len(staleness) - len(kept)
        rollouts = tuple(
            compare_costs([group.rollouts[index] for index in kept], self.algorithm.reward)
        )
        rewarded = rewarded_group(rollouts, self.algorithm.unrewarded)
        if self.algorithm.why_useless(rewarded):
            self._dropped.groups.append((STALE, group))
            return None
        return replace(
            group, rollouts=rollouts, rewarded=rewarded, staleness=tuple(staleness[i] for i in kept)
        )

    def staleness(self, traced: TracedRollout, ticket: Ticket) -> int:
        """The number of publications since the oldest token of a rollout was sampled, of a fork
        also what it was given again; for weights that this run does not descend from, more than
        ever allowed. If a backend does not report versions, the newest version at the group's start
        counts."""
        ages = {version: age for age, version in enumerate(reversed(self._lineage))}
        sampled = {
            int(version) for call in traced.transitions for version in np.unique(call.versions)
        } or {-1}
        if traced.prefix_version is not None:
            sampled.add(traced.prefix_version)
        unknown = 1 + self.algorithm.max_staleness
        return max(
            ages.get(ticket.version if version < 0 else version, unknown) for version in sampled
        )

    async def collect(self) -> None:
        """Start groups and collect complete ones, forever. `take` raises its errors."""
        store = self.context.store
        run_id = self.context.run.run_id
        try:
            async with asyncio.TaskGroup() as judging:
                while True:
                    for group in await store.complete_groups_after(
                        run_id, self._cursor, timeout=30.0
                    ):
                        # groups of an abandoned lineage are ignored
                        if group.group_id in map(forks_group, self._forked):
                            await self._collect_forks(group)
                        elif group.group_id in self._started and self.algorithm.judge is not None:
                            judging.create_task(self._collect(group))
                        elif group.group_id in self._started:
                            await self._collect(group)
                        self._cursor = max(self._cursor, group.finished_index or 0)
                    if self.algorithm.refills:
                        await self._begin_groups()
                    self._changed.set()
        except Exception as error:  # noqa: BLE001 (`take` raises it)
            self._failure = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
            self._changed.set()

    async def _collect(self, group: Group) -> None:
        """Take in a complete group, after a judge has ranked it, if there is one."""
        judge = self.algorithm.judge
        context = self.context
        agreement = None
        if judge is not None:
            agreement = await judge_group(context, judge, group.rollout_ids)
        rollouts = await self._trace(group)
        await self._check_called(rollouts)
        if not await self._fork(group, rollouts):
            self._take_in(group.group_id, group.finished_index or 0, rollouts, agreement)
            self._changed.set()

    async def _trace(self, group: Group) -> list[TracedRollout]:
        context = self.context
        return await trace_group(
            context.store, group.rollout_ids, self.algorithm, context.policies, context.spending
        )

    async def _fork(self, group: Group, rollouts: list[TracedRollout]) -> bool:
        """Whether a complete group has forks, which are started; repeating this changes nothing."""
        name = forks_group(group.group_id)
        store = self.context.store
        forks = await store.get_group(name)
        if forks is None or not forks.rollout_ids:
            requests = fork_requests(self.algorithm, name, group.run_id, rollouts)
            if not requests:
                return False
            self._forked[group.group_id] = rollouts
            await store.create_group(
                len(requests), run_id=group.run_id, group_id=name, source_id=group.group_id
            )
            await store.enqueue_many_rollouts(requests)
            return True
        self._forked[group.group_id] = rollouts  # started before a kill
        if forks.finished_index is not None:
            await self._collect_forks(forks)
        return True

    async def _collect_forks(self, forks: Group) -> None:
        """Take in a group whose forks are complete, together with them."""
        group_id = forks.source_id or ""
        if (sources := self._forked.pop(group_id, None)) is not None:
            rollouts = [*sources, *await self._trace(forks)]
            self._take_in(group_id, forks.finished_index or 0, rollouts)
            self._changed.set()

    async def _check_called(self, rollouts: Sequence[TracedRollout]) -> None:
        """TrainingError if none of the first step's rollouts called the model; an agent may well
        solve some tasks without it."""
        if self._first is not None:
            self._first += rollouts
            if len(self._first) >= self.algorithm.tasks_per_step * self.algorithm.group_size:
                await refuse_uncalled(self.context, self._first)
                self._first = None

    def _take_in(
        self,
        name: str,
        finished: int,
        rollouts: Sequence[TracedRollout],
        agreement: float | None = None,
    ) -> None:
        ticket = self._started.pop(name, None)
        if ticket is None:  # cancelled while it was read
            return
        self._enqueued.discard(name)
        rewarded = rewarded_group(rollouts, self.algorithm.unrewarded)
        complete = CompleteGroup(ticket, finished, tuple(rollouts), rewarded, agreement=agreement)
        if rewarded.rewards:
            self.sampler.report(ticket.position, rewarded.mean)
        useless = self.algorithm.why_useless(rewarded) if self.algorithm.refills else None
        if useless:
            self._dropped.groups.append((useless, complete))
        else:
            self._ready.append(complete)

    def _start_next(self, count: int) -> None:
        for _ in range(count):
            position, index = self.sampler.take()
            ticket = Ticket(position, self._lineage[-1], index)
            self._started[self.name(ticket)] = ticket

    async def _begin_groups(self) -> None:
        """Start as many groups as there is room for; groups that turn out complete but useless make
        room for more."""
        while True:
            # Each must be fresh at training, and there must be a step for it.
            steps = min(self.algorithm.max_staleness + 1, self.steps_left)
            busy = len(self._started) + len(self._ready) + len(self._taken)
            self._start_next(self._affordable(steps * self.algorithm.tasks_per_step - busy))
            # Restored ones too: the process may have died before all were enqueued.
            missing = {
                name: ticket for name, ticket in self._started.items() if name not in self._enqueued
            }
            if not missing:
                return
            self._enqueued |= missing.keys()
            await self._enqueue(missing)

    def _affordable(self, groups: int) -> int:
        """The number of so many groups that the budget leaves; where no group is replaced, a step
        has all of its groups or does not begin. When none is left, `take` raises OutOfBudget."""
        spending = self.context.spending
        if spending is None or groups <= 0:
            return groups
        size = self.algorithm.rollouts_per_group
        started = len(self._started)
        needed = (started + groups) * size
        try:
            if not self.algorithm.refills:
                spending.require(needed)
                return groups
            left = spending.fitting(needed) // size - started
            if left <= 0 and not started:
                spending.require(size)
                return 1
        except OutOfBudget as error:
            if not started:
                self._failure = error
                self._changed.set()
            return 0
        return max(0, left)

    async def _enqueue(self, missing: Mapping[str, Ticket]) -> None:
        """Enqueue these groups in the store; repeating this changes nothing. Groups that a killed
        process completed are not reported again after `collect` has passed them, so they are
        collected here."""
        passed = self._cursor
        store = self.context.store
        size = self.algorithm.group_size
        run_id = self.context.run.run_id
        groups = await asyncio.gather(
            *(store.create_group(size, run_id=run_id, group_id=name) for name in missing)
        )
        await store.enqueue_many_rollouts(
            [
                request
                for name, ticket in missing.items()
                for request in self._requests(name, ticket)
            ]
        )
        complete = [group for group in groups if group.finished_index is not None]
        for group in sorted(complete, key=lambda group: (group.finished_index, group.group_id)):
            if (group.finished_index or 0) <= passed:
                await self._collect(group)

    def _requests(self, name: str, ticket: Ticket) -> list[EnqueueRolloutRequest]:
        algorithm = self.algorithm
        context = self.context
        step, index = divmod(ticket.position, algorithm.tasks_per_step)
        return [
            EnqueueRolloutRequest(
                input=self.sampler.task(ticket.position, ticket.index),
                rollout_id=f"{name}-{member}",
                resources_id=context.resources_id,
                run_id=context.run.run_id,
                group_id=name,
                group_index=member,
                config=algorithm.rollout,
                metadata=context.noise(f"train-{step + 1}-{index}-{member}"),
            )
            for member in range(algorithm.group_size)
        ]


async def withdraw_rollouts(context: RunContext, unwanted: Callable[[Rollout], bool]) -> None:
    """Cancel the unfinished rollouts of the run that are no longer wanted."""
    for rollout in await context.store.query_rollouts(
        run_id=context.run.run_id, status_in=UNFINISHED
    ):
        if unwanted(rollout):
            with contextlib.suppress(ConflictError):  # it has ended meanwhile
                await context.store.cancel_rollout(rollout.rollout_id)
