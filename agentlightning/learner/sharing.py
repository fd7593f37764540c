"""The GPUs of a machine, for a learner and for the vLLM that samples beside it.

Knows devices and bytes. Knows no server and no model.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from agentlightning.errors import ConfigError
from agentlightning.learner.memory import GIB, MemoryEstimate

_MARGIN: Final = 2 * GIB  # contexts, and what allocators cannot use


@dataclass(frozen=True)
class Share:
    """What a server gets: `flags` and `environment` to start it with. One that `sleeps` gives its memory away while a
    step is computed."""

    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    sleeps: bool = False


def usual_sampler(*, deterministic: bool, models: int, processes: int | None, devices: int) -> str | None:
    """Of a run on GPUs that names none: vLLM where it is installed. Several models, runs that can be repeated exactly,
    and learners on all of the `devices` have the embedded engine."""
    fits = models == 1 and not deterministic and (processes is None or devices > processes)
    return "vllm" if fits and shutil.which("vllm") is not None else None


def share_gpus(
    estimate: MemoryEstimate | None, processes: int | None, overlaps: bool, *, devices: int, free: int, total: int
) -> Share:
    """Of so many `devices` those that the learner's `processes` leave (None: it has one, in the trainer's); else what
    the learner leaves of the only one, which has so many bytes in `total` and `free`, its weights being there. Where
    sampling `overlaps` steps, the server cannot sleep. ConfigError where nothing is left."""
    if devices > (learners := processes or 1):
        known = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(devices)))
        return Share(environment={"CUDA_VISIBLE_DEVICES": ",".join(known.split(",")[learners:])})
    if processes is not None:
        raise ConfigError(
            f"learner: {processes} processes leave none of the {devices} GPUs to the sampler: take fewer, or name a "
            "server elsewhere, as in sampler: {vllm: http://host:8000/v1}"
        )
    kept = 0
    if estimate is not None:
        in_steps = 0 if overlaps else estimate.gradients + estimate.activations + estimate.logits
        kept = estimate.total - estimate.weights - in_steps
    part = (free - kept - _MARGIN) / total
    if part <= 0.05:
        raise ConfigError(
            f"training keeps {kept / GIB:.1f} GiB beside its weights, which leaves nothing of the GPU's "
            f"{free / GIB:.1f} to the sampler. What helps: lora: {{}}, or a sampler elsewhere ({{vllm: http://host:8000/v1}})"
        )
    flags = ("--gpu-memory-utilization", f"{part:.3f}")
    return Share(flags) if overlaps else Share((*flags, "--enable-sleep-mode"), sleeps=True)
