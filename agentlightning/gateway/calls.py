"""From a request to a call that is under way, and from its answer to a stored span.

Ties models, attribution, capture and the store together. Knows no HTTP: `gateway.routes` speaks it.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import msgspec

from agentlightning.errors import BackendError
from agentlightning.gateway.answer import Answer
from agentlightning.gateway.attribution import Attributor, Caller, api_key_of
from agentlightning.gateway.backend import (
    SESSION_HEADER,
    BackendEvent,
    ModelCall,
    RelayedAnswer,
    RelayedCall,
    Sampling,
)
from agentlightning.gateway.capture import ABORTED, FAILED, CallRecord, call_span, undelivered_span
from agentlightning.gateway.conversations import Conversations
from agentlightning.gateway.endpoints.base import Endpoint, Head
from agentlightning.gateway.endpoints.passed_through import HEADERS, read_fields, read_request
from agentlightning.gateway.holding import AttemptIds, Gate, Holding
from agentlightning.gateway.models import ANY, ModelEntry, ModelTable
from agentlightning.gateway.recording import Recorder
from agentlightning.gateway.request import NOT_JSON, CallRequest
from agentlightning.gateway.seeds import call_seed
from agentlightning.gateway.statistics import CallStatistics

# Where neither run nor agent decides, the backend does: a server's defaults are its maker's recommendation.
_LEFT_OPEN = Sampling(temperature=None, top_p=None, top_k=None)
# How the SDKs of OpenAI and Anthropic say that they repeat a request.
RETRY_HEADER = "x-stainless-retry-count"


class ClientGone(Exception):
    """The agent no longer listens: its call is cancelled and recorded as aborted."""


@dataclass(frozen=True)
class Recorders:
    """Where spans go: those of attempts, and those of calls that no attempt made."""

    attributed: Recorder
    unattributed: Recorder

    def of(self, caller: Caller) -> Recorder:
        return self.unattributed if caller.mode is None else self.attributed


class CallOpener:
    """Turns requests into running calls. Without recorders nothing is captured."""

    def __init__(
        self,
        models: ModelTable,
        attributor: Attributor,
        recorders: Recorders | None,
        holding: Holding,
        conversations: Conversations,
    ) -> None:
        self.statistics = CallStatistics()
        self.conversations = conversations
        self._models = models
        self._holding = holding
        self._attributor = attributor
        self._recorders = recorders
        self._run = secrets.token_hex(4)  # two gateways may number the calls of one attempt: their ids differ in this

    async def admit(self, headers: Mapping[str, str]) -> None:
        """CallRefused (401) for a caller who would need a key and has none that was issued here."""
        await self._attributor.check_key(api_key_of(headers))

    async def caller(self, headers: Mapping[str, str], path_ids: tuple[str, str] | None) -> Caller | None:
        """Who asks, None without a store. CallRefused as for a call."""
        return await self._attributor.attribute(path_ids, api_key_of(headers))

    async def open(
        self, endpoint: Endpoint, body: bytes, headers: Mapping[str, str], path_ids: tuple[str, str] | None
    ) -> RunningCall:
        """Check, attribute and start a call; use it as `async with`. `headers` has lower-case names.

        Raises BackendError (and its kin CallRefused) for everything that cannot be answered."""
        caller, request, entry, fields = await self._read(endpoint, body, headers, path_ids)
        held_seconds = 0.0
        while (gate := self._models.gate(entry.name)).held:
            held_seconds += await self._holding.wait(gate, _ids(caller))
            # Meanwhile the attempt may have ended, and the model may be another.
            caller, request, entry, fields = await self._read(endpoint, body, headers, path_ids)
        numbered = caller is not None and caller.mode is not None
        call_index = caller.take_call_index() if caller is not None and numbered else None
        sampling, overridden = _effective_sampling(request, entry, caller, call_index)
        request_id = secrets.token_hex(12) if caller is None or not numbered else f"{caller.attempt_id}-{call_index}"
        response_id = endpoint.id_prefix + (f"{request_id}-{self._run}" if numbered else request_id)
        model = request.model if entry.name == ANY else entry.name
        call = ModelCall(
            request_id=request_id,
            model=model,
            messages=request.messages,
            prompt=request.prompt,
            tools=request.tools,
            tool_choice=request.tool_choice,
            sampling=sampling,
            session=caller.attempt_id if caller is not None and numbered else headers.get(SESSION_HEADER),
            logprobs=request.logprobs,
            top_logprobs=request.top_logprobs,
            stream=request.stream,
            extra=request.extra if _decided_by_run(entry, caller) else request.extra | request.shaping,
        )
        recording = None
        if caller is not None and self._recorders is not None:
            body_hash = hash(body)
            record = CallRecord(
                caller=caller,
                call_index=call_index,
                endpoint=endpoint.path,
                operation=endpoint.operation,
                request=request,
                model=model,
                entry=entry,
                sampling=sampling,
                overridden=overridden,
                response_id=response_id,
                traceparent=headers.get("traceparent"),
                start_time=time.time(),
                discards=caller.retried(body_hash) if numbered and _is_retry(headers) else [],
                held_seconds=held_seconds,
            )
            recording = _Recording(record, body_hash, self._recorders.of(caller), self.statistics)
        head = Head(response_id, model, int(time.time()))
        running = RunningCall(request, head, call, entry, gate, recording, self.statistics)
        running.remember = partial(self.conversations.remember, caller, endpoint, request, head)
        if fields is not None:
            kept = {name: value for name, value in headers.items() if name in HEADERS}
            running.relayed = RelayedCall(endpoint.path, model, fields, kept, call.session)
        return running

    async def count_tokens(
        self, endpoint: Endpoint, body: bytes, headers: Mapping[str, str], path_ids: tuple[str, str] | None
    ) -> int:
        """How many tokens the prompt of a call would have; nothing is numbered or captured. BackendError as in `open`,
        and where the backend cannot count."""
        caller, request, entry, fields = await self._read(endpoint, body, headers, path_ids)
        model = request.model if entry.name == ANY else entry.name
        if fields is not None:
            kept = {name: value for name, value in headers.items() if name in HEADERS}
            async with entry.backend.relay(RelayedCall(endpoint.path, model, fields, kept)) as answer:
                return await _count(answer)
        call = ModelCall(
            request_id=secrets.token_hex(12),
            model=model,
            messages=request.messages,
            tools=request.tools,
            tool_choice=request.tool_choice,
            session=headers.get(SESSION_HEADER) if (ids := _ids(caller)) is None else ids[1],
            extra=request.extra,
        )
        return await entry.backend.count_tokens(call)

    async def _read(
        self, endpoint: Endpoint, body: bytes, headers: Mapping[str, str], path_ids: tuple[str, str] | None
    ) -> tuple[Caller | None, CallRequest, ModelEntry, dict[str, msgspec.Raw] | None]:
        """Who asks, what, and who answers it; and the request's fields, if that one does so in the agent's protocol."""
        caller = await self.caller(headers, path_ids)
        if any(endpoint.path in entry.backend.relays for entry in self._models):
            fields = read_fields(body)
            request = read_request(fields)
            entry = self._models.resolve(request.model)
            if endpoint.path in entry.backend.relays:
                return caller, request, entry, fields
        request = await self.conversations.join(caller, endpoint.read(body))
        return caller, request, self._models.resolve(request.model), None


def _ids(caller: Caller | None) -> AttemptIds | None:
    return None if caller is None or caller.mode is None else (caller.rollout_id, caller.attempt_id)


class _Counted(msgspec.Struct):
    input_tokens: int


async def _count(answer: RelayedAnswer) -> int:
    body = b"".join([part async for part in answer.parts])
    try:
        return msgspec.json.decode(body, type=_Counted).input_tokens
    except NOT_JSON:
        told = body[:500].decode(errors="replace")
        raise BackendError(f"the backend did not count ({answer.status}): {told}") from None


def _is_retry(headers: Mapping[str, str]) -> bool:
    return headers.get(RETRY_HEADER, "0") != "0"


class _Recording:
    """Turns one call into its spans."""

    def __init__(self, record: CallRecord, body_hash: int, recorder: Recorder, statistics: CallStatistics) -> None:
        self.record = record
        self._body_hash = body_hash
        self._recorder = recorder
        self._statistics = statistics
        self._started = time.monotonic()
        record.caller.running += 1

    async def store(self, answer: Answer, error: BaseException | None) -> None:
        record, first = self.record, answer.first_token_time
        span = call_span(
            record,
            answer,
            end_time=record.start_time + (time.monotonic() - self._started),
            time_to_first_chunk=None if first is None else first - self._started,
            error=error,
        )
        self._statistics.captured(span)
        try:
            await self._recorder.record(span)
        finally:
            record.caller.running -= 1
        if error is None and record.call_index is not None:
            record.caller.note_answered(self._body_hash, record.call_index)

    async def store_undelivered(self) -> None:
        if self.record.call_index is not None:
            self._statistics.undelivered += 1
            await self._recorder.record(undelivered_span(self.record, time=time.time()))


class RunningCall:
    """One call under way. Leaving its `async with` block without `commit` records it as failed or aborted."""

    def __init__(
        self,
        request: CallRequest,
        head: Head,
        call: ModelCall,
        entry: ModelEntry,
        gate: Gate,
        recording: _Recording | None,
        statistics: CallStatistics,
    ) -> None:
        self.request = request
        self.answer = Answer(request.n)
        self.head = head
        self.relayed: RelayedCall | None = None
        self.remember: Callable[[Answer], None] | None = None
        self._call = call
        self._entry = entry
        self._gate = gate
        self._recording = recording
        self._ids = None if recording is None else _ids(recording.record.caller)
        self._recorded = False
        self._statistics = statistics

    def events(self) -> AsyncGenerator[BackendEvent, None]:
        """The backend's events; closing the iterator cancels the generation."""
        return self._entry.backend.answer(self._call)

    def relay(self) -> AbstractAsyncContextManager[RelayedAnswer]:
        """The backend's own answer to a call that is passed through."""
        assert self.relayed is not None
        return self._entry.backend.relay(self.relayed)

    async def commit(self) -> None:
        """Store the finished call. When this returns the call is durable; only then may its end be sent."""
        self._statistics.count(self.head.model, "answered")
        self._recorded = True
        if self._recording is not None:
            await self._recording.store(self.answer, None)
        if self.remember is not None:
            self.remember(self.answer)

    async def undelivered(self) -> None:
        """The client left between the commit and the end of its answer: note that nobody received it."""
        if self._recording is not None:
            await self._recording.store_undelivered()

    async def __aenter__(self) -> RunningCall:
        self._gate.enter(self._ids)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is not None and not self._recorded:
                aborted = isinstance(error, ClientGone | asyncio.CancelledError)
                self._statistics.count(self.head.model, "aborted" if aborted else "failed")
                self.answer.abort(ABORTED if aborted else FAILED)
                if self._recording is not None:
                    await self._recording.store(self.answer, error)
        finally:
            self._gate.leave(self._ids)


def _decided_by_run(entry: ModelEntry, caller: Caller | None) -> bool:
    return _run_sampling(entry, caller) is not None


def _run_sampling(entry: ModelEntry, caller: Caller | None) -> Sampling | None:
    """What the run decides about sampling: None in test mode, without an attempt, or where the entry leaves it open."""
    if caller is None:
        return None
    return {"train": entry.train, "val": entry.val}.get(caller.mode or "test")


def _effective_sampling(
    request: CallRequest, entry: ModelEntry, caller: Caller | None, call_index: int | None
) -> tuple[Sampling, dict[str, Any]]:
    """(the sampling in effect, what the agent asked instead where that differs).

    Where the run decides, its temperature, top_p and top_k hold without penalties; elsewhere the agent's do."""
    decided = _run_sampling(entry, caller)
    default = decided or _LEFT_OPEN
    shape = Sampling(
        temperature=_first(None if decided else request.temperature, default.temperature),
        top_p=_first(None if decided else request.top_p, default.top_p),
        top_k=_first(None if decided else request.top_k, default.top_k),
    )
    limits = [limit for limit in (request.max_tokens, default.max_tokens) if limit is not None]
    seed = request.seed
    if seed is None and caller is not None and call_index is not None and entry.backend.captures_tokens:
        seed = call_seed(caller.run_seed, caller.sample, call_index)
    sampling = replace(shape, max_tokens=min(limits, default=None), stop=request.stop, seed=seed, n=request.n)
    asked = {name: getattr(request, name) for name in ("temperature", "top_p", "top_k", "max_tokens")}
    overridden = {name: value for name, value in asked.items() if value not in (None, getattr(sampling, name))}
    return sampling, overridden | request.shaping if decided else overridden


_Number = TypeVar("_Number", int, float)


def _first(asked: _Number | None, default: _Number | None) -> _Number | None:
    return default if asked is None else asked
