"""A request with all that is known of it before its call begins, and what its backend is sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from agentlightning.gateway.admission import admit
from agentlightning.gateway.attribution import Caller, is_worker
from agentlightning.gateway.backend import SESSION_HEADER, Sampling
from agentlightning.gateway.chat.repairs import canonical
from agentlightning.gateway.generation import call_seed
from agentlightning.gateway.models import ANY, ModelEntry
from agentlightning.gateway.request import NEUTRAL_PENALTIES, CallRequest
from agentlightning.prompts.replacing import Replaced
from agentlightning.types import Credential


class Incoming(NamedTuple):
    """A request with its caller, key and headers, what was replaced in it, and the model that
    answers."""

    caller: Caller
    key: Credential | None
    headers: Mapping[str, str]
    request: CallRequest
    entry: ModelEntry
    replaced: Replaced | None = None

    @property
    def model(self) -> str:
        return self.request.model if self.entry.name == ANY else self.entry.name

    @property
    def learns(self) -> bool:
        """Whether the policy learns from the answer: then it is sampled freely, whatever the agent
        wishes it to be."""
        return self.entry.trainable and self.entry.name != ANY and self.caller.mode == "train"

    @property
    def guarded(self) -> bool:
        """Whether the model is an engine of ours, whose caller may not send it every field. What is
        only recorded (`ANY`) is recorded unchanged."""
        ours = self.entry.backend.captures_tokens and self.entry.name != ANY
        return ours and (self.entry.trainable or self.caller.attempt is not None)

    @property
    def admitted(self) -> tuple[CallRequest, list[str]]:
        """(what may be sent of the request, names of its fields that are not). CallRefused where
        that is not enough."""
        request = self.request
        dropped = list[str]()
        if self.entry.backend.captures_tokens and request.relayed is None:
            request, dropped = canonical(request)
        if self.guarded:
            request, more = admit(request, trained=self.entry.trainable, training=self.learns)
            dropped += more
        return request, dropped

    @property
    def run_sampling(self) -> Sampling | None:
        """The sampling that the run decides: None in test mode, without an attempt, or where it
        is left open."""
        return {"train": self.entry.train, "val": self.entry.val}.get(self.caller.mode or "test")

    @property
    def session(self) -> str | None:
        """The attempt; or what a gateway before this one says it is, which no agent may."""
        if self.caller.attempt:
            return self.caller.attempt_id
        return self.headers.get(SESSION_HEADER) if is_worker(self.key) else None


def sent_of(
    incoming: Incoming, request: CallRequest, request_id: str, index: int | None
) -> tuple[CallRequest, dict[str, Any]]:
    """(what the backend is sent of an admitted request, the sampling that the agent asked for and
    does not get).

    What is trained has no penalty: vLLM takes those that are left out from the model's generation
    config."""
    sampling = request.sampling
    overridden = dict[str, Any]()
    if request.relayed is None:  # what is passed on says itself how it is sampled
        sampling, overridden = _effective_sampling(incoming, index)
    extra = request.extra
    if incoming.learns:
        extra = {**NEUTRAL_PENALTIES, **extra}
    elif incoming.run_sampling is None:
        extra = {**extra, **request.shaping}
    sent = msgspec.structs.replace(
        request,
        request_id=request_id,
        model=incoming.model,
        session=incoming.session,
        sampling=sampling,
        extra=extra,
    )
    return sent, overridden


def _effective_sampling(incoming: Incoming, index: int | None) -> tuple[Sampling, dict[str, Any]]:
    """Where the run decides, its temperature, top_p, top_k and seeds hold, without penalties;
    elsewhere the agent's."""
    requested = incoming.request.sampling
    decided = incoming.run_sampling
    overridden = dict[str, Any]()
    sampling = requested
    if decided is not None:
        limits = [
            limit for limit in (requested.max_tokens, decided.max_tokens) if limit is not None
        ]
        limit = min(limits, default=None)
        sampling = msgspec.structs.replace(
            decided, max_tokens=limit, stop=requested.stop, n=requested.n
        )
        for name in ("temperature", "top_p", "top_k", "max_tokens", "seed"):
            value = getattr(requested, name)
            if value is not None and value != getattr(sampling, name):
                overridden[name] = value
    if decided is not None or incoming.learns:
        overridden |= incoming.request.shaping
    caller = incoming.caller
    backend = incoming.entry.backend
    seeded = backend.seeded or (caller.deterministic and backend.captures_tokens)
    if sampling.seed is None and index is not None and seeded:
        sampling = msgspec.structs.replace(
            sampling, seed=call_seed(caller.run_seed, caller.sample, index)
        )
    return sampling, overridden
