"""How the rewards of a group become the advantages of its calls, as its run has it or as it would be otherwise; the
group's prefix tree; and the quality of rollouts that no training has counted.

The numbers are those of `data.credit`, given other settings. Knows groups, transitions and token ids.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from agentlightning.dashboard.rollouts import RolloutRow, rows_of
from agentlightning.dashboard.runs import Quality
from agentlightning.data.continuity import SUGGESTIONS, continuity
from agentlightning.data.credit_table import RETURNS, RewardedGroup
from agentlightning.data.forest import shared_length
from agentlightning.data.recorded import ENDED, CreditSettings, Training, rewarded_group, training_of
from agentlightning.data.transitions import FloatArray, IntArray, TracedRollout, Transition, trace_rollout
from agentlightning.errors import ConfigError, NotFoundError
from agentlightning.store.base import LightningStore
from agentlightning.types import And, Condition, Group, Order, Rollout

if TYPE_CHECKING:
    from agentlightning.data.token_bytes import TokenBytes

_SAMPLED: Final = 200  # rollouts that stand for a run's whenever it has not counted itself
_TEXT: Final = 200  # characters of a node


class CreditedCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call that trains. `given` are its intermediate rewards; its `return_` and its mean `advantage` are None where
    its rollout counts for nothing."""

    span_id: str
    call_index: int
    agent: str | None
    prompt_tokens: int
    sampled_tokens: int
    given: float | None
    tools: list[dict[str, Any]]
    return_: float | None = msgspec.field(name="return", default=None)
    advantage: float | None = None


class CreditMember(msgspec.Struct, frozen=True, kw_only=True):
    rollout_id: str
    reward: float | None
    terms: dict[str, float]
    calls: list[CreditedCall]


class CreditView(msgspec.Struct, frozen=True, kw_only=True):
    """`problem` says why there are no returns and advantages; `options` are those that each return takes."""

    settings: CreditSettings
    trained_with: CreditSettings | None
    options: dict[str, list[str]]
    tools: list[str]
    problem: str | None
    members: list[CreditMember]


class GroupMember(msgspec.Struct, frozen=True, kw_only=True):
    row: RolloutRow
    advantage: float | None
    calls: list[CreditedCall]


class GroupView(msgspec.Struct, frozen=True, kw_only=True):
    group: Group
    credit: CreditSettings
    problem: str | None
    members: list[GroupMember]


@dataclass(frozen=True)
class TracedGroup:
    """The rollouts that are compared, as their run trains them."""

    traced: Sequence[TracedRollout]
    training: Training

    def advantages(self, settings: CreditSettings) -> dict[str, FloatArray]:
        """By the span of each call that counts, float32[T], an advantage for each sampled token. ConfigError where the
        settings do not go together."""
        counted = rewarded_group(self.traced, self.training.unrewarded)
        filled = [index for index, transitions in enumerate(counted.transitions) if transitions]
        group = RewardedGroup([counted.transitions[i] for i in filled], [counted.rewards[i] for i in filled])
        credited = settings.credit(self.training.reward).advantages([group])[0]
        return {item.transition.span_id: item.advantages for rollout in credited for item in rollout}

    def view(self, asked: CreditSettings | None) -> CreditView:
        settings = asked or self.training.credit or CreditSettings()
        returns: dict[str, FloatArray] = {}
        advantages: dict[str, FloatArray] = {}
        problem = None
        try:
            advantages = self.advantages(settings)
            # Without a baseline an advantage is the return itself.
            plain = CreditSettings(returns=settings.returns, returns_options=settings.returns_options, baseline="none")
            returns = self.advantages(plain)
        except (ConfigError, TypeError, ValueError) as error:
            problem = str(error)
        if problem is None and not advantages:
            problem = "no rollout here has both a reward and a call that trains"

        def credited(one: Transition) -> CreditedCall:
            return CreditedCall(
                span_id=one.span_id,
                call_index=one.call_index,
                agent=one.agent,
                prompt_tokens=len(one.prompt_ids),
                sampled_tokens=len(one.response_ids),
                given=one.reward,
                tools=[{"tool": tool.tool, "status": tool.status, "duration": tool.duration} for tool in one.tools],
                return_=float(returns[one.span_id][0]) if one.span_id in returns else None,
                advantage=float(advantages[one.span_id].mean()) if one.span_id in advantages else None,
            )

        return CreditView(
            settings=settings,
            trained_with=self.training.credit,
            options={name: _options(function) for name, function in RETURNS.items()},
            tools=sorted({tool.tool for one in self.traced for call in one.transitions for tool in call.tools}),
            problem=problem,
            members=[
                CreditMember(
                    rollout_id=one.rollout.rollout_id,
                    reward=one.reward,
                    terms=dict(one.reward_terms),
                    calls=[credited(transition) for transition in one.transitions],
                )
                for one in self.traced
            ],
        )


def _options(function: Any) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [one.name for one in parameters if one.kind is one.KEYWORD_ONLY]


async def trained_by(store: LightningStore, run_id: str | None) -> Training:
    """How the run of this id trains; of none, that every call counts."""
    runs = [] if run_id is None else await store.query_runs()
    return training_of(next((run for run in runs if run.run_id == run_id), None))


async def require(store: LightningStore, rollout_id: str) -> Rollout:
    """NotFoundError where there is no rollout of this id."""
    rollout = await store.get_rollout_by_id(rollout_id)
    if rollout is None:
        raise NotFoundError(f"there is no rollout {rollout_id!r} here")
    return rollout


async def find_group(store: LightningStore, group_id: str) -> Group:
    """NotFoundError where there is none of this id."""
    group = await store.get_group(group_id)
    if group is None:
        raise NotFoundError(f"there is no group {group_id!r} here")
    return group


async def trace_group(store: LightningStore, rollout_ids: Sequence[str]) -> TracedGroup:
    rollouts = await asyncio.gather(*(require(store, name) for name in rollout_ids))
    spans = await asyncio.gather(*(store.query_spans(name, "latest") for name in rollout_ids))
    training = await trained_by(store, rollouts[0].run_id if rollouts else None)

    def trace() -> list[TracedRollout]:
        return [
            trace_rollout(rollout, own, calls=training.calls, reward=training.reward)
            for rollout, own in zip(rollouts, spans, strict=True)
        ]

    return TracedGroup(await asyncio.to_thread(trace), training)


async def compared_with(store: LightningStore, rollout: Rollout) -> TracedGroup:
    """The rollout's whole group; of one without a group, it alone."""
    group = None if rollout.group_id is None else await store.get_group(rollout.group_id)
    return await trace_group(store, [rollout.rollout_id] if group is None else group.rollout_ids)


async def group_view(store: LightningStore, group_id: str) -> GroupView:
    group = await find_group(store, group_id)
    traced = await trace_group(store, group.rollout_ids)
    view = await asyncio.to_thread(traced.view, None)
    rows = await rows_of(store, [one.rollout for one in traced.traced])

    def mean(calls: Sequence[CreditedCall]) -> float | None:
        credited = [(call.advantage, call.sampled_tokens) for call in calls if call.advantage is not None]
        tokens = sum(count for _, count in credited)
        return sum(value * count for value, count in credited) / tokens if tokens else None

    return GroupView(
        group=group,
        credit=view.settings,
        problem=view.problem,
        members=[
            GroupMember(row=row, advantage=mean(member.calls), calls=member.calls)
            for row, member in zip(rows, view.members, strict=True)
        ],
    )


# --- the prefix tree ----------------------------------------------------------------------------------------------


class TreeNode(msgspec.Struct, frozen=True, kw_only=True):
    """A run of tokens after those of its `parent`. `sampled` of them some rollout has sampled; `value` is the mean
    reward of the `rollouts` that pass; `ends` are the calls whose answer ends here."""

    parent: int | None
    tokens: int
    sampled: int
    depth: int
    text: str | None
    rollouts: list[str]
    value: float | None
    ends: list[dict[str, Any]]


class PrefixTree(msgspec.Struct, frozen=True, kw_only=True):
    """`tokens` counts those of all calls laid end to end, `shared` how many of them stand in the tree already."""

    tokens: int
    shared: int
    nodes: list[TreeNode]


@dataclass(frozen=True)
class _Path:
    ids: IntArray
    answer: int  # where it begins
    call: Transition


def prefix_tree(traced: Sequence[TracedRollout], token_bytes: TokenBytes | None) -> PrefixTree:
    """The calls of these rollouts over token ids: branches part where ids do, and where an answer ends."""
    rewards = {one.rollout.rollout_id: one.reward for one in traced}
    paths = [
        _Path(np.concatenate([call.prompt_ids, call.response_ids]), len(call.prompt_ids), call)
        for one in traced
        for call in one.transitions
    ]
    nodes: list[TreeNode] = []
    waiting: list[tuple[list[_Path], int, int | None]] = [(paths, 0, None)]
    while waiting:
        passing, depth, parent = waiting.pop()
        by_token: dict[int, list[_Path]] = {}
        for path in passing:
            if len(path.ids) > depth:
                by_token.setdefault(int(path.ids[depth]), []).append(path)
        for branch in by_token.values():
            end = min(shared_length(branch[0].ids, path.ids) for path in branch)
            names = list(dict.fromkeys(path.call.rollout_id for path in branch))
            known = [reward for name in names if (reward := rewards[name]) is not None]
            waiting.append((branch, end, len(nodes)))
            nodes.append(
                TreeNode(
                    parent=parent,
                    tokens=end - depth,
                    sampled=max(0, end - max(depth, min(path.answer for path in branch))),
                    depth=depth,
                    text=None if token_bytes is None else token_bytes.text(branch[0].ids[depth:end].tolist())[:_TEXT],
                    rollouts=names,
                    value=sum(known) / len(known) if known else None,
                    ends=[
                        {"rollout_id": path.call.rollout_id, "call_index": path.call.call_index}
                        for path in branch
                        if len(path.ids) == end
                    ],
                )
            )
    total = sum(len(path.ids) for path in paths)
    return PrefixTree(tokens=total, shared=total - sum(node.tokens for node in nodes), nodes=nodes)


# --- the quality of data ------------------------------------------------------------------------------------------


async def sampled_quality(store: LightningStore, run_id: str) -> Quality:
    """The quality of a run's newest finished rollouts."""
    where = And([Condition("run_id", "eq", run_id), Condition("status", "in", list(ENDED))])
    page = await store.page_rollouts(where, [Order(field="number", descending=True)], limit=_SAMPLED)
    spans = await asyncio.gather(*(store.query_spans(one.rollout_id, "latest") for one in page.items))
    training = await trained_by(store, run_id)

    def read() -> list[TracedRollout]:
        found: list[TracedRollout] = []
        for rollout, own in zip(page.items, spans, strict=True):
            one = trace_rollout(rollout, own, calls=training.calls, reward=training.reward)
            found.append(replace(one, breaks=continuity(one.transitions, own).breaks))
        return found

    traced = await asyncio.to_thread(read)
    counted: Mapping[str, Counter[str]] = {
        "outcomes": Counter(one.outcome for one in traced),
        "excluded": sum((one.excluded for one in traced), Counter[str]()),
        "kept": sum((one.kept for one in traced), Counter[str]()),
        "breaks": Counter(found.kind for one in traced for found in one.breaks),
        "rewards_lost": sum((one.rewards_lost for one in traced), Counter[str]()),
        "dropped": Counter(),
    }
    return Quality(
        run_id=run_id,
        measured=False,
        rollouts=len(traced),
        calls=sum(len(one.transitions) + one.excluded.total() for one in traced),
        step=[],
        counts={name: dict(counts) for name, counts in counted.items()},
        shares={},
        suggestions={**SUGGESTIONS},
    )
