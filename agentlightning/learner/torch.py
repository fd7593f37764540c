"""The torch learner: gradient steps on one device, exact under micro-batching.

The learner knows the model's forward and the optimiser. It does not know the tokenizer's language, rewards or the
engine; whoever owns the engine keeps it from reading weights during `step`.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedModel

from agentlightning.data.sequences import MicroBatch, TrainingSequence, aggregation_weights, micro_batches
from agentlightning.data.token_bytes import TokenBytes
from agentlightning.data.transitions import FloatArray
from agentlightning.errors import ConfigError, TrainingError
from agentlightning.learner import losses
from agentlightning.learner.base import AdamW, Loss
from agentlightning.learner.forest import branching_pair, forest_hidden, unsupported
from agentlightning.learner.policy import Policy

_log = logging.getLogger(__name__)

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
        self._logits_at_once = max(1, LOGITS_AT_ONCE // vocabulary)
        self._forests_are_exact: bool | None = None  # not known before the first batch that asks for them

    @property
    def mismatch_tolerance(self) -> float:
        return MISMATCH_TOLERANCE.get(self.model.dtype, MISMATCH_TOLERANCE[torch.float32])

    @cached_property
    def token_bytes(self) -> TokenBytes | None:
        tokenizer = getattr(self.policy.tokenizer, "backend_tokenizer", None)
        return TokenBytes(tokenizer) if isinstance(tokenizer, Tokenizer) else None

    def step(self, batch: Sequence[TrainingSequence], loss: Loss) -> dict[str, float]:
        """See `Learner.step`. The gradient is that of Σ weights · loss over the whole batch."""
        if not batch:
            raise TrainingError("an empty batch cannot be trained; the loop must skip the step")
        if loss.kl_coefficient and self.reference is None:
            raise ConfigError("kl_coefficient is set but the learner keeps no reference; pass reference=True")
        if any(sequence.tree for sequence in batch) and not self._trusts_forests(batch):
            batch = [replace(sequence, tree=False) for sequence in batch]
        weights = aggregation_weights(batch, loss.aggregation, loss.constant_length)
        self.optimizer.zero_grad(set_to_none=True)
        totals = _Totals()
        computed = 0
        for micro in self._micro_batches(batch, weights):
            self._backward(micro, loss, totals)
            computed += micro.tokens
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm))
        if not np.isfinite(norm) or not np.isfinite(totals.loss):
            self.optimizer.zero_grad(set_to_none=True)
            raise TrainingError(
                f"the step was not taken: loss {totals.loss}, gradient norm {norm}. The weights are unchanged; lower "
                "the learning rate, or look for extreme rewards in the run's metrics; `agl data replay` trains a "
                "step again by itself"
            )
        self.steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate * min(1.0, self.steps / max(1, self.config.warmup_steps))
        self.optimizer.step()
        return totals.metrics() | {
            "grad_norm": norm,
            "tokens_computed": float(computed),
            "tokens_saved": float(sum(sequence.tokens_alone for sequence in batch) - computed),
        }

    def _micro_batches(self, batch: Sequence[TrainingSequence], weights: Sequence[FloatArray]) -> Iterator[MicroBatch]:
        tokens = self.config.micro_batch_tokens
        if self.model.config.model_type not in PLAIN_HEAD:  # every token is projected, sampled or not
            tokens = min(tokens, self._logits_at_once)
        return micro_batches(batch, weights, tokens, self._logits_at_once)

    def _trusts_forests(self, batch: Sequence[TrainingSequence]) -> bool:
        """Whether forests give this model what its sequences give alone: tried once, on two sequences that branch."""
        if self._forests_are_exact is None:
            reason = unsupported(self.model)
            if reason is None:
                pair = branching_pair(batch)
                error = float((self._logprobs(pair, 1.0) - torch.cat(self.logprobs(pair))).abs().max())
                if not np.expm1(error) <= self.mismatch_tolerance:
                    reason = f"on two sequences of the first batch its log-probabilities are off by {error:.2g}"
            if reason:
                _log.warning(
                    "level 'tree' cannot be used: %s. Each call is trained by itself, as at level 'transition'; "
                    "'trajectory' would still join the calls of a conversation",
                    reason,
                )
            self._forests_are_exact = reason is None
        return self._forests_are_exact

    def _backward(self, micro: MicroBatch, loss: Loss, totals: _Totals) -> None:
        device = self.model.device
        old = torch.from_numpy(micro.logprobs).to(device)
        advantages = torch.from_numpy(micro.advantages).to(device)
        weights = torch.from_numpy(micro.weights).to(device)
        distributions = self._distributions(self.model, micro, loss.temperature)
        logprobs = distributions.logprobs
        transitions = torch.from_numpy(micro.transitions).to(device)
        per_token, clipped = losses.policy_loss(logprobs, old, advantages, transitions, loss)
        if loss.kl_coefficient and self.reference is not None:
            with torch.no_grad():
                reference = self._distributions(self.reference, micro, loss.temperature).logprobs
            divergence = losses.kl(logprobs, reference, loss.kl_estimator)
            per_token = per_token + loss.kl_coefficient * divergence
            totals.reference_kl += float((divergence.detach() * weights).sum())
        with torch.set_grad_enabled(loss.entropy_coefficient != 0):
            entropy = losses.entropy(distributions.log_probabilities)[distributions.of]
            if loss.entropy_coefficient:
                per_token = per_token - loss.entropy_coefficient * entropy
        total = (per_token * weights).sum()
        torch.autograd.backward(total)
        totals.add(float(total.detach()), logprobs.detach() - old, clipped, entropy.detach())

    def _distributions(self, model: PreTrainedModel, micro: MicroBatch, temperature: float) -> _Distributions:
        """Of each sampled token, predicted at the position before it.

        Right padding needs no mask: under causal attention nothing before a padded position sees it. Where the
        logits are a plain projection of the last hidden state, only sampled positions are projected."""
        device = self.model.device
        places, of = np.unique(micro.predictors, return_inverse=True)
        rows, columns = (torch.from_numpy(part).to(device) for part in divmod(places, micro.token_ids.shape[1]))
        if micro.forest is not None:
            hidden = forest_hidden(model, micro.forest)
        else:
            ids = torch.from_numpy(micro.token_ids[:, :-1].astype(np.int64)).to(device)
            if model.config.model_type not in PLAIN_HEAD:
                logits = model(input_ids=ids, use_cache=False).logits[rows, columns]
                return _Distributions.of_tokens(micro, of, logits.float() / temperature)
            hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        logits = cast(torch.nn.Module, model.get_output_embeddings())(hidden[rows, columns])
        return _Distributions.of_tokens(micro, of, logits.float() / temperature)

    def logprobs(self, batch: Sequence[TrainingSequence], temperature: float = 1.0) -> list[Tensor]:
        """The policy's present log-probability of every sampled token, one float32[N] per sequence; no gradient."""
        return [self._logprobs([replace(sequence, tree=False)], temperature) for sequence in batch]

    def _logprobs(self, batch: Sequence[TrainingSequence], temperature: float) -> Tensor:
        """The same of sequences that make one micro-batch, float32[N] in its order."""
        nothing = [np.zeros(len(sequence.positions), np.float32) for sequence in batch]
        (micro,) = micro_batches(batch, nothing, sum(map(len, batch)))
        with torch.no_grad():
            return self._distributions(self.model, micro, temperature).logprobs

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


@dataclass(frozen=True)
class _Distributions:
    """What sampled tokens were drawn from, each distribution once: `log_probabilities` float32[U, V], of which token n
    was drawn from number `of`[n], int64[N], with `logprobs` float32[N]."""

    log_probabilities: Tensor
    of: Tensor
    logprobs: Tensor

    @staticmethod
    def of_tokens(micro: MicroBatch, of: npt.NDArray[np.int64], logits: Tensor) -> _Distributions:
        targets = torch.from_numpy(micro.token_ids[micro.rows, micro.positions].astype(np.int64)).to(logits.device)
        number = torch.from_numpy(of).to(logits.device)
        log_probabilities = torch.log_softmax(logits, -1)
        return _Distributions(log_probabilities, number, log_probabilities[number, targets])


def _frozen_copy(model: PreTrainedModel) -> PreTrainedModel:
    reference = copy.deepcopy(model)
    reference.requires_grad_(False)
    return reference.eval()


def _read(file: Path) -> Iterator[tuple[str, Tensor]]:
    yield from load_file(file).items()
