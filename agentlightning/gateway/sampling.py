"""How a call is sampled: what the run decides, and what it leaves to the agent or the backend.

A pure function of a request, a model's entry and the mode of a rollout.
"""

from __future__ import annotations

from typing import Any, Final

from agentlightning.gateway.attribution import Caller
from agentlightning.gateway.backend import Sampling
from agentlightning.gateway.models import ModelEntry
from agentlightning.gateway.request import CallRequest
from agentlightning.gateway.seeds import call_seed

# Where neither run nor agent decides, the backend does: a server's defaults are its maker's recommendation.
LEFT_OPEN: Final = Sampling(temperature=None, top_p=None, top_k=None)


def decided_by_run(entry: ModelEntry, caller: Caller | None) -> bool:
    return _run_sampling(entry, caller) is not None


def _run_sampling(entry: ModelEntry, caller: Caller | None) -> Sampling | None:
    """What the run decides about sampling: None in test mode, without an attempt, or where the entry leaves it open."""
    if caller is None:
        return None
    return {"train": entry.train, "val": entry.val}.get(caller.mode or "test")


def effective_sampling(
    request: CallRequest, entry: ModelEntry, caller: Caller | None, call_index: int | None
) -> tuple[Sampling, dict[str, Any]]:
    """(the sampling in effect, what the agent asked instead where that differs).

    Where the run decides, its temperature, top_p and top_k hold without penalties; elsewhere the agent's do."""
    decided = _run_sampling(entry, caller)
    temperature, top_p, top_k = request.temperature, request.top_p, request.top_k
    if decided is not None:
        temperature, top_p, top_k = decided.temperature, decided.top_p, decided.top_k
    limits = [limit for limit in (request.max_tokens, decided and decided.max_tokens) if limit is not None]
    seed = request.seed
    if seed is None and caller is not None and call_index is not None and entry.backend.captures_tokens:
        seed = call_seed(caller.run_seed, caller.sample, call_index)
    sampling = Sampling(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        max_tokens=min(limits, default=None),
        stop=request.stop,
        seed=seed,
        n=request.n,
    )
    asked = {name: getattr(request, name) for name in ("temperature", "top_p", "top_k", "max_tokens")}
    overridden = {name: value for name, value in asked.items() if value not in (None, getattr(sampling, name))}
    return sampling, overridden if decided is None else overridden | request.shaping
