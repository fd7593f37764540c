"""The way of one sampled token from its rollout's reward to its gradient, by number, in the step
that trained it.

The batch is made again from the store by the functions that train, and the numbers are those of
every optimiser step the token was in. The gradient is that of the policy's loss: divergence from a
reference and entropy are not in it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np
from torch import cat, from_numpy

from agentlightning.algorithm.rl.batch import RecordedBatch, make_batches, values_of
from agentlightning.algorithm.rl.groups import trace_group
from agentlightning.algorithm.rl.policies import Policies, optimiser_steps
from agentlightning.algorithm.rl.reinforcement import Reinforcement
from agentlightning.cli.options import make_table, print_table
from agentlightning.data.aggregation import Tokens, aggregation_weights
from agentlightning.data.credit import RewardedGroup, no_baseline
from agentlightning.data.credit_table import Credit
from agentlightning.data.functions import function_name
from agentlightning.data.recordings import rewarded_group
from agentlightning.data.sequences import CreditedTransition, TrainingSequence
from agentlightning.data.transitions import TracedRollout, Transition
from agentlightning.errors import NotFoundError
from agentlightning.learner.losses import Loss, policy_loss
from agentlightning.store.base import LightningStore

if TYPE_CHECKING:
    from torch import Tensor

    from agentlightning.learner.base import Learner


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
    text: str
    logprob: float
    stages: tuple[Stage, ...]


async def explain_token(
    store: LightningStore,
    recorded: RecordedBatch,
    algorithm: Reinforcement,
    policies: Policies,
    seed: int,
    rollout_id: str,
    call: int,
    token: int,
) -> TokenPath:
    """Explain how the recorded step trained a token. `policies` hold the weights from which that
    step began, and make it. NotFoundError if the rollout has no such call or token."""
    groups = [
        await trace_group(store, names, algorithm, policies.names) for names in recorded.groups
    ]
    traced = next(
        traced for group in groups for traced in group if traced.rollout.rollout_id == rollout_id
    )
    transition = _find_call(traced, call, token)
    rewarded = [rewarded_group(group, algorithm.unrewarded) for group in groups]
    enough = [group for group in rewarded if len(group.rewards) >= algorithm.fewest_rewarded]
    own = next((group for group in enough if traced.rollout in group.rollouts), None)
    if own is None:
        raise NotFoundError(
            f"rollout {rollout_id} counts for nothing: it has no reward, or its group has too few"
        )
    critics = policies.critics(algorithm)
    several = len(policies.names) > 1
    of_model = [group.of_model(transition.model) for group in enough] if several else enough
    critic = critics[transition.model]
    values = None if critic is None else values_of(of_model, algorithm.level, critic)
    credited = _credited(algorithm.credited(of_model, values), transition)
    number = own.rollouts.index(traced.rollout)
    terms = " + ".join(f"{name} {value:g}" for name, value in own.terms[number].items())
    stages = [
        Stage("reward", own.rewards[number], f"R = {terms}"),
        *_return(algorithm, own.of_model(transition.model) if several else own, transition),
        *_advantage(algorithm, own, credited, token),
    ]
    sequences = make_batches(algorithm, rewarded, critics)[transition.model].sequences
    advantage = np.float32(credited.advantages[token])
    found = next((one for one in sequences if _has_token(one, transition, token, advantage)), None)
    learner = policies.learners[transition.model]
    if found is None:
        stages.append(
            Stage("mask", 0.0, "not in the batch: its whole group has advantage 0, or it weighs 0")
        )
    else:
        watched = _WatchingLearner(learner, found, len(transition.prompt_ids) + token, advantage)
        steps = optimiser_steps(
            cast("Learner", watched),
            sequences,
            algorithm,
            seed=seed,
            step=recorded.step,
            version=None,
        )
        list(steps)  # which makes them
        stages += watched.stages or [Stage("mask", 0.0, "a correction leaves the token out")]
    token_id = int(transition.response_ids[token])
    return TokenPath(
        rollout_id=rollout_id,
        step=recorded.step,
        call=transition.call_index,
        token=token,
        token_id=token_id,
        text=cast("Any", learner).policy.tokenizer.decode([token_id]),
        logprob=float(transition.logprobs[token]),
        stages=tuple(stages),
    )


def show_path(path: TokenPath) -> None:
    token = f"token {path.token}: {path.text!r} id {path.token_id}, log p {path.logprob:.4f}"
    print(f"step {path.step}, call {path.call}, {token}")
    print_table(
        make_table(
            ("", "value", "how"),
            [(stage.name, f"{stage.value:.6g}", stage.how) for stage in path.stages],
        )
    )


def _find_call(traced: TracedRollout, number: int, token: int) -> Transition:
    """The call, which has such a token."""
    name = traced.rollout.rollout_id
    call = next(
        (transition for transition in traced.transitions if number == transition.call_index), None
    )
    if call is None:
        why = (
            ", ".join(f"{count} {reason}" for reason, count in traced.excluded.items())
            or traced.outcome
        )
        raise NotFoundError(f"rollout {name} has no call {number} that trains ({why})")
    if not 0 <= token < len(call.response_ids):
        last = len(call.response_ids) - 1
        raise NotFoundError(
            f"call {call.call_index} sampled tokens 0 to {last}; there is no {token}"
        )
    return call


def _credited(
    groups: Sequence[Sequence[Sequence[CreditedTransition]]], call: Transition
) -> CreditedTransition:
    items = (item for group in groups for rollout in group for item in rollout)
    return next(item for item in items if item.transition.span_id == call.span_id)


def _advantage(
    algorithm: Reinforcement, group: RewardedGroup, credited: CreditedTransition, token: int
) -> Iterator[Stage]:
    given = getattr(algorithm, "baseline", type(algorithm))
    baseline = given if isinstance(given, str) else function_name(given, {})
    if credited.values is not None:
        yield Stage(
            "value", float(credited.values[token]), "what the critic says the token is worth"
        )
    rewards = ", ".join(f"{reward:g}" for reward in group.rewards)
    yield Stage(
        "advantage",
        float(credited.advantages[token]),
        f"{baseline} in a group whose R are {rewards}",
    )


def _return(algorithm: Reinforcement, group: RewardedGroup, call: Transition) -> list[Stage]:
    """The return of the call, where `returns` makes one."""
    credit: Any = getattr(algorithm, "credit", None)
    if not isinstance(credit, Credit):
        return []
    plain = replace(credit, baseline=no_baseline)
    value = _credited(plain.advantages([group]), call).advantages[0]
    return [Stage("return", float(value), f"x of the call: {function_name(credit.returns, {})}")]


def _has_token(
    sequence: TrainingSequence, call: Transition, token: int, advantage: np.float32
) -> bool:
    """Whether the token is among the sampled ones of the sequence, with this advantage if it is
    there several times."""
    ids = call.token_ids
    if sequence.rollout_id != call.rollout_id or not np.array_equal(
        sequence.token_ids[: len(ids)], ids
    ):
        return False
    found = np.flatnonzero(sequence.positions == len(call.prompt_ids) + token)
    return len(found) == 1 or any(np.float32(sequence.advantages[at]) == advantage for at in found)


@dataclass
class _WatchingLearner:
    """A learner in whose optimiser steps one token is watched, which stands at `position` of
    `sequence` and has this `advantage`."""

    learner: Learner
    sequence: TrainingSequence
    position: int
    advantage: np.float32
    stages: list[Stage] = field(default_factory=list[Stage])
    steps: int = 0

    def logprobs(
        self, batch: Sequence[TrainingSequence], temperature: float = 1.0
    ) -> Sequence[Tensor]:
        return self.learner.logprobs(batch, temperature)

    def step(
        self, part: Sequence[TrainingSequence], loss: Loss, version: int | None = None
    ) -> dict[str, float]:
        self.steps += 1
        before = 0
        for sequence in part:
            # A correction replaces advantages and log-probabilities of a sequence, and may leave
            # tokens out.
            same = sequence.token_ids is self.sequence.token_ids
            for place in np.flatnonzero(same & (sequence.positions == self.position)):
                self.stages += self._token_stages(
                    part, sequence, int(place), before + int(place), loss
                )
            before += len(sequence.positions)
        return self.learner.step(part, loss, version)

    def _token_stages(
        self,
        part: Sequence[TrainingSequence],
        sequence: TrainingSequence,
        place: int,
        at: int,
        loss: Loss,
    ) -> Iterator[Stage]:
        """The token at `place` of the sequence, which is number `at` of the optimiser step."""
        weights = aggregation_weights(part, loss.aggregation, loss.constant_length)
        tokens = Tokens(part)
        parts = (
            np.concatenate([getattr(member, name) for member in part])
            for name in ("logprobs", "advantages")
        )
        old, advantages = (from_numpy(array) for array in parts)
        logprobs = cat(list(self.logprobs(part, loss.temperature))).clone().requires_grad_()
        per_token, clipped, _ = policy_loss(
            logprobs, old, advantages, from_numpy(tokens.calls), loss, tokens
        )
        weighted = from_numpy(
            np.concatenate([w[:count] for w, count in zip(weights, tokens.lengths, strict=True)])
        )
        (per_token * weighted).sum().backward()
        assert logprobs.grad is not None
        present = float(logprobs[at].detach())
        gradient = float(logprobs.grad[at])
        aggregation = (
            function_name(loss.aggregation, {}) if callable(loss.aggregation) else loss.aggregation
        )
        rollouts = len({member.rollout_id for member in part})
        ratio = math.exp(present - float(old[at]))
        if loss.old == "proximal":
            factor = float(sequence.advantages[place] / self.advantage) if self.advantage else 1.0
            yield Stage(
                "correction",
                factor,
                "by which the advantage is multiplied, for the weights that sampled",
            )
        against = "before the step" if loss.old == "proximal" else "when it was sampled"
        how = (
            f"log p now {present:.4f}, {against} {float(old[at]):.4f}; optimiser step {self.steps}"
        )
        yield Stage("ratio", ratio, how)
        yield Stage(
            "weight",
            float(weighted[at]),
            f"{aggregation} over {rollouts} rollouts with {len(tokens):,} tokens",
        )
        yield Stage(
            "mask",
            float(not clipped[at]),
            "clipped" if clipped[at] else "the token trains: no clip holds",
        )
        yield Stage("loss", float(per_token[at].detach()), f"{loss.name} at r = {ratio:.4g}")
        yield Stage(
            "gradient", gradient, "of the batch's loss by log p: weight · that of the token's loss"
        )
        probability = math.exp(present)
        yield Stage(
            "logit",
            gradient * (1 - probability),
            f"by its logit: gradient · (1 − p), p = {probability:.4g}",
        )
