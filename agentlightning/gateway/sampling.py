"""How a call is sampled: what the run decides, and what it leaves to the agent or the backend.

A pure function of a request, a model's entry and the mode of a rollout.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from agentlightning.gateway.attribution import Caller
from agentlightning.gateway.backend import Sampling
from agentlightning.gateway.generation import call_seed
from agentlightning.gateway.models import ModelEntry
from agentlightning.gateway.request import CallRequest


def run_sampling(entry: ModelEntry, caller: Caller) -> Sampling | None:
    """What the run decides about sampling: None in test mode, without an attempt, or where the entry leaves it open."""
    return {"train": entry.train, "val": entry.val}.get(caller.mode or "test")


def effective_sampling(
    request: CallRequest, entry: ModelEntry, caller: Caller, call_index: int | None
) -> tuple[Sampling, dict[str, Any]]:
    """(the sampling in effect, what the agent asked instead where that differs).

    Where the run decides, its temperature, top_p, top_k and seeds hold, without penalties; elsewhere the agent's do."""
    asked, decided, overridden = request.sampling, run_sampling(entry, caller), dict[str, Any]()
    sampling = asked
    if decided is not None:
        limit = decided.max_tokens if asked.max_tokens is None else asked.max_tokens
        if decided.max_tokens is not None and limit is not None:
            limit = min(limit, decided.max_tokens)
        sampling = replace(decided, max_tokens=limit, stop=asked.stop, n=asked.n)
        for name in ("temperature", "top_p", "top_k", "max_tokens", "seed"):
            value = getattr(asked, name)
            if value is not None and value != getattr(sampling, name):
                overridden[name] = value
        overridden |= request.shaping
    seeded = entry.backend.seeded or (caller.deterministic and entry.backend.captures_tokens)
    if sampling.seed is None and call_index is not None and seeded:
        sampling = replace(sampling, seed=call_seed(caller.run_seed, caller.sample, call_index))
    return sampling, overridden
