"""From a request to a call that is under way, and from its answer to a stored span.

Ties models, attribution, capture and the store together. Knows no HTTP: `gateway.routes` speaks it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final

import msgspec

from agentlightning.errors import AgentLightningError, BackendError
from agentlightning.gateway.admission import Admitted, admit, admit_relayed
from agentlightning.gateway.attribution import Attributor, Caller, is_worker
from agentlightning.gateway.backend import LEFT_OPEN, SESSION_HEADER, RelayedAnswer, RelayedCall, Sampling
from agentlightning.gateway.callers import caller_attributes
from agentlightning.gateway.capture import CallRecord
from agentlightning.gateway.conversations import Conversations
from agentlightning.gateway.endpoints.base import Endpoint, Head
from agentlightning.gateway.endpoints.passed_through import HEADERS, read_fields, read_request
from agentlightning.gateway.generation import call_seed
from agentlightning.gateway.holding import Holding
from agentlightning.gateway.models import ANY, ModelEntry, ModelTable
from agentlightning.gateway.request import NEUTRAL_PENALTIES, NOT_JSON, CallRefused, CallRequest
from agentlightning.gateway.running import CallStatistics, Recorder, RunningCall
from agentlightning.semconv import CALL_REFUSED, ERROR_TYPE, FROZEN_HEADER, HTTP_STATUS
from agentlightning.tracing.context import AttemptTracer
from agentlightning.tracing.dialects import items, json_of
from agentlightning.types import Attributes, Credential, SpanStatus

_MOST_REFUSALS: Final = 100  # of one attempt that are recorded
_LONGEST: Final = 1000  # characters of a reason, which may quote what an agent sent


class CallOpener:
    """Turns requests into running calls. Without `recorders`, one for the calls of attempts and one for those that no
    attempt made, nothing is captured."""

    def __init__(
        self,
        models: ModelTable,
        attributor: Attributor,
        recorders: tuple[Recorder, Recorder] | None,
        holding: Holding,
        conversations: Conversations,
    ) -> None:
        self.statistics = CallStatistics()
        self._conversations = conversations
        self._models = models
        self._holding = holding
        self._attributor = attributor
        self._recorders = recorders
        self._run = secrets.token_hex(4)  # two gateways may number the calls of one attempt: their ids differ in this

    async def admit(self, headers: Mapping[str, str]) -> None:
        """CallRefused (401, 403) for a caller who would need a key, or to be of this machine."""
        await self._attributor.check_key(headers)

    async def open(
        self, endpoint: Endpoint, body: bytes, headers: Mapping[str, str], path_ids: tuple[str, str] | None
    ) -> RunningCall:
        """Check, attribute and start a call; use it as `async with`. `headers` has lower-case names.

        Raises BackendError (and its kin CallRefused) for everything that cannot be answered."""
        caller, key = await self._attributor.attribute(path_ids, headers)
        request, entry, fields = await self._read(caller, key, endpoint, body, headers)
        held_seconds = 0.0
        while (gate := self._models.gate(entry.name)).held:
            held_seconds += await self._holding.wait(gate, caller.attempt)
            # Meanwhile the attempt may have ended, and the model may be another.
            caller, key = await self._attributor.attribute(path_ids, headers)
            request, entry, fields = await self._read(caller, key, endpoint, body, headers)
        admitted = _admitted(request, entry, caller)
        attempt = caller.attempt
        call_index = next(caller.call_indices) if attempt else None
        sampling, overridden = LEFT_OPEN, dict[str, Any]()
        if fields is None:  # what is passed on says itself how it is sampled
            sampling, overridden = _effective_sampling(request, entry, caller, call_index)
        request_id = f"{attempt[1]}-{call_index}" if attempt else secrets.token_hex(12)
        response_id = endpoint.id_prefix + (f"{request_id}-{self._run}" if attempt else request_id)
        head = Head(response_id, _model_of(request, entry), int(time.time()))
        call = msgspec.structs.replace(
            request,
            request_id=request_id,
            model=head.model,
            sampling=sampling,
            session=_session(caller, key, headers),
            tools=admitted.tools,
            tool_choice=admitted.tool_choice,
            extra=_extra(request, admitted, entry, caller),
        )
        record = CallRecord(
            caller=caller,
            call_index=call_index,
            endpoint=endpoint,
            request=request,
            head=head,
            entry=entry,
            sampling=sampling,
            overridden=overridden,
            traceparent=headers.get("traceparent"),
            discards=caller.lost,
            dropped=[*admitted.dropped, *request.dropped],
            one_tool_call=admitted.one_tool_call,
            held_seconds=held_seconds,
            made_by=caller_attributes(headers, _messages(request, fields)),
        )
        caller.lost = []
        recorder = self._recorders[0 if attempt else 1] if self._recorders else None
        running = RunningCall(record, call, gate, recorder, self.statistics)
        running.remember = partial(self._conversations.remember, caller, request, head)
        if fields is not None:
            if _is_guarded(entry, caller):
                fields, record.dropped = admit_relayed(fields)
            running.relayed = RelayedCall(endpoint.path, head.model, fields, _let_through(headers), call.session)
        return running

    async def count_tokens(
        self, endpoint: Endpoint, body: bytes, headers: Mapping[str, str], path_ids: tuple[str, str] | None
    ) -> int:
        """How many tokens the prompt of a call would have; nothing is numbered or captured. BackendError as in `open`,
        and where the backend cannot count."""
        caller, key = await self._attributor.attribute(path_ids, headers)
        request, entry, fields = await self._read(caller, key, endpoint, body, headers)
        model = _model_of(request, entry)
        if fields is not None:
            async with entry.backend.relay(RelayedCall(endpoint.path, model, fields, _let_through(headers))) as answer:
                return await _count(answer)
        admitted = _admitted(request, entry, caller)
        return await entry.backend.count_tokens(
            msgspec.structs.replace(
                request, model=model, session=_session(caller, key, headers), extra=admitted.extra, tools=admitted.tools
            )
        )

    async def note_refusal(
        self, path: str, headers: Mapping[str, str], path_ids: tuple[str, str] | None, error: BackendError
    ) -> None:
        """Record in the attempt of a request why it was refused: of each attempt the first 100, so that no agent fills
        the store. Those that no attempt made leave nothing."""
        with suppress(AgentLightningError):  # whose key is wrong, or a store that does not answer
            caller, _ = await self._attributor.attribute(path_ids, headers)
            if self._recorders and caller.attempt and caller.refused < _MOST_REFUSALS:
                caller.refused += 1
                said: Attributes = {CALL_REFUSED: path[:_LONGEST], ERROR_TYPE: error.code, HTTP_STATUS: error.status}
                status = SpanStatus(status_code="ERROR", description=str(error)[:_LONGEST])
                span = AttemptTracer(*caller.attempt).record(CALL_REFUSED, said, status=status)
                await self._recorders[0].record(span)

    async def _read(
        self, caller: Caller, key: Credential | None, endpoint: Endpoint, body: bytes, headers: Mapping[str, str]
    ) -> tuple[CallRequest, ModelEntry, dict[str, msgspec.Raw] | None]:
        """What is asked, and who answers it; and the request's fields, if that one does so in the agent's protocol."""
        if any(endpoint.path in entry.backend.relays for entry in self._models):
            fields = read_fields(body)
            request = read_request(fields)
            entry = self._resolve(request.model, key, headers)
            if endpoint.path in entry.backend.relays:
                return request, entry, fields
        request = await self._conversations.join(caller, endpoint.read(body))
        return request, self._resolve(request.model, key, headers), None

    def _resolve(self, model: str, key: Credential | None, headers: Mapping[str, str]) -> ModelEntry:
        """Who answers; a call that says it is none of the policy's is not trained, and sampled as it asks. CallRefused
        (403) where an agent says so of the policy."""
        entry = self._models.resolve(model)
        if headers.get(FROZEN_HEADER) != "true":
            return entry
        if entry.trainable and entry.name != ANY and not (is_worker(key) or (key is not None and key.rewards)):
            raise CallRefused(
                f"an agent cannot take its calls of {entry.name!r} out of training ({FROZEN_HEADER}): ask a model that "
                "is registered with trainable=False, or use a key with the scope worker, or one that gives rewards",
                status=403,
                code="key_scope",
            )
        return replace(entry, trainable=False)


def _is_guarded(entry: ModelEntry, caller: Caller) -> bool:
    """Whether the model is an engine of ours, and asked by somebody who may not send it all there is. Who only has an
    agent recorded (`ANY`) has it recorded as it is."""
    return entry.backend.captures_tokens and entry.name != ANY and (entry.trainable or caller.attempt is not None)


def _admitted(request: CallRequest, entry: ModelEntry, caller: Caller) -> Admitted:
    if _is_guarded(entry, caller):
        return admit(request, trained=entry.trainable, training=_learns(entry, caller))
    hints = frozenset[str]() if entry.backend.captures_tokens else request.hints.intersection(request.extra)
    extra = {name: value for name, value in request.extra.items() if name not in hints}
    one_tool_call = entry.backend.captures_tokens and extra.get("parallel_tool_calls") is False
    return Admitted(extra, request.tools, request.tool_choice, one_tool_call, sorted(hints))


def _learns(entry: ModelEntry, caller: Caller) -> bool:
    """Whether the policy learns from the answer: then it is sampled freely, whatever the agent wishes it to be."""
    return entry.trainable and entry.name != ANY and caller.mode == "train"


def _extra(request: CallRequest, admitted: Admitted, entry: ModelEntry, caller: Caller) -> dict[str, Any]:
    """What is sent beside messages, tools and sampling. What is trained has no penalty: vLLM takes those that are left
    out from the model's generation config."""
    if _learns(entry, caller):
        return {**NEUTRAL_PENALTIES, **admitted.extra}
    return {**admitted.extra, **({} if _run_sampling(entry, caller) else request.shaping)}


def _run_sampling(entry: ModelEntry, caller: Caller) -> Sampling | None:
    """What the run decides about sampling: None in test mode, without an attempt, or where the entry leaves it open."""
    return {"train": entry.train, "val": entry.val}.get(caller.mode or "test")


def _effective_sampling(
    request: CallRequest, entry: ModelEntry, caller: Caller, call_index: int | None
) -> tuple[Sampling, dict[str, Any]]:
    """(the sampling in effect, what the agent asked instead where that differs).

    Where the run decides, its temperature, top_p, top_k and seeds hold, without penalties; elsewhere the agent's do."""
    asked, decided, overridden = request.sampling, _run_sampling(entry, caller), dict[str, Any]()
    sampling = asked
    if decided is not None:
        limit = decided.max_tokens if asked.max_tokens is None else asked.max_tokens
        if decided.max_tokens is not None and limit is not None:
            limit = min(limit, decided.max_tokens)
        sampling = msgspec.structs.replace(decided, max_tokens=limit, stop=asked.stop, n=asked.n)
        for name in ("temperature", "top_p", "top_k", "max_tokens", "seed"):
            value = getattr(asked, name)
            if value is not None and value != getattr(sampling, name):
                overridden[name] = value
    if decided is not None or _learns(entry, caller):
        overridden |= request.shaping
    seeded = entry.backend.seeded or (caller.deterministic and entry.backend.captures_tokens)
    if sampling.seed is None and call_index is not None and seeded:
        sampling = msgspec.structs.replace(sampling, seed=call_seed(caller.run_seed, caller.sample, call_index))
    return sampling, overridden


class _Counted(msgspec.Struct):
    input_tokens: int


async def _count(answer: RelayedAnswer) -> int:
    body = b"".join([part async for part in answer.parts])
    try:
        return msgspec.json.decode(body, type=_Counted).input_tokens
    except NOT_JSON:
        told, refused = body[:500].decode(errors="replace"), 400 <= answer.status < 500
        message = f"the backend did not count ({answer.status}): {told}"
        raise BackendError(message, status=answer.status if refused else 502) from None


def _let_through(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name in HEADERS}


def _model_of(request: CallRequest, entry: ModelEntry) -> str:
    return request.model if entry.name == ANY else entry.name


def _messages(request: CallRequest, fields: Mapping[str, msgspec.Raw] | None) -> list[Any]:
    """What is said, a system prompt first; of requests in any protocol."""
    if fields is None:
        return request.messages
    system = json_of(bytes(fields.get("system") or fields.get("instructions") or b"").decode())
    return [{"role": "system", "content": system}, *items(json_of(request.messages_json))]


def _session(caller: Caller, key: Credential | None, headers: Mapping[str, str]) -> str | None:
    """The attempt; or what a gateway before this one says it is, which no agent may."""
    if caller.attempt:
        return caller.attempt_id
    return headers.get(SESSION_HEADER) if is_worker(key) else None
