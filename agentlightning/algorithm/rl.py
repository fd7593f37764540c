"""The reinforcement-learning loop: enqueue groups, wait for them, give credit, step, publish, repeat.

The loop knows groups, policy versions and checkpoints. It does not know how advantages are made (the algorithm's
`advantages`) or how a gradient is taken (the learner). It is synchronous: a step trains on rollouts that were all
started under the weights it is about to change.

What makes it survive a kill at any moment: a group's id is made of the run, the step and the policy version it is
sampled from, so that the step that was interrupted finds its finished rollouts again, and none of another lineage.
"""

from __future__ import annotations

import abc
import asyncio
import itertools
import math
import random
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

from agentlightning.algorithm.base import RunContext, Stopped
from agentlightning.algorithm.checkpoints import Checkpoints, LoopState
from agentlightning.algorithm.evaluation import Evaluation, evaluate, evaluation_id, why_unrewarded
from agentlightning.data.agents import agent_pattern
from agentlightning.data.credit.table import RewardedGroup
from agentlightning.data.rewards import PLAIN, RewardSpec
from agentlightning.data.sequences import Aggregation, CreditedTransition, Level, TrainingSequence, build_sequences
from agentlightning.data.transitions import TracedRollout, trace_rollout
from agentlightning.errors import AgentLightningError, ConfigError, TrainingError
from agentlightning.learner.base import KLEstimator, Learner, Loss, LossKind
from agentlightning.types import EnqueueRolloutRequest, Metrics, RolloutConfig


@dataclass(kw_only=True)
class Reinforcement(abc.ABC):
    """Settings every reinforcement-learning algorithm shares, and its two answers: advantages and a loss.

    A step samples `tasks_per_step` tasks, runs each `group_size` times, and makes `minibatches` optimiser steps.
    `reference` keeps a copy of the starting weights; straying from it costs `kl_coefficient` (0.04 by default).
    `reward` says what R is made of, `loss` how an advantage becomes a loss (`learner/losses.py`).
    `unrewarded` says what a rollout without a reward counts for: left out of its group, or a stated reward.
    `agents` are the names of the agents to train, as in `"writer|rewriter"`; without it all are.
    Training stops after `steps`, or once the mean training reward of three steps reaches `target_reward`."""

    steps: int = 100
    tasks_per_step: int = 16
    group_size: int = 8
    minibatches: int = 1
    level: Level = "trajectory"
    reward: RewardSpec = PLAIN
    loss: LossKind = "ppo_clip"
    clip_low: float | None = None
    clip_high: float | None = None
    dual_clip: float | None = None
    aggregation: Aggregation = "token-mean"
    constant_length: int | None = None
    reference: bool = False
    kl_coefficient: float | None = None
    kl_estimator: KLEstimator = "k3"
    entropy_coefficient: float = 0.0
    temperature: float = 1.0
    val_temperature: float = 1.0
    max_tokens: int | None = None
    unrewarded: Literal["exclude"] | float = "exclude"
    agents: str | None = None
    target_reward: float | None = None
    evaluate_every: int = 0
    checkpoint_every: int = 10
    rollout: RolloutConfig = field(
        default_factory=lambda: RolloutConfig(timeout_seconds=300.0, max_attempts=3, retry_condition=("unresponsive",))
    )
    name: str = "rl"

    def __post_init__(self) -> None:
        for name in ("steps", "tasks_per_step", "group_size", "minibatches", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.evaluate_every < 0:
            raise ConfigError(
                f"evaluate_every is {self.evaluate_every}; give a number of steps, or 0 for only at the ends"
            )
        for name, lowest in (("temperature", 1e-3), ("val_temperature", 0.0)):
            if not lowest <= getattr(self, name) <= 2:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must lie between {lowest} and 2")
        if self.unrewarded != "exclude" and not math.isfinite(self.unrewarded):
            raise ConfigError(f"unrewarded is {self.unrewarded}; give 'exclude', or a finite reward")
        if self.kl_coefficient and not self.reference:
            raise ConfigError("kl_coefficient pulls towards a reference policy; set reference=True to keep one")
        self.agent_pattern = None if self.agents is None else agent_pattern(self.agents)
        if self.loss == "policy_gradient" and self.minibatches > 1:
            raise ConfigError(
                f"loss 'policy_gradient' is right for the weights that sampled, and {self.minibatches} minibatches "
                "move them in between; give minibatches=1 or loss='importance_sampling'"
            )
        self.make_loss()  # refuses settings out of range now, rather than after the first rollouts
        build_sequences((), self.level)  # and a level that there is not

    @abc.abstractmethod
    def advantages(self, groups: Sequence[RewardedGroup]) -> list[list[list[CreditedTransition]]]:
        """Credit the groups of one step. The answer has, for each rollout of each group, its transitions with an
        advantage per sampled token."""

    def make_loss(self) -> Loss:
        """The loss of every batch."""
        return Loss(
            kind=self.loss,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
            aggregation=self.aggregation,
            constant_length=self.constant_length,
            kl_coefficient=self.kl_coefficient if self.kl_coefficient is not None else 0.04 * self.reference,
            kl_estimator=self.kl_estimator,
            entropy_coefficient=self.entropy_coefficient,
            temperature=self.temperature,
        )

    async def run(self, context: RunContext) -> None:
        """Train until done or stopped; afterwards `evaluations` holds the first and the last, and what lay between."""
        self.evaluations: list[Evaluation] = []
        with ThreadPoolExecutor(1, "learner") as thread:
            self.stopped_because = await Loop(self, context, thread).run()


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
        batch, metrics = await self._learnable(groups)
        if batch:
            metrics |= await self._learn(batch, step)
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
                    traced[group.group_id] = await self._trace(group.rollout_ids)
            context.progress.advance(len(traced) * algorithm.group_size)
        return [traced[group_id] for group_id in sorted(traced)], cursor

    async def _trace(self, rollout_ids: Sequence[str]) -> list[TracedRollout]:
        store, models, algorithm = self.context.store, (self.context.model_name,), self.algorithm
        rollouts = {r.rollout_id: r for r in await store.query_rollouts(rollout_id_in=rollout_ids)}
        return [
            trace_rollout(
                rollouts[name],
                await store.query_spans(name, "latest"),
                models=models,
                agents=algorithm.agent_pattern,
                reward=algorithm.reward,
            )
            for name in rollout_ids
        ]

    async def _learnable(self, groups: list[list[TracedRollout]]) -> tuple[list[TrainingSequence], dict[str, float]]:
        """The step's training sequences and what was counted on the way. Groups that teach nothing are dropped."""
        rollouts = [traced for group in groups for traced in group]
        silent = not any(traced.transitions for traced in rollouts)
        unrewarded = sum(traced.reward is None for traced in rollouts)
        if unrewarded == len(rollouts) and (silent or self.algorithm.unrewarded == "exclude"):
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
        rewarded = [self._rewarded(group) for group in groups]
        enough = [group for group in rewarded if len(group.rewards) >= min(2, self.algorithm.group_size)]
        batch: list[TrainingSequence] = []
        flat = 0
        for credited in self.algorithm.advantages(enough):
            if not any(item.advantages.any() for transitions in credited for item in transitions):
                flat += 1
                continue
            for transitions in credited:
                batch += build_sequences(transitions, self.algorithm.level)
        counted = [reward for group in rewarded for reward in group.rewards]
        calls = [transition for traced in rollouts for transition in traced.transitions]
        metrics = {
            "reward": sum(counted) / len(counted),
            "rollouts": float(len(rollouts)),
            "unrewarded": float(unrewarded),
            "calls": float(len(calls)),
            "sampled_tokens": float(sum(len(call.response_ids) for call in calls)),
            "groups_too_few_rewarded": float(len(groups) - len(enough)),
            "groups_without_variance": float(flat),
            "calls_excluded": float(sum(excluded.values())),
            "sequences": float(len(batch)),
        }
        return batch, metrics | _by_name(rollouts, excluded)

    def _no_chosen_agent(self, others: list[str]) -> None:
        """TrainingError in the first batch, where it is a mistake; later an agent may have had nothing to do."""
        message = (
            f"none of the calls is by an agent that agents={self.algorithm.agents!r} names; the agents here are "
            f"{', '.join(others[:10])}{' …' if len(others) > 10 else ''}"
        )
        if self.state.step == 0:
            raise TrainingError(message)
        self.context.progress.note(f"step {self.state.step + 1} trains nothing: {message}")

    def _rewarded(self, group: list[TracedRollout]) -> RewardedGroup:
        stated = self.algorithm.unrewarded
        pairs = [
            (traced.transitions, float(traced.reward if traced.reward is not None else stated))
            for traced in group
            if traced.reward is not None or stated != "exclude"
        ]
        return RewardedGroup([transitions for transitions, _ in pairs], [reward for _, reward in pairs])

    async def _learn(self, batch: list[TrainingSequence], step: int) -> dict[str, float]:
        """The step's optimiser steps, then the publication of the new weights."""
        order = list(batch)
        random.Random(f"{self.context.seed}/minibatches/{step}").shuffle(order)
        count = min(self.algorithm.minibatches, len(order))
        bounds = [-(-len(order) * part // count) for part in range(count + 1)]
        parts = [order[start:end] for start, end in itertools.pairwise(bounds)]
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


def _by_name(rollouts: Sequence[TracedRollout], excluded: Counter[str]) -> dict[str, float]:
    """The mean of each part of the rewards, and what was left out, by reason."""
    parts = [traced.reward_terms for traced in rollouts if traced.reward_terms]
    lost = sum((traced.rewards_lost for traced in rollouts), Counter[str]())
    return (
        {f"reward/{name}": sum(terms[name] for terms in parts) / len(parts) for name in (parts[0] if parts else ())}
        | {f"excluded/{reason}": float(count) for reason, count in excluded.items()}
        | {f"rewards_lost/{reason}": float(count) for reason, count in lost.items()}
    )


def tasks_of_step(tasks: Sequence[Any], step: int, count: int, seed: int) -> list[Any]:
    """The tasks of step 1, 2, …: each epoch is a permutation of the dataset drawn from (seed, epoch)."""
    orders: dict[int, list[int]] = {}
    chosen: list[Any] = []
    for position in range((step - 1) * count, step * count):
        epoch, index = divmod(position, len(tasks))
        if epoch not in orders:
            orders[epoch] = list(range(len(tasks)))
            random.Random(f"{seed}/epoch/{epoch}").shuffle(orders[epoch])
        chosen.append(tasks[orders[epoch][index]])
    return chosen
