"""From a request to a call: its attempt, its model, and what the backend is sent. `gateway.serving`
speaks HTTP."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec

from agentlightning.errors import AgentLightningError, BackendError
from agentlightning.gateway.admission import admit, admit_relayed
from agentlightning.gateway.answer import Answer
from agentlightning.gateway.attribution import Attributor, Caller, is_worker
from agentlightning.gateway.backend import SESSION_HEADER, NotRelayedError, RelayedCall, Sampling
from agentlightning.gateway.backends.words import words_of
from agentlightning.gateway.callers import caller_attributes
from agentlightning.gateway.capture import Call
from agentlightning.gateway.chat.repairs import canonical
from agentlightning.gateway.endpoints.base import Endpoint
from agentlightning.gateway.endpoints.passed_through import HEADERS, read_passed_through
from agentlightning.gateway.endpoints.response_items import with_references
from agentlightning.gateway.gates import Holding
from agentlightning.gateway.generation import call_seed
from agentlightning.gateway.models import ANY, ModelAwayError, ModelEntry, ModelTable
from agentlightning.gateway.previous_responses import Conversations
from agentlightning.gateway.recorder import CallStatistics, Recorder
from agentlightning.gateway.request import (
    NEUTRAL_PENALTIES,
    NOT_JSON,
    OBJECT,
    CallRefused,
    CallRequest,
    check_parts,
    check_urls,
)
from agentlightning.prompts.replacing import Replaced, Replacer
from agentlightning.prompts.watching import MetShare
from agentlightning.semconv import CALL_REFUSED, ERROR_TYPE, FROZEN_HEADER, HTTP_STATUS
from agentlightning.store.base import LightningStore
from agentlightning.store.redaction import text_without_secrets
from agentlightning.tracing.context import AttemptTracer
from agentlightning.types import Attributes, Credential, SpanStatus

_LARGE: Final = 2**18  # bytes of a body whose texts are replaced in a thread
_MOST_REFUSALS: Final = 100  # of one attempt that are recorded
_NOTING_SECONDS: Final = 5.0  # for a refusal to be recorded
_LONGEST: Final = 1000  # characters of a reason, which may quote what an agent sent


class _Incoming(NamedTuple):
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


class Calls:
    """Opens calls. The calls of attempts are committed to the `store`, those that no attempt made
    are queued; without a store nothing is captured. `prompts` are put into the calls of whoever has
    no candidate of their own."""

    def __init__(
        self,
        models: ModelTable,
        store: LightningStore | None,
        attributor: Attributor,
        holding: Holding,
        prompts: Replacer | None = None,
    ) -> None:
        self.models = models
        self.met = MetShare()
        self._prompts = prompts
        self.attributor = attributor
        self.statistics = CallStatistics()
        self.queue = Recorder(store, commit=False) if store is not None else None
        self._committed = Recorder(store, commit=True) if store is not None else None
        self._conversations = Conversations()
        self._holding = holding
        # two gateways may number the calls of one attempt: their ids differ in this
        self._run = secrets.token_hex(4)

    async def open(
        self,
        endpoint: Endpoint,
        body: bytes,
        headers: Mapping[str, str],
        path_ids: tuple[str, str] | None,
    ) -> Call:
        """Check, attribute and start a call; use it as `async with`. `headers` has lower-case
        names.

        Raises BackendError (and its kin CallRefused) for everything that cannot be answered."""
        held_seconds = 0.0
        while True:  # while a call is held its attempt may end, and the model may become another
            caller, key = await self.attributor.attribute(path_ids, headers)
            try:
                incoming = await self._incoming(endpoint, body, headers, caller, key)
                gate = self.models.gate(incoming.entry.name)
            except ModelAwayError as error:
                gate = error.gate
            else:
                if not gate.held:
                    break
            held_seconds += await self._holding.wait(gate, caller.attempt)
        request = incoming.request
        entry = incoming.entry
        admitted, dropped = incoming.admitted
        attempt = caller.attempt
        if self._prompts is not None and caller.prompts is None and endpoint.operation == "chat":
            self.met.add(incoming.replaced is not None)
        # Numbered once it is admitted: an attempt that seems to lack a call is not trained.
        index = await self.attributor.number(caller) if attempt else None
        request_id = f"{attempt[1]}-{index}" if attempt else secrets.token_hex(12)
        response_id = endpoint.id_prefix + (f"{request_id}-{self._run}" if attempt else request_id)
        sent, overridden = _sent(incoming, admitted, request_id, index)
        relayed = None
        if request.relayed is not None:
            fields = request.relayed
            if incoming.guarded:
                fields, dropped = admit_relayed(fields)
            relayed = RelayedCall(
                endpoint.path, incoming.model, fields, _let_through(headers), incoming.session
            )
        discards = caller.lost
        caller.lost = []
        return Call(
            caller=caller,
            endpoint=endpoint,
            request=request,
            sent=sent,
            entry=entry,
            answer=Answer(sent.sampling.n, response_id, incoming.model, int(time.time())),
            gate=gate,
            recorder=self._committed if attempt else self.queue,
            statistics=self.statistics,
            remember=self._conversations.remember,
            index=index,
            overridden=overridden,
            dropped=[*dropped, *request.dropped],
            discards=discards,
            held_seconds=held_seconds,
            made_by=caller_attributes(headers, request.messages, incoming.replaced),
            traceparent=headers.get("traceparent"),
            relayed=relayed,
            replaced=incoming.replaced,
            lost=self.models.lost,
        )

    def translate(self, call: Call, body: bytes, headers: Mapping[str, str]) -> None:
        """Make a call whose backend turned out to have no such endpoint one that it is asked by
        chat completions. CallRefused for what has no such form."""
        request = self._read(call.endpoint, body, call.caller, call.replaced)
        incoming = _Incoming(call.caller, None, headers, request, call.entry, call.replaced)
        admitted, dropped = incoming.admitted
        call.sent, call.overridden = _sent(incoming, admitted, call.sent.request_id, call.index)
        call.request = request
        call.relayed = None
        call.dropped = [*dropped, *request.dropped]
        call.made_by = caller_attributes(headers, request.messages, call.replaced)
        answer = call.answer
        call.answer = Answer(call.sent.sampling.n, answer.response_id, answer.model, answer.created)

    async def count_tokens(
        self,
        endpoint: Endpoint,
        body: bytes,
        headers: Mapping[str, str],
        path_ids: tuple[str, str] | None,
    ) -> bytes:
        """The answer that says how many tokens the prompt of a call would have; nothing is numbered
        or captured. BackendError as in `open`, and where the backend cannot count."""
        caller, key = await self.attributor.attribute(path_ids, headers)
        incoming = await self._incoming(endpoint, body, headers, caller, key)
        backend = incoming.entry.backend
        fields = incoming.request.relayed
        if fields is None:
            count = await backend.count_tokens(_sent(incoming, incoming.admitted[0], "", None)[0])
            return msgspec.json.encode({endpoint.counted_as: count})
        relayed = RelayedCall(endpoint.path, incoming.model, fields, _let_through(headers))
        try:
            async with backend.relay(relayed) as answer:
                body = b"".join([part async for part in answer.parts])
        except NotRelayedError:  # which it will not be again
            return await self.count_tokens(endpoint, body, headers, path_ids)
        if answer.status != 200:
            message = f"the backend did not count ({answer.status}): {words_of(body).message[:500]}"
            raise BackendError(message, status=answer.status if 400 <= answer.status < 500 else 502)
        return body

    async def note_refusal(
        self,
        path: str,
        headers: Mapping[str, str],
        path_ids: tuple[str, str] | None,
        error: BackendError,
    ) -> None:
        """Record in the attempt of a request why it was refused: of each attempt the first 100, so
        that no agent fills the store. Those that no attempt made leave nothing."""
        if self._committed is None:
            return
        # A key may be wrong, and a store may not answer: the refusal does not wait for it.
        with suppress(AgentLightningError, TimeoutError):
            async with asyncio.timeout(_NOTING_SECONDS):
                caller, _ = await self.attributor.attribute(path_ids, headers)
                if not caller.attempt or caller.refused >= _MOST_REFUSALS:
                    return
                caller.refused += 1
                reason: Attributes = {
                    CALL_REFUSED: path[:_LONGEST],
                    ERROR_TYPE: error.code,
                    HTTP_STATUS: error.status,
                }
                why = text_without_secrets(str(error))[:_LONGEST]
                status = SpanStatus(status_code="ERROR", description=why)
                span = AttemptTracer(*caller.attempt).record(CALL_REFUSED, reason, status=status)
                await self._committed.record(span)

    async def _incoming(
        self,
        endpoint: Endpoint,
        body: bytes,
        headers: Mapping[str, str],
        caller: Caller,
        key: Credential | None,
    ) -> _Incoming:
        prompts = caller.prompts or self._prompts
        replaced = None
        if prompts is not None and len(body) > _LARGE:
            replaced = await asyncio.to_thread(_replaced, prompts, endpoint, body)
        elif prompts is not None:
            replaced = _replaced(prompts, endpoint, body)
        if any(endpoint.path in entry.backend.relays for entry in self.models):
            request = read_passed_through(body if replaced is None else replaced.body)
            entry = self._resolve(request.model, caller, key, headers)
            if endpoint.path in entry.backend.relays:
                return _Incoming(caller, key, headers, request, entry, replaced)
        request = self._read(endpoint, body, caller, replaced)
        entry = self._resolve(request.model, caller, key, headers)
        return _Incoming(caller, key, headers, request, entry, replaced)

    def _read(
        self, endpoint: Endpoint, body: bytes, caller: Caller, replaced: Replaced | None
    ) -> CallRequest:
        """The request, in the words of the caller's candidate, with what it goes on from, or refers
        to, of the caller's earlier responses."""
        if replaced is not None:
            body = replaced.body
        body = with_references(body, partial(self._conversations.answer, caller))
        request = endpoint.read(body)
        if replaced is not None:
            request = endpoint.repeating(request, replaced)
        check_urls(request.messages)
        return self._conversations.join(caller, request)

    def _resolve(
        self, model: str, caller: Caller, key: Credential | None, headers: Mapping[str, str]
    ) -> ModelEntry:
        """The model that answers; a call with FROZEN_HEADER is not trained, and sampled as it asks.
        CallRefused (403) if an agent sends that to the policy."""
        entry = self.models.resolve(model, caller.models)
        if headers.get(FROZEN_HEADER) != "true":
            return entry
        if (
            entry.trainable
            and entry.name != ANY
            and not (is_worker(key) or (key is not None and key.rewards))
        ):
            raise CallRefused(
                f"an agent cannot take its calls of {entry.name!r} out of training "
                f"({FROZEN_HEADER}): ask a model that is registered with trainable=False, or use "
                "a key with the scope worker, or one that gives rewards",
                status=403,
                code="key_scope",
            )
        return replace(entry, trainable=False)


def _replaced(prompts: Replacer, endpoint: Endpoint, body: bytes) -> Replaced | None:
    """The request with the texts of a candidate. None where none of them belongs into it, and for
    what is no request, which its reader says."""
    if endpoint.operation != "chat":
        return None
    check_parts(body)
    try:
        return prompts.replaced(OBJECT.decode(body))
    except NOT_JSON:
        return None


def _sent(
    incoming: _Incoming, request: CallRequest, request_id: str, index: int | None
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


def _effective_sampling(incoming: _Incoming, index: int | None) -> tuple[Sampling, dict[str, Any]]:
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


def _let_through(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name in HEADERS}
