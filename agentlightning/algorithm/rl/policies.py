"""The models that a run trains: they step, are published, saved and restored together, under one policy version.

Each has its optimiser and engine, and learns from its own calls. With several, metric names start with the model's
name.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import numpy as np

from agentlightning.algorithm.rl.batch import Sequences, Values, minibatches
from agentlightning.algorithm.rl.metrics import Usage
from agentlightning.algorithm.rl.settings import RLSettings
from agentlightning.errors import TrainingError, docs_page
from agentlightning.learner.base import Learner, Sampler, Weights
from agentlightning.learner.corrections import corrected, prepare

_EXPORTS_KEPT: Final[dict[str, int]] = {"adapter": 16}  # per policy, else 3; a server may read one again

T = TypeVar("T")


class Policies:
    """Learners by name, and their samplers. Gradient steps run in one `thread`, because memory that torch has freed
    stays with its thread. Samplers that load files get their weights through the directory `exports`."""

    def __init__(
        self,
        learners: Mapping[str, Learner],
        samplers: Mapping[str, Sampler] | None = None,
        thread: Executor | None = None,
        exports: Path = Path("published"),
    ) -> None:
        self.names = tuple(learners)
        self.learners = learners
        self._samplers = samplers or {}
        self._thread = thread
        self._exports = exports

    def critics(self, algorithm: RLSettings) -> dict[str, Values | None]:
        """The critic of each policy, if the algorithm trains one."""
        has_critic = algorithm.trained_critic is not None
        return {name: learner.values if has_critic else None for name, learner in self.learners.items()}

    async def in_thread(self, work: Callable[[], T]) -> T:
        """The result of `work` in the thread of the gradient steps."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    @asynccontextmanager
    async def alone(self) -> AsyncGenerator[None]:
        """In the block, no engine samples."""
        async with AsyncExitStack() as stack:
            for sampler in self._samplers.values():
                await stack.enter_async_context(sampler.exclusive())
            yield

    async def begin(self, version: int) -> None:
        """Before the first call: send weights to samplers that do not read the learner's. TrainingError if one does not
        sample with them."""
        for name, sampler in self._samplers.items():
            if sampler.takes != "live":
                await self._publish(name, sampler, version)
                await self._check_parity(name, sampler)

    async def publish(self, version: int) -> None:
        """Sample with the current weights from now on, as `version`."""
        for name, sampler in self._samplers.items():
            await self._publish(name, sampler, version)

    async def _publish(self, name: str, sampler: Sampler, version: int) -> None:
        if sampler.takes == "live":
            await sampler.publish(Weights(version))
            return
        written = self._exports / name
        place = written / f"version-{version:06d}"
        await asyncio.to_thread(shutil.rmtree, place, ignore_errors=True)  # left by a killed run
        await self.in_thread(partial(self.learners[name].export, place, sampler.takes))
        await sampler.publish(Weights(version, place.absolute()))
        for old in sorted(written.iterdir())[: -_EXPORTS_KEPT.get(sampler.takes, 3)]:
            if old != place:  # a run resumed from an earlier step has later ones
                await asyncio.to_thread(shutil.rmtree, old, ignore_errors=True)

    async def _check_parity(self, name: str, sampler: Sampler) -> None:
        samples, learner = await sampler.sample(), self.learners[name]
        of_learner = await self.in_thread(lambda: [logprobs.numpy() for logprobs in learner.logprobs(samples)])
        pairs = zip(of_learner, samples, strict=True)
        differences = [float(np.abs(np.expm1(own - sample.logprobs)).max()) for own, sample in pairs]
        worst = max(differences, default=0.0)  # without a usable server there is nothing to compare
        if not worst <= learner.mismatch_tolerance:
            raise TrainingError(
                f"the sampler was given the weights of {name!r} and does not sample with them: in the probability of a "
                f"token it and the learner differ by {worst:.2g} (expected at most {learner.mismatch_tolerance:.2g}). "
                "Does the server have another model or dtype, or weights of another run (restart it)? "
                f"See {docs_page('training.md')}"
            )

    def usage(self) -> Usage:
        samplers = self._samplers.values()
        idle = sum(sampler.idle_seconds for sampler in samplers) / max(1, len(samplers))
        return Usage(sum(sampler.generated_tokens for sampler in samplers), idle)

    def save(self, directory: Path, resumable: bool = True) -> None:
        """Save into the directory, or, with several policies, into one subdirectory each."""
        for name, learner in self.learners.items():
            place = self._place(directory, name)
            place.mkdir(exist_ok=True)
            learner.save(place, resumable=resumable)

    def load(self, directory: Path) -> None:
        for name, learner in self.learners.items():
            learner.load(self._place(directory, name))

    def named(self, by_policy: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
        """`loss` for a single policy, `writer/loss` for one of several."""
        single = len(self.names) == 1
        return {
            metric if single else f"{name}/{metric}": value
            for name, metrics in by_policy.items()
            for metric, value in metrics.items()
        }

    def _place(self, directory: Path, name: str) -> Path:
        return directory if len(self.names) == 1 else directory / name


def optimiser_steps(
    learner: Learner,
    batch: Sequences,
    algorithm: RLSettings,
    *,
    seed: int,
    step: int,
    version: int | None,
) -> Iterator[dict[str, float]]:
    """Make the optimiser steps of one batch, whose starting weights are called `version`; yields the metrics of each.
    Blocks."""
    if not batch:
        return
    loss, corrections, count = algorithm.make_loss(step), algorithm.corrections, algorithm.minibatches
    if loss.old == "behaviour" and not corrections:
        for epoch in range(algorithm.epochs):
            for part in minibatches(batch, count, seed, step, epoch):
                yield learner.step(part, loss, version)
                version = None  # the weights have changed
        return
    prepared, measured = prepare(learner, batch, loss.temperature, version)
    moved = False
    for epoch in range(algorithm.epochs):
        for some in minibatches(prepared, count, seed, step, epoch):
            present = None
            if moved and corrections.ask_present:
                of_part = learner.logprobs([sequence for sequence, _ in some], loss.temperature)
                present = [tensor.numpy() for tensor in of_part]
            part, masked = corrected(some, corrections, loss.old, present)
            moved |= bool(part)
            yield (learner.step(part, loss) if part else {}) | masked | measured
            measured = {}
