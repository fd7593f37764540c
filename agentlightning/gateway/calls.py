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
from typing import Final

import msgspec

from agentlightning.arrays import int32
from agentlightning.errors import AgentLightningError, BackendError
from agentlightning.gateway.admission import admit_relayed
from agentlightning.gateway.answer import Answer
from agentlightning.gateway.attribution import Attributor, Caller, is_worker
from agentlightning.gateway.backend import NotRelayedError, RelayedCall
from agentlightning.gateway.backends.words import words_of
from agentlightning.gateway.callers import caller_attributes
from agentlightning.gateway.capture import Call, asked
from agentlightning.gateway.endpoints.base import Endpoint
from agentlightning.gateway.endpoints.passed_through import HEADERS, read_passed_through
from agentlightning.gateway.endpoints.response_items import with_references
from agentlightning.gateway.gates import Holding
from agentlightning.gateway.incoming import Incoming, sent_of
from agentlightning.gateway.models import ANY, ModelAwayError, ModelEntry, ModelTable
from agentlightning.gateway.previous_responses import Conversations
from agentlightning.gateway.recorder import CallStatistics, Recorder
from agentlightning.gateway.recordings import RecordedCall, key_of
from agentlightning.gateway.repeating import created, reciters
from agentlightning.gateway.replay import LIVE, Met
from agentlightning.gateway.request import (
    NOT_JSON,
    OBJECT,
    CallRefused,
    CallRequest,
    check_parts,
    check_urls,
)
from agentlightning.prompts.replacing import Replaced, Replacer
from agentlightning.prompts.watching import MetShare
from agentlightning.semconv import (
    CALL_FLAG,
    CALL_PROMPT,
    CALL_REFUSED,
    CALL_RESPONSE,
    CALL_SAMPLING,
    ERROR_TYPE,
    FROZEN_HEADER,
    GEN_AI_INPUT_MESSAGES,
    GEN_AI_RESPONSE_ID,
    GEN_AI_RESPONSE_MODEL,
    GEN_AI_TOOL_DEFINITIONS,
    GIVEN,
    HTTP_STATUS,
)
from agentlightning.store.base import LightningStore
from agentlightning.store.redaction import Redact, redaction, text_without_secrets
from agentlightning.tracing.context import AttemptTracer
from agentlightning.types import Attributes, Credential, SpanStatus

REMOVE_SECRETS: Final = redaction()
_LARGE: Final = 2**18  # bytes of a body whose texts are replaced in a thread
_MOST_REFUSALS: Final = 100  # of one attempt that are recorded
_NOTING_SECONDS: Final = 5.0  # for a refusal to be recorded
# by which the SDKs of OpenAI and Anthropic say how often they have made this call before
_RETRIES: Final = "x-stainless-retry-count"
_LONGEST: Final = 1000  # characters of a reason, which may quote what an agent sent


class Calls:
    """Opens calls. The calls of attempts are committed to the `store`, those that no attempt made
    are queued; without a store nothing is captured. `prompts` are put into the calls of whoever has
    no candidate of their own. Calls are compared with recorded ones as `redact` leaves them."""

    def __init__(
        self,
        models: ModelTable,
        store: LightningStore | None,
        attributor: Attributor,
        holding: Holding,
        prompts: Replacer | None = None,
        redact: Redact = REMOVE_SECRETS,
    ) -> None:
        self.models = models
        self._redact = redact
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
        self._began = time.time()

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
        met = None
        while True:  # while a call is held its attempt may end, and the model may become another
            caller, key = await self.attributor.attribute(path_ids, headers)
            try:
                incoming = await self._incoming(endpoint, body, headers, caller, key)
                gate = self.models.gate(incoming.entry.name)
                met = met or await self._met(endpoint, incoming)
            except ModelAwayError as error:
                gate = error.gate
            else:
                if met.call is not None or not gate.held:
                    break
            held_seconds += await self._holding.wait(gate, caller.attempt)
        if met.call is not None and incoming.request.relayed is not None:
            request = self._read(endpoint, body, caller, incoming.replaced)
            incoming = incoming._replace(request=request)
        request = incoming.request
        attempt = caller.attempt
        admitted, dropped = incoming.admitted
        if self._prompts is not None and caller.prompts is None and endpoint.operation == "chat":
            self.met.add(incoming.replaced is not None)
        unreceived = await self._unreceived(endpoint, incoming)
        # Numbered once it is admitted: an attempt that seems to lack a call is not trained.
        index = await self.attributor.number(caller) if attempt else None
        request_id = f"{attempt[1]}-{index}" if attempt else secrets.token_hex(12)
        response_id = endpoint.id_prefix + (f"{request_id}-{self._run}" if attempt else request_id)
        now = time.time()
        answer = Answer(request.sampling.n, response_id, incoming.model, int(now))
        if met.call is not None:
            request_id = _as_recorded(answer, endpoint, met.call, request_id)
        sent, overridden = sent_of(incoming, admitted, request_id, index)
        relayed = None
        if request.relayed is not None:
            relayed, dropped = _relayed(endpoint, incoming, request.relayed, dropped)
        return Call(
            caller=caller,
            endpoint=endpoint,
            request=request,
            sent=sent,
            entry=incoming.entry,
            answer=answer,
            start_time=now,
            met=met,
            gate=gate,
            recorder=self._committed if attempt else self.queue,
            statistics=self.statistics,
            remember=self._conversations.remember,
            index=index,
            overridden=overridden,
            dropped=[*dropped, *request.dropped],
            discards=caller.take_lost() or unreceived,
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
        incoming = Incoming(call.caller, None, headers, request, call.entry, call.replaced)
        admitted, dropped = incoming.admitted
        call.sent, call.overridden = sent_of(incoming, admitted, call.sent.request_id, call.index)
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
            count = await backend.count_tokens(sent_of(incoming, incoming.admitted[0], "", None)[0])
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
    ) -> Incoming:
        prompts = caller.prompts or self._prompts
        replaced = None
        if prompts is not None and len(body) > _LARGE:
            replaced = await asyncio.to_thread(_replaced, prompts, endpoint, body)
        elif prompts is not None:
            replaced = _replaced(prompts, endpoint, body)
        walked = caller.replay
        passed = walked is None or walked.passed_through
        if passed and any(endpoint.path in entry.backend.relays for entry in self.models):
            request = read_passed_through(body if replaced is None else replaced.body)
            entry = self._resolve(request.model, caller, key, headers)
            if endpoint.path in entry.backend.relays:
                if walked is not None and walked.beginnings is not None:
                    raise CallRefused(
                        "replace: this model's server is asked in the agent's own protocol, in "
                        "which nothing is sent as recorded; fork without it",
                        status=409,
                        code="not_replayable",
                    )
                return Incoming(caller, key, headers, request, entry, replaced)
        request = self._read(endpoint, body, caller, replaced)
        if walked is not None and walked.beginnings is not None and request.messages:
            sent = await asyncio.to_thread(walked.beginnings.sent, request.messages)
            request = msgspec.structs.replace(request, messages=sent, messages_json=None)
        entry = self._resolve(request.model, caller, key, headers)
        return Incoming(caller, key, headers, request, entry, replaced)

    async def _met(self, endpoint: Endpoint, incoming: Incoming) -> Met:
        """The recorded call that answers, where the caller walks recorded calls again. CallRefused
        (409) for a call that diverges, or cannot be compared."""
        replay = incoming.caller.replay
        if replay is None or endpoint.operation == "embeddings":
            return LIVE
        await self.attributor.catch_up(incoming.caller)
        asks, ids = await self._asks(endpoint, incoming)
        met = replay.meet(asks, ids, again=_is_retry(incoming.headers))
        if met.diverged is not None and not replay.is_fork:
            incoming.caller.lost += replay.take_copies()
        return met

    async def _unreceived(self, endpoint: Endpoint, incoming: Incoming) -> list[int]:
        """The number of the call that a gateway before this one answered, and that the agent makes
        again since it did not receive the answer."""
        caller = incoming.caller
        met_at_its_first_call = caller.links is not None
        if met_at_its_first_call or not caller.attempt or not _is_retry(incoming.headers):
            return []
        asks, ids = await self._asks(endpoint, incoming)
        model = incoming.request.model
        return await self.attributor.unreceived(caller, model, key_of(asks, ids), self._began)

    async def _asks(self, endpoint: Endpoint, incoming: Incoming) -> tuple[Attributes, bytes]:
        """What a call asks, as it would be stored, and the token ids where these identify it."""
        replay = incoming.caller.replay
        request = incoming.request
        says = asked(endpoint.operation, request)
        says[CALL_SAMPLING] = msgspec.json.encode(request.sampling).decode()
        if request.relayed is not None:
            says[CALL_RESPONSE] = ""  # as it is passed through
        ids = b""
        if isinstance(request.prompt, tuple):
            ids = int32(request.prompt).tobytes()
        elif replay is not None and replay.blind:
            ids = await self._prompt_ids(incoming)
            for name in (GEN_AI_INPUT_MESSAGES, CALL_PROMPT, GEN_AI_TOOL_DEFINITIONS):
                says.pop(name, None)
        tracer = AttemptTracer(incoming.caller.rollout_id, incoming.caller.attempt_id)
        span = tracer.record(f"{endpoint.operation} {request.model}", says)
        if len(str(says.get(GEN_AI_INPUT_MESSAGES))) > _LARGE:
            span = await asyncio.to_thread(self._redact, span)
        else:
            span = self._redact(span)
        return {} if span is None else span.attributes, ids

    async def _prompt_ids(self, incoming: Incoming) -> bytes:
        speakers = reciters(incoming.entry.backend)
        if not speakers:
            raise CallRefused(
                "the record holds token ids alone (--capture tokens), and this model's server "
                "renders chats itself: it can be walked again where a tokenizer is named",
                status=409,
                code="not_replayable",
            )
        sent, _ = sent_of(incoming, incoming.admitted[0], "", None)
        return (await speakers[0].prompt_ids(sent)).tobytes()

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


def _as_recorded(answer: Answer, endpoint: Endpoint, call: RecordedCall, request_id: str) -> str:
    """Give an answer the recorded ids and time; returns the id from which those of its tool calls
    follow."""
    attributes = call.span.attributes
    answer.model = str(attributes.get(GEN_AI_RESPONSE_MODEL, answer.model))
    if attributes.get(CALL_FLAG) == GIVEN:
        return request_id
    answer.response_id = str(attributes.get(GEN_AI_RESPONSE_ID, answer.response_id))
    answer.created = created(call)
    return answer.response_id.removeprefix(endpoint.id_prefix).rpartition("-")[0]


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


def _relayed(
    endpoint: Endpoint, incoming: Incoming, fields: dict[str, msgspec.Raw], dropped: list[str]
) -> tuple[RelayedCall, list[str]]:
    """(what is passed on of a request, names of its fields that are not)."""
    if incoming.guarded:
        fields, dropped = admit_relayed(fields)
    let_through = _let_through(incoming.headers)
    call = RelayedCall(endpoint.path, incoming.model, fields, let_through, incoming.session)
    return call, dropped


def _let_through(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name in HEADERS}


def _is_retry(headers: Mapping[str, str]) -> bool:
    """Whether the client makes a call again, of which it had no answer, or an error."""
    return headers.get(_RETRIES, "").lstrip("0").isdecimal()
