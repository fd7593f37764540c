"""The torch learner: gradient steps on one device, exact under micro-batching.

The learner knows the model's forward and the optimiser. It does not know the tokenizer's language, rewards or the
engine; whoever owns the engine keeps it from reading weights during `step`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from agentlightning.data.sequences import MicroBatch, TrainingSequence, aggregation_weights, micro_batches
from agentlightning.errors import ConfigError, TrainingError
from agentlightning.learner import losses
from agentlightning.learner.base import AdamW, Loss
from agentlightning.learner.policy import Policy

OPTIMIZER_FILE = "optimizer.pt"

PLAIN_HEAD = frozenset({"llama", "mistral", "qwen2", "qwen3"})  # logits = head(hidden), nothing scaled or capped

LOGITS_AT_ONCE = 2**28  # numbers of one [tokens, vocabulary] tensor, 1 GiB in float32; a step holds about four of them

# See `Learner`. On peaked tiny models float32 logprobs differed by less than 1e-5, bfloat16 ones by up to 0.32.
MISMATCH_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.2}


class TorchLearner:
    """Trains `policy.model` in place. With `reference=True` a frozen copy of the starting weights is kept for KL."""

    def __init__(self, policy: Policy, config: AdamW | None = None, *, reference: bool = False) -> None:
        self.policy = policy
        self.config = config or AdamW()
        self.model = policy.model
        self.model.eval()  # no dropout: what is trained is the distribution that was sampled
        self.reference = _frozen_copy(self.model) if reference else None
        self.optimizer = torch.optim.AdamW(
            [parameter for parameter in self.model.parameters() if parameter.requires_grad],
            lr=self.config.learning_rate,
            betas=self.config.betas,
            weight_decay=self.config.weight_decay,
        )
        self.steps = 0
        vocabulary = int(self.model.get_output_embeddings().weight.shape[0])  # type: ignore[union-attr]
        self._tokens_at_once = min(self.config.micro_batch_tokens, max(1, LOGITS_AT_ONCE // vocabulary))

    @property
    def mismatch_tolerance(self) -> float:
        return MISMATCH_TOLERANCE.get(self.model.dtype, MISMATCH_TOLERANCE[torch.float32])

    def step(self, batch: Sequence[TrainingSequence], loss: Loss) -> dict[str, float]:
        """See `Learner.step`. The gradient is that of Σ weights · loss over the whole batch."""
        if not batch:
            raise TrainingError("an empty batch cannot be trained; the loop must skip the step")
        if loss.kl_coefficient and self.reference is None:
            raise ConfigError("kl_coefficient is set but the learner keeps no reference; pass reference=True")
        weights = aggregation_weights(batch, loss.aggregation, loss.constant_length)
        self.optimizer.zero_grad(set_to_none=True)
        totals = _Totals()
        for micro in micro_batches(batch, weights, self._tokens_at_once):
            self._backward(micro, loss, totals)
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm))
        if not np.isfinite(norm) or not np.isfinite(totals.loss):
            self.optimizer.zero_grad(set_to_none=True)
            raise TrainingError(
                f"the step was not taken: loss {totals.loss}, gradient norm {norm}. The weights are unchanged; lower "
                "the learning rate, or look for extreme rewards in the run's metrics"
            )
        self.steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate * min(1.0, self.steps / max(1, self.config.warmup_steps))
        self.optimizer.step()
        return totals.metrics() | {"grad_norm": norm}

    def _backward(self, micro: MicroBatch, loss: Loss, totals: _Totals) -> None:
        device = self.model.device
        old = torch.from_numpy(micro.logprobs).to(device)
        advantages = torch.from_numpy(micro.advantages).to(device)
        weights = torch.from_numpy(micro.weights).to(device)
        targets = _targets(micro, device)
        log_probabilities = self._log_probabilities(self.model, micro, loss.temperature)
        logprobs = _pick(log_probabilities, targets)
        transitions = torch.from_numpy(micro.transitions).to(device)
        per_token, clipped = losses.policy_loss(logprobs, old, advantages, transitions, loss)
        if loss.kl_coefficient and self.reference is not None:
            with torch.no_grad():
                reference = _pick(self._log_probabilities(self.reference, micro, loss.temperature), targets)
            divergence = losses.kl(logprobs, reference, loss.kl_estimator)
            per_token = per_token + loss.kl_coefficient * divergence
            totals.reference_kl += float((divergence.detach() * weights).sum())
        with torch.set_grad_enabled(loss.entropy_coefficient != 0):
            entropy = losses.entropy(log_probabilities)
            if loss.entropy_coefficient:
                per_token = per_token - loss.entropy_coefficient * entropy
        total = (per_token * weights).sum()
        torch.autograd.backward(total)
        totals.add(float(total.detach()), logprobs.detach() - old, clipped, entropy.detach())

    def _log_probabilities(self, model: PreTrainedModel, micro: MicroBatch, temperature: float) -> Tensor:
        """float32[N, V]: the distribution each sampled token was drawn from, predicted at the position before it.

        Right padding needs no mask: under causal attention nothing before a padded position sees it. Where the
        logits are a plain projection of the last hidden state, only sampled positions are projected."""
        device = self.model.device
        ids = torch.from_numpy(micro.token_ids[:, :-1].astype(np.int64)).to(device)
        rows = torch.from_numpy(micro.rows).to(device)
        before = torch.from_numpy(micro.positions - 1).to(device)
        if model.config.model_type in PLAIN_HEAD:
            hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
            logits = cast(torch.nn.Module, model.get_output_embeddings())(hidden[rows, before])
        else:
            logits = model(input_ids=ids, use_cache=False).logits[rows, before]
        return torch.log_softmax(logits.float() / temperature, -1)

    def logprobs(self, batch: Sequence[TrainingSequence], temperature: float = 1.0) -> list[Tensor]:
        """The policy's present log-probability of every sampled token, one float32[N] per sequence; no gradient."""
        out: list[Tensor] = []
        for sequence in batch:
            nothing = [np.zeros(len(sequence.positions), np.float32)]
            (micro,) = micro_batches([sequence], nothing, len(sequence))
            with torch.no_grad():
                log_probabilities = self._log_probabilities(self.model, micro, temperature)
            out.append(_pick(log_probabilities, _targets(micro, log_probabilities.device)))
        return out

    def save(self, directory: Path) -> None:
        """See `Learner.save`."""
        self.policy.save(directory)
        torch.save({"optimizer": self.optimizer.state_dict(), "steps": self.steps}, directory / OPTIMIZER_FILE)

    def load(self, directory: Path) -> None:
        """See `Learner.load`. Weights are copied into the live model, so that whoever shares it sees them."""
        try:
            weights = {name: tensor for file in sorted(directory.glob("*.safetensors")) for name, tensor in _read(file)}
            missing, unexpected = self.model.load_state_dict(weights, strict=False)
            state = torch.load(directory / OPTIMIZER_FILE, weights_only=True)
            self.optimizer.load_state_dict(state["optimizer"])
        except (OSError, RuntimeError, SafetensorError, ValueError, KeyError) as error:
            raise ConfigError(f"checkpoint {directory} cannot be resumed from: {error}") from None
        self.model.tie_weights()
        tied = set(getattr(self.model, "_tied_weights_keys", None) or ())
        if unexpected or set(missing) - tied:
            raise ConfigError(f"checkpoint {directory} is of another architecture: {[*missing, *unexpected][:3]} …")
        self.steps = int(state["steps"])


class _Totals:
    """Sums over the tokens of one step, for its metrics."""

    def __init__(self) -> None:
        self.loss = 0.0
        self.reference_kl = 0.0
        self.tokens = 0
        self.clipped = 0
        self.entropy = 0.0
        self.log_ratio = 0.0
        self.k3 = 0.0
        self.max_ratio_error = 0.0

    def add(self, loss: float, log_ratio: Tensor, clipped: Tensor, entropy: Tensor) -> None:
        ratio = log_ratio.exp()
        self.loss += loss
        self.tokens += log_ratio.numel()
        self.clipped += int(clipped.sum())
        self.entropy += float(entropy.sum())
        self.log_ratio += float(log_ratio.sum())
        self.k3 += float((ratio - 1 - log_ratio).sum())
        self.max_ratio_error = max(self.max_ratio_error, float((ratio - 1).abs().max()))

    def metrics(self) -> dict[str, float]:
        return {
            "loss": self.loss,
            "tokens": float(self.tokens),
            "entropy": self.entropy / self.tokens,
            "clip_fraction": self.clipped / self.tokens,
            "behaviour_kl": self.k3 / self.tokens,
            "max_ratio_error": self.max_ratio_error,
            "reference_kl": self.reference_kl,
        }


def _targets(micro: MicroBatch, device: torch.device) -> Tensor:
    return torch.from_numpy(micro.token_ids[micro.rows, micro.positions].astype(np.int64)).to(device)


def _pick(log_probabilities: Tensor, targets: Tensor) -> Tensor:
    return log_probabilities.gather(1, targets[:, None]).squeeze(1)


def _frozen_copy(model: PreTrainedModel) -> PreTrainedModel:
    reference = copy.deepcopy(model)
    reference.requires_grad_(False)
    return reference.eval()


def _read(file: Path) -> Iterator[tuple[str, Tensor]]:
    yield from load_file(file).items()
