"""From a request to a call that is under way, and from its answer to a committed span.

Ties models, attribution, capture and the store together. Knows no HTTP: `gateway.routes` speaks it.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeVar

from agentlightning.gateway.answer import Answer
from agentlightning.gateway.attribution import Attributor, Caller, api_key_of
from agentlightning.gateway.backend import SESSION_HEADER, BackendEvent, ChatCall, Sampling
from agentlightning.gateway.capture import ABORTED, FAILED, CallRecord, call_span
from agentlightning.gateway.models import ModelEntry, ModelTable
from agentlightning.gateway.openai import ChatRequest, parse_chat_request
from agentlightning.gateway.seeds import call_seed
from agentlightning.store.base import LightningStore


class ClientGone(Exception):
    """The agent no longer listens: its call is cancelled and recorded as aborted."""


class Gate:
    """Lets calls through, holds them while weights change, and knows how many are running."""

    def __init__(self) -> None:
        self.running = 0
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()

    def hold(self) -> None:
        self._open.clear()

    def release(self) -> None:
        self._open.set()

    async def passed(self) -> None:
        """Return as soon as calls are let through."""
        await self._open.wait()

    async def idle(self) -> None:
        """Return when no call is running; those that wait to pass do not count."""
        await self._idle.wait()

    def enter(self) -> None:
        self.running += 1
        self._idle.clear()

    def leave(self) -> None:
        self.running -= 1
        if self.running == 0:
            self._idle.set()


class CallOpener:
    """Turns requests into running calls. Without a store nothing is attributed or captured."""

    def __init__(self, models: ModelTable, store: LightningStore | None, *, require_key: bool) -> None:
        self.gate = Gate()
        self._models = models
        self._store = store
        self._attributor = Attributor(store, require_key=require_key)

    async def admit(self, headers: Mapping[str, str]) -> None:
        """CallRefused (401) for a caller who would need a key and has none that was issued here."""
        await self._attributor.check_key(api_key_of(headers))

    async def open(self, body: bytes, headers: Mapping[str, str], path_ids: tuple[str, str] | None) -> RunningCall:
        """Check, attribute and start a call; use it as `async with`. `headers` has lower-case names.

        Raises BackendError (and its kin CallRefused) for everything that cannot be answered."""
        caller = await self._attributor.attribute(path_ids, api_key_of(headers))
        request = parse_chat_request(body)
        entry = self._models.resolve(request.model)
        await self.gate.passed()
        call_index = caller.take_call_index() if caller else 0
        sampling, overridden = _effective_sampling(request, entry, caller, call_index)
        request_id = f"{caller.attempt_id}-{call_index}" if caller else secrets.token_hex(12)
        chat = ChatCall(
            request_id=request_id,
            model=entry.name,
            messages=request.messages,
            tools=request.tools,
            tool_choice=request.tool_choice,
            sampling=sampling,
            session=caller.attempt_id if caller else headers.get(SESSION_HEADER),
            logprobs=request.logprobs,
            stream=request.stream,
            extra=request.extra if _decided_by_run(caller) else request.extra | request.shaping,
        )
        record = None
        if caller is not None:
            record = CallRecord(
                caller=caller,
                call_index=call_index,
                request=request,
                entry=entry,
                sampling=sampling,
                overridden=overridden,
                response_id=f"chatcmpl-{request_id}",
                traceparent=headers.get("traceparent"),
                start_time=time.time(),
            )
        return RunningCall(self, request, chat, entry, record)

    async def commit(self, record: CallRecord, answer: Answer, started: float, error: BaseException | None) -> None:
        """Store the call's span; when this returns it is durable. `started` is on the monotonic clock."""
        assert self._store is not None, "a call is only recorded where it was attributed, which takes a store"
        first = answer.first_token_time
        span = call_span(
            record,
            answer,
            end_time=record.start_time + (time.monotonic() - started),
            time_to_first_token=None if first is None else first - started,
            error=error,
        )
        await self._store.add_many_spans([span])


class RunningCall:
    """One call under way. Leaving its `async with` block without `commit` records it as failed or aborted."""

    def __init__(
        self, opener: CallOpener, request: ChatRequest, chat: ChatCall, entry: ModelEntry, record: CallRecord | None
    ) -> None:
        self.request = request
        self.answer = Answer(request.n)
        self.response_id = f"chatcmpl-{chat.request_id}"
        self.model = entry.name
        self._opener = opener
        self._chat = chat
        self._entry = entry
        self._record = record
        self._started = time.monotonic()

    def events(self) -> AsyncGenerator[BackendEvent, None]:
        """The backend's events; closing the iterator cancels the generation."""
        return self._entry.backend.chat(self._chat)

    async def commit(self) -> None:
        """Store the finished call. When this returns the call is durable; only then may its end be sent."""
        record, self._record = self._record, None
        if record is not None:
            await self._opener.commit(record, self.answer, self._started, None)

    async def __aenter__(self) -> RunningCall:
        self._opener.gate.enter()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            record, self._record = self._record, None
            if record is not None and error is not None:
                aborted = isinstance(error, ClientGone | asyncio.CancelledError)
                self.answer.abort(ABORTED if aborted else FAILED)
                await self._opener.commit(record, self.answer, self._started, error)
        finally:
            self._opener.gate.leave()


def _decided_by_run(caller: Caller | None) -> bool:
    return caller is not None and caller.mode != "test"


def _effective_sampling(
    request: ChatRequest, entry: ModelEntry, caller: Caller | None, call_index: int
) -> tuple[Sampling, dict[str, Any]]:
    """(the sampling in effect, what the agent asked instead where that differs).

    In train and val mode the model entry decides temperature, top_p and top_k and there are no penalties; in test
    mode and without attribution the agent does."""
    decided = None
    if caller is not None and caller.mode != "test":
        decided = entry.train if caller.mode == "train" else entry.val
    default = decided or Sampling()
    shape = Sampling(
        temperature=_first(None if decided else request.temperature, default.temperature),
        top_p=_first(None if decided else request.top_p, default.top_p),
        top_k=_first(None if decided else request.top_k, default.top_k),
    )
    limits = [limit for limit in (request.max_tokens, default.max_tokens) if limit is not None]
    seed = request.seed
    if seed is None and caller is not None:
        seed = call_seed(caller.run_seed, caller.sample, call_index)
    sampling = replace(shape, max_tokens=min(limits, default=None), stop=request.stop, seed=seed, n=request.n)
    asked = {name: getattr(request, name) for name in ("temperature", "top_p", "top_k", "max_tokens")}
    overridden = {name: value for name, value in asked.items() if value not in (None, getattr(sampling, name))}
    return sampling, overridden | request.shaping if decided else overridden


_Number = TypeVar("_Number", int, float)


def _first(asked: _Number | None, default: _Number) -> _Number:
    return default if asked is None else asked
