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
_LEAST_CACHE: Final = GIB


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


def other_gpus(processes: int | None, *, devices: int, first: int = 0) -> Share | None:
    """Those of so many `devices` that the learner's `processes` leave (None: it has the `first`, in the trainer's);
    None where it has the only one. ConfigError where several processes leave none."""
    learners = processes or 1
    known = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(devices)))
    if left := [one for place, one in enumerate(known.split(",")) if not first <= place < first + learners]:
        return Share(environment={"CUDA_VISIBLE_DEVICES": ",".join(left)})
    if processes is None:
        return None
    raise ConfigError(
        f"learner: {processes} processes leave none of the {devices} GPUs to the sampler: take fewer, or name a server "
        "elsewhere, as in sampler: {vllm: http://host:8000/v1}"
    )


def part_of_gpu(estimate: MemoryEstimate | None, overlaps: bool, *, weights: int, free: int, total: int) -> Share:
    """What the learner leaves of its GPU, which has so many bytes in `total` and `free`, its `weights` being there.
    Where sampling `overlaps` steps, the server cannot sleep. ConfigError where the weights once more do not fit."""
    kept = 0
    if estimate is not None:
        in_steps = 0 if overlaps else estimate.gradients + estimate.activations + estimate.logits
        kept = estimate.total - estimate.weights - in_steps
    left = free - kept - _MARGIN
    if left < weights + _LEAST_CACHE:
        raise ConfigError(
            f"the GPU has {free / GIB:.1f} GiB free, training keeps {kept / GIB:.1f} of them, and the sampler needs "
            f"{weights / GIB:.1f} for the weights and some for keys and values. What helps: lora: {{}}, or a sampler "
            "elsewhere ({vllm: http://host:8000/v1})"
        )
    flags = ("--gpu-memory-utilization", f"{left / total:.3f}")
    return Share(flags) if overlaps else Share((*flags, "--enable-sleep-mode"), sleeps=True)
