"""A group's advantages, computed from its rewards by the functions that train; and its prefix
tree."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from agentlightning.dashboard.rollout_views import RolloutRow, rows_of
from agentlightning.data.forest import shared_length
from agentlightning.data.recordings import (
    CreditSettings,
    Training,
    advantages_of,
    credit_of,
    training_of,
)
from agentlightning.data.transitions import (
    FloatArray,
    IntArray,
    TracedRollout,
    Transition,
    compare_costs,
    trace_rollout,
)
from agentlightning.errors import NotFoundError
from agentlightning.store.base import LightningStore
from agentlightning.types import Group

if TYPE_CHECKING:
    from agentlightning.data.token_bytes import TokenBytes

_TEXT: Final = 200  # characters of a node


class CreditedCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call that trains. `given` is the sum of its intermediate rewards; `return_` and its mean
    `advantage` are None if its rollout does not count."""

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
    """A rollout, the mean `advantage` of its tokens, and the terms that add up to its reward."""

    row: RolloutRow
    advantage: float | None
    terms: dict[str, float]
    calls: list[CreditedCall]


class CreditView(msgspec.Struct, frozen=True, kw_only=True):
    """The members of a group, or a single rollout; `problem` is why there are no advantages."""

    group: Group | None
    credit: CreditSettings
    problem: str | None
    members: list[CreditMember]


@dataclass(frozen=True)
class TracedGroup:
    """The rollouts that are compared, with their run's settings. Without a `group`, a single
    rollout."""

    group: Group | None
    traced: Sequence[TracedRollout]
    training: Training

    @property
    def settings(self) -> CreditSettings:
        return self.training.credit or CreditSettings()

    def advantages(self, settings: CreditSettings) -> dict[str, FloatArray]:
        """An advantage for each sampled token, float32[T], by the call's span id, for the calls
        that count. ConfigError if the settings do not go together."""
        return advantages_of(self.traced, self.training, settings)

    def credited(self, rows: Sequence[RolloutRow]) -> CreditView:
        """`rows` are those of the rollouts."""
        credit = credit_of(self.traced, self.training)
        returns = credit.returns
        advantages = credit.advantages

        def member(row: RolloutRow, traced: TracedRollout) -> CreditMember:
            of_tokens = [
                advantages[call.span_id]
                for call in traced.transitions
                if call.span_id in advantages
            ]
            return CreditMember(
                row=row,
                advantage=float(np.concatenate(of_tokens).mean()) if of_tokens else None,
                terms=dict(traced.reward_terms),
                calls=[_credited(call, returns, advantages) for call in traced.transitions],
            )

        members = [member(row, traced) for row, traced in zip(rows, self.traced, strict=True)]
        return CreditView(
            group=self.group, credit=self.settings, problem=credit.problem, members=members
        )


def _credited(
    call: Transition, returns: Mapping[str, FloatArray], advantages: Mapping[str, FloatArray]
) -> CreditedCall:
    return CreditedCall(
        span_id=call.span_id,
        call_index=call.call_index,
        agent=call.agent,
        prompt_tokens=len(call.prompt_ids),
        sampled_tokens=len(call.response_ids),
        given=call.reward,
        tools=[
            {"tool": tool.tool, "status": tool.status, "duration": tool.duration}
            for tool in call.tools
        ],
        return_=float(returns[call.span_id][0]) if call.span_id in returns else None,
        advantage=float(advantages[call.span_id].mean()) if call.span_id in advantages else None,
    )


async def trained_by(store: LightningStore, run_id: str | None) -> Training:
    """The training settings of a run; without a run, all calls count."""
    runs = [] if run_id is None else await store.query_runs()
    return training_of(next((run for run in runs if run.run_id == run_id), None))


async def trace_group(
    store: LightningStore, rollout_ids: Sequence[str], group: Group | None
) -> TracedGroup:
    """NotFoundError if one of the rollouts was removed."""
    found = await asyncio.gather(*map(store.get_rollout_by_id, rollout_ids))
    rollouts = [rollout for rollout in found if rollout is not None]
    if len(rollouts) < len(found):
        raise NotFoundError("a rollout of this group was removed")
    spans = await asyncio.gather(*(store.query_spans(name, "latest") for name in rollout_ids))
    training = await trained_by(store, rollouts[0].run_id if rollouts else None)

    def trace() -> list[TracedRollout]:
        alone = [
            trace_rollout(rollout, own, calls=training.calls, reward=training.reward)
            for rollout, own in zip(rollouts, spans, strict=True)
        ]
        return compare_costs(alone, training.reward)

    return TracedGroup(group, await asyncio.to_thread(trace), training)


async def credit_view(store: LightningStore, group: TracedGroup) -> CreditView:
    rows = await rows_of(store, [member.rollout for member in group.traced])
    return await asyncio.to_thread(group.credited, rows)


# --- the prefix tree ------------------------------------------------------------------------------


class TreeNode(msgspec.Struct, frozen=True, kw_only=True):
    """A run of tokens after those of its `parent`. `sampled` of them were sampled by some rollout;
    `value` is the mean reward of the `rollouts` that pass through; `ends` are the calls whose
    answer ends here."""

    parent: int | None
    tokens: int
    sampled: int
    depth: int
    text: str | None
    rollouts: list[str]
    value: float | None
    ends: list[dict[str, Any]]


class PrefixTree(msgspec.Struct, frozen=True, kw_only=True):
    """`tokens` is the sum over all calls; `shared` of them are in the tree already."""

    tokens: int
    shared: int
    nodes: list[TreeNode]


@dataclass(frozen=True)
class _Path:
    ids: IntArray
    answer: int  # where it starts
    call: Transition


def prefix_tree(
    traced: Sequence[TracedRollout], tokenizers: Mapping[str, TokenBytes]
) -> PrefixTree:
    """The calls of these rollouts as a tree of token ids, which branches where ids differ and where
    an answer ends; with texts of the models whose tokenizers are known."""
    rewards = {member.rollout.rollout_id: member.reward for member in traced}
    paths = [
        _Path(call.token_ids, len(call.prompt_ids), call)
        for member in traced
        for call in member.transitions
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
            token_bytes = tokenizers.get(branch[0].call.model)
            waiting.append((branch, end, len(nodes)))
            nodes.append(
                TreeNode(
                    parent=parent,
                    tokens=end - depth,
                    sampled=max(0, end - max(depth, min(path.answer for path in branch))),
                    depth=depth,
                    text=None
                    if token_bytes is None
                    else token_bytes.text(branch[0].ids[depth:end].tolist())[:_TEXT],
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
