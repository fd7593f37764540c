"""The way of one sampled token from its rollout's reward to its gradient, by number, in the step that trained it.

The batch is made again from the store, by the functions that train. The model is not run: the gradient is that of the
loss in the first optimiser step, at the weights that sampled the token, where the importance ratio r and the weights of
corrections are 1, and no divergence from a reference or entropy is added.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from agentlightning.algorithm.directory import read_mark
from agentlightning.algorithm.rl.batch import RecordedBatch, make_batches, minibatches, recorded_batches
from agentlightning.algorithm.rl.groups import trace_group
from agentlightning.algorithm.rl.reinforcement import Reinforcement
from agentlightning.cli.fit import make_algorithm
from agentlightning.data.aggregation import Tokens, aggregation_weights
from agentlightning.data.credit import no_baseline
from agentlightning.data.credit_table import Credit, RewardedGroup
from agentlightning.data.recordings import rewarded_group
from agentlightning.data.references import function_name
from agentlightning.data.sequences import TrainingSequence
from agentlightning.data.transitions import TracedRollout, Transition
from agentlightning.errors import ConfigError, NotFoundError
from agentlightning.learner.losses import Loss
from agentlightning.store.base import LightningStore
from agentlightning.types import Run


class Stage(msgspec.Struct, frozen=True):
    """A number on the way, and how it comes about."""

    name: str
    value: float
    how: str


class TokenPath(msgspec.Struct, frozen=True, kw_only=True):
    """The stages of token `token` of the call `call`, in the step that trained its rollout."""

    rollout_id: str
    step: int
    call: int
    token: int
    token_id: int
    logprob: float
    stages: tuple[Stage, ...]


async def explain_token(
    store: LightningStore, directory: Path, rollout_id: str, call: int | None = None, token: int = 0
) -> TokenPath:
    """How the run in `directory` trained a token; without `call`, of the rollout's first call that trains.

    NotFoundError where no step trained the rollout, or it has no such call or token. ConfigError where the algorithm
    has values of its own, or cannot be made again."""
    mark = read_mark(directory)
    step = next((one for one in recorded_batches(directory).values() if rollout_id in sum(one.groups, ())), None)
    run = next((one for one in await store.query_runs() if one.run_id == mark.run_id), None)
    if step is None or run is None:
        raise NotFoundError(
            f"no step of the run in {directory} was given rollout {rollout_id}: it was held out or dropped, or another "
            "run's. `agl rollouts ls --mode train` lists those that train"
        )
    algorithm = _algorithm(run)
    models = list(run.manifest["config"]["models"])
    groups = [await trace_group(store, names, algorithm, models) for names in step.groups]
    traced = next(one for group in groups for one in group if one.rollout.rollout_id == rollout_id)
    one = next((each for each in traced.transitions if call in (None, each.call_index)), None)
    if one is None:
        why = ", ".join(f"{count} {reason}" for reason, count in traced.excluded.items()) or traced.outcome
        raise NotFoundError(f"rollout {rollout_id} has no call {'' if call is None else call} that trains ({why})")
    if not 0 <= token < len(one.response_ids):
        last = len(one.response_ids) - 1
        raise NotFoundError(f"call {one.call_index} sampled tokens 0 to {last}; there is no {token}")
    return TokenPath(
        rollout_id=rollout_id,
        step=step.step,
        call=one.call_index,
        token=token,
        token_id=int(one.response_ids[token]),
        logprob=float(one.logprobs[token]),
        stages=tuple(_stages(algorithm, groups, traced, one, token, step, mark.seed, models)),
    )


def _algorithm(run: Run) -> Reinforcement:
    algorithm = make_algorithm(run.manifest["config"]["algorithm"])
    if not isinstance(algorithm, Reinforcement) or algorithm.trained_critic is not None:
        raise ConfigError(
            f"the advantages of {algorithm.name} are not known without the weights of its critic"
            if isinstance(algorithm, Reinforcement)
            else f"run {run.run_id} is of kind {run.kind!r}, which trains no weights"
        )
    return algorithm


def _stages(
    algorithm: Reinforcement,
    groups: Sequence[Sequence[TracedRollout]],
    traced: TracedRollout,
    call: Transition,
    token: int,
    step: RecordedBatch,
    seed: int,
    models: Sequence[str],
) -> list[Stage]:
    rewarded = [rewarded_group(group, algorithm.unrewarded) for group in groups]
    own = next((group for group in rewarded if traced.rollout in group.rollouts), None)
    if own is None:
        raise NotFoundError(f"rollout {traced.rollout.rollout_id} has no reward, and counts for nothing")
    number = own.rollouts.index(traced.rollout)
    stages = [_reward(own, number), *_return(algorithm, own, call)]
    of_model = rewarded if len(models) == 1 else [group.of_model(call.model) for group in rewarded]
    credited = algorithm.credited(of_model)
    items = [item for group in credited for rollout in group for item in rollout]
    advantage = float(next(one for one in items if one.transition.span_id == call.span_id).advantages[token])
    given = getattr(algorithm, "baseline", type(algorithm))
    baseline = given if isinstance(given, str) else function_name(given, {})
    rewards = ", ".join(f"{reward:g}" for reward in own.rewards)
    stages.append(Stage("advantage", advantage, f"{baseline} in a group whose R are {rewards}"))
    sequences = make_batches(algorithm, rewarded, dict.fromkeys(models))[call.model].sequences
    loss = algorithm.make_loss(step.step)
    for part in minibatches(sequences, algorithm.minibatches, seed, step.step):
        for sequence in part:
            if (place := _place(sequence, call, token, advantage)) is not None:
                return [*stages, *_gradient(part, sequence, place, loss, float(call.logprobs[token]))]
    return [*stages, Stage("mask", 0.0, "the whole group has advantage 0 and is not in the batch")]


def _reward(group: RewardedGroup, number: int) -> Stage:
    terms = " + ".join(f"{name} {value:g}" for name, value in group.terms[number].items())
    return Stage("reward", group.rewards[number], f"R = {terms}")


def _return(algorithm: Reinforcement, group: RewardedGroup, call: Transition) -> list[Stage]:
    """The return of the call, where `returns` makes one."""
    credit: Any = getattr(algorithm, "credit", None)
    if not isinstance(credit, Credit):
        return []
    plain = replace(credit, baseline=no_baseline, baseline_options={})
    items = [item for rollout in plain.advantages([group])[0] for item in rollout]
    value = next(one for one in items if one.transition.span_id == call.span_id).advantages[0]
    return [Stage("return", float(value), f"x of the call: {function_name(credit.returns, {})}")]


def _place(sequence: TrainingSequence, call: Transition, token: int, advantage: float) -> int | None:
    """Where the token stands among the sampled tokens of the sequence; None if it is in another."""
    end = len(call.prompt_ids) + len(call.response_ids)
    ids = np.concatenate([call.prompt_ids, call.response_ids])
    if sequence.rollout_id != call.rollout_id or not np.array_equal(sequence.token_ids[:end], ids):
        return None
    found = np.flatnonzero(sequence.positions == len(call.prompt_ids) + token)
    return next((int(at) for at in found if sequence.advantages[at] == np.float32(advantage)), None)


def _gradient(
    part: Sequence[TrainingSequence], sequence: TrainingSequence, place: int, loss: Loss, logprob: float
) -> list[Stage]:
    """Weight, mask, loss and gradient of the token at `place` of a sequence, in the optimiser step of `part`."""
    from torch import from_numpy

    from agentlightning.learner.losses import policy_loss

    weights = aggregation_weights(part, loss.aggregation, loss.constant_length)
    tokens = Tokens(part)
    parts = (np.concatenate([getattr(one, name) for one in part]) for name in ("logprobs", "advantages"))
    old, advantages = (from_numpy(one) for one in parts)
    logprobs = old.clone().requires_grad_()
    per_token, clipped, _ = policy_loss(logprobs, old, advantages, from_numpy(tokens.calls), loss, tokens)
    weighted = from_numpy(np.concatenate([w[:count] for w, count in zip(weights, tokens.lengths, strict=True)]))
    (per_token * weighted).sum().backward()
    number = next(index for index, one in enumerate(part) if one is sequence)
    at = sum(tokens.lengths[:number]) + place
    assert logprobs.grad is not None
    gradient = float(logprobs.grad[at])
    aggregation = function_name(loss.aggregation, {}) if callable(loss.aggregation) else loss.aggregation
    rollouts, probability = len({one.rollout_id for one in part}), math.exp(logprob)
    return [
        Stage("weight", float(weighted[at]), f"{aggregation} over {rollouts} rollouts with {len(tokens):,} tokens"),
        Stage(
            "mask", float(not clipped[at]), "clipped" if clipped[at] else "the token trains, and at r = 1 no clip holds"
        ),
        Stage("loss", float(per_token[at].detach()), f"{loss.name} at r = 1"),
        Stage("gradient", gradient, "of the batch's loss by log p: weight · that of the token's loss"),
        Stage("logit", gradient * (1 - probability), f"by its logit: gradient · (1 − p), p = {probability:.4g}"),
    ]
