"""The reinforcement-learning loop: take complete groups, give credit, step, publish, repeat.

With staleness 0, rollouts, steps and evaluations take turns; with more they run concurrently. After
a kill at any moment, `resume` (`job.py`) finds everything again."""

from __future__ import annotations

import asyncio
import math
import shutil
import time
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from functools import partial
from typing import Final

import msgspec

from agentlightning.algorithm.base import RunContext, Stopped
from agentlightning.algorithm.budget import UNLIMITED, OutOfBudget
from agentlightning.algorithm.evaluation import Evaluation, why_unrewarded
from agentlightning.algorithm.rl.alarms import Alarms
from agentlightning.algorithm.rl.batch import BATCHES_FILE, RecordedBatch, make_batches
from agentlightning.algorithm.rl.evaluations import HeldOut
from agentlightning.algorithm.rl.groups import CompleteGroup, Groups
from agentlightning.algorithm.rl.job import Checkpoints, Job, explained, resume
from agentlightning.algorithm.rl.metrics import over_steps, rollout_metrics, speed_metrics
from agentlightning.algorithm.rl.policies import Policies, optimiser_steps
from agentlightning.algorithm.rl.settings import RLSettings
from agentlightning.data.sequences import TrainingSequence
from agentlightning.data.transitions import TracedRollout
from agentlightning.errors import AgentLightningError, ConfigError, TrainingError
from agentlightning.store.base import LightningStore

EXPORTS: Final = "published"  # folder of a run for the weights that samplers read


class Loop:
    """One training job of an algorithm on these groups.

    Everything that reads or writes weights runs in one `thread`, so the event loop stays free, and
    a checkpoint has the weights of one step."""

    def __init__(
        self, algorithm: RLSettings, context: RunContext, groups: Groups, thread: Executor
    ) -> None:
        if not context.policies:
            raise ConfigError(f"{algorithm.name} trains weights: give the Trainer a model")
        policies = Policies(
            {name: policy.learner for name, policy in context.policies.items()},
            {name: policy.sampler for name, policy in context.policies.items()},
            thread,
            context.directory / EXPORTS,
        )
        self.job = Job(
            algorithm, context, groups, policies, Checkpoints(context.directory / "checkpoints")
        )
        self.held_out = HeldOut(self.job)
        norms = policies.named({policy: {"grad_norm": 0.0} for policy in policies.names})
        self._alarms = Alarms(algorithm, context.progress.note, norms)
        self._learning = False  # between the first optimiser step of a batch and the publication

    async def run(self) -> str:
        """Train until one of the reasons to end holds; returns the reason as text."""
        job = self.job
        if job.context.resume:
            await resume(job, self._alarms)
        async with job.context.calls_held():
            await job.policies.begin(job.state.policy_version)
        job.groups.steps_left = job.algorithm.steps - job.state.step
        reason = "all steps done"
        try:
            await self.held_out.first()
            collector = asyncio.create_task(job.groups.collect())
            try:
                while job.state.step < job.algorithm.steps and not self._reached_target():
                    await self.held_out.when_due()
                    await self._step()
            finally:
                collector.cancel()
                await asyncio.gather(collector, return_exceptions=True)
            if self._reached_target():
                reason = f"mean training reward reached {job.algorithm.target_reward}"
            await job.groups.withdraw()
            await self.held_out.finished()
        except (Stopped, OutOfBudget) as end:
            reason = str(end)
        except AgentLightningError as error:
            if not self._learning:  # the weights are those of a complete step
                if isinstance(error, TrainingError):
                    await job.renew_version()
                await job.save()
            raise
        finally:
            await self.held_out.cancel()
        await job.save()
        return await self.held_out.last() or reason

    def _reached_target(self) -> bool:
        target = self.job.algorithm.target_reward
        rewards = self.job.recent_rewards()
        return target is not None and len(rewards) == 3 and sum(rewards) / 3 >= target

    async def _step(self) -> None:
        job = self.job
        started = time.perf_counter()
        engines = job.policies.usage()
        step = job.state.step + 1
        groups, dropped = await job.context.unless_stopped(job.groups.take())
        sampled = time.perf_counter()
        self._record_batch(step, groups)
        everything = [*groups, *(group for _, group in dropped.groups)]
        await self._check_trainable([traced for group in everything for traced in group.rollouts])
        critics = job.policies.critics(job.algorithm)
        make = partial(make_batches, job.algorithm, [group.rewarded for group in groups], critics)
        if job.algorithm.trained_critic is None:
            batches = await asyncio.to_thread(make)
        else:  # a critic reads weights like a gradient step
            async with job.alone():
                batches = await job.policies.in_thread(make)
        metrics = rollout_metrics(groups, dropped)
        metrics |= job.policies.named({name: batch.metrics for name, batch in batches.items()})
        version = None
        if any(batch.sequences for batch in batches.values()):
            metrics |= await self._learn(
                {name: batch.sequences for name, batch in batches.items()}, step
            )
            version = job.state.policy_version
        elif metrics["calls"] or dropped.groups:
            reasons = dropped.reasons
            left_out = (
                f"; {reasons.total()} groups were replaced: {dict(reasons)}" if reasons else ""
            )
            why = (
                "no group had two different rewards (mean reward "
                f"{metrics['reward']:.2f}){left_out}"
            )
            job.context.progress.note(f"step {step} was skipped: {why}")
        # Together: an interrupted step must find its groups again.
        job.state.step = step
        await job.groups.trained(version)
        times = sampled - started, time.perf_counter() - sampled
        metrics |= speed_metrics(
            metrics, *times, engines, job.policies.usage(), overlaps=job.overlaps
        )
        metrics["policy_version"] = float(job.state.policy_version)
        used = [*groups, *dropped.useless]
        if job.context.spending is not None:
            spent = job.context.spending.metrics
            metrics |= {"tokens": spent["tokens"], "usd": spent["usd"]}
        metrics |= self._own_metrics(used, metrics)
        # Without the terms that training adds.
        given = job.algorithm.reward.given_part
        if any(given(rollout.reward_terms) > 0 for group in used for rollout in group.rollouts):
            job.state.flat_steps = 0
        elif job.state.flat_steps is not None:
            job.state.flat_steps += 1
        await job.context.tracking.record(step, metrics)
        if step % job.algorithm.checkpoint_every == 0:
            await job.save()
        job.context.progress.step(step, metrics)
        self._alarms.check_lost_rewards(step, metrics)
        self._alarms.check_excluded(step, metrics)
        self._alarms.check_forks(step, metrics)
        if version is not None:
            await job.policies.check_published(step)
        self._alarms.check_explosion(step, metrics, self._how_to_replay(step))
        self._alarms.check_collapse(step, job.state.flat_steps or 0, job.checkpoints.best)

    def _own_metrics(
        self, groups: Sequence[CompleteGroup], others: Mapping[str, float]
    ) -> dict[str, float]:
        """Report the step to the algorithm. ConfigError if one of its metrics has a name of the
        loop's, or is not finite."""
        ordered = sorted(groups, key=lambda group: group.ticket.position)
        own = self.job.algorithm.step_done(
            [group.rewarded for group in ordered if group.rewarded.rewards]
        )
        for name, value in own.items():
            if name in others or not math.isfinite(value):
                reason = (
                    "which is measured already"
                    if name in others
                    else "which is not a finite number"
                )
                raise ConfigError(
                    f"{self.job.algorithm.name}.step_done gave {name} = {value!r}, {reason}"
                )
        return {name: float(value) for name, value in own.items()}

    def _how_to_replay(self, step: int) -> str:
        directory = self.job.context.directory
        return f"The batch is kept; `agl replay {directory} --steps {step}` trains it again"

    def _record_batch(self, step: int, groups: Sequence[CompleteGroup]) -> None:
        """Record the step's training data before training."""
        names = tuple(
            tuple(traced.rollout.rollout_id for traced in group.rollouts) for group in groups
        )
        path = self.job.context.directory / BATCHES_FILE
        line = (
            msgspec.json.encode(RecordedBatch(step, self.job.state.policy_version, names)) + b"\n"
        )
        with explained("the record of steps", path), path.open("a+b") as file:
            file.seek(max(0, file.tell() - 1))
            cut_short = file.read() not in (b"", b"\n")  # by a full disk or a kill
            file.write(b"\n" + line if cut_short else line)

    async def _check_trainable(self, rollouts: Sequence[TracedRollout]) -> None:
        """TrainingError if nothing can be learned from these rollouts, for a reason that would also
        hold for others."""
        job = self.job
        silent = not any(traced.transitions for traced in rollouts)
        unrewarded = all(traced.reward is None for traced in rollouts)
        if unrewarded and (silent or job.algorithm.unrewarded == "exclude"):
            raise await why_unrewarded(job.context.store, [traced.rollout for traced in rollouts])
        if not silent:
            return
        others = sorted({name for traced in rollouts for name in traced.other_agents})
        if not others:
            excluded = sum((traced.excluded for traced in rollouts), Counter[str]())
            raise TrainingError(
                f"no call of the policy in {len(rollouts)} rollouts can be "
                f"trained{f' (left out: {dict(excluded)})' if excluded else ''}: the agent must "
                "send its chat completions to the URL in `llm.endpoint` with `llm.api_key`"
            )
        message = (
            f"none of the calls is by an agent that agents={job.algorithm.agents!r} names; the "
            f"agents here are {', '.join(others[:10])}{' …' if len(others) > 10 else ''}"
        )
        if job.state.step == 0:  # a mistake; later, the agent may just have had nothing to do
            raise TrainingError(message)
        job.context.progress.note(f"step {job.state.step + 1} trains nothing: {message}")

    async def _learn(
        self, batches: Mapping[str, list[TrainingSequence]], step: int
    ) -> dict[str, float]:
        """The step's optimiser steps, then the publication of the new weights."""
        job = self.job
        progress = self.job.context.progress
        history: dict[str, list[dict[str, float]]] = {
            name: [] for name, batch in batches.items() if batch
        }
        parts = sum(min(job.algorithm.minibatches, len(batch)) for batch in batches.values())
        progress.phase("learn", parts * job.algorithm.epochs)
        about = {"seed": job.context.seed, "step": step, "version": job.state.policy_version}
        async with job.alone():
            try:
                for name, batch in batches.items():
                    steps = optimiser_steps(
                        job.policies.learners[name], batch, job.algorithm, **about
                    )
                    while (
                        metrics := await job.policies.in_thread(partial(next, steps, None))
                    ) is not None:
                        self._learning = True
                        history[name].append(metrics)
                        progress.advance(sum(map(len, history.values())))
            except TrainingError as error:
                raise TrainingError(f"step {step}: {error}. {self._how_to_replay(step)}") from error
            # Before the engines continue, or tokens of the new weights would get the old version.
            job.state.policy_version = await job.context.store.next_policy_version(
                job.context.run.run_id
            )
            await job.policies.publish(job.state.policy_version)
        self._learning = False
        measured = {name: over_steps(steps) for name, steps in history.items()}
        for name, metrics in measured.items():
            if metrics.get("masked") == 1:
                progress.note(
                    f"step {step} trained nothing of {name!r}: the correction left out every token"
                )
            self._alarms.check_mismatch(
                step, metrics, job.policies.learners[name].mismatch_tolerance
            )
        return job.policies.named(measured)


class Reinforcement(RLSettings):
    """Base class of algorithms; a dataclass below it defines `advantages`, and its fields are its
    settings, in addition to those of `RLSettings`."""

    evaluations: list[Evaluation]
    stopped_because: str

    def traces_beside(self, store: LightningStore) -> AbstractAsyncContextManager[LightningStore]:
        """The store of the rollouts to learn from; `store` is the run's own."""
        return nullcontext(store)

    @asynccontextmanager
    async def groups(self, context: RunContext) -> AsyncGenerator[Groups]:
        """The groups that steps train on. ConfigError or TrainingError if there is nothing to learn
        from."""
        if not context.train_tasks:
            raise ConfigError(f"{self.name} runs the agent on tasks: give a training dataset")
        yield Groups(self, context)

    async def run(self, context: RunContext) -> None:
        """Train until done or stopped; afterwards `evaluations` has all evaluations in order."""
        if self.budget != UNLIMITED:
            await context.limit(self.budget, self.prices)
        async with self.groups(context) as groups:
            with ThreadPoolExecutor(1, "learner") as thread:
                loop = Loop(self, context, groups, thread)
                self.evaluations = loop.held_out.evaluations
                try:
                    self.stopped_because = await loop.run()
                finally:
                    await asyncio.to_thread(
                        shutil.rmtree, context.directory / EXPORTS, ignore_errors=True
                    )
