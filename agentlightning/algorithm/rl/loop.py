"""The reinforcement-learning loop: enqueue groups, wait for them, give credit, step, publish, repeat.

The loop knows groups, policy versions and checkpoints. It does not know how advantages are made (the algorithm's
`advantages`) or how a gradient is taken (the learner). It is synchronous: a step trains on rollouts that were all
started under the weights it is about to change.

What makes it survive a kill at any moment: a group's id is made of the run, the step and the policy version it is
sampled from, so that the step that was interrupted finds its finished rollouts again, and none of another lineage.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from concurrent.futures import Executor

import msgspec

from agentlightning.algorithm.base import RunContext, Stopped
from agentlightning.algorithm.checkpoints import Checkpoints, LoopState
from agentlightning.algorithm.evaluation import Evaluation, evaluate, evaluation_id, why_unrewarded
from agentlightning.algorithm.rl.batch import BATCHES_FILE, RecordedBatch, make_batch, minibatches, trace_group
from agentlightning.algorithm.rl.reinforcement import Reinforcement
from agentlightning.algorithm.rl.sampling import tasks_of_step
from agentlightning.data.rewards import RewardSpec
from agentlightning.data.sequences import TrainingSequence
from agentlightning.data.transitions import TracedRollout
from agentlightning.errors import AgentLightningError, ConfigError, TrainingError
from agentlightning.learner.base import Learner
from agentlightning.types import EnqueueRolloutRequest, Metrics


class Loop:
    """One training job of a `Reinforcement` algorithm. All gradient steps run in the one thread of `thread`: the memory
    that torch frees stays with the thread that took it, and is there again for the next step."""

    def __init__(self, algorithm: Reinforcement, context: RunContext, thread: Executor) -> None:
        if context.learner is None or context.serving is None:
            raise ConfigError(f"{algorithm.name} trains weights: give the Trainer a model")
        if not context.train_tasks:
            raise ConfigError("the training dataset is empty")
        self.algorithm = algorithm
        self.context = context
        self.thread = thread
        self.learner: Learner = context.learner
        self.serving = context.serving
        self.run_id = context.run.run_id
        self.checkpoints = Checkpoints(context.directory / "checkpoints")
        self.state = LoopState()
        self.learning = False  # between the first optimiser step of a batch and the publication
        self.history: dict[int, dict[str, float]] = {}

    async def run(self) -> str:
        """Steps until one of the reasons to end holds; returns the reason in words."""
        if self.context.resume:
            await self._restore()
        reason = "all steps done"
        try:
            await self._evaluate_start()
            while self.state.step < self.algorithm.steps and not self._reached_target():
                if self._evaluation_is_due():
                    await self._evaluate()
                await self._step()
            if self._reached_target():
                reason = f"mean training reward reached {self.algorithm.target_reward}"
        except Stopped as stopped:
            reason = str(stopped)
        except AgentLightningError as error:
            if not self.learning:  # the weights are those of a whole step
                if isinstance(error, TrainingError):
                    await self._renew_version()
                self._save()
            raise
        self._save()
        if not self.context.stop.is_set() and self._last_evaluated() != self.state.step:
            self.context.deadline = None  # the time for the closing evaluation was set aside at the start
            try:
                await self._evaluate()
            except Stopped as stopped:
                reason = str(stopped)
        return reason

    # --- one step ---

    async def _step(self) -> None:
        started = time.perf_counter()
        step = self.state.step + 1
        groups, cursor = await self._rollouts(step)
        sampled = time.perf_counter()
        self._record_batch(step, groups)
        await self._check_trainable(groups)
        batch = make_batch(self.algorithm, groups)
        metrics = batch.metrics
        if batch.sequences:
            metrics |= await self._learn(batch.sequences, step)
        elif metrics["calls"]:
            self.context.progress.note(
                f"step {step} taught nothing: in every group all rewards were equal, or fewer than two members had one "
                f"(mean {metrics['reward']:.2f})"
            )
        # Together: a step that is cut short must find its groups again, those complete already too.
        self.state.step, self.state.cursor = step, cursor
        learned = time.perf_counter()
        metrics |= {
            "rollout_seconds": sampled - started,
            "learn_seconds": learned - sampled,
            "tokens_per_second": metrics["sampled_tokens"] / (sampled - started),
            "policy_version": float(self.state.policy_version),
        }
        if step % self.algorithm.checkpoint_every == 0:
            self._save()
        await self._record(step, metrics)
        self.context.progress.step(step, metrics)

    async def _rollouts(self, step: int) -> tuple[list[list[TracedRollout]], int]:
        """Run this step's groups to their end; the groups, and the cursor behind them."""
        algorithm, context = self.algorithm, self.context
        tasks = tasks_of_step(context.train_tasks, step, algorithm.tasks_per_step, context.seed)
        context.progress.phase("rollouts", len(tasks) * algorithm.group_size)
        waiting: set[str] = set()
        for index, task in enumerate(tasks):
            group_id = f"{self._step_id(step)}-{index}"
            waiting.add(group_id)
            await context.store.create_group(algorithm.group_size, run_id=self.run_id, group_id=group_id)
            await context.store.enqueue_many_rollouts(
                [
                    EnqueueRolloutRequest(
                        input=task,
                        rollout_id=f"{group_id}-{member}",
                        resources_id=context.resources_id,
                        run_id=self.run_id,
                        group_id=group_id,
                        group_index=member,
                        config=algorithm.rollout,
                        metadata={"seed": context.seed, "sample": f"train-{step}-{index}-{member}"},
                    )
                    for member in range(algorithm.group_size)
                ]
            )
        traced: dict[str, list[TracedRollout]] = {}
        cursor = self.state.cursor
        while waiting:
            complete = await context.unless_stopped(
                context.store.complete_groups_after(self.run_id, cursor, timeout=30.0)
            )
            for group in complete:
                cursor = max(cursor, group.finished_index or 0)
                if group.group_id in waiting:  # groups of an abandoned lineage pass by unused
                    waiting.discard(group.group_id)
                    traced[group.group_id] = await trace_group(
                        context.store, group.rollout_ids, algorithm, context.model_name
                    )
            context.progress.advance(len(traced) * algorithm.group_size)
        return [traced[group_id] for group_id in sorted(traced)], cursor

    async def _check_trainable(self, groups: list[list[TracedRollout]]) -> None:
        """TrainingError where nothing can be learned from these rollouts for a reason that would hold for others."""
        rollouts = [traced for group in groups for traced in group]
        silent = not any(traced.transitions for traced in rollouts)
        unrewarded = all(traced.reward is None for traced in rollouts)
        if unrewarded and (silent or self.algorithm.unrewarded == "exclude"):
            raise await why_unrewarded(self.context.store, rollouts)
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

    async def _learn(self, batch: list[TrainingSequence], step: int) -> dict[str, float]:
        """The step's optimiser steps, then the publication of the new weights."""
        parts = minibatches(batch, self.algorithm.minibatches, self.context.seed, step)
        self.context.progress.phase("learn", len(parts))
        loss = self.algorithm.make_loss()
        history: list[dict[str, float]] = []
        loop = asyncio.get_running_loop()
        self.learning = True
        async with self.context.calls_held(), self.serving.exclusive():
            for done, part in enumerate(parts, 1):
                history.append(await loop.run_in_executor(self.thread, self.learner.step, part, loss))
                self.context.progress.advance(done)
            # Before the engine goes on: no token of the new weights is to be called one of the old.
            self.state.policy_version = await self.context.store.next_policy_version(self.run_id)
            await self.serving.update_weights(self.state.policy_version)
        self.learning = False
        # Before the first optimiser step of a batch the learner and the engine hold the same weights: any difference
        # of their log-probabilities is numerical.
        mismatch = history[0]["max_ratio_error"]
        if mismatch > self.learner.mismatch_tolerance:
            self.context.progress.note(
                f"step {step}: engine and learner differ by {mismatch:.2g} in the probability of a token (expected at "
                f"most {self.learner.mismatch_tolerance:.2g}): what is trained is not what was sampled. Try float32"
            )
        mean = {name: sum(one[name] for one in history) / len(history) for name in history[0]}
        counts = {name: sum(one[name] for one in history) for name in mean if name.startswith("tokens")}
        return mean | {"inference_mismatch": mismatch} | counts

    # --- around the steps ---

    def _step_id(self, step: int) -> str:
        return f"{self.run_id}-{step}-v{self.state.policy_version}"

    def _reached_target(self) -> bool:
        target, step = self.algorithm.target_reward, self.state.step
        recent = [self.history.get(one, {}).get("reward") for one in range(step - 2, step + 1)]
        rewards = [reward for reward in recent if reward is not None]
        return target is not None and len(rewards) == 3 and sum(rewards) / 3 >= target

    def _evaluation_is_due(self) -> bool:
        every, step = self.algorithm.evaluate_every, self.state.step
        return every > 0 and step % every == 0 and self._last_evaluated() != step

    async def _evaluate_start(self) -> None:
        """Evaluate the weights that training starts from. In a resumed run the answer is in the store already."""
        if not self.context.val_tasks:
            return
        started = time.perf_counter()
        first = await self._evaluation(0, self.state.first_version)
        if first.unrewarded == len(first.tasks) and self.algorithm.unrewarded == "exclude":
            raise await why_unrewarded(self.context.store, [task.traced for task in first.tasks])
        await self._keep(first)
        if self.context.deadline is not None:
            self.context.deadline -= 1.5 * (time.perf_counter() - started)

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
            reward=RewardSpec(base=self.algorithm.reward.base),
        )

    def _last_evaluated(self) -> int | None:
        return self.algorithm.evaluations[-1].step if self.algorithm.evaluations else None

    async def _keep(self, evaluation: Evaluation) -> None:
        self.algorithm.evaluations.append(evaluation)
        values = {"val_reward": evaluation.reward, "val_unrewarded": float(evaluation.unrewarded)}
        await self._record(evaluation.step, values)
        best = self.state.best_reward
        if evaluation.step == self.state.step and (best is None or evaluation.reward > best):
            self.state.best_reward = evaluation.reward
            self.checkpoints.save_best(self.learner, self.state)

    async def _record(self, step: int, values: dict[str, float]) -> None:
        self.history[step] = self.history.get(step, {}) | values
        values = self.history[step]
        await self.context.store.add_metrics(Metrics(run_id=self.run_id, step=step, time=time.time(), values=values))

    def _record_batch(self, step: int, groups: list[list[TracedRollout]]) -> None:
        """Note what the step trains on, before it does."""
        names = tuple(str(group[0].rollout.group_id) for group in groups)
        with (self.context.directory / BATCHES_FILE).open("ab") as file:
            file.write(msgspec.json.encode(RecordedBatch(step, self.state.policy_version, names)) + b"\n")

    def _save(self) -> None:
        self.checkpoints.save(self.learner, self.state)

    async def _renew_version(self) -> None:
        """Publish the present weights once more, as another version: finished rollouts are never run again, and a
        resumed run, its agent mended, must not meet those that ended this one."""
        self.state.policy_version = await self.context.store.next_policy_version(self.run_id)
        if self.state.step == 0:
            self.state.first_version = self.state.policy_version
        await self.serving.update_weights(self.state.policy_version)

    async def _restore(self) -> None:
        """Go on from the newest checkpoint: its weights are served again under the version they were published as."""
        restored = self.checkpoints.restore(self.learner)
        if restored is None:
            self.context.progress.note("nothing was saved yet: starting from the beginning")
        else:
            self.state = restored
            measured = await self.context.store.query_metrics(self.run_id)
            self.history = {m.step: m.values for m in measured if m.step <= restored.step}
            await self.serving.update_weights(restored.policy_version)
            self.context.progress.note(f"resumed after step {restored.step} (policy version {restored.policy_version})")
        if not self.context.owns_runner:
            await self._abandon_failures()
        await self._withdraw_leftovers()

    async def _abandon_failures(self) -> None:
        """Runners elsewhere went on while nothing served the policy: what failed then says nothing about the agent."""
        current = self._current_ids()
        failed = await self.context.store.query_rollouts(run_id=self.run_id, status_in=["failed"])
        if any(rollout.rollout_id.startswith(current) for rollout in failed):
            await self._renew_version()

    def _current_ids(self) -> tuple[str, str]:
        """What the ids of the rollouts begin with that the present weights are still to be measured and trained by."""
        evaluation = evaluation_id(self.run_id, "val", self.state.step, self.state.policy_version)
        return f"{self._step_id(self.state.step + 1)}-", f"{evaluation}-"

    async def _withdraw_leftovers(self) -> None:
        """Rollouts the process before left behind: those that will be asked for again run again, others are
        cancelled."""
        store = self.context.store
        wanted = (*self._current_ids(), f"{evaluation_id(self.run_id, 'val', 0, self.state.first_version)}-")
        for rollout in await store.query_rollouts(
            run_id=self.run_id, status_in=["queuing", "requeuing", "preparing", "running"]
        ):
            if not rollout.rollout_id.startswith(wanted):
                await store.cancel_rollout(rollout.rollout_id)
            elif rollout.status in ("preparing", "running") and self.context.owns_runner:
                attempt = await store.get_latest_attempt(rollout.rollout_id)
                # An older attempt's runner lived in the process that died; a younger one is our own runner's.
                if attempt is not None and attempt.start_time < self.context.run_time:
                    await store.update_attempt(rollout.rollout_id, attempt.attempt_id, status="unresponsive")
