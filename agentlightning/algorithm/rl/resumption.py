"""How an interrupted run continues: from its newest checkpoint, with the rollouts that it still waits for.

A group's id contains the run, the position of its task and the policy version at its start; an evaluation's id contains
the step and the version. So a resumed run finds its own again, and none of another lineage.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial

from agentlightning.algorithm.evaluation import evaluation_id
from agentlightning.algorithm.rl.alarms import Alarms
from agentlightning.algorithm.rl.groups import withdraw_rollouts
from agentlightning.algorithm.rl.job import Job
from agentlightning.errors import ConflictError
from agentlightning.types import Rollout


async def resume(job: Job, alarms: Alarms) -> None:
    """Continue from the newest checkpoint. Its weights are served under their published version, and no call is
    answered before that."""
    context = job.context
    async with context.calls_held(), job.policies.alone():
        restored = await job.policies.in_thread(partial(job.checkpoints.restore, job.policies))
        if restored is not None:
            await job.policies.publish(restored.policy_version)
    if restored is None:
        context.progress.note("nothing was saved yet: starting from the beginning")
    else:
        job.state = restored
        job.groups.restore(restored.groups)
        if restored.algorithm is not None:
            job.algorithm.restore(restored.algorithm)
        await context.tracking.resume_after(restored.step)
        alarms.remember(measured for _, measured in sorted(context.tracking.history.items()))
        context.progress.note(f"resumed after step {restored.step} (policy version {restored.policy_version})")
    if not context.owns_runner:
        # Runners elsewhere continued while nothing served the policy; failures from then say nothing about the agent.
        failed = await context.store.query_rollouts(run_id=job.run_id, status_in=["failed"])
        if any(map(_wanted(job), failed)):
            await job.renew_version()
    await withdraw_leftovers(job)


def _wanted(job: Job) -> Callable[[Rollout], bool]:
    """Whether the current weights are still to be measured or trained with a rollout."""
    present = f"{evaluation_id(job.run_id, 'val', job.state.step, job.state.policy_version)}-"
    return lambda rollout: job.groups.awaits(rollout.group_id) or rollout.rollout_id.startswith(present)


async def withdraw_leftovers(job: Job) -> None:
    """Handle rollouts that the previous process left: those still needed run again, others are cancelled."""
    store, wanted = job.context.store, _wanted(job)
    first = f"{evaluation_id(job.run_id, 'val', 0, job.state.first_version)}-"

    def needed(rollout: Rollout) -> bool:
        return wanted(rollout) or rollout.rollout_id.startswith(first)

    await withdraw_rollouts(job.context, lambda rollout: not needed(rollout))
    if not job.context.owns_runner:
        return
    for rollout in await store.query_rollouts(run_id=job.run_id, status_in=["preparing", "running"]):
        attempt = await store.get_latest_attempt(rollout.rollout_id)
        # An older attempt's runner died with its process; a newer attempt is our own runner's.
        if attempt is not None and attempt.start_time < job.context.run_time and needed(rollout):
            with contextlib.suppress(ConflictError):  # it has ended meanwhile
                await store.update_attempt(rollout.rollout_id, attempt.attempt_id, status="unresponsive")
