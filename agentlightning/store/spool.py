"""Spans on their way to a server: posted at once, sent in batches in the background, kept until acknowledged.

The spool knows encoded spans, how much of them it may hold, and what to do with those a server refuses. It does not
know HTTP: it is given a function that sends a batch and raises typed errors. It belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec

from agentlightning.errors import AgentLightningError, ConfigError, InvalidError, UnavailableError
from agentlightning.store.wire import KeyRefusedError, RetryLaterError, encode
from agentlightning.types import Span

if TYPE_CHECKING:
    from agentlightning.store.journal import Journal

MAX_BYTES: Final = 64 * 1024 * 1024
BATCH_SPANS: Final = 512
BATCH_BYTES: Final = 4 * 1024 * 1024
LINGER_SECONDS: Final = 0.05
REFUSED_KEPT: Final = 1000
_PAUSE_SECONDS: Final = 1.0  # between two tries of a batch
_DEFECT_TRIES: Final = 3  # of a span at which the server fails, before it counts as refused

_logger: Final = logging.getLogger(__name__)


@dataclass(frozen=True)
class RefusedSpan:
    """A span that the server will never take, and why."""

    span: Span
    error: AgentLightningError


Send: TypeAlias = Callable[[Sequence[bytes]], Awaitable[object]]
"""Stores a batch of msgpack spans, all or none. UnavailableError, ConfigError and KeyRefusedError say that it did not
reach a store; any other error of ours, that the store refuses it."""


class SpanSpool:
    """Holds up to `max_bytes` of encoded spans and sends them in the order posted, one batch at a time: after
    `linger_seconds`, or at once when a batch is full or somebody waits for it.

    What does not reach a store, be it for its key, is kept and sent again and again. A batch that is refused is halved
    until the refused spans are alone: the others are stored, these are logged, kept in `refused` (the newest 1,000) and
    given to `on_refused`. With a `journal` the spans are on the disk as well, and those that an earlier process left
    there are sent first."""

    def __init__(
        self,
        send: Send,
        *,
        max_bytes: int = MAX_BYTES,
        batch_spans: int = BATCH_SPANS,
        batch_bytes: int = BATCH_BYTES,
        linger_seconds: float = LINGER_SECONDS,
        patience: float = 60.0,
        journal: Journal | None = None,
        on_refused: Callable[[RefusedSpan], None] | None = None,
    ) -> None:
        if min(max_bytes, batch_spans, batch_bytes) < 1:
            raise ConfigError("max_bytes, batch_spans and batch_bytes of a spool must be at least 1")
        self.refused: deque[RefusedSpan] = deque(maxlen=REFUSED_KEPT)
        self._send = send
        self._max_bytes = max_bytes
        self._batch_spans = batch_spans
        self._batch_bytes = batch_bytes
        self._linger = linger_seconds
        self._patience = patience
        self._journal = journal
        self._on_refused = on_refused
        self._held: deque[bytes] = deque()
        self._bytes = 0
        self._posted = 0  # spans taken in, ever
        self._settled = 0  # of those, stored or refused
        self._recovering = journal is not None
        self._fault: AgentLightningError | None = None
        self._entrance = asyncio.Lock()
        self._filled = asyncio.Event()
        self._hurried = asyncio.Event()
        self._room = asyncio.Event()
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._sender = asyncio.get_running_loop().create_task(self._run(), name="agl-span-spool")
        self._sender.add_done_callback(self._sender_ended)

    # --- the face ---

    async def post(self, spans: Sequence[Span]) -> None:
        """Take spans in, to be sent soon. Waits while there is no room; after `patience` seconds UnavailableError says
        how many were not taken. InvalidError, and none is taken, if one cannot be sent at all."""
        encoded = [self._encoded(span) for span in spans]
        # Posters wait their turn, so that spans are sent in the order in which they were posted.
        if not self._entrance.locked() and self._bytes + sum(map(len, encoded)) <= self._max_bytes:
            self._take(encoded)
            return
        taken = 0
        try:
            async with asyncio.timeout(self._patience), self._entrance:
                for span in encoded:
                    while self._bytes + len(span) > self._max_bytes:
                        self._hurried.set()
                        self._room.clear()
                        await self._room.wait()
                    self._take([span])
                    taken += 1
        except TimeoutError:
            raise UnavailableError(
                f"{len(spans) - taken} of {len(spans)} spans were not taken in {self._patience:g} s: {self._state()}. "
                f"Its limit is {self._max_bytes} bytes; post them again later, or give it more room"
            ) from None

    async def flush(self, timeout: float | None = None) -> None:
        """Return when everything posted before is stored or refused. UnavailableError after `timeout` seconds (None:
        the spool's patience) says how many are not; they stay in the spool and are sent later."""
        target = self._posted
        if self._is_settled(target):
            return
        if self._sender.done():
            raise UnavailableError(f"the spool of spans is closed: {self._state()}")
        timeout = self._patience if timeout is None else timeout
        settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((target, settled))
        self._hurried.set()
        try:
            async with asyncio.timeout(timeout):
                await settled
        except TimeoutError:
            remain = target - self._settled
            raise UnavailableError(
                f"{remain} spans were not acknowledged within {timeout:g} s: {self._state()}"
            ) from None

    async def close(self, timeout: float | None = None) -> None:
        """Flush, then stop. UnavailableError, which is also logged, if spans could not be delivered."""
        try:
            await self.flush(timeout)
        except UnavailableError as error:
            kept = "lost" if self._journal is None else f"kept in {self._journal.directory} for the next client"
            message = f"{len(self._held)} spans could not be delivered and are {kept}: {error}"
            _logger.error(message)
            raise UnavailableError(message) from None
        finally:
            self._sender.cancel()
            await asyncio.wait([self._sender])
            if self._journal is not None:
                self._journal.close()

    # --- taking in ---

    def _encoded(self, span: Span) -> bytes:
        encoded = encode(span, f"span {span.name!r} ({span.span_id})")
        if len(encoded) > self._max_bytes:
            raise InvalidError(
                f"span {span.name!r} ({span.span_id}) is {len(encoded)} bytes long; the spool takes {self._max_bytes}"
            )
        return encoded

    def _take(self, encoded: Sequence[bytes]) -> None:
        if self._sender.done():
            raise UnavailableError("the spool of spans is closed; make a new client")
        if self._journal is not None:
            self._journal.append(encoded)
        self._held.extend(encoded)
        self._bytes += sum(map(len, encoded))
        self._posted += len(encoded)
        if self._held:
            self._filled.set()
        if len(self._held) >= self._batch_spans or self._bytes >= self._batch_bytes:
            self._hurried.set()

    # --- sending ---

    async def _run(self) -> None:
        if self._journal is not None:
            for orphan in self._journal.orphans():
                while batch := self._batch_of(orphan.spans):
                    await self._deliver(batch, orphan.spans)
                orphan.delete()
            self._recovering = False
            self._wake()
        while True:
            await self._filled.wait()
            if not self._hurried.is_set():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._linger):
                        await self._hurried.wait()
            await self._deliver(self._batch_of(self._held), self._held)

    def _batch_of(self, spans: deque[bytes]) -> list[bytes]:
        """The foremost spans, as many as go into a batch; at least one, if there is one. They stay in place."""
        batch: list[bytes] = []
        size = 0
        for span in islice(spans, self._batch_spans):
            size += len(span)
            if batch and size > self._batch_bytes:
                break
            batch.append(span)
        return batch

    async def _deliver(self, batch: Sequence[bytes], source: deque[bytes]) -> None:
        """Send the foremost spans of `source` and take them off it, whether the store took or refused them."""
        try:
            await self._send_until_decided(batch)
        except AgentLightningError as error:
            if len(batch) > 1:
                middle = len(batch) // 2
                await self._deliver(batch[:middle], source)
                await self._deliver(batch[middle:], source)
                return
            self._refuse(batch[0], error)
        for _ in batch:
            source.popleft()
        if source is self._held:
            self._settle(batch)

    async def _send_until_decided(self, batch: Sequence[bytes]) -> None:
        """Send a batch until the store has taken it; raises its refusal."""
        defects = 0
        while True:
            pause = _PAUSE_SECONDS * random.uniform(0.5, 1.0)
            try:
                await self._send(batch)
            except (UnavailableError, ConfigError, KeyRefusedError) as error:
                known, self._fault = str(self._fault), error
                if str(error) != known:
                    _logger.warning("spans wait for their server: %s", self._state())
                if isinstance(error, RetryLaterError):
                    pause += error.seconds
            except AgentLightningError as error:
                # Refused by itself, unless the server had a defect: that may pass, or be this very span's fault.
                defects += 1
                if type(error) is not AgentLightningError or len(batch) > 1 or defects == _DEFECT_TRIES:
                    raise
            else:
                self._fault = None
                return
            await asyncio.sleep(pause)

    def _refuse(self, encoded: bytes, error: AgentLightningError) -> None:
        try:
            span = msgspec.msgpack.decode(encoded, type=Span)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            _logger.error(
                "a span that another version left (%d bytes) was refused and is dropped: %s", len(encoded), error
            )
            return
        refused = RefusedSpan(span, error)
        _logger.error(
            "span %r (%s) of attempt %s was refused and is dropped: %s", span.name, span.span_id, span.attempt_id, error
        )
        self.refused.append(refused)
        if self._on_refused is not None:
            try:
                self._on_refused(refused)
            except Exception:
                _logger.exception("on_refused failed for span %s", span.span_id)

    def _settle(self, batch: Sequence[bytes]) -> None:
        self._settled += len(batch)
        self._bytes -= sum(map(len, batch))
        if self._journal is not None:
            self._journal.settled(len(batch))
        self._room.set()
        self._wake()
        if not self._held:
            self._filled.clear()
        if not self._waiters and len(self._held) < self._batch_spans and self._bytes < self._batch_bytes:
            self._hurried.clear()

    def _is_settled(self, target: int) -> bool:
        return self._settled >= target and not self._recovering

    def _wake(self) -> None:
        """Answer the flushes that have got what they wait for, and forget those that gave up."""
        while self._waiters and (self._is_settled(self._waiters[0][0]) or self._waiters[0][1].done()):
            _, waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)

    def _sender_ended(self, sender: asyncio.Task[None]) -> None:
        if sender.cancelled() or (error := sender.exception()) is None:
            return
        _logger.critical("the sender of spans has died; what is posted now is refused", exc_info=error)
        for _, waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(error)

    def _state(self) -> str:
        left = " beside what an earlier process left" if self._recovering else ""
        because = "" if self._fault is None else f" ({self._fault})"
        return f"the spool holds {len(self._held)} spans of {self._bytes} bytes{left}{because}"
