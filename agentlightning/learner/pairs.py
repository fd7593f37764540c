"""Opens a model as a pair of learner and sampler, ready to be served and trained.

The only module that knows all classes of them. It does not know algorithms, stores or gateways.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from shutil import which
from typing import TypeAlias

import torch

from agentlightning.data.references import is_reference
from agentlightning.errors import ConfigError
from agentlightning.learner.base import Critic
from agentlightning.learner.embedded_sampler import (
    EmbeddedSampler,
    choose_threads,
    engine_size,
    serve_policy,
)
from agentlightning.learner.fsdp import FsdpLearner, Settings, check_devices
from agentlightning.learner.losses import Loss
from agentlightning.learner.memory import GIB, MemoryEstimate, available_memory, estimate_memory
from agentlightning.learner.pair_specs import (
    LearnerSpec,
    SamplerSpec,
    check_combination,
    read_learner,
    read_sampler,
)
from agentlightning.learner.policy import (
    Policy,
    choose_device,
    empty_model,
    empty_policy,
    load_policy,
    open_policy,
)
from agentlightning.learner.policy_config import DType, PolicyConfig
from agentlightning.learner.remote import RemoteSampler
from agentlightning.learner.servers import (
    Share,
    StartedServer,
    find_program,
    other_gpus,
    part_of_gpu,
)
from agentlightning.learner.tinker import TinkerLearner, check_training, open_tinker
from agentlightning.learner.tinker_sampler import TinkerSampler, tinker_sdk
from agentlightning.learner.torch import TorchLearner

Source: TypeAlias = "str | Path | Policy"
Pair: TypeAlias = tuple[
    EmbeddedSampler | RemoteSampler | TinkerSampler,
    TorchLearner | FsdpLearner | TinkerLearner,
]


def _made_by_function(source: Source) -> bool:
    """Whether the policy is made by a function, not loaded."""
    return isinstance(source, Policy) or is_reference(str(source))


@dataclass
class PairOpener:
    """Opens models as the settings of a policy say. Only with a `loss` are they trained and is
    memory reserved for that. With `overlaps`, rollouts continue while the weights change.

    Defaults on a GPU, for loaded models, are bfloat16 and vLLM, if installed; a model made by a
    function keeps its dtype. ConfigError for settings that do not go together."""

    config: PolicyConfig
    models: Mapping[str, Source]
    loss: Loss | None = None
    reference: bool = False
    critic: Critic | None = None
    concurrency: int = 1
    overlaps: bool = False
    directory: Path = Path()
    place: LearnerSpec = field(init=False)
    sampling: SamplerSpec | None = field(init=False)
    dtype: DType | None = field(init=False)

    def __post_init__(self) -> None:
        given = {name: getattr(self.config, name) for name in PolicyConfig.__struct_fields__}
        place = read_learner(given.pop("learner"))
        sampler = given.pop("sampler")
        self.dtype = self.config.dtype
        if (
            not place.remote
            and not any(map(_made_by_function, self.models.values()))
            and self._on_gpu
        ):
            self.dtype = self.dtype or "bfloat16"
            room = place.fsdp is None or torch.cuda.device_count() > place.fsdp
            alone = len(self.models) == 1 and not self.config.deterministic
            if sampler is None and alone and room and which("vllm"):
                sampler = "vllm"
        sampling = read_sampler(sampler)
        check_combination(
            place,
            sampling,
            models=len(self.models),
            loss=self.loss and self.loss.kind,
            aggregation=self.loss and self.loss.aggregation,
            reference=self.reference,
            max_staleness=self.overlaps,
            gradient_checkpointing=self.config.optimizer.gradient_checkpointing,
            **given,
            **{"a critic": self.critic},
        )
        if place.remote and self.loss is not None:
            check_training(place, self.loss, self.config.lora)
        self.place = place
        self.sampling = sampling

    @property
    def _on_gpu(self) -> bool:
        return self._device.type == "cuda"

    @property
    def _device(self) -> torch.device:
        return torch.device(choose_device(self.config.device))

    @property
    def _processes(self) -> int | None:
        """The number of processes of a sharded learner, if it trains."""
        return self.place.fsdp if self.loss is not None else None

    def check(self) -> None:
        """ConfigError if this machine lacks something it needs."""
        if self.place.remote:
            if any(map(_made_by_function, self.models.values())):
                raise ConfigError(
                    "learner: a Tinker server trains its own model: give its name there as `model`"
                )
            tinker_sdk()
        else:
            choose_device(self.config.device)
        if self.sampling is not None and self.sampling.starts:
            find_program(self.sampling.program)
            self._other_gpus()
        if self._processes is not None:
            check_devices(choose_device(self.config.device), self._processes)

    def _other_gpus(self) -> Share | None:
        """The GPUs of a started server, apart from the learner's; None if both share the only
        one."""
        assert self.sampling is not None
        chosen = "CUDA_VISIBLE_DEVICES" in self.sampling.environment
        if chosen or not self._on_gpu:
            return Share()
        first = self._device.index or 0
        return other_gpus(self.place.fsdp, devices=torch.cuda.device_count(), first=first)

    @contextmanager
    def open(self, source: Source, phase: Callable[[str], None]) -> Generator[Pair]:
        """In the block, the model is served and ready to be trained; `phase` reports progress. A
        given `Policy` can be opened again afterwards, with its trained weights and only the adapter
        that it came with; a learner in separate processes leaves it unchanged.

        ConfigError if the model cannot be loaded, or would not fit into memory."""
        config = self.config
        with ExitStack() as stack:
            if self.place.remote:
                phase("reach the Tinker server")
                yield stack.enter_context(open_tinker(self.place, str(source), config))
                return
            made = _made_by_function(source)
            device = config.device
            if made:
                phase("make the model")
                if self._processes is not None:
                    device = None if isinstance(source, Policy) else "cpu"
                source = open_policy(source, seed=config.seed, device=device, dtype=self.dtype)
            estimate, note = self._check_memory(source) if self.loss is not None else (None, "")
            if self.sampling is None and self._on_gpu:
                note += (
                    ", sampled by the embedded engine, which is made for laptops: see Samplers in "
                    "the docs for vLLM"
                )
            phase(f"{'serve' if made else 'load'} the model{note}")
            if self._processes is not None:
                place = (
                    self._save_model(source, "model") if isinstance(source, Policy) else str(source)
                )
                yield self._open_sharded(stack, place, self._processes, estimate)
                return
            policy = open_policy(
                source,
                seed=config.seed,
                device=config.device,
                dtype=self.dtype,
                lora=config.lora,
            )
            if policy.adapter is not None and policy is not source:
                stack.callback(policy.adapter.unload)
            sampler = self._sampler(stack, policy, None if made else str(source), estimate)
            learner = TorchLearner(
                policy, config.optimizer, reference=self.reference, critic=self.critic
            )
            stack.callback(learner.close)
            yield sampler, learner

    def _open_sharded(
        self, stack: ExitStack, source: str, processes: int, estimate: MemoryEstimate | None
    ) -> Pair:
        """A learner in separate processes; this one has at most the weights of an embedded
        sampler."""
        device = choose_device(self.config.device)
        dtype = self.dtype or "float32"
        if self.sampling is None:
            policy = load_policy(source, device=device, dtype=dtype)
        else:
            policy = empty_policy(source, dtype=dtype)
        settings = Settings(
            source, self.config.optimizer, self.reference, device, dtype, self.config.threads
        )
        learner = FsdpLearner(policy, settings, processes, self.directory / "fsdp.log")
        stack.callback(learner.close)
        sampler = self._sampler(stack, policy, source, estimate)
        return replace(sampler, takes="whole") if isinstance(
            sampler, EmbeddedSampler
        ) else sampler, learner

    def _sampler(
        self, stack: ExitStack, policy: Policy, place: str | None, estimate: MemoryEstimate | None
    ) -> EmbeddedSampler | RemoteSampler:
        config = self.config
        if self.sampling is None:
            sampler = serve_policy(
                policy,
                concurrency=self.concurrency,
                max_sequence_length=config.max_sequence_length,
                threads=config.threads,
                seed=config.seed,
                own_weights=self.overlaps and self.place.fsdp is None,
                deterministic=config.deterministic,
            )
            stack.callback(sampler.service.close)
            return sampler
        choose_threads(policy.model, config.threads)
        if not self.sampling.starts:
            return RemoteSampler(
                self.sampling, policy, max_sequence_length=config.max_sequence_length
            )
        share = self._other_gpus()
        if share is None:
            weights = sum(
                parameter.numel() * parameter.itemsize for parameter in policy.model.parameters()
            )
            free, total = torch.cuda.mem_get_info(choose_device(config.device))
            share = part_of_gpu(estimate, self.overlaps, weights=weights, free=free, total=total)
        started = self._start(policy, place, self.sampling, share)
        stack.callback(started.stop)
        return RemoteSampler(self.sampling, policy, started, sleeps=share.sleeps)

    def _start(
        self, policy: Policy, place: str | None, sampling: SamplerSpec, share: Share
    ) -> StartedServer:
        """A server for the policy, which was loaded from `place`, or else is saved for it."""
        if place is None:
            # the adapter is sent separately
            place = self._save_model(policy, "vllm-model", merged=False)
        _, length = engine_size(policy.model, 1, self.config.max_sequence_length)
        dtype = str(policy.model.dtype).removeprefix("torch.")
        flags = ["--dtype", dtype, "--max-model-len", str(length), *share.flags]
        if policy.adapter is not None:  # vLLM supports certain ranks only, among them these
            rank = max(8, 1 << (policy.adapter.config.rank - 1).bit_length())
            flags += ["--enable-lora", "--max-loras", "2", "--max-lora-rank", str(rank)]
        return StartedServer(
            sampling.program,
            place,
            [*flags, *sampling.flags],
            environment={**share.environment, **sampling.environment},
            log=self.directory / "vllm.log",
        )

    def _save_model(self, policy: Policy, name: str, *, merged: bool = True) -> str:
        """Save the model to a directory, with an adapter `merged` or without it."""
        model = policy.model
        adapter = policy.adapter
        if adapter is not None:
            model = adapter.publish() if merged else adapter.base()
        place = self.directory / name
        place.mkdir(parents=True, exist_ok=True)
        replace(policy, model=model, adapter=None).save(place)
        return str(place)

    def _check_memory(self, source: Source) -> tuple[MemoryEstimate, str]:
        if isinstance(source, Policy):
            model = source.adapter.merged if source.adapter is not None else source.model
            device = model.device
        else:
            model = empty_model(source, dtype=self.dtype or "float32")
            device = self._device
        available = available_memory(device)  # before the measurement takes memory there
        slots, length = engine_size(model, self.concurrency, self.config.max_sequence_length)
        estimate = estimate_memory(
            model,
            self.config.optimizer,
            lora=self.config.lora,
            reference=self.reference,
            critic=self.critic,
            own_weights=self.overlaps or self._processes is not None,
            slots=0 if self.sampling else slots,
            max_sequence_length=length,
            device=device,
        )
        if self._processes is not None:
            estimate = estimate.over(self._processes, shared_memory=device.type == "cpu")
        note = f" (training takes up to {estimate.total / GIB:.1f} GiB"
        if available is None:
            return estimate, f"{note})"
        estimate.check(available, loaded=isinstance(source, Policy) and self._processes is None)
        return estimate, f"{note}, {available / GIB:.1f} are free)"
