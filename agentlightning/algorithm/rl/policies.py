"""The models that a run trains: they step, are published, saved and restored together, under one
policy version.

Each has its optimiser and engine, and learns from its own calls. With several, metric names start
with the model's name."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import numpy as np

from agentlightning.algorithm.rl.batch import Sequences, Values, minibatches
from agentlightning.algorithm.rl.metrics import Usage
from agentlightning.algorithm.rl.settings import RLSettings
from agentlightning.data.sequences import TrainingSequence
from agentlightning.data.transitions import FloatArray
from agentlightning.errors import TrainingError, docs_page
from agentlightning.learner.base import Learner, Sampler, Weights
from agentlightning.learner.corrections import corrected, prepare

# per policy, else 3; a server may read one again
_EXPORTS_KEPT: Final[dict[str, int]] = {"adapter": 16}

_MOST_CHECKS: Final = 5  # of a sampler, behind steps
_SAME: Final = 1e-5  # nats; the same weights answer in the same words and differ by less

T = TypeVar("T")


@dataclass
class FirstAnswers:
    """A sampler's answers with the weights of `version`, and how often it was checked since."""

    version: int
    samples: Sequences
    checks: int = 0

    def answered_same(self, samples: Sequences) -> bool:
        """Whether a server gave the tokens, as far as they are the same, the same log-probabilities
        as now."""
        return any(
            _same_tokens(before, now) for before, now in zip(self.samples, samples, strict=False)
        )


class Policies:
    """Learners by name, and their samplers. Gradient steps run in one `thread`, because memory that
    torch has freed stays with its thread. Samplers that load files get their weights through the
    directory `exports`."""

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
        self._first: dict[str, FirstAnswers] = {}  # of samplers that are to be checked again
        self._published: dict[str, tuple[int, Path | None]] = {}  # version, and where its files are

    def critics(self, algorithm: RLSettings) -> dict[str, Values | None]:
        """The critic of each policy, if the algorithm trains one."""
        has_critic = algorithm.trained_critic is not None
        return {
            name: learner.values if has_critic else None for name, learner in self.learners.items()
        }

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
        """Before the first call: send weights to samplers that do not read the learner's.
        TrainingError if one does not sample with them."""
        for name, sampler in self._samplers.items():
            if sampler.takes != "live":
                await self._publish(name, sampler, version)
                await self._check_parity(name, sampler)

    async def publish(self, version: int) -> None:
        """Sample with the current weights from now on, as `version`."""
        for name, sampler in self._samplers.items():
            await self._publish(name, sampler, version)

    async def _publish(self, name: str, sampler: Sampler, version: int) -> None:
        self._published[name] = (version, None)
        if sampler.takes == "live":
            await sampler.publish(Weights(version))
            return
        written = self._exports / name
        place = written / f"version-{version:06d}"
        await asyncio.to_thread(shutil.rmtree, place, ignore_errors=True)  # left by a killed run
        await self.in_thread(partial(self.learners[name].export, place, sampler.takes))
        self._published[name] = (version, place)
        await sampler.publish(Weights(version, place.absolute()))
        for old in sorted(written.iterdir())[: -_EXPORTS_KEPT.get(sampler.takes, 3)]:
            if old != place:  # a run resumed from an earlier step has later ones
                await asyncio.to_thread(shutil.rmtree, old, ignore_errors=True)

    async def check_published(self, step: int) -> None:
        """Compare samplers and learners after a publication behind a step: only then can their
        weights differ. It is repeated until the weights have moved so far that a sampler which kept
        its first ones would be noticed, for a few publications at most. TrainingError if one does
        not sample with the new weights."""
        for name, first in [*self._first.items()]:
            learner = self.learners[name]
            sampler = self._samplers[name]
            await self._check_parity(name, sampler, f"after step {step} ")
            moved = difference(first.samples, await self._logprobs(name, first.samples))
            first.checks += 1
            if moved > learner.mismatch_tolerance or first.checks == _MOST_CHECKS:
                del self._first[name]

    async def _check_parity(self, name: str, sampler: Sampler, when: str = "") -> None:
        samples = await sampler.sample()
        tolerance = self.learners[name].mismatch_tolerance
        of_learner = await self._logprobs(name, samples)
        # without a usable server there is nothing to compare
        worst = difference(samples, of_learner)
        if not worst <= tolerance:
            raise TrainingError(
                f"{when}the sampler was given the weights of {name!r} and does not sample with "
                f"them: in the probability of a token it and the learner differ by {worst:.2g} "
                f"(expected at most {tolerance:.2g}). {self._cause(name, samples)} See "
                f"{docs_page('training.md')}"
            )
        if name not in self._first and not when:
            self._first[name] = FirstAnswers(self._published[name][0], samples)

    async def _logprobs(self, name: str, samples: Sequences) -> list[FloatArray]:
        learner = self.learners[name]
        return await self.in_thread(
            lambda: [logprobs.numpy() for logprobs in learner.logprobs(samples)]
        )

    def _cause(self, name: str, samples: Sequences) -> str:
        """The likeliest reasons why a sampler and a learner differ."""
        version, place = self._published[name]
        first = self._first.get(name)
        if first is not None and first.answered_same(samples):
            return (
                f"It still has the weights of version {first.version}: it answers as it did with "
                f"those, and not with version {version}, which it said it had loaded. See its "
                "log, and restart it."
            )
        causes = (
            "Does the server have another model or dtype, or weights of another run (restart it)?"
        )
        if first is not None:
            causes = (
                "Has the server another dtype than the learner, or has it kept some of its old "
                "weights?"
            )
        if place is not None and self._samplers[name].takes == "whole" and _shares_head(place):
            causes += (
                " The embeddings of this model are also its head (tie_word_embeddings), and some "
                "servers keep the old head when they load weights: train an adapter (lora), give "
                "the model a head of its own, or use another version of the server."
            )
        return causes

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


def difference(samples: Sequences, of_learner: Sequence[FloatArray]) -> float:
    """The largest relative difference of a sampled token's probability: |exp(learner − sampler) −
    1|."""
    pairs = zip(of_learner, samples, strict=True)
    return max(
        (float(np.abs(np.expm1(own - sample.logprobs)).max()) for own, sample in pairs), default=0.0
    )


def _shares_head(place: Path) -> bool:
    from agentlightning.learner.policy import weight_names  # which imports torch

    return not any(weight.endswith("lm_head.weight") for weight in weight_names(place))


def _same_tokens(before: TrainingSequence, now: TrainingSequence) -> bool:
    length = min(len(before.token_ids), len(now.token_ids))
    same = int(np.cumprod(before.token_ids[:length] == now.token_ids[:length]).sum())
    sampled = int((before.positions < same).sum())
    return sampled > 0 and bool(
        np.abs(before.logprobs[:sampled] - now.logprobs[:sampled]).max() < _SAME
    )


def optimiser_steps(
    learner: Learner,
    batch: Sequences,
    algorithm: RLSettings,
    *,
    seed: int,
    step: int,
    version: int | None,
) -> Iterator[dict[str, float]]:
    """Make the optimiser steps of one batch, whose starting weights are called `version`; yields
    the metrics of each. Blocks."""
    if not batch:
        return
    loss = algorithm.make_loss(step)
    corrections = algorithm.corrections
    count = algorithm.minibatches
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
