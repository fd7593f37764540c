"""The forks with which a complete group is trained."""

from __future__ import annotations

from collections.abc import Sequence

from agentlightning.algorithm.rl.settings import RLSettings
from agentlightning.data.transitions import TracedRollout
from agentlightning.store.sources import forked
from agentlightning.types import EnqueueRolloutRequest, ForkSource


def fork_requests(
    algorithm: RLSettings, group_id: str, run_id: str | None, rollouts: Sequence[TracedRollout]
) -> list[EnqueueRolloutRequest]:
    """The requests for the forks of a group's rollouts that an algorithm chooses; they make a group
    of this id."""
    chosen = [
        (traced.rollout, at, number)
        for traced in rollouts
        for number, at in enumerate(algorithm.forks_of(traced))
    ]
    return [
        forked(
            rollout,
            ForkSource(rollout_id=rollout.rollout_id, at=at),
            number,
            rollout_id=f"{group_id}-{member}",
            run_id=run_id,
            group_id=group_id,
            group_index=member,
        )
        for member, (rollout, at, number) in enumerate(chosen)
    ]
