"""A training run's parts and state, how they are saved, and how an interrupted run continues.

Checkpoints are atomic directories that `transformers` loads. A group's id contains the run, the
position of its task and the policy version at its start; an evaluation's id contains the step and
the version. So a resumed run finds its own rollouts again, and none of another lineage."""

from __future__ import annotations

import contextlib
import copy
import os
import shutil
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from agentlightning.algorithm.base import RunContext
from agentlightning.algorithm.evaluation import evaluation_id
from agentlightning.algorithm.rl.alarms import Alarms
from agentlightning.algorithm.rl.groups import Groups, GroupsState, withdraw_rollouts
from agentlightning.algorithm.rl.policies import Policies
from agentlightning.algorithm.rl.settings import RLSettings
from agentlightning.errors import ConfigError, ConflictError
from agentlightning.types import Rollout

STATE_FILE = "loop.json"


@dataclass
class LoopState:
    """The state of the loop. `policy_version` numbers the current weights, `first_version` the
    starting ones; `groups` are the running ones, `evaluation_seconds` the time of the first
    evaluation, `recent_reward` the mean training reward of the last steps, `flat_steps` how many of
    the last earned nothing (None: none ever did)."""

    step: int = 0
    policy_version: int = 0
    first_version: int = 0
    best_reward: float | None = None
    groups: GroupsState = field(default_factory=GroupsState)
    evaluation_seconds: float = 0.0
    recent_reward: float | None = None
    flat_steps: int | None = None
    algorithm: Any = None


class Checkpoints:
    """`step-000010/`, `step-000020/` … in one directory. The two newest and the one with the
    highest training reward are kept. `best/` has weights only."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def save(self, weights: Policies, state: LoopState) -> Path:
        """Write a checkpoint. A kill at any moment leaves the earlier ones intact."""
        path = self.directory / f"step-{state.step:06d}"
        if (path / STATE_FILE).is_file():  # this step's weights are saved already
            with explained("checkpoint", path):
                _write_state(path, state)
            return path
        self._write(weights, state, path.name)
        for old in {*self._steps()[:-2]} - {_highest(self._steps())}:
            shutil.rmtree(old)
        return path

    def save_best(self, weights: Policies, state: LoopState) -> Path:
        return self._write(weights, state, "best", resumable=False)

    def save_candidate(self, weights: Policies, state: LoopState) -> Path:
        """Keep weights that are being evaluated while training continues."""
        return self._write(weights, state, "candidate", resumable=False)

    def promote_candidate(self, step: int, reward: float) -> bool:
        """Make this step's candidate the best. False if the candidate is of another step."""
        candidate = self.directory / "candidate"
        if not (candidate / STATE_FILE).is_file() or (state := _read_state(candidate)).step != step:
            return False
        state.best_reward = reward
        _write_state(candidate, state)
        self._replace(candidate, self.directory / "best")
        return True

    def latest(self) -> Path | None:
        steps = self._steps()
        return steps[-1] if steps else None

    def best(self) -> Path | None:
        """The best weights, by held-out reward or, if higher, by training reward."""
        best = self.directory / "best"
        return _highest([*([best] if (best / STATE_FILE).is_file() else []), *self._steps()])

    def restore(self, weights: Policies) -> LoopState | None:
        """Load the newest checkpoint; None if there is none."""
        # the process was killed between two renames
        for replaced in self.directory.glob(".*.replaced"):
            target = self.directory / replaced.name[1 : -len(".replaced")]
            if not target.exists():
                os.replace(replaced, target)
        path = self.latest()
        if path is None:
            return None
        weights.load(path)
        state = _read_state(path)
        best = self.directory / "best"
        if (best / STATE_FILE).is_file():  # it may be newer than the checkpoint
            state.best_reward = _read_state(best).best_reward
        return state

    def _steps(self) -> list[Path]:
        return sorted(
            path for path in self.directory.glob("step-*") if (path / STATE_FILE).is_file()
        )

    def _write(
        self, weights: Policies, state: LoopState, name: str, resumable: bool = True
    ) -> Path:
        """Write into a hidden directory, then rename it: a named checkpoint is complete."""
        target = self.directory / name
        partial = self.directory / f".{name}.partial"
        with explained("checkpoint", target):
            shutil.rmtree(partial, ignore_errors=True)
            try:
                partial.mkdir(parents=True)
                weights.save(partial, resumable=resumable)
                _write_state(partial, state)
                self._replace(partial, target)
            finally:  # frees its space on a full disk
                shutil.rmtree(partial, ignore_errors=True)
        return target

    @staticmethod
    def _replace(source: Path, target: Path) -> None:
        replaced = target.with_name(f".{target.name}.replaced")
        shutil.rmtree(replaced, ignore_errors=True)
        if target.exists():
            os.replace(target, replaced)
        os.replace(source, target)
        shutil.rmtree(replaced, ignore_errors=True)


def _highest(places: list[Path]) -> Path | None:
    """The checkpoint with the highest recorded reward."""
    states = {path: _read_state(path) for path in places}
    rewards = {
        path: state.best_reward if path.name == "best" else state.recent_reward
        for path, state in states.items()
    }
    known = {path: reward for path, reward in rewards.items() if reward is not None}
    return max(known, key=known.__getitem__, default=None)


def _read_state(checkpoint: Path) -> LoopState:
    return msgspec.json.decode((checkpoint / STATE_FILE).read_bytes(), type=LoopState)


def _write_state(checkpoint: Path, state: LoopState) -> None:
    partial = checkpoint / f".{STATE_FILE}.partial"
    partial.write_bytes(msgspec.json.encode(state))
    os.replace(partial, checkpoint / STATE_FILE)


@contextmanager
def explained(what: str, target: Path) -> Generator[None]:
    """Turn write errors into a ConfigError that says what to do."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"cannot write {what} {target}: {error}. Free space and continue from the checkpoint "
            "before, if there is one, with --resume; or begin anew in another --run-dir"
        ) from None


@dataclass
class Job:
    algorithm: RLSettings
    context: RunContext
    groups: Groups
    policies: Policies
    checkpoints: Checkpoints
    state: LoopState = field(default_factory=LoopState)

    @property
    def overlaps(self) -> bool:
        """Whether rollouts run while the learner learns."""
        return self.algorithm.max_staleness > 0

    @asynccontextmanager
    async def alone(self) -> AsyncGenerator[None]:
        """In the block, the learner has weights and cores to itself, unless rollouts run beside
        it."""
        if self.overlaps:
            yield
        else:
            async with self.context.calls_held(), self.policies.alone():
                yield

    def recent_rewards(self) -> list[float]:
        """The mean training rewards of the last three steps."""
        history = self.context.tracking.history
        return [
            history[step]["reward"] for step in sorted(history)[-3:] if "reward" in history[step]
        ]

    async def save(self) -> None:
        """Write a checkpoint for resuming the run."""
        self.state.groups = self.groups.state
        self.state.algorithm = self.algorithm.saved_state()
        rewards = self.recent_rewards()
        self.state.recent_reward = sum(rewards) / len(rewards) if rewards else None
        await self.written(self.checkpoints.save)

    async def written(self, save: Callable[[Policies, LoopState], object]) -> None:
        """Write the current weights and state in the learner's thread, between changes."""
        await self.policies.in_thread(partial(save, self.policies, copy.deepcopy(self.state)))

    async def renew_version(self) -> None:
        """Publish the current weights again, as another version: finished rollouts never run again,
        and a resumed run whose agent was fixed must not reuse those that ended this one."""
        self.state.policy_version = await self.context.store.next_policy_version(
            self.context.run.run_id
        )
        if self.state.step == 0:
            self.state.first_version = self.state.policy_version
        self.groups.restart(self.state.policy_version)
        await self.policies.publish(self.state.policy_version)


async def resume(job: Job, alarms: Alarms) -> None:
    """Continue from the newest checkpoint. Its weights are served under their published version,
    and no call is answered before that."""
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
        context.progress.note(
            f"resumed after step {restored.step} (policy version {restored.policy_version})"
        )
    if not context.owns_runner:
        # Runners elsewhere continued while nothing served the policy; failures from then say
        # nothing about the agent.
        failed = await context.store.query_rollouts(
            run_id=job.context.run.run_id, status_in=["failed"]
        )
        # a fork may fail because its agent varies
        if any(_wanted(job)(rollout) for rollout in failed if rollout.source is None):
            await job.renew_version()
    await withdraw_leftovers(job)


def _wanted(job: Job) -> Callable[[Rollout], bool]:
    """Whether the current weights are still to be measured or trained with a rollout."""
    present = (
        f"{evaluation_id(job.context.run.run_id, 'val', job.state.step, job.state.policy_version)}-"
    )
    return lambda rollout: (
        job.groups.awaits(rollout.group_id) or rollout.rollout_id.startswith(present)
    )


async def withdraw_leftovers(job: Job) -> None:
    """Handle rollouts that the previous process left: those still needed run again, others are
    cancelled."""
    store = job.context.store
    wanted = _wanted(job)
    first = f"{evaluation_id(job.context.run.run_id, 'val', 0, job.state.first_version)}-"

    def needed(rollout: Rollout) -> bool:
        return wanted(rollout) or rollout.rollout_id.startswith(first)

    await withdraw_rollouts(job.context, lambda rollout: not needed(rollout))
    if not job.context.owns_runner:
        return
    for rollout in await store.query_rollouts(
        run_id=job.context.run.run_id, status_in=["preparing", "running"]
    ):
        attempt = await store.get_latest_attempt(rollout.rollout_id)
        # An older attempt's runner died with its process; a newer attempt is our own runner's.
        if attempt is not None and attempt.start_time < job.context.run_time and needed(rollout):
            with contextlib.suppress(ConflictError):  # it has ended meanwhile
                await store.update_attempt(
                    rollout.rollout_id, attempt.attempt_id, status="unresponsive"
                )
