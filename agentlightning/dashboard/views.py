"""The data the page shows: each view as a call with its route and its answer, and how it is read
from a store."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Annotated, Any, Final, get_type_hints

import msgspec

from agentlightning.dashboard import (
    credit_views,
    progress,
    rollout_views,
    run_views,
    token_views,
)
from agentlightning.data.recordings import whole_group
from agentlightning.datasets.export import changed_annotation
from agentlightning.errors import InvalidError, NotFoundError
from agentlightning.store.base import LightningStore
from agentlightning.store.calls import StoreCall
from agentlightning.tracing.scores import give_score
from agentlightning.types import Filter, Order, Rollout

_MOST_CURVES: Final = 20_000  # of an answer, which is made in memory


@dataclass(frozen=True)
class Sources:
    """The sources of a view: the store, tokenizers, and the name of its `caller`."""

    store: LightningStore
    tokenizers: token_views.Tokenizers
    measured: run_views.MetricsCache
    caller: str

    async def rollout(self, rollout_id: str) -> Rollout:
        """NotFoundError where there is no rollout of this id."""
        rollout = await self.store.get_rollout_by_id(rollout_id)
        if rollout is None:
            raise NotFoundError(f"there is no rollout {rollout_id!r} here")
        return rollout

    async def row(self, rollout: Rollout) -> rollout_views.RolloutRow:
        return (await rollout_views.rows_of(self.store, [rollout]))[0]

    async def group(self, group_id: str) -> credit_views.TracedGroup:
        """A group, with the forks of its rollouts. NotFoundError where there is none of this
        id."""
        group = await whole_group(self.store, group_id)
        if group is None:
            raise NotFoundError(f"there is no group {group_id!r} here")
        return await credit_views.trace_group(self.store, group.rollout_ids, group)

    async def compared_with(self, rollout: Rollout) -> credit_views.TracedGroup:
        """The rollout's whole group; of one without a group, it alone."""
        named = rollout.group_id
        group = None if named is None else await whole_group(self.store, named)
        names = [rollout.rollout_id] if group is None else group.rollout_ids
        return await credit_views.trace_group(self.store, names, group)


class Contents(msgspec.Struct, frozen=True, kw_only=True):
    """Whether each view that may be empty has something to show."""

    resources: bool
    workers: bool


class View(StoreCall, frozen=True, kw_only=True):
    """Its `scope` is that of the calls it makes."""

    scope = "read"

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.returns = get_type_hints(cls.read)["return"]

    async def read(self, sources: Sources) -> Any:
        raise NotImplementedError


class ListRuns(View, frozen=True, kw_only=True):
    """The newest first."""

    route = "GET /dashboard/runs"

    async def read(self, sources: Sources) -> list[run_views.RunRow]:
        rows: list[run_views.RunRow] = []
        for run in sorted(await sources.store.query_runs(), key=lambda run: -run.start_time):
            measured, failed = await sources.measured.of(sources.store, run)
            active_at = run.end_time or await run_views.last_activity(sources.store, run, measured)
            rows.append(await asyncio.to_thread(run_views.row_of, run, measured, failed, active_at))
        return rows


class ShowFailures(View, frozen=True, kw_only=True):
    """Why rollouts of a run failed, the most frequent cause first."""

    route = "GET /dashboard/runs/{run_id}/failures"
    run_id: str

    async def read(self, sources: Sources) -> list[progress.Cause]:
        return await progress.causes(sources.store, self.run_id)


class ShowProgress(View, frozen=True, kw_only=True):
    """Why the held-out reward of a run moved."""

    route = "GET /dashboard/runs/{run_id}/progress"
    run_id: str

    async def read(self, sources: Sources) -> progress.Progress:
        return await progress.progress(sources.store, self.run_id)


class CompareTasks(View, frozen=True, kw_only=True):
    """The newest evaluations of some runs, task by task."""

    route = "POST /dashboard/tasks"
    run_ids: Annotated[list[str], msgspec.Meta(max_length=50)]

    async def read(self, sources: Sources) -> list[progress.TaskRow]:
        return await progress.compared(sources.store, self.run_ids)


class ListContents(View, frozen=True, kw_only=True):
    route = "GET /dashboard/contents"

    async def read(self, sources: Sources) -> Contents:
        store = sources.store
        return Contents(
            resources=await store.get_latest_resources() is not None,
            workers=bool(await store.query_workers()),
        )


class ShowSeries(View, frozen=True, kw_only=True):
    route = "POST /dashboard/series"
    run_ids: list[str]
    names: list[str]
    points: Annotated[int, msgspec.Meta(ge=20, le=2000)] = 400

    async def read(self, sources: Sources) -> list[run_views.RunSeries]:
        if len(self.run_ids) * (1 + len(self.names)) > _MOST_CURVES:
            raise InvalidError(
                f"these are more than {_MOST_CURVES:,} curves; ask for fewer runs or names at once"
            )
        found = [await run_views.find_run(sources.store, run_id) for run_id in self.run_ids]
        measured = [(await sources.measured.of(sources.store, run))[0] for run in found]
        return [
            await asyncio.to_thread(run_views.series, run, own, self.names, self.points)
            for run, own in zip(found, measured, strict=True)
        ]


class ShowQuality(View, frozen=True, kw_only=True):
    route = "GET /dashboard/quality"
    run_id: str

    async def read(self, sources: Sources) -> run_views.Quality:
        run = await run_views.find_run(sources.store, self.run_id)
        return await asyncio.to_thread(
            run_views.quality, run, (await sources.measured.of(sources.store, run))[0]
        )


class ShowPrompts(View, frozen=True, kw_only=True):
    route = "GET /dashboard/prompts"
    run_id: str

    async def read(self, sources: Sources) -> run_views.Prompts:
        return await run_views.prompts(
            sources.store, await run_views.find_run(sources.store, self.run_id)
        )


class ListRollouts(View, frozen=True, kw_only=True):
    """`page_rollouts`, with what each rollout came to."""

    route = "POST /dashboard/rollouts"
    where: Filter | None = None
    order: tuple[Order, ...] = rollout_views.NEWEST_FIRST
    limit: Annotated[int, msgspec.Meta(ge=1, le=200)] = 50
    cursor: str | None = None
    with_total: bool = False

    async def read(self, sources: Sources) -> rollout_views.RolloutList:
        page = await sources.store.page_rollouts(**msgspec.structs.asdict(self))
        rows = await rollout_views.rows_of(sources.store, page.items)
        return rollout_views.RolloutList(items=rows, total=page.total, next_cursor=page.next_cursor)


class ShowRollout(View, frozen=True, kw_only=True):
    """One of its attempts, by number; else the last."""

    route = "GET /dashboard/rollouts/{rollout_id}"
    rollout_id: str
    attempt: Annotated[int, msgspec.Meta(ge=1)] | None = None

    async def read(self, sources: Sources) -> rollout_views.RolloutView:
        rollout = await sources.rollout(self.rollout_id)
        attempts = await sources.store.query_attempts(self.rollout_id)
        shown = self.attempt or len(attempts)
        if shown > len(attempts):
            raise NotFoundError(
                f"rollout {self.rollout_id} has {len(attempts)} attempts; there is no {shown}"
            )
        spans = (
            await sources.store.query_spans(self.rollout_id, attempts[shown - 1].attempt_id)
            if attempts
            else []
        )
        training = await credit_views.trained_by(sources.store, rollout.run_id)
        row = await sources.row(rollout)
        return await asyncio.to_thread(
            rollout_views.rollout_view, row, attempts, shown or None, spans, training
        )


class ShowForks(View, frozen=True, kw_only=True):
    """The newest forks of a rollout, by the call where they left it."""

    route = "GET /dashboard/rollouts/{rollout_id}/forks"
    rollout_id: str

    async def read(self, sources: Sources) -> list[rollout_views.Branch]:
        await sources.rollout(self.rollout_id)
        return await rollout_views.branches_of(sources.store, self.rollout_id)


class ShowTokens(View, frozen=True, kw_only=True):
    """The tokens of the call whose span is `call`, or the first."""

    route = "GET /dashboard/rollouts/{rollout_id}/tokens"
    rollout_id: str
    call: str | None = None

    async def read(self, sources: Sources) -> token_views.TokenView:
        group = await sources.compared_with(await sources.rollout(self.rollout_id))
        spans = await sources.store.query_spans(self.rollout_id, "latest")
        traced = next(
            member for member in group.traced if member.rollout.rollout_id == self.rollout_id
        )
        return await asyncio.to_thread(
            token_views.token_view, traced, spans, group, self.call, sources.tokenizers
        )


class ShowCredit(View, frozen=True, kw_only=True):
    """The credit of a rollout and of those it is compared with."""

    route = "GET /dashboard/rollouts/{rollout_id}/credit"
    rollout_id: str

    async def read(self, sources: Sources) -> credit_views.CreditView:
        return await credit_views.credit_view(
            sources.store, await sources.compared_with(await sources.rollout(self.rollout_id))
        )


class ShowGroup(View, frozen=True, kw_only=True):
    route = "GET /dashboard/groups/{group_id}"
    group_id: str

    async def read(self, sources: Sources) -> credit_views.CreditView:
        return await credit_views.credit_view(sources.store, await sources.group(self.group_id))


class ShowTree(View, frozen=True, kw_only=True):
    route = "GET /dashboard/groups/{group_id}/tree"
    group_id: str

    async def read(self, sources: Sources) -> credit_views.PrefixTree:
        group = await sources.group(self.group_id)
        if not group.traced:
            raise NotFoundError(f"the group {self.group_id!r} has no rollouts yet")
        first = group.traced[0].rollout.rollout_id

        def tree() -> credit_views.PrefixTree:
            models = {call.model for member in group.traced for call in member.transitions}
            found = {model: sources.tokenizers.find(first, model) for model in models}
            return credit_views.prefix_tree(
                group.traced, {model: known[1] for model, known in found.items() if known}
            )

        return await asyncio.to_thread(tree)


class ScoreRollout(View, frozen=True, kw_only=True):
    """Becomes a reward span of the last attempt like any other, marked as the last word and with
    who gave it. Without a `reward` it is only a `comment`. `name` is what the reward is called."""

    route = "POST /dashboard/rollouts/{rollout_id}/score"
    scope = "grader"
    rollout_id: str
    reward: float | None = None
    comment: str | None = None
    name: str = "human"

    async def read(self, sources: Sources) -> rollout_views.RolloutRow:
        rollout = await sources.rollout(self.rollout_id)
        given = {} if self.reward is None else {self.name: self.reward}
        await give_score(sources.store, rollout, given, self.comment, sources.caller)
        return await sources.row(await sources.rollout(self.rollout_id))  # with its new reward


class AnnotateRollout(View, frozen=True, kw_only=True):
    """Change the parts that are given of what a person says of a rollout: a label, a note, the
    answer that would have been right. An empty text removes a part."""

    route = "POST /dashboard/rollouts/{rollout_id}/annotation"
    scope = "trainer"
    rollout_id: str
    label: str | None = None
    note: str | None = None
    answer: str | None = None

    async def read(self, sources: Sources) -> Rollout:
        changed = changed_annotation(label=self.label, note=self.note, answer=self.answer)
        return await sources.store.update_rollout(self.rollout_id, merge=changed)


VIEWS: Final[tuple[type[View], ...]] = (
    ListRuns,
    ShowFailures,
    ShowProgress,
    CompareTasks,
    ListContents,
    ShowSeries,
    ShowQuality,
    ShowPrompts,
    ListRollouts,
    ShowRollout,
    ShowForks,
    ShowTokens,
    ShowCredit,
    ShowGroup,
    ShowTree,
    ScoreRollout,
    AnnotateRollout,
)
