"""From what a user calls a model to one that is served and trained: opened, measured against the memory, wired.

Knows policies, engine and learner. It does not know algorithms, stores or gateways.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from agentlightning.data.references import is_reference
from agentlightning.errors import ConfigError
from agentlightning.learner.base import AdamW, Critic, DType, LoRA, is_tinker, read_learner
from agentlightning.learner.fsdp import FsdpLearner, Settings, check_devices
from agentlightning.learner.losses import Loss
from agentlightning.learner.memory import GIB, MemoryEstimate, available_memory, estimate_memory
from agentlightning.learner.policy import Policy, choose_device, empty_model, empty_policy, load_policy, open_policy
from agentlightning.learner.remote import RemoteSampler, RemoteSampling, read_sampler
from agentlightning.learner.serving import EmbeddedSampler, choose_threads, engine_size, serve_policy
from agentlightning.learner.sharing import Share, other_gpus, part_of_gpu, usual_sampler
from agentlightning.learner.started import ENGINES, StartedServer, find_program
from agentlightning.learner.tinker import TinkerLearner, TinkerSampler, open_tinker, read_tinker, tinker_sdk
from agentlightning.learner.torch import TorchLearner


def on_gpu(device: str | None) -> bool:
    """Whether this, or what is taken where none is named, is one of CUDA."""
    return torch.device(choose_device(device)).type == "cuda"


def _is_made(source: str | Path | Policy) -> bool:
    """Whether a function has made it, or does."""
    return isinstance(source, Policy) or is_reference(str(source))


def read_engines(
    learner: Any,
    sampler: Any,
    dtype: DType | None,
    device: str | None,
    *,
    models: Mapping[str, str | Path | Policy],
    deterministic: bool,
    overlaps: bool,
    **settings: Any,
) -> tuple[int | None, RemoteSampling | None, DType | None]:
    """In how many processes the learner is, what samples for it, and the type of its weights: see `read_learner` and
    `read_sampler`. What is left open is on a GPU bfloat16 and vLLM, if it is installed, for models that are loaded;
    one that a function made stays as it is."""
    common: dict[str, Any] = {"models": len(models), "deterministic": deterministic}
    processes = read_learner(learner, **common, **settings)
    if not any(map(_is_made, models.values())) and on_gpu(device) and not is_tinker(learner):
        dtype = dtype or "bfloat16"
        if sampler is None:
            sampler = usual_sampler(**common, processes=processes, devices=torch.cuda.device_count())
    return processes, read_sampler(sampler, **common, overlaps=overlaps), dtype


@dataclass(frozen=True)
class Opening:
    """How models are opened; the fields are those of `Trainer`, `serve_policy` and `TorchLearner`. Only where they are
    `trained` memory is set aside for it."""

    optimizer: AdamW
    trained: bool
    reference: bool
    concurrency: int
    seed: int
    critic: Critic | None = None
    own_weights: bool = False
    deterministic: bool = False
    lora: LoRA | None = None
    dtype: DType | None = None
    max_sequence_length: int | None = None
    device: str | None = None
    threads: int | None = None
    sampling: RemoteSampling | None = None
    processes: int | None = None
    learner: str | Mapping[str, Any] | None = None
    loss: Loss | None = None
    directory: Path = Path()

    def check(self, sources: Iterable[str | Path | Policy]) -> None:
        """ConfigError where what it needs is not on this machine, or where these models do not go with it."""
        if is_tinker(self.learner):
            read_tinker(self.learner, self)
            if any(map(_is_made, sources)):
                raise ConfigError("learner: a Tinker server trains a model of its own: give its name for it as `model`")
            tinker_sdk()
        else:
            choose_device(self.device)
        if self.sampling is not None and self.sampling.starts:
            find_program(self.sampling.kind, self.sampling.program)
            self._other_gpus()
        if self.processes is not None and self.trained:
            check_devices(choose_device(self.device), self.processes)

    def _other_gpus(self) -> Share | None:
        """What a server that is started gets beside the learner's GPUs; None where it shares the only one."""
        assert self.sampling is not None
        told = "CUDA_VISIBLE_DEVICES" in self.sampling.environment
        if self.sampling.kind != "vllm" or told or not on_gpu(self.device):
            return Share()
        first = torch.device(choose_device(self.device)).index or 0
        return other_gpus(self.processes, devices=torch.cuda.device_count(), first=first)

    @contextmanager
    def open(
        self, source: str | Path | Policy, phase: Callable[[str], None]
    ) -> Generator[tuple[EmbeddedSampler | RemoteSampler | TinkerSampler, TorchLearner | FsdpLearner | TinkerLearner]]:
        """Inside, the model is served and ready to be trained; `phase` is told what is going on. A given `Policy` may
        be opened again afterwards: it has the weights it was trained to, but no adapter that it did not come with; with
        a learner in `processes` of its own it is what it was.

        ConfigError where it cannot be had, or would not fit into the memory there is."""
        made = _is_made(source)
        if is_tinker(self.learner):
            learning = read_tinker(self.learner, self)
            phase("reach the Tinker server")
            with open_tinker(learning, str(source), self) as opened:
                yield opened
            return
        spread = self.processes is not None and self.trained
        if made:
            phase("make the model")
            device = self.device if not spread else None if isinstance(source, Policy) else "cpu"
            source = open_policy(source, seed=self.seed, device=device, dtype=self.dtype)
        estimate, told = self._check_memory(source) if self.trained else (None, "")
        if self.sampling is None and on_gpu(self.device):
            told += ", sampled by the embedded engine, which is made for laptops: see Samplers in the docs for vLLM"
        phase(f"{'serve' if made else 'load'} the model{told}")
        if spread:
            source = self._written(source, "model") if isinstance(source, Policy) else str(source)
            with self._spread(source, estimate) as opened:
                yield opened
            return
        policy = open_policy(source, seed=self.seed, device=self.device, dtype=self.dtype, lora=self.lora)
        with ExitStack() as stack:
            if policy.adapter is not None and policy is not source:
                stack.callback(policy.adapter.unload)
            sampler = self._sampler(stack, policy, None if made else str(source), estimate)
            learner = TorchLearner(policy, self.optimizer, reference=self.reference, critic=self.critic)
            stack.callback(learner.close)
            yield sampler, learner

    @contextmanager
    def _spread(
        self, source: str, estimate: MemoryEstimate | None
    ) -> Generator[tuple[EmbeddedSampler | RemoteSampler, FsdpLearner]]:
        """With a learner in processes of its own; this one has the weights of an embedded sampler at most."""
        device, dtype = choose_device(self.device), self.dtype or "float32"
        if self.sampling is None:
            policy = load_policy(source, device=device, dtype=dtype)
        else:
            policy = empty_policy(source, dtype=dtype)
        settings = Settings(source, self.optimizer, self.reference, device, dtype, self.threads)
        with ExitStack() as stack:
            learner = FsdpLearner(policy, settings, self.processes or 1, self.directory / "fsdp.log")
            stack.callback(learner.close)
            sampler = self._sampler(stack, policy, source, estimate)
            yield replace(sampler, takes="whole") if isinstance(sampler, EmbeddedSampler) else sampler, learner

    def _sampler(
        self, stack: ExitStack, policy: Policy, place: str | None, estimate: MemoryEstimate | None
    ) -> EmbeddedSampler | RemoteSampler:
        if self.sampling is not None:
            choose_threads(policy.model, self.threads)
            if not self.sampling.starts:
                return RemoteSampler(self.sampling, policy, max_sequence_length=self.max_sequence_length)
            share = self._other_gpus()
            if share is None:
                weights = sum(one.numel() * one.itemsize for one in policy.model.parameters())
                free, total = torch.cuda.mem_get_info(choose_device(self.device))
                share = part_of_gpu(estimate, self.own_weights, weights=weights, free=free, total=total)
            return RemoteSampler(self.sampling, policy, self._start(stack, policy, place, share), sleeps=share.sleeps)
        sampler = serve_policy(
            policy,
            concurrency=self.concurrency,
            max_sequence_length=self.max_sequence_length,
            threads=self.threads,
            seed=self.seed,
            own_weights=self.own_weights and not self.processes,
            deterministic=self.deterministic,
        )
        stack.callback(sampler.service.close)
        return sampler

    def _start(self, stack: ExitStack, policy: Policy, place: str | None, share: Share) -> StartedServer:
        """A server for the policy, which was loaded from `place`, or is saved for it."""
        assert self.sampling is not None
        kind = self.sampling.kind
        if place is None:
            place = self._written(policy, f"{kind}-model", merged=kind != "vllm")  # which is given the adapter too
        _, length = engine_size(policy.model, 1, self.max_sequence_length)
        dtype = str(policy.model.dtype).removeprefix("torch.")
        flags = ["--dtype", dtype, ENGINES[kind].length, str(length), *share.flags]
        if policy.adapter is not None and kind == "vllm":  # which takes certain ranks, of which these are some
            rank = max(8, 1 << (policy.adapter.config.rank - 1).bit_length())
            flags += ["--enable-lora", "--max-loras", "2", "--max-lora-rank", str(rank)]
        server = StartedServer(
            kind,
            self.sampling.program,
            place,
            [*flags, *self.sampling.flags],
            environment={**share.environment, **self.sampling.environment},
            log=self.directory / f"{kind}.log",
        )
        stack.callback(server.stop)
        return server

    def _written(self, policy: Policy, name: str, *, merged: bool = True) -> str:
        """A directory that holds the model, an adapter `merged` into it or left out."""
        model, adapter = policy.model, policy.adapter
        if adapter is not None:
            model = adapter.publish() if merged else adapter.base()
        place = self.directory / name
        place.mkdir(parents=True, exist_ok=True)
        replace(policy, model=model, adapter=None).save(place)
        return str(place)

    def _check_memory(self, source: str | Path | Policy) -> tuple[MemoryEstimate, str]:
        model, device = self._shapes(source)
        available = available_memory(device)  # before anything is measured there
        slots, length = engine_size(model, self.concurrency, self.max_sequence_length)
        estimate = estimate_memory(
            model,
            self.optimizer,
            lora=self.lora,
            reference=self.reference,
            critic=self.critic,
            own_weights=self.own_weights or self.processes is not None,
            slots=0 if self.sampling else slots,
            max_sequence_length=length,
            device=device,
        )
        if self.processes is not None:
            estimate = estimate.over(self.processes, one_memory=device.type == "cpu")
        if available is None:
            return estimate, f" (training takes up to {estimate.total / GIB:.1f} GiB)"
        estimate.check(available, loaded=isinstance(source, Policy) and self.processes is None)
        return estimate, f" (training takes up to {estimate.total / GIB:.1f} GiB, {available / GIB:.1f} are there)"

    def _shapes(self, source: str | Path | Policy) -> tuple[PreTrainedModel, torch.device]:
        """The model without an adapter, or one that only has its shapes, and where it will be."""
        if isinstance(source, Policy):
            return source.adapter.merged if source.adapter is not None else source.model, source.model.device
        return empty_model(source, dtype=self.dtype or "float32"), torch.device(choose_device(self.device))
