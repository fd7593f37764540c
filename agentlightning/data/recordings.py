"""The finished rollouts of a store, group by group, each with the spans of its last attempt; and
how their run trains them, read from its manifest: which calls, which reward, which credit.

Knows stores, rollouts and manifests. Users' functions are named in manifests and never loaded here.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from agentlightning.data.call_filter import EVERY_CALL, CallFilter
from agentlightning.data.credit import RewardedGroup
from agentlightning.data.credit_table import BASELINES, RETURNS, Credit, make_credit
from agentlightning.data.rewards import PLAIN, RewardSpec
from agentlightning.data.transitions import FloatArray, TracedRollout
from agentlightning.errors import ConfigError, NotFoundError
from agentlightning.store.base import LightningStore
from agentlightning.store.sources import forks_group
from agentlightning.tracing.dialects import mapping
from agentlightning.types import And, Condition, Filter, Group, Order, Rollout, Run, Span

ENDED: Final = ("succeeded", "failed", "cancelled")
LEARNED_FROM: Final = ("train", "test")  # all but held-out rollouts
_AT_ONCE: Final = 200  # rollouts held in memory, without their spans


@dataclass(frozen=True)
class Recorded:
    """A finished rollout and the spans of its last attempt."""

    rollout: Rollout
    spans: Sequence[Span]

    @property
    def reward(self) -> float | None:
        """R as the agent gave it; None if it gave none or did not succeed."""
        return self.rollout.reward if self.rollout.status == "succeeded" else None


def finished_rollouts(
    run_id: str | None = None, modes: Sequence[str] = LEARNED_FROM, statuses: Sequence[str] = ENDED
) -> Filter:
    """Filter for the rollouts of a run (None: all runs) with these modes and final statuses."""
    conditions = [Condition("status", "in", list(statuses)), Condition("mode", "in", list(modes))]
    return And(conditions if run_id is None else [*conditions, Condition("run_id", "eq", run_id)])


async def recorded_groups(store: LightningStore, where: Filter) -> AsyncGenerator[list[Recorded]]:
    """The rollouts of each group and their forks together, then those without a group, one by
    one."""
    group: list[Recorded] = []
    order = [Order(field="group_id"), Order(field="group_index")]
    cursor = None
    more = True
    while more:
        page = await store.page_rollouts(where, order, limit=_AT_ONCE, cursor=cursor)
        for rollout in page.items:
            of = group[0].rollout.group_id if group else None
            names = () if of is None else (of, *([forks_group(of)] if rollout.source else ()))
            if group and rollout.group_id not in names:  # that of forks follows directly
                yield group
                group = []
            with contextlib.suppress(NotFoundError):  # removed meanwhile
                group.append(
                    Recorded(rollout, await store.query_spans(rollout.rollout_id, "latest"))
                )
        cursor = page.next_cursor
        more = cursor is not None
    if group:
        yield group


async def whole_group(store: LightningStore, group_id: str) -> Group | None:
    """A group of a store, with the forks of its rollouts, or the group whose forks these are; None
    without one."""
    group = await store.get_group(group_id)
    if group is not None and group.source_id is not None:
        group = await store.get_group(group.source_id)
    forks = group and await store.get_group(forks_group(group.group_id))
    if group is None or forks is None or forks.source_id != group.group_id:
        return group
    together = (*group.rollout_ids, *forks.rollout_ids)
    return msgspec.structs.replace(group, size=group.size + forks.size, rollout_ids=together)


class CreditSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A return and a baseline by name, and their options."""

    returns: str = "identical"
    returns_options: dict[str, Any] = {}
    baseline: str = "grpo"
    baseline_options: dict[str, Any] = {}
    equal_rewards: bool = False

    def credit(self, reward: RewardSpec = PLAIN) -> Credit:
        """ConfigError if a name is not built in or they do not go together."""
        for what, name, known in (
            ("returns", self.returns, RETURNS),
            ("baseline", self.baseline, BASELINES),
        ):
            if name not in known:
                raise ConfigError(
                    f"{what} {name!r} is not built in; choose one of {', '.join(known)}"
                )
        return make_credit(**msgspec.structs.asdict(self), reward=reward)


class Training(msgspec.Struct, frozen=True, kw_only=True):
    """The settings by which a run trains on its rollouts. `credit` is None if it trains nothing, or
    if the settings do not determine it. `unrewarded` is the reward of a rollout without one: none
    (`exclude`), or a number."""

    calls: CallFilter = EVERY_CALL
    reward: RewardSpec = PLAIN
    credit: CreditSettings | None = None
    unrewarded: str | float = "exclude"
    name: str | None = None


UNTRAINED: Final = Training()


def training_of(run: Run | None) -> Training:
    """The settings in the run's manifest. Without a run, a policy or a known manifest, all calls
    count."""
    config = mapping(run.manifest.get("config")) if run else {}
    algorithm = mapping(config.get("algorithm"))
    if "reward" not in algorithm:
        return UNTRAINED
    named = {name: algorithm[name] for name in CallFilter.__dataclass_fields__ if name in algorithm}
    credit = {
        name: algorithm[name] for name in CreditSettings.__struct_fields__ if name in algorithm
    }
    by_settings = config.get("credit_by_settings", "baseline" in algorithm)
    calls = {**named, "models": list(mapping(config.get("models")))}
    unrewarded = algorithm.get("unrewarded", "exclude")
    settings = {
        "calls": calls,
        "reward": algorithm["reward"],
        "unrewarded": unrewarded,
        "name": algorithm.get("name"),
    }
    try:
        return msgspec.convert(settings | ({"credit": credit} if by_settings else {}), Training)
    except msgspec.ValidationError:
        return UNTRAINED


def rewarded_group(group: Sequence[TracedRollout], unrewarded: str | float) -> RewardedGroup:
    """The group's members that count: those with a reward and, if `unrewarded` is a number, the
    others with that reward. A fork that sampled nothing is no try."""
    counted = [
        member
        for member in group
        if (member.reward is not None or unrewarded != "exclude") and not member.is_lost_fork
    ]
    return RewardedGroup(
        [member.transitions for member in counted],
        [float(unrewarded if member.reward is None else member.reward) for member in counted],
        [member.reward_terms or {"unrewarded": float(unrewarded)} for member in counted],
        [member.rollout for member in counted],
        [member.answers for member in counted],
    )


def _refuse_held_out(traced: Sequence[TracedRollout]) -> None:
    if any(member.rollout.mode != "train" for member in traced):
        raise ConfigError("Held-out rollouts are not trained: they measure the weights.")


def advantages_of(
    traced: Sequence[TracedRollout], training: Training, settings: CreditSettings
) -> dict[str, FloatArray]:
    """An advantage for each sampled token of a group, float32[T], by the call's span id, for the
    calls that count. ConfigError if the settings do not go together, or the rollouts are held
    out."""
    _refuse_held_out(traced)
    group = rewarded_group(traced, training.unrewarded)
    credit = settings.credit(training.reward)
    models = {call.model for calls in group.transitions for call in calls}
    # As in training, the calls of several policies are compared among their own.
    own = [group.of_model(model) for model in models] if len(models) > 1 else [group]
    credited = [rollout for part in own for rollout in credit.advantages([part])[0]]
    return {item.transition.span_id: item.advantages for rollout in credited for item in rollout}


@dataclass(frozen=True)
class GroupCredit:
    """The returns and advantages of a group's calls by span id, float32[T]; `problem` is why there
    are none."""

    returns: Mapping[str, FloatArray]
    advantages: Mapping[str, FloatArray]
    problem: str | None = None


def credit_of(traced: Sequence[TracedRollout], training: Training) -> GroupCredit:
    """The credit that a run gave for a group's rewards, as far as one group tells."""
    settings = training.credit or CreditSettings()
    returns: dict[str, FloatArray] = {}
    try:
        _refuse_held_out(traced)
        if training.credit is None and training.name is not None:
            raise ConfigError(f"what {training.name} made of these rewards is not known here")
        # Without a baseline, an advantage is the return itself.
        plain = CreditSettings(
            returns=settings.returns, returns_options=settings.returns_options, baseline="none"
        )
        returns = advantages_of(traced, training, plain)
        if settings.credit(training.reward).needs_batch:
            raise ConfigError(
                f"baseline {settings.baseline!r} compares all groups of a step, and this is one "
                "of them: its advantages are not known here"
            )
        advantages = advantages_of(traced, training, settings)
    except (ConfigError, TypeError, ValueError) as error:
        return GroupCredit(returns, {}, str(error))
    problem = None if advantages else "no rollout here has both a reward and a call that trains"
    return GroupCredit(returns, advantages, problem)
