"""The way of one sampled token from its rollout's reward to its gradient, by number, in the step that trained it.

The batch is made again from the store, by the functions that train. Given the learners as they were before the step,
they make it once more, and the numbers are those of every optimiser step the token was in. Without them the model is
not run: the numbers are those at the weights that sampled the token, where the importance ratio r is 1. The gradient is
that of the policy's loss: divergence from a reference and entropy are not in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click
import msgspec
import numpy as np

from agentlightning.algorithm.directory import read_mark
from agentlightning.algorithm.rl.batch import RecordedBatch, Values, make_batches, recorded_batches, values_of
from agentlightning.algorithm.rl.groups import trace_group
from agentlightning.algorithm.rl.policies import Policies, optimiser_steps
from agentlightning.algorithm.rl.reinforcement import Reinforcement
from agentlightning.cli.fit import make_algorithm
from agentlightning.cli.options import make_table, print_json, print_table
from agentlightning.dashboard.tokens import Tokenizers
from agentlightning.data.aggregation import Tokens, aggregation_weights
from agentlightning.data.credit import no_baseline
from agentlightning.data.credit_table import Credit, RewardedGroup
from agentlightning.data.recordings import rewarded_group
from agentlightning.data.references import function_name
from agentlightning.data.sequences import CreditedTransition, TrainingSequence
from agentlightning.data.transitions import TracedRollout, Transition
from agentlightning.errors import ConfigError, NotFoundError
from agentlightning.learner.losses import Loss, policy_loss
from agentlightning.store.base import LightningStore
from agentlightning.types import Run

if TYPE_CHECKING:
    from torch import Tensor

    from agentlightning.learner.base import Learner


class Stage(msgspec.Struct, frozen=True):
    """A number on the way, and how it comes about."""

    name: str
    value: float
    how: str


class TokenPath(msgspec.Struct, frozen=True, kw_only=True):
    """The stages of token `token` of the call `call`, in the step that trained its rollout; `exact` where that was made
    again with its weights."""

    rollout_id: str
    step: int
    model: str
    call: int
    token: int
    token_id: int
    logprob: float
    exact: bool
    stages: tuple[Stage, ...]


async def explain_token(
    store: LightningStore,
    directory: Path,
    rollout_id: str,
    call: int | None = None,
    token: int = 0,
    policies: Policies | None = None,
) -> TokenPath:
    """How the run in `directory` trained a token; without `call`, of the rollout's first call that trains. `policies`,
    with the weights from which that step began, make it.

    NotFoundError where no step trained the rollout, or it has no such call or token. ConfigError where the algorithm
    needs `policies` for its values, or cannot be made again."""
    mark, step = read_mark(directory), trained_step(directory, rollout_id)
    run = next((run for run in await store.query_runs() if run.run_id == mark.run_id), None)
    if run is None:
        raise NotFoundError(f"the store has no run {mark.run_id}, which {directory} is of")
    algorithm = _algorithm(run, policies, directory)
    models = list(run.manifest["config"]["models"])
    groups = [await trace_group(store, names, algorithm, models) for names in step.groups]
    traced = next(traced for group in groups for traced in group if traced.rollout.rollout_id == rollout_id)
    transition = _call(traced, call, token)
    rewarded = [rewarded_group(group, algorithm.unrewarded) for group in groups]
    enough = [group for group in rewarded if len(group.rewards) >= algorithm.fewest_rewarded]
    own = next((group for group in enough if traced.rollout in group.rollouts), None)
    if own is None:
        raise NotFoundError(f"rollout {rollout_id} counts for nothing: it has no reward, or its group has too few")
    learner = None if policies is None else policies.learners[transition.model]
    critics = dict.fromkeys(models) if policies is None else policies.critics(algorithm)
    of_model = enough if len(models) == 1 else [group.of_model(transition.model) for group in enough]
    credited = _credited(algorithm, of_model, transition, critics[transition.model])
    number = own.rollouts.index(traced.rollout)
    terms = " + ".join(f"{name} {value:g}" for name, value in own.terms[number].items())
    stages = [
        Stage("reward", own.rewards[number], f"R = {terms}"),
        *_return(algorithm, own if len(models) == 1 else own.of_model(transition.model), transition),
        *_advantage(algorithm, own, credited, token),
    ]
    sequences = make_batches(algorithm, rewarded, critics)[transition.model].sequences
    advantage = np.float32(credited.advantages[token])
    found = next((each for each in sequences if _place(each, transition, token, advantage) is not None), None)
    if found is None:
        stages.append(Stage("mask", 0.0, "not in the batch: its whole group has advantage 0, or it weighs 0"))
    else:
        watched = _Watched(learner, found, len(transition.prompt_ids) + token, advantage)
        learned = cast("Learner", watched)
        for _ in optimiser_steps(learned, sequences, algorithm, seed=mark.seed, step=step.step, version=None):
            if learner is None and watched.stages:
                break  # where nothing is stepped another epoch is the same
        stages += watched.stages or [Stage("mask", 0.0, "a correction leaves the token out")]
    return TokenPath(
        rollout_id=rollout_id,
        step=step.step,
        model=transition.model,
        call=transition.call_index,
        token=token,
        token_id=int(transition.response_ids[token]),
        logprob=float(transition.logprobs[token]),
        exact=learner is not None,
        stages=tuple(stages),
    )


def show_path(path: TokenPath, store: str, as_json: bool) -> None:
    """Print it, with the token's text where the tokenizer of the run, whose store is this, is at hand."""
    if as_json:
        print_json(path)
        return
    tokenizer = Tokenizers(lambda _: store).find(path.rollout_id, path.model)
    text = f" {tokenizer[1].text([path.token_id])!r}" if tokenizer else ""
    token = f"token {path.token}:{text} id {path.token_id}, log p {path.logprob:.4f}"
    click.echo(f"step {path.step}, call {path.call}, {token}")
    print_table(
        make_table(("", "value", "how"), [(stage.name, f"{stage.value:.6g}", stage.how) for stage in path.stages])
    )


def trained_step(directory: Path, rollout_id: str) -> RecordedBatch:
    """The step of the run in `directory` that was given the rollout. NotFoundError where none was."""
    step = next((batch for batch in recorded_batches(directory).values() if rollout_id in sum(batch.groups, ())), None)
    if step is None:
        raise NotFoundError(
            f"no step of the run in {directory} was given rollout {rollout_id}: it was held out or dropped, or another "
            "run's. `agl rollouts ls --mode train` lists those that train"
        )
    return step


def _algorithm(run: Run, policies: Policies | None, directory: Path) -> Reinforcement:
    algorithm = make_algorithm(run.manifest["config"]["algorithm"])
    if not isinstance(algorithm, Reinforcement):
        raise ConfigError(f"run {run.run_id} is of kind {run.kind!r}, which trains no weights")
    if algorithm.trained_critic is not None and policies is None:
        raise ConfigError(
            f"the advantages of {algorithm.name} are not known without the weights of its critic, which are trained "
            f"again by `python scripts/replay.py {directory} --explain ID CALL:TOKEN`"
        )
    return algorithm


def _call(traced: TracedRollout, number: int | None, token: int) -> Transition:
    """The call, which has such a token."""
    name = traced.rollout.rollout_id
    call = next((transition for transition in traced.transitions if number in (None, transition.call_index)), None)
    if call is None:
        why = ", ".join(f"{count} {reason}" for reason, count in traced.excluded.items()) or traced.outcome
        raise NotFoundError(f"rollout {name} has no call {'' if number is None else number} that trains ({why})")
    if not 0 <= token < len(call.response_ids):
        last = len(call.response_ids) - 1
        raise NotFoundError(f"call {call.call_index} sampled tokens 0 to {last}; there is no {token}")
    return call


def _credited(
    algorithm: Reinforcement, groups: Sequence[RewardedGroup], call: Transition, critic: Values | None
) -> CreditedTransition:
    values = None if critic is None else values_of(groups, algorithm.level, critic)
    items = [item for group in algorithm.credited(groups, values) for rollout in group for item in rollout]
    return next(item for item in items if item.transition.span_id == call.span_id)


def _advantage(
    algorithm: Reinforcement, group: RewardedGroup, credited: CreditedTransition, token: int
) -> Iterator[Stage]:
    given = getattr(algorithm, "baseline", type(algorithm))
    baseline = given if isinstance(given, str) else function_name(given, {})
    if credited.values is not None:
        yield Stage("value", float(credited.values[token]), "what the critic says the token is worth")
    rewards = ", ".join(f"{reward:g}" for reward in group.rewards)
    yield Stage("advantage", float(credited.advantages[token]), f"{baseline} in a group whose R are {rewards}")


def _return(algorithm: Reinforcement, group: RewardedGroup, call: Transition) -> list[Stage]:
    """The return of the call, where `returns` makes one."""
    credit: Any = getattr(algorithm, "credit", None)
    if not isinstance(credit, Credit):
        return []
    plain = replace(credit, baseline=no_baseline, baseline_options={})
    items = [item for rollout in plain.advantages([group])[0] for item in rollout]
    value = next(item for item in items if item.transition.span_id == call.span_id).advantages[0]
    return [Stage("return", float(value), f"x of the call: {function_name(credit.returns, {})}")]


def _place(sequence: TrainingSequence, call: Transition, token: int, advantage: np.float32) -> int | None:
    """Where the token stands among the sampled tokens of the sequence; None if it is in another."""
    end = len(call.prompt_ids) + len(call.response_ids)
    ids = np.concatenate([call.prompt_ids, call.response_ids])
    if sequence.rollout_id != call.rollout_id or not np.array_equal(sequence.token_ids[:end], ids):
        return None
    found = np.flatnonzero(sequence.positions == len(call.prompt_ids) + token)
    if len(found) == 1:
        return int(found[0])
    return next((int(at) for at in found if np.float32(sequence.advantages[at]) == advantage), None)


@dataclass
class _Watched:
    """A learner in whose optimiser steps one token is watched, which stands at `position` of `sequence` and has this
    `advantage`. Without a learner nothing is stepped, and all tokens are as likely as when they were sampled."""

    learner: Learner | None
    sequence: TrainingSequence
    position: int
    advantage: np.float32
    stages: list[Stage] = field(default_factory=list[Stage])
    steps: int = 0

    def logprobs(self, batch: Sequence[TrainingSequence], temperature: float = 1.0) -> Sequence[Tensor]:
        from torch import from_numpy

        if self.learner is None:
            return [from_numpy(sequence.logprobs) for sequence in batch]
        return self.learner.logprobs(batch, temperature)

    def step(self, part: Sequence[TrainingSequence], loss: Loss, version: int | None = None) -> dict[str, float]:
        self.steps += 1
        before = 0
        for sequence in part:
            # A correction replaces advantages and log-probabilities of a sequence, and may leave tokens out.
            same = sequence.token_ids is self.sequence.token_ids
            for place in np.flatnonzero(same & (sequence.positions == self.position)):
                self.stages += self._explained(part, sequence, int(place), before + int(place), loss)
            before += len(sequence.positions)
        return {} if self.learner is None else self.learner.step(part, loss, version)

    def _explained(
        self, part: Sequence[TrainingSequence], sequence: TrainingSequence, place: int, at: int, loss: Loss
    ) -> Iterator[Stage]:
        """The token at `place` of the sequence, which is number `at` of the optimiser step."""
        from torch import cat, from_numpy

        weights = aggregation_weights(part, loss.aggregation, loss.constant_length)
        tokens = Tokens(part)
        parts = (np.concatenate([getattr(member, name) for member in part]) for name in ("logprobs", "advantages"))
        old, advantages = (from_numpy(array) for array in parts)
        logprobs = cat(list(self.logprobs(part, loss.temperature))).clone().requires_grad_()
        per_token, clipped, _ = policy_loss(logprobs, old, advantages, from_numpy(tokens.calls), loss, tokens)
        weighted = from_numpy(np.concatenate([w[:count] for w, count in zip(weights, tokens.lengths, strict=True)]))
        (per_token * weighted).sum().backward()
        assert logprobs.grad is not None
        present, gradient = float(logprobs[at].detach()), float(logprobs.grad[at])
        aggregation = function_name(loss.aggregation, {}) if callable(loss.aggregation) else loss.aggregation
        rollouts, ratio = len({member.rollout_id for member in part}), math.exp(present - float(old[at]))
        if loss.old == "proximal":
            factor = float(sequence.advantages[place] / self.advantage) if self.advantage else 1.0
            yield Stage("correction", factor, "by which the advantage is multiplied, for the weights that sampled")
        against = "before the step" if loss.old == "proximal" else "when it was sampled"
        how = f"log p now {present:.4f}, {against} {float(old[at]):.4f}; optimiser step {self.steps}"
        unknown = "the weights of that step are not at hand, and it is shown as 1"
        yield Stage("ratio", ratio, unknown if self.learner is None else how)
        yield Stage(
            "weight", float(weighted[at]), f"{aggregation} over {rollouts} rollouts with {len(tokens):,} tokens"
        )
        yield Stage("mask", float(not clipped[at]), "clipped" if clipped[at] else "the token trains: no clip holds")
        yield Stage("loss", float(per_token[at].detach()), f"{loss.name} at r = {ratio:.4g}")
        yield Stage("gradient", gradient, "of the batch's loss by log p: weight · that of the token's loss")
        probability = math.exp(present)
        yield Stage("logit", gradient * (1 - probability), f"by its logit: gradient · (1 − p), p = {probability:.4g}")
