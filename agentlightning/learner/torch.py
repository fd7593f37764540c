"""The torch learner: gradient steps on one device, exact with micro-batches.

The engine's owner keeps it from reading weights during `step`.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel

from agentlightning.data.aggregation import aggregation_weights
from agentlightning.data.sequences import MicroBatch, TrainingSequence, micro_batches
from agentlightning.data.token_bytes import TokenBytes
from agentlightning.data.transitions import FloatArray
from agentlightning.errors import ConfigError, TrainingError
from agentlightning.learner import losses
from agentlightning.learner.base import CRITIC_RATE, Critic, WeightsForm
from agentlightning.learner.losses import Loss, Totals, objective
from agentlightning.learner.master_weights import MasterWeights
from agentlightning.learner.policy import Policy, saved_weights, written
from agentlightning.learner.policy_config import AdamW
from agentlightning.learner.training_forward import (
    LOGITS_AT_ONCE,
    Sampled,
    States,
    ValueModel,
    branching_pair,
    has_plain_head,
    predicting_states,
    recomputed,
    sampled,
    unsupported,
)

_log = logging.getLogger(__name__)

T = TypeVar("T")

OPTIMIZER_FILE = "optimizer.pt"

# See `Learner`. With tiny, confident models float32 logprobs differed by less than 1e-5, bfloat16
# ones by up to 0.32.
MISMATCH_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.2}


class TorchLearner:
    """Trains `policy.model` in place, or only its adapter, if it has one. With `reference=True` the
    starting weights are kept for KL: a frozen copy, or, with an adapter, the model without it. With
    `critic` a critic is trained too; its gradient is clipped separately.

    A subclass may shard its weights over processes that make the same calls at the same time."""

    def __init__(
        self,
        policy: Policy,
        config: AdamW | None = None,
        *,
        reference: bool | PreTrainedModel = False,
        critic: Critic | None = None,
    ) -> None:
        self.policy = policy
        self.config = config or AdamW()
        self.config.rate(1)  # refuses a schedule without an end
        self.model = policy.model
        self.model.eval()  # no dropout: the trained distribution is the sampled one
        self.keeps_reference = bool(reference)
        self.reference = reference if isinstance(reference, PreTrainedModel) else None
        if reference is True and policy.adapter is None:
            self.reference = copy.deepcopy(self.model).requires_grad_(False)
        self._frozen = _frozen_sample(self.reference or self.model).to(self.dtype)
        self.critic = None if critic is None else ValueModel(self.model, critic)
        self._masters, self._trained = _trained(self.model, self.critic)
        own_rate = critic.learning_rate if critic else None
        self._rates = (1.0, own_rate / self.config.learning_rate if own_rate else CRITIC_RATE)
        self.optimizer = torch.optim.AdamW(
            [{"params": tensors} for tensors in self._trained.values()],
            lr=self.config.learning_rate,
            betas=self.config.betas,
            weight_decay=self.config.weight_decay,
            # otherwise a step takes as much memory again as the weights
            fused=self.model.device.type == "cuda",
        )
        self.steps = 0
        self._logits_at_once = max(
            1, LOGITS_AT_ONCE // int(self.model.config.get_text_config().vocab_size)
        )
        self._head_is_plain = self._run(self.model, lambda: has_plain_head(self.model))
        self._forests_are_exact: bool | None = None  # unknown before the first batch with forests

    def close(self) -> None:
        """Leave the policy to the next learner; this one cannot step any more."""
        self._masters.close()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the model's computation."""
        return self.model.dtype

    @property
    def mismatch_tolerance(self) -> float:
        return MISMATCH_TOLERANCE.get(self.dtype, MISMATCH_TOLERANCE[torch.float32])

    @property
    def token_bytes(self) -> TokenBytes | None:
        return self.policy.token_bytes

    def step(
        self, batch: Sequence[TrainingSequence], loss: Loss, version: int | None = None
    ) -> dict[str, float]:
        """See `Learner.step`. The gradient is of Σ weights · loss over the whole batch."""
        if not batch:
            raise TrainingError("an empty batch cannot be trained; the loop must skip the step")
        if loss.kl_coefficient and not self.keeps_reference:
            raise ConfigError(
                "kl_coefficient is set but the learner keeps no reference; pass reference=True"
            )
        batch = self._with_exact_forests(batch)
        weights = aggregation_weights(batch, loss.aggregation, loss.constant_length)
        self._clear_gradient()
        totals = Totals(version)
        for micro in self._micro_batches(batch, weights):
            self._backward(micro, loss, totals)
        totals = self._reduced(totals)
        norms = {name: self._clipped(tensors) for name, tensors in self._trained.items()}
        if not np.isfinite([*norms.values(), totals.sums["loss"]]).all():
            self._clear_gradient()
            raise not_finite(totals.sums["loss"], *norms.values())
        self.steps += 1
        rate = self.config.rate(self.steps)
        for group, factor in zip(self.optimizer.param_groups, self._rates, strict=False):
            group["lr"] = rate * factor
        self.optimizer.step()
        self._masters.write_back()
        saved = sum(sequence.tokens_alone for sequence in batch) - totals.sums["tokens_computed"]
        return totals.metrics() | norms | {"learning_rate": rate, "tokens_saved": saved}

    def _run(self, model: PreTrainedModel, work: Callable[[], T]) -> T:
        """The result of `work`, which uses the model's weights; gradients flow through tensors in
        tuples."""
        return work()

    def _reduced(self, totals: Totals) -> Totals:
        return totals

    def _clipped(self, trained: Sequence[Tensor]) -> float:
        """Clip the gradient; returns its norm before."""
        return float(torch.nn.utils.clip_grad_norm_(trained, self.config.max_grad_norm))

    def _clear_gradient(self) -> None:
        for tensor in self._masters.trained:
            tensor.grad = None

    def _micro_batches(
        self, batch: Sequence[TrainingSequence], weights: Sequence[FloatArray]
    ) -> Iterator[MicroBatch]:
        tokens = self.config.micro_batch_tokens
        if not self._head_is_plain:  # the model projects every token, sampled or not
            tokens = min(tokens, self._logits_at_once)
        return micro_batches(batch, weights, tokens)

    def _with_exact_forests(self, batch: Sequence[TrainingSequence]) -> Sequence[TrainingSequence]:
        """The batch, without forests if they are not exact for this model."""
        if not any(sequence.tree for sequence in batch) or self._trusts_forests(batch):
            return batch
        return [replace(sequence, tree=False) for sequence in batch]

    def _trusts_forests(self, batch: Sequence[TrainingSequence]) -> bool:
        """Whether forests give the same results as separate sequences: tested once, on two
        sequences that branch."""
        if self._forests_are_exact is None:
            reason = unsupported(self.model)
            if reason is None:
                pair = branching_pair(batch)
                alone = [replace(sequence, tree=False) for sequence in pair]
                error = float(
                    (torch.cat(self._logprobs(pair, 1.0)) - torch.cat(self.logprobs(alone)))
                    .abs()
                    .max()
                )
                if not np.expm1(error) <= self.mismatch_tolerance:
                    reason = (
                        "on two sequences of the first batch its log-probabilities are off by "
                        f"{error:.2g}"
                    )
            if reason:
                _log.warning(
                    "level 'tree' cannot be used: %s. Each call is trained by itself, as at level "
                    "'transition'; 'trajectory' would still join the calls of a conversation",
                    reason,
                )
            self._forests_are_exact = reason is None
        return self._forests_are_exact

    def _backward(self, micro: MicroBatch, loss: Loss, totals: Totals) -> None:
        reference = None
        if loss.kl_coefficient:
            adapter = self.policy.adapter
            with torch.no_grad(), adapter.off() if adapter is not None else nullcontext():
                reference = self._forward(self.reference or self.model, micro, loss.temperature)[
                    1
                ].logprobs
        with torch.set_grad_enabled(not loss.critic_alone), self._recomputed(self.model):
            states, of_policy = self._forward(
                self.model, micro, loss.temperature, loss.entropy_coefficient != 0
            )
        logprobs, entropy = of_policy
        # other processes have tokens, and collective operations need this one too
        if not len(logprobs):
            torch.autograd.backward(logprobs.sum())
            return
        total = objective(micro, loss, totals, logprobs, entropy=entropy, reference=reference)
        if self.critic is not None:
            total = total + loss.value_coefficient * self._value_loss(
                self.critic, micro, states, loss, totals
            )
        torch.autograd.backward(total)
        totals.sums["loss"] += float(total.detach())
        totals.sums["tokens_computed"] += micro.tokens

    def _value_loss(
        self, critic: ValueModel, micro: MicroBatch, states: States, loss: Loss, totals: Totals
    ) -> Tensor:
        if micro.values is None or micro.value_targets is None:
            raise ConfigError(
                "the critic cannot be trained: the batch has no values and no returns"
            )
        old, targets, weights = (
            torch.from_numpy(part).to(self.model.device)
            for part in (micro.values, micro.value_targets, micro.weights)
        )
        with self._recomputed(critic.trunk):
            values = critic(micro, states)[: len(old)]
        per_token, clipped = losses.value_loss(values, old, targets, loss.value_clip)
        total = (per_token * weights).sum()
        totals.sums["value_loss"] += float(total.detach())
        totals.add_means(value_clip_fraction=clipped)
        return total

    def _recomputed(self, model: PreTrainedModel | None) -> AbstractContextManager[None]:
        return (
            recomputed(model)
            if model is not None and self.config.gradient_checkpointing
            else nullcontext()
        )

    def _forward(
        self,
        model: PreTrainedModel,
        micro: MicroBatch,
        temperature: float,
        entropy_gradient: bool = False,
    ) -> tuple[States, Sampled]:
        """If the logits are a plain projection of the last hidden state, only positions that
        predict a sampled token are projected."""

        def work() -> tuple[States, Sampled]:
            states = self._states(model, micro)
            head = cast(
                torch.nn.Module,
                model.get_output_embeddings() if states.logits is None else torch.nn.Identity(),
            )
            projected = cast(Tensor, states.hidden if states.logits is None else states.logits)
            targets = torch.from_numpy(
                micro.token_ids[micro.rows, micro.positions].astype(np.int64)
            ).to(model.device)
            of_tokens = sampled(
                head,
                projected,
                targets,
                states.of,
                temperature,
                entropy_gradient=entropy_gradient,
                at_once=self._logits_at_once,
            )
            return states, of_tokens

        return self._run(model, work)

    def _states(self, model: PreTrainedModel, micro: MicroBatch) -> States:
        return predicting_states(
            model, micro, hidden=self.critic is not None, logits=not self._head_is_plain
        )

    def logprobs(self, batch: Sequence[TrainingSequence], temperature: float = 1.0) -> list[Tensor]:
        return self._logprobs(self._with_exact_forests(batch), temperature)

    def _logprobs(self, batch: Sequence[TrainingSequence], temperature: float) -> list[Tensor]:
        def of_policy(micro: MicroBatch) -> Tensor:
            return self._forward(self.model, micro, temperature)[1].logprobs

        return self._per_token(batch, of_policy)

    def values(self, batch: Sequence[TrainingSequence]) -> list[FloatArray]:
        critic = self.critic
        if critic is None:
            raise ConfigError("this learner has no critic; pass critic=Critic()")

        def of_critic(micro: MicroBatch) -> Tensor:
            return critic(micro, self._states(self.model, micro) if critic.trunk is None else None)

        return [
            values.numpy() for values in self._per_token(self._with_exact_forests(batch), of_critic)
        ]

    def _per_token(
        self, batch: Sequence[TrainingSequence], measure: Callable[[MicroBatch], Tensor]
    ) -> list[Tensor]:
        """`measure` of each sampled token, float32[N] per sequence, on the CPU."""
        lengths = [len(sequence.positions) for sequence in batch]
        out = torch.zeros(sum(lengths))
        # Weights follow their tokens through packing: here they carry each token's index in the
        # batch.
        numbers = np.split(np.arange(len(out), dtype=np.float64), np.cumsum(lengths)[:-1])
        with torch.no_grad():
            for micro in self._micro_batches(batch, cast(list[FloatArray], numbers)):
                out[torch.from_numpy(micro.weights.astype(np.int64))] = measure(micro).float().cpu()
        return list(self._all_reduced(out).split(lengths))

    def _all_reduced(self, parts: Tensor) -> Tensor:
        """Values that are 0 where another process has them."""
        return parts

    def export(self, directory: Path, form: WeightsForm) -> None:
        self._clear_gradient()  # on a shared GPU the sampler gets this memory until the next step
        directory.mkdir(parents=True)
        adapter = self.policy.adapter
        if form == "adapter" and adapter is None:
            raise ConfigError("there is no adapter to export: all weights are trained")
        if adapter is None or form == "adapter":
            self.policy.save(directory)
        else:
            replace(self.policy, model=adapter.publish(), adapter=None).save(directory)

    def save(self, directory: Path, resumable: bool = True) -> None:
        self.policy.save(directory)
        if not resumable:
            return
        if self.critic is not None:
            self.critic.save(directory)
        self._save_state(directory, self.optimizer.state_dict(), self._masters.state())

    def _save_state(self, directory: Path, optimizer: Any, masters: Sequence[Tensor]) -> None:
        state = {
            "optimizer": optimizer,
            "steps": self.steps,
            "masters": masters,
            "frozen": self._frozen,
        }
        with written():
            torch.save(state, directory / OPTIMIZER_FILE)

    def load(self, directory: Path) -> None:
        """See `Learner.load`. Weights are copied into the live model, so that everything that
        shares it sees them."""
        try:
            if not (directory / OPTIMIZER_FILE).is_file():
                raise ValueError(
                    f"it has no {OPTIMIZER_FILE}; its weights can be the model of a new run"
                )
            if strangers := self._load_weights(directory):
                raise ValueError(f"it has another architecture: {strangers[:3]} …")
            if self.critic is not None:
                self.critic.load(directory)
            # to the weights' device, so that the file can be closed
            copied = self.model.device.type != "cpu"
            state = torch.load(
                directory / OPTIMIZER_FILE, weights_only=True, map_location="cpu", mmap=copied
            )
            if (
                len(self._frozen)
                and len(state["frozen"])
                and not torch.equal(state["frozen"], self._frozen)
            ):
                raise ValueError(
                    "its run started from other weights, which are kept as the reference or under "
                    "the adapter. Give the model that it started from; if this process has "
                    "trained that one, load it again"
                )
            self._load_state(state)
            # the loaded groups have the earlier run's settings
            for group in self.optimizer.param_groups:
                group |= {"betas": self.config.betas, "weight_decay": self.config.weight_decay}
        except (OSError, RuntimeError, SafetensorError, ValueError, KeyError) as error:
            raise ConfigError(f"checkpoint {directory} cannot be resumed from: {error}") from None
        self.steps = int(state["steps"])

    def _load_state(self, state: Mapping[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self._masters.load(state.get("masters", ()))

    def _load_weights(self, directory: Path) -> list[str]:
        """Names of weights that only one of checkpoint and model has."""
        if self.policy.adapter is not None:
            self.policy.adapter.load(directory)
            return []
        missing, unexpected = self.model.load_state_dict(
            self._sharded(saved_weights(directory)), strict=False
        )
        self.model.tie_weights()
        tied = set(getattr(self.model, "_tied_weights_keys", None) or ())
        return [*sorted(set(missing) - tied), *unexpected]

    def _sharded(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Weights by name, in the form of the model's state."""
        return weights


def _frozen_sample(model: PreTrainedModel) -> Tensor:
    """A few values of each frozen tensor, to recognise other weights."""
    frozen = [parameter.detach() for parameter in model.parameters() if not parameter.requires_grad]
    whole: list[Tensor] = [getattr(tensor, "full_tensor", tensor.detach)() for tensor in frozen]
    return torch.cat([torch.zeros(0), *(tensor.flatten()[:8].float().cpu() for tensor in whole)])


def _trained(
    model: PreTrainedModel, critic: ValueModel | None
) -> tuple[MasterWeights, dict[str, list[Tensor]]]:
    """The tensors to optimise, by the metric name of their gradient norm."""
    own = [parameter for parameter in model.parameters() if parameter.requires_grad]
    of_critic = (
        []
        if critic is None
        else [parameter for parameter in critic.parameters() if parameter.requires_grad]
    )
    masters = MasterWeights([*own, *of_critic])
    parts = {
        "grad_norm": masters.trained[: len(own)],
        "critic_grad_norm": masters.trained[len(own) :],
    }
    return masters, {name: tensors for name, tensors in parts.items() if tensors}


def not_finite(loss: float, *norms: float) -> TrainingError:
    numbers = ", gradient norm ".join(str(number) for number in (loss, *norms))
    return TrainingError(
        f"the step was not taken: loss {numbers}. The weights are unchanged; lower the learning "
        "rate, or look for extreme rewards in the run's metrics, or for NaN in a loss of your own"
    )
