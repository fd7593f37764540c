"""The reinforcement-learning loop: take complete groups, give credit, step, publish, repeat.

The loop knows groups, policy versions and checkpoints. It does not know how advantages are made (the algorithm's
`advantages`), how a gradient is taken (the learner) or which groups are on their way (`Groups`). With a staleness of 0
rollouts, steps and evaluations take turns; with more they go on beside each other.

What makes it survive a kill at any moment: a group's id is made of the run, the position of its task and the policy
version it was begun under, so that a run that goes on from a checkpoint finds its groups again, and none of another
lineage.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from functools import partial

import msgspec

from agentlightning.algorithm.base import RunContext, Stopped
from agentlightning.algorithm.checkpoints import Checkpoints, LoopState, explained
from agentlightning.algorithm.evaluation import Evaluation, evaluate, evaluation_id, why_unrewarded
from agentlightning.algorithm.rl.batch import (
    BATCHES_FILE,
    Batch,
    RecordedBatch,
    groups_that_earned,
    make_batches,
    rollout_metrics,
)
from agentlightning.algorithm.rl.groups import CompleteGroup, Dropped, Groups, withdraw_rollouts
from agentlightning.algorithm.rl.policies import EXPLOSION, FAR, FAR_KL, GradientNorms, Policies, Usage, over_steps
from agentlightning.algorithm.rl.reinforcement import Reinforcement
from agentlightning.data.rewards import RewardSpec
from agentlightning.data.sequences import TrainingSequence
from agentlightning.data.transitions import TracedRollout, tool_success
from agentlightning.errors import AgentLightningError, ConfigError, ConflictError, TrainingError
from agentlightning.types import Rollout

EXPORTS = "published"  # folder of a run for the weights that samplers read


class Loop:
    """One training job of a `Reinforcement` algorithm on these groups.

    Whatever reads or writes weights runs in the one `thread`: the event loop goes on, and a checkpoint holds the
    weights of one step."""

    def __init__(self, algorithm: Reinforcement, context: RunContext, groups: Groups, thread: Executor) -> None:
        if not context.policies:
            raise ConfigError(f"{algorithm.name} trains weights: give the Trainer a model")
        self.algorithm = algorithm
        self.context = context
        self.policies = Policies(
            {name: policy.learner for name, policy in context.policies.items()},
            {name: policy.sampler for name, policy in context.policies.items()},
            thread,
            context.directory / EXPORTS,
        )
        self.run_id = context.run.run_id
        self.groups = groups
        self.checkpoints = Checkpoints(context.directory / "checkpoints")
        self.state = LoopState()
        norms = self.policies.named({policy: {"grad_norm": 0.0} for policy in self.policies.names})
        self.norms = {name: GradientNorms() for name in norms}
        self.learning = False  # between the first optimiser step of a batch and the publication
        self.evaluating: asyncio.Task[None] | None = None
        self.collapse_told = False

    async def run(self) -> str:
        """Steps until one of the reasons to end holds; returns the reason in words."""
        if self.context.resume:
            await self._restore()
        async with self.context.calls_held():
            await self.policies.begin(self.state.policy_version)
        self.groups.steps_left = self.algorithm.steps - self.state.step
        reason = "all steps done"
        try:
            await self._evaluate_start()
            async with self._collecting():
                while self.state.step < self.algorithm.steps and not self._reached_target():
                    await self._evaluate_when_due()
                    await self._step()
            if self._reached_target():
                reason = f"mean training reward reached {self.algorithm.target_reward}"
            await self.groups.withdraw()
            await self._evaluated()
        except Stopped as stopped:
            reason = str(stopped)
        except AgentLightningError as error:
            if not self.learning:  # the weights are those of a whole step
                if isinstance(error, TrainingError):
                    await self._renew_version()
                await self._save()
            raise
        finally:
            if self.evaluating is not None:
                self.evaluating.cancel()
                await asyncio.gather(self.evaluating, return_exceptions=True)
        await self._save()
        if not self.context.stop.is_set() and self._last_evaluated() not in (None, self.state.step):
            self.context.deadline = None  # the time for the closing evaluation was set aside at the start
            try:
                await self._evaluate()
            except Stopped as stopped:
                reason = str(stopped)
        return reason

    @asynccontextmanager
    async def _collecting(self) -> AsyncGenerator[None]:
        collector = asyncio.create_task(self.groups.collect())
        try:
            yield
        finally:
            collector.cancel()
            await asyncio.gather(collector, return_exceptions=True)

    # --- one step ---

    async def _step(self) -> None:
        started, engines = time.perf_counter(), self.policies.usage()
        step = self.state.step + 1
        groups, dropped = await self.context.unless_stopped(self.groups.take())
        sampled = time.perf_counter()
        self._record_batch(step, groups)
        traced = [group.rollouts for group in groups]
        await self._check_trainable([*traced, *dropped.traced])
        credited = await self._credited(traced)
        batches = {name: batch.sequences for name, batch in credited.items()}
        metrics = rollout_metrics(self.algorithm, traced, dropped.useless) | _flow_metrics(groups, dropped)
        metrics |= self.policies.named({name: batch.metrics for name, batch in credited.items()})
        version = None
        if any(batches.values()):
            metrics |= await self._learn(batches, step)
            version = self.state.policy_version
        elif metrics["calls"] or dropped.traced:
            self._note_nothing_learned(step, metrics["reward"], dropped)
        # Together: a step that is cut short must find its groups again.
        self.state.step = step
        await self.groups.trained(version)
        learned = time.perf_counter()
        metrics |= self._speed(metrics, sampled - started, learned - sampled, self.policies.usage() - engines)
        metrics["policy_version"] = float(self.state.policy_version)
        fallen = self.state.earnings.add(groups_that_earned(self.algorithm, [*traced, *dropped.useless]))
        await self.context.tracking.record(step, metrics)
        if step % self.algorithm.checkpoint_every == 0:
            await self._save()
        self.context.progress.step(step, metrics)
        self._check_explosion(step, metrics)
        self._check_collapse(step, fallen)

    def _speed(self, metrics: Mapping[str, float], waited: float, learned: float, engines: Usage) -> dict[str, float]:
        """Of a step that waited so many seconds for rollouts and learned for so many, engine and learner by
        themselves."""
        took = waited + learned if self._overlaps else waited
        computed = sum(value for name, value in metrics.items() if name.rpartition("/")[2] == "tokens_computed")
        return {
            "rollout_seconds": waited,
            "learn_seconds": learned,
            "learner_idle": waited / (waited + learned),
            "engine_idle": min(1.0, engines.idle_seconds / (waited + learned)),
            "rollouts_per_second": metrics["rollouts"] / took,
            "tokens_per_second": metrics["sampled_tokens"] / took,
            "engine_tokens_per_second": engines.generated_tokens / max(1e-9, waited + learned - engines.idle_seconds),
            "learner_tokens_per_second": computed / learned,
        }

    def _check_explosion(self, step: int, metrics: Mapping[str, float]) -> None:
        """TrainingError once gradients have been far larger than usual for as many steps as the algorithm allows."""
        for name, norms in self.norms.items():
            row = norms.add(norm := metrics.get(name, 0.0))
            allowed = self.algorithm.stop_on_explosion
            told = f"step {step}: {name} is {norm:.3g}, over {EXPLOSION:.0f} times what was usual" if row else ""
            if allowed and row >= allowed:
                raise TrainingError(f"{told}, for {row} steps in a row. {self._how_to_replay(step)}")
            if row == 1:
                self.context.progress.note(told)

    def _check_collapse(self, step: int, row: int) -> None:
        """TrainingError once rollouts have earned nothing for as many steps as the algorithm allows; a note before."""
        ends = 0 < self.algorithm.stop_on_collapse <= row
        if not ends and (row < 3 or self.collapse_told):
            return
        best = self.checkpoints.best()
        told = (
            f"step {step}: the policy has collapsed: no rollout of the last {row} steps earned anything, and in "
            f"{self.state.earnings.share:.0%} of the groups before one did. "
            f"{f'The best weights are in {best}' if best else 'No better weights were saved'}"
        )
        if ends:
            raise TrainingError(f"{told}. Try a lower learning_rate; stop_on_collapse=0 goes on")
        self.collapse_told = True
        self.context.progress.note(told)

    def _how_to_replay(self, step: int) -> str:
        return f"The batch is kept; `python scripts/replay.py {self.context.directory} --step {step}` trains it again"

    @property
    def _overlaps(self) -> bool:
        """Whether rollouts go on while the learner learns."""
        return self.algorithm.max_staleness > 0

    def _note_nothing_learned(self, step: int, reward: float, dropped: Dropped) -> None:
        left_out = f"; {len(dropped.traced)} groups were replaced: {dict(dropped.groups)}" if dropped.traced else ""
        self.context.progress.note(
            f"step {step} taught nothing: in every group all rewards were equal, or fewer than two members had one "
            f"(mean {reward:.2f}){left_out}"
        )

    async def _check_trainable(self, groups: Sequence[Sequence[TracedRollout]]) -> None:
        """TrainingError where nothing can be learned from these rollouts for a reason that would hold for others."""
        rollouts = [traced for group in groups for traced in group]
        silent = not any(traced.transitions for traced in rollouts)
        unrewarded = all(traced.reward is None for traced in rollouts)
        if unrewarded and (silent or self.algorithm.unrewarded == "exclude"):
            raise await why_unrewarded(self.context.store, [traced.rollout for traced in rollouts])
        excluded = sum((traced.excluded for traced in rollouts), Counter[str]())
        others = sorted({name for traced in rollouts for name in traced.other_agents})
        if silent and others:
            self._no_chosen_agent(others)
        elif silent:
            raise TrainingError(
                f"no call of the policy in {len(rollouts)} rollouts can be trained"
                f"{f' (left out: {dict(excluded)})' if excluded else ''}: the agent must send its chat completions to "
                "the URL in `llm.endpoint` with `llm.api_key`"
            )

    def _no_chosen_agent(self, others: list[str]) -> None:
        """TrainingError in the first batch, where it is a mistake; later an agent may have had nothing to do."""
        message = (
            f"none of the calls is by an agent that agents={self.algorithm.agents!r} names; the agents here are "
            f"{', '.join(others[:10])}{' …' if len(others) > 10 else ''}"
        )
        if self.state.step == 0:
            raise TrainingError(message)
        self.context.progress.note(f"step {self.state.step + 1} trains nothing: {message}")

    async def _credited(self, groups: Sequence[Sequence[TracedRollout]]) -> dict[str, Batch]:
        """The batch of each policy; a critic reads weights as a gradient step does."""
        make = partial(make_batches, self.algorithm, groups, self.policies.critics(self.algorithm))
        if self.algorithm.trained_critic is None or not groups:
            return await asyncio.to_thread(make)
        async with self._alone():
            return await self.policies.in_thread(make)

    async def _learn(self, batches: Mapping[str, list[TrainingSequence]], step: int) -> dict[str, float]:
        """The step's optimiser steps, then the publication of the new weights."""
        progress = self.context.progress
        history: dict[str, list[dict[str, float]]] = {name: [] for name, batch in batches.items() if batch}
        progress.phase("learn", self._optimiser_steps(batches))
        async with self._alone():
            try:
                async for name, metrics in self.policies.learn(
                    batches, self.algorithm, seed=self.context.seed, step=step, version=self.state.policy_version
                ):
                    self.learning = True
                    history[name].append(metrics)
                    progress.advance(sum(map(len, history.values())))
            except TrainingError as error:
                raise TrainingError(f"step {step}: {error}. {self._how_to_replay(step)}") from error
            # Before the engines go on: no token of the new weights is to be called one of the old.
            self.state.policy_version = await self.context.store.next_policy_version(self.run_id)
            await self.policies.publish(self.state.policy_version)
        self.learning = False
        measured = {name: over_steps(steps) for name, steps in history.items()}
        for name, metrics in measured.items():
            self._check_mismatch(name, metrics, step)
        return self.policies.named(measured)

    def _optimiser_steps(self, batches: Mapping[str, Sequence[TrainingSequence]]) -> int:
        parts = sum(min(self.algorithm.minibatches, len(batch)) for batch in batches.values())
        return parts * self.algorithm.epochs

    @asynccontextmanager
    async def _alone(self) -> AsyncGenerator[None]:
        """Inside, the learner has the weights and the cores for itself, unless rollouts are to go on beside it."""
        if self._overlaps:
            yield
        else:
            async with self.context.calls_held(), self.policies.alone():
                yield

    def _check_mismatch(self, name: str, metrics: Mapping[str, float], step: int) -> None:
        """Of what these very weights sampled, learner and sampler differ by rounding alone. TrainingError where no
        rounding explains it."""
        tolerance = self.policies.learners[name].mismatch_tolerance
        mismatch, kl = metrics.get("inference_mismatch", 0.0), metrics.get("inference_kl", 0.0)
        told = (
            f"step {step}: sampler and learner differ by {mismatch:.2g} in the probability of a token (expected at "
            f"most {tolerance:.2g}): what is trained is not what was sampled"
        )
        if mismatch > FAR * tolerance or kl > FAR_KL:
            raise TrainingError(f"{told}, with a KL of {kl:.2g}. Does the sampler have the learner's weights?")
        if mismatch > tolerance:
            self.context.progress.note(f"{told}. Try float32")

    # --- around the steps ---

    def _recent_rewards(self) -> list[float]:
        """The mean training rewards of the latest three steps."""
        history = self.context.tracking.history
        return [history[step]["reward"] for step in sorted(history)[-3:] if "reward" in history[step]]

    def _reached_target(self) -> bool:
        target, rewards = self.algorithm.target_reward, self._recent_rewards()
        return target is not None and len(rewards) == 3 and sum(rewards) / 3 >= target

    async def _evaluate_when_due(self) -> None:
        """Measure the present weights every so many steps: before training goes on, or, where that overlaps with
        rollouts anyway, beside it; one that is still going on then is not begun again."""
        every, step = self.algorithm.evaluate_every, self.state.step
        if not every or step % every or self._last_evaluated() == step:
            return
        if not self._overlaps:
            await self._evaluate()
        elif not self._evaluates_beside:
            await self._evaluated()
            await self._written(self.checkpoints.save_candidate)
            self.evaluating = asyncio.create_task(self._evaluate())

    async def _evaluated(self) -> None:
        """The evaluation that goes on beside training has ended, and what went wrong in it is raised."""
        if self.evaluating is not None:
            await self.evaluating

    async def _evaluate_start(self) -> None:
        """Evaluate the weights that training starts from, and set aside the time to do so once more at the end. In a
        resumed run the answer is in the store already, and what it took is known."""
        if not self.context.val_tasks:
            return
        started = time.perf_counter()
        first = await self._evaluation(0, self.state.first_version)
        if first.unrewarded == len(first.tasks) and self.algorithm.unrewarded == "exclude":
            raise await why_unrewarded(self.context.store, [task.rollout for task in first.tasks])
        await self._keep(first)
        self.state.evaluation_seconds = max(self.state.evaluation_seconds, time.perf_counter() - started)
        if self.context.deadline is not None:
            self.context.deadline -= 1.5 * self.state.evaluation_seconds

    async def _evaluate(self) -> None:
        """Evaluate the present weights."""
        if self.context.val_tasks:
            await self._keep(await self._evaluation(self.state.step, self.state.policy_version))

    async def _evaluation(self, step: int, version: int) -> Evaluation:
        return await evaluate(
            self.context,
            self.context.val_tasks,
            step=step,
            version=version,
            mode="val",
            config=self.algorithm.rollout,
            reward=RewardSpec(base=self.algorithm.reward.base, failed_tool=self.algorithm.reward.failed_tool),
            beside=self._evaluates_beside,
        )

    @property
    def _evaluates_beside(self) -> bool:
        """Whether an evaluation goes on beside training."""
        return self.evaluating is not None and not self.evaluating.done()

    def _last_evaluated(self) -> int | None:
        return self.algorithm.evaluations[-1].step if self.algorithm.evaluations else None

    async def _keep(self, evaluation: Evaluation) -> None:
        self.algorithm.evaluations.append(evaluation)
        values = {"val_reward": evaluation.reward, "val_unrewarded": float(evaluation.unrewarded)}
        if (worked := tool_success(task.traced for task in evaluation.tasks)) is not None:
            values["val_tool_success"] = worked
        await self.context.tracking.record(evaluation.step, values)
        best = self.state.best_reward
        if best is not None and evaluation.reward <= best:
            return
        if self._evaluates_beside:  # the learner may be changing the weights this very moment
            promote = partial(self.checkpoints.promote_candidate, evaluation.step, evaluation.reward)
            if await self.policies.in_thread(promote):
                self.state.best_reward = evaluation.reward
        elif evaluation.step == self.state.step:
            self.state.best_reward = evaluation.reward
            await self._written(self.checkpoints.save_best)

    def _record_batch(self, step: int, groups: Sequence[CompleteGroup]) -> None:
        """Note what the step trains on, before it does."""
        names = tuple(tuple(traced.rollout.rollout_id for traced in group.rollouts) for group in groups)
        path = self.context.directory / BATCHES_FILE
        with explained("the record of steps", path), path.open("ab") as file:
            file.write(msgspec.json.encode(RecordedBatch(step, self.state.policy_version, names)) + b"\n")

    async def _save(self) -> None:
        self.state.groups = self.groups.state
        rewards = self._recent_rewards()
        self.state.recent_reward = sum(rewards) / len(rewards) if rewards else None
        await self._written(self.checkpoints.save)

    async def _written(self, save: Callable[[Policies, LoopState], object]) -> None:
        """Write the present weights and state, which goes on to change meanwhile."""
        await self.policies.in_thread(partial(save, self.policies, copy.deepcopy(self.state)))

    async def _renew_version(self) -> None:
        """Publish the present weights once more, as another version: finished rollouts are never run again, and a
        resumed run, its agent mended, must not meet those that ended this one."""
        self.state.policy_version = await self.context.store.next_policy_version(self.run_id)
        if self.state.step == 0:
            self.state.first_version = self.state.policy_version
        self.groups.begin_again(self.state.policy_version)
        await self.policies.publish(self.state.policy_version)

    async def _restore(self) -> None:
        """Go on from the newest checkpoint: its weights are served again under the version they were published as, and
        no call is answered before they are."""
        async with self.context.calls_held(), self.policies.alone():
            restored = await self.policies.in_thread(partial(self.checkpoints.restore, self.policies))
            if restored is not None:
                await self.policies.publish(restored.policy_version)
        if restored is None:
            self.context.progress.note("nothing was saved yet: starting from the beginning")
        else:
            self.state = restored
            self.groups.restore(restored.groups)
            await self.context.tracking.go_on_after(restored.step)
            for _, measured in sorted(self.context.tracking.history.items()):
                for name, norms in self.norms.items():
                    norms.add(measured.get(name, 0.0))
            self.context.progress.note(f"resumed after step {restored.step} (policy version {restored.policy_version})")
        if not self.context.owns_runner:
            await self._abandon_failures()
        await self._withdraw_leftovers()

    async def _abandon_failures(self) -> None:
        """Runners elsewhere went on while nothing served the policy: what failed then says nothing about the agent."""
        failed = await self.context.store.query_rollouts(run_id=self.run_id, status_in=["failed"])
        if any(map(self._wanted(), failed)):
            await self._renew_version()

    def _wanted(self) -> Callable[[Rollout], bool]:
        """Whether a rollout is one that the present weights are still to be measured or trained by."""
        present = f"{evaluation_id(self.run_id, 'val', self.state.step, self.state.policy_version)}-"
        return lambda rollout: self.groups.awaits(rollout.group_id) or rollout.rollout_id.startswith(present)

    async def _withdraw_leftovers(self) -> None:
        """Rollouts the process before left behind: those that will be asked for again run again, others are
        cancelled."""
        store, wanted = self.context.store, self._wanted()
        first = f"{evaluation_id(self.run_id, 'val', 0, self.state.first_version)}-"

        def asked_for(rollout: Rollout) -> bool:
            return wanted(rollout) or rollout.rollout_id.startswith(first)

        await withdraw_rollouts(self.context, lambda rollout: not asked_for(rollout))
        if not self.context.owns_runner:
            return
        for rollout in await store.query_rollouts(run_id=self.run_id, status_in=["preparing", "running"]):
            attempt = await store.get_latest_attempt(rollout.rollout_id)
            # An older attempt's runner lived in the process that died; a younger one is our own runner's.
            if attempt is not None and attempt.start_time < self.context.run_time and asked_for(rollout):
                with contextlib.suppress(ConflictError):  # it has ended meanwhile
                    await store.update_attempt(rollout.rollout_id, attempt.attempt_id, status="unresponsive")


def _flow_metrics(groups: Sequence[CompleteGroup], dropped: Dropped) -> dict[str, float]:
    """How old the rollouts of a step are, and how much was dropped."""
    ages = Counter(age for group in groups for age in group.staleness)
    return (
        {"groups_dropped": float(len(dropped.traced))}
        | {f"staleness/{age}": float(count) for age, count in sorted(ages.items())}
        | {f"groups_dropped/{reason}": float(count) for reason, count in dropped.groups.items()}
        | {f"rollouts_dropped/{reason}": float(count) for reason, count in dropped.rollouts.items()}
    )
