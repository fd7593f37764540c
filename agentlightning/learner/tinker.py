"""A Tinker server as learner and sampler in one: the hosted service, or your own server with its
protocol.

Knows the `tinker` SDK, and the requests to the server and their order. Weights stay on the server;
publications and checkpoints here are handles.

Every loss is computed here: the server returns log-probabilities, and gets −dL/dlogprob as the
advantages of its `importance_sampling` at ratio 1, whose gradient is that of L."""

from __future__ import annotations

import os
import urllib.request
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch
from torch import Tensor

from agentlightning.data.aggregation import aggregation_weights
from agentlightning.data.sequences import TrainingSequence, pack
from agentlightning.data.token_bytes import TokenBytes
from agentlightning.data.transitions import FloatArray
from agentlightning.errors import (
    ConfigError,
    TrainingError,
)
from agentlightning.gateway.chat.template import ChatTemplate
from agentlightning.learner.base import WeightsForm
from agentlightning.learner.losses import Loss, Totals, objective
from agentlightning.learner.pair_specs import HOSTED, LearnerSpec
from agentlightning.learner.policy import load_tokenizer
from agentlightning.learner.policy_config import AdamW, LoRA, PolicyConfig
from agentlightning.learner.tinker_sampler import (
    HANDLE_FILE,
    LENGTH,
    Handle,
    TinkerSampler,
    errors_translated,
    new_name,
    read_handle,
    tinker_sdk,
)
from agentlightning.learner.torch import MISMATCH_TOLERANCE, not_finite

_FEWEST: Final = 16  # smallest batch for an averaging server, which compiles for each batch size
_SECONDS: Final = 10.0  # for a server to answer at the start


def check_training(place: LearnerSpec, loss: Loss, lora: LoRA | None) -> None:
    """ConfigError if a Tinker server cannot train with these settings."""
    check_loss(loss)
    if place.verl is not None and lora is not None:
        raise ConfigError(
            "learner: verl's Tinker server trains all weights and no adapter: leave lora out"
        )
    if place.verl is None and (lora is None or lora != LoRA(lora.rank)):
        raise ConfigError(
            "learner: a Tinker server trains an adapter of all layers with alpha "
            f"{LoRA().alpha:g}: give lora: {{rank: 16}}, without other keys"
        )


def check_loss(loss: Loss) -> None:
    """ConfigError for a loss whose gradient a Tinker server cannot provide."""
    if loss.temperature != 1:
        raise ConfigError(
            "learner: a Tinker server returns log-probabilities at temperature 1, not "
            f"{loss.temperature:g}: set the algorithm's temperature to 1"
        )
    for name in ("entropy_coefficient", "kl_coefficient"):
        if getattr(loss, name):
            raise ConfigError(
                "learner: a Tinker server returns log-probabilities of sampled tokens only: "
                f"{name} is 0"
            )


@contextmanager
def open_tinker(
    place: LearnerSpec, model: str, config: PolicyConfig
) -> Generator[tuple[TinkerSampler, TinkerLearner]]:
    """In the block, the server is ready to sample from `model`, its name for it, and to train an
    adapter on it (verl's: all weights). ConfigError if it cannot be reached, is not ready, or does
    not have the model."""
    tokenizer = load_tokenizer(place.tokenizer or model)
    sdk = tinker_sdk()
    url = None if place.url == HOSTED else place.url
    if url is not None:
        try:  # the SDK would retry for minutes
            with urllib.request.urlopen(f"{url}/api/v1/healthz", timeout=_SECONDS) as answer:
                health = answer.read().decode(errors="replace")
        except (OSError, ValueError) as error:
            raise ConfigError(f"learner: no Tinker server answers at {url}: {error}") from None
        if place.verl is not None and '"ready"' not in health:
            raise ConfigError(
                f"learner: verl's Tinker server at {url} is not ready, or is another server: it "
                f"answered {health}"
            )
    with errors_translated(sdk):
        service = sdk.ServiceClient(
            base_url=url, api_key=os.environ.get("TINKER_API_KEY", "tml-none")
        )
        offered = service.get_server_capabilities().supported_models
        names = [offer.model_name for offer in offered if offer.model_name]
    # some are directories
    served = {os.path.abspath(name): name for name in names}.get(os.path.abspath(model))
    if served is None:
        raise ConfigError(
            f"learner: {place.url} serves {', '.join(names)}, and not the model {model!r}"
        )
    rank = (config.lora or LoRA()).rank
    create = partial(service.create_lora_training_client, served, rank=rank, seed=config.seed)
    length = config.max_sequence_length or LENGTH
    chat = ChatTemplate.from_pretrained(tokenizer)
    try:
        learner = TinkerLearner(sdk, service, create, tokenizer, config.optimizer, place)
        yield TinkerSampler(sdk, service, served, chat, place.url, length), learner
    finally:
        service.holder.close()


class TinkerLearner:
    """A `Learner` on the server behind `service`, which has weights and optimiser. The server clips
    gradients to `max_grad_norm` if it can."""

    mismatch_tolerance = MISMATCH_TOLERANCE[torch.bfloat16]  # the server's dtype is unknown

    def __init__(
        self,
        sdk: Any,
        service: Any,
        create: Callable[[], Any],
        tokenizer: Any,
        config: AdamW,
        place: LearnerSpec,
    ) -> None:
        config.rate(1)  # refuses a schedule without an end
        self.config = config
        self.steps = 0
        self.token_bytes: TokenBytes | None = TokenBytes(tokenizer.backend_tokenizer)
        self._sdk = sdk
        self._service = service
        self._create = create
        self._client: Any = None  # created on first use: a state can only be loaded into a new one
        self._masked = place.verl is not None
        self._averages = place.reduction == "mean"
        self._sums = place.verl is not None or place.reduction is not None

    def values(self, batch: Sequence[TrainingSequence]) -> list[FloatArray]:
        raise ConfigError("learner: a Tinker server trains no critic")

    def step(
        self, batch: Sequence[TrainingSequence], loss: Loss, version: int | None = None
    ) -> dict[str, float]:
        """See `Learner.step`; no entropy. The gradient norm is the server's, if it returns one."""
        if not batch:
            raise TrainingError("an empty batch cannot be trained; the loop must skip the step")
        check_loss(loss)
        rows = self._rows(batch)
        slopes, totals = gradient(batch, rows, loss, version)
        if not np.isfinite(
            [totals.sums["loss"], *(float(np.abs(slope).sum()) for slope in slopes)]
        ).all():
            raise not_finite(totals.sums["loss"])
        rate = self.config.rate(self.steps + 1)
        settings = {
            "learning_rate": rate,
            "beta1": self.config.betas[0],
            "beta2": self.config.betas[1],
            "eps": 1e-8,
        }
        settings |= {
            "weight_decay": self.config.weight_decay,
            "grad_clip_norm": self.config.max_grad_norm,
        }
        data = self._data(batch, rows, [-slope for slope in slopes])
        adam = self._sdk.types.AdamParams(**settings)
        self._ask("forward_backward", data, "importance_sampling")
        answer: dict[str, float] = self._ask("optim_step", adam).metrics or {}
        self.steps += 1
        norms = [
            value for name, value in answer.items() if name.split(":")[0].endswith("grad_norm")
        ]
        computed = sum(map(len, batch))
        saved = sum(sequence.tokens_alone for sequence in batch) - computed
        counts = {"tokens_computed": float(computed), "tokens_saved": float(saved)}
        return (
            totals.metrics()
            | ({"grad_norm": norms[0]} if norms else {})
            | {"learning_rate": rate}
            | counts
        )

    def logprobs(self, batch: Sequence[TrainingSequence], temperature: float = 1.0) -> list[Tensor]:
        """See `Learner.logprobs`; temperature 1 only."""
        check_loss(Loss(temperature=temperature))
        return [
            torch.from_numpy(row[s.positions - 1])
            for row, s in zip(self._rows(batch), batch, strict=True)
        ]

    def _rows(self, batch: Sequence[TrainingSequence]) -> list[FloatArray]:
        """The log-probability of every token after the first, float32[L − 1] per sequence."""
        nothing = [np.zeros(len(sequence) - 1, np.float32) for sequence in batch]
        answer = self._ask("forward", self._data(batch, nothing, nothing), "importance_sampling")
        return [
            np.asarray(row["logprobs"].data, np.float32)
            for row in answer.loss_fn_outputs[: len(batch)]
        ]

    def export(self, directory: Path, form: WeightsForm) -> None:
        """See `Learner.export`: writes the file that a `TinkerSampler` reads. ConfigError for any
        form but `handle` and, before the first, if it is unknown whether the server sums its
        losses."""
        if form != "handle":
            raise ConfigError(
                f"a Tinker server gives handles of its weights, not the {form} weights"
            )
        self._check_sums()
        directory.mkdir(parents=True)
        saved = self._ask("save_weights_for_sampler", new_name())
        (directory / HANDLE_FILE).write_bytes(msgspec.json.encode(Handle(saved.path)))

    def save(self, directory: Path, resumable: bool = True) -> None:
        """Write the handle of weights and optimiser, which stay on the server until deleted there.
        It keeps both or neither."""
        saved = self._ask("save_state", new_name())
        (directory / HANDLE_FILE).write_bytes(msgspec.json.encode(Handle(saved.path, self.steps)))

    def load(self, directory: Path) -> None:
        """See `Learner.load`: the server loads them into a new adapter."""
        handle = read_handle(directory)
        try:
            restored = self._service.create_training_client_from_state_with_optimizer(handle.path)
        except self._sdk.TinkerError as error:
            raise ConfigError(
                f"checkpoint {directory} cannot be resumed from: the server says {error}"
            ) from None
        self._client = restored
        self.steps = handle.steps

    def _ask(self, method: str, *arguments: Any) -> Any:
        """The final answer of the server to a call of its training client."""
        with errors_translated(self._sdk):
            if self._client is None:
                self._client = self._create()
            return getattr(self._client, method)(*arguments).result()

    def _check_sums(self) -> None:
        """ConfigError unless the server is known to sum its losses, or reports a sum, which
        averaging servers do not. This request has gradient 0."""
        if self._sums:
            return
        nothing = self._datum(np.zeros(2, np.int64), *np.zeros((3, 1), np.float32))
        if not any(
            "loss" in name
            for name in self._ask("forward_backward", [nothing], "importance_sampling").metrics
        ):
            raise ConfigError(
                "learner: this server does not report the sum of its losses: it may average them, "
                "like SkyRL's JAX backend. Say which: reduction: mean, or reduction: sum"
            )
        self._sums = True

    def _data(
        self,
        batch: Sequence[TrainingSequence],
        logprobs: Sequence[FloatArray],
        advantages: Sequence[FloatArray],
    ) -> Any:
        """The request's data; both arrays are float32[L − 1] per sequence. A server that averages
        gets rescaled advantages and a number of sequences that is a power of two, because it
        compiles for each."""
        count = max(_FEWEST, 1 << (len(batch) - 1).bit_length()) if self._averages else len(batch)
        data: list[Any] = []
        for sequence, old, own in zip(batch, logprobs, advantages, strict=True):
            trained = np.zeros(len(sequence) - 1, np.float32)
            trained[sequence.positions - 1] = 1
            if sequence.observed is not None:
                trained[sequence.observed.positions - 1] = 1
            undone = len(trained) * count if self._averages else 1
            data.append(
                self._datum(sequence.token_ids, old * trained, own * np.float32(undone), trained)
            )
        if count > len(batch):
            short = min(batch, key=len)
            nothing = np.zeros((3, len(short) - 1), np.float32)
            data += [self._datum(short.token_ids, *nothing)] * (count - len(batch))
        return data

    def _datum(
        self, token_ids: Any, logprobs: FloatArray, advantages: FloatArray, sampled: FloatArray
    ) -> Any:
        """Row i is for the token after the i-th, float32[L − 1]. The mask of sampled tokens is for
        verl's server, which refuses a sequence of zeros without one."""
        inputs = {
            "target_tokens": token_ids[1:].astype(np.int64),
            "logprobs": logprobs,
            "advantages": advantages,
        }
        if self._masked:
            inputs["mask"] = sampled
        types = self._sdk.types
        prompt = types.ModelInput.from_ints(token_ids[:-1].tolist())
        return types.Datum(
            model_input=prompt,
            loss_fn_inputs={
                name: types.TensorData.from_numpy(array) for name, array in inputs.items()
            },
        )


def gradient(
    batch: Sequence[TrainingSequence], rows: Sequence[FloatArray], loss: Loss, version: int | None
) -> tuple[list[FloatArray], Totals]:
    """dL/dlogprob of every token after the first, float32[L − 1] per sequence, given the
    log-probabilities `rows`; and the metrics."""
    micro = pack(batch, aggregation_weights(batch, loss.aggregation, loss.constant_length))
    ends = np.cumsum([len(row) for row in rows])
    places = np.array([0, *ends])[micro.rows] + micro.positions - 1
    now = torch.from_numpy(np.concatenate(rows)[places]).requires_grad_()
    totals = Totals(version)
    total = objective(micro, loss, totals, now)
    torch.autograd.backward(total)
    totals.sums["loss"] += float(total.detach())
    assert now.grad is not None
    slopes = np.zeros(ends[-1], np.float32)
    np.add.at(slopes, places, now.grad.numpy())  # two calls may observe one token
    return np.split(slopes, ends[:-1]), totals
