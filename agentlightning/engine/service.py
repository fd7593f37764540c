"""The engine in a thread of its own, usable from one asyncio loop.

The thread takes requests, steps while there is work, and waits on a condition otherwise. Tokens cross to the loop in
one wake-up per step, however many requests it served. This module knows no tensors.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, nullcontext

import torch

from agentlightning.engine.engine import Engine, Generation
from agentlightning.errors import AgentLightningError, BackendError, UnavailableError
from agentlightning.gateway.generation import GenerationRequest, GrammarsAs, SampledToken

logger = logging.getLogger(__name__)


class _Stream:
    """Tokens of one request on their way from the engine's thread to the loop.

    The thread appends, the loop pops; `ready` is touched by the loop alone. With `whole` the loop is woken once, when
    the request has ended."""

    def __init__(self, request: GenerationRequest, touched: set[_Stream], *, whole: bool) -> None:
        self.request = request
        self.tokens: deque[SampledToken] = deque()
        self.error: AgentLightningError | None = None
        self.ready = asyncio.Event()
        self.generation: Generation | None = None
        self.ended = False
        self._touched = touched
        self._whole = whole

    def put(self, token: SampledToken) -> None:
        self.tokens.append(token)
        self.ended = token.finish_reason is not None
        if self.ended or not self._whole:
            self._touched.add(self)

    def fail(self, error: AgentLightningError) -> None:
        self.error = error
        self.ended = True
        self._touched.add(self)


class EngineService:
    """Generates with an engine from coroutines: a `TokenGenerator`. `start` and `close` are called once each;
    all coroutines belong to one loop. `write` brings the engine's weights up to date where they are not the trained
    ones themselves."""

    grammars: GrammarsAs = "masks"

    def __init__(self, engine: Engine, write: Callable[[], object] = lambda: None) -> None:
        self._engine = engine
        self._write = write
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._changed = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()
        self._touched: set[_Stream] = set()
        self._open: set[_Stream] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._owner: asyncio.Task[object] | None = None
        self._turn = asyncio.Lock()
        self._hold: asyncio.Event | None = None
        self._closed = False
        self._idle = 0.0
        self._idle_since: float | None = None

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the thread after its present step; requests in flight get UnavailableError."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def engine(self) -> Engine:
        """The engine itself: its sizes and statistics may be read at any time, its methods called in `exclusive`."""
        return self._engine

    @property
    def version(self) -> int:
        """The policy version that is sampled from now."""
        return self._engine.version

    @property
    def generated_tokens(self) -> int:
        """How many were sampled so far."""
        return self._engine.statistics.generated_tokens

    @property
    def idle_seconds(self) -> float:
        """How long the thread has waited so far: for requests, or because somebody held the engine."""
        with self._changed:
            since = self._idle_since
            return self._idle + (0.0 if since is None else time.monotonic() - since)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[SampledToken]:
        """Yield the tokens of a request as they are sampled. Closing the iterator cancels the generation.

        Raises BackendError(status=400) for a request that cannot be served, BackendError(status=500) where the engine
        failed in it, and UnavailableError where the service is closed."""
        stream = self._submit(request, whole=False)
        try:
            while True:
                await stream.ready.wait()
                stream.ready.clear()
                while stream.tokens:
                    token = stream.tokens.popleft()
                    yield token
                    if token.finish_reason is not None:
                        return
                if stream.error is not None:
                    raise stream.error
        finally:
            self._leave(stream)

    async def complete(self, request: GenerationRequest) -> list[SampledToken]:
        """All tokens of a request at once: like `generate`, but the loop is woken once instead of for every token."""
        stream = self._submit(request, whole=True)
        try:
            await stream.ready.wait()
            if stream.error is not None:
                raise stream.error
            return list(stream.tokens)
        finally:
            self._leave(stream)

    @asynccontextmanager
    async def exclusive(self) -> AsyncGenerator[Engine]:
        """Wait until the engine is between two steps and hold it there: the caller owns the weights and the cores.

        Requests wait meanwhile. Not to be nested."""
        self._bind()
        async with self._turn:
            self._check_open()  # it may have ended while others had their turn
            held = asyncio.Event()
            self._set_hold(held)
            self._owner = asyncio.current_task()
            try:
                await held.wait()
                self._check_open()
                yield self._engine
            finally:
                self._owner = None
                self._set_hold(None)

    async def update_weights(self, version: int, write: Callable[[], object] | None = None) -> None:
        """Sample with the model's present weights, those that `write` leaves, and call them `version`; inside or
        outside of `exclusive`. Calls that are being answered go on with them."""
        inside = self._owner is not None and self._owner is asyncio.current_task()
        async with nullcontext() if inside else self.exclusive():
            # In a thread of its own, since agents may hold all of the loop's; where this task is cancelled, the end of
            # the block waits for it.
            with ThreadPoolExecutor(1) as thread:
                await asyncio.get_running_loop().run_in_executor(thread, self._bring_up_to_date, version, write)

    def _bring_up_to_date(self, version: int, write: Callable[[], object] | None) -> None:
        (write or self._write)()
        self._engine.update_weights(version)

    # --- on the loop ---

    def _bind(self) -> None:
        self._check_open()
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise UnavailableError("this engine service belongs to another event loop; make one service per loop")

    def _check_open(self) -> None:
        if self._closed or not self._thread.is_alive():
            raise UnavailableError("the engine is not running: call start() first, and not after close()")

    def _submit(self, request: GenerationRequest, *, whole: bool) -> _Stream:
        self._bind()
        self._engine.check(request)
        stream = _Stream(request, self._touched, whole=whole)
        self._open.add(stream)
        self._post(lambda: self._begin(stream))
        return stream

    def _leave(self, stream: _Stream) -> None:
        self._open.discard(stream)
        if not stream.ended:
            self._post(lambda: self._abandon(stream))

    def _post(self, command: Callable[[], None]) -> None:
        with self._changed:
            self._commands.append(command)
            self._changed.notify()

    def _set_hold(self, hold: asyncio.Event | None) -> None:
        with self._changed:
            self._hold = hold
            self._changed.notify()

    @staticmethod
    def _wake(streams: tuple[_Stream, ...]) -> None:
        for stream in streams:
            stream.ready.set()

    def _fail_all(self, error: AgentLightningError) -> None:
        for stream in self._open:
            if not stream.ended:
                stream.fail(error)
            stream.ready.set()
        if self._hold is not None:
            self._hold.set()

    # --- on the engine's thread ---

    def _begin(self, stream: _Stream) -> None:
        try:
            stream.generation = self._engine.submit(stream.request, stream.put, stream.fail)
        except BackendError as error:
            stream.fail(error)

    def _abandon(self, stream: _Stream) -> None:
        if stream.generation is not None:
            self._engine.cancel(stream.generation)

    def _run(self) -> None:
        # Values too small to matter cost CPUs hundreds of cycles each; the setting belongs to the thread.
        torch.set_flush_denormal(True)
        error: AgentLightningError = UnavailableError("the engine was closed while the request was in flight")
        try:
            busy = False
            while self._await_work(busy=busy):
                while self._commands:
                    self._commands.popleft()()
                busy = self._engine.step()
                self._deliver()
        except Exception as fault:
            logger.exception("The engine's thread ended.")
            error = UnavailableError(f"the engine failed: {type(fault).__name__}: {fault}")
        self._finish(error)

    def _await_work(self, *, busy: bool) -> bool:
        """Wait until there is something to do and nobody holds the engine; False once it is closed."""
        announced: asyncio.Event | None = None
        with self._changed:
            while not self._closed:
                if self._hold is None:
                    if busy or self._commands:
                        return True
                elif self._hold is not announced:
                    announced = self._hold
                    self._to_loop(announced.set)
                self._wait()
        return False

    def _wait(self) -> None:
        self._idle_since = time.monotonic()
        self._changed.wait()
        self._idle += time.monotonic() - self._idle_since
        self._idle_since = None

    def _deliver(self) -> None:
        if self._touched:
            streams = tuple(self._touched)
            self._touched.clear()
            self._to_loop(lambda: self._wake(streams))

    def _finish(self, error: AgentLightningError) -> None:
        with self._changed:
            self._closed = True
        if self._loop is not None and not self._loop.is_closed():
            self._to_loop(lambda: self._fail_all(error))

    def _to_loop(self, callback: Callable[[], object]) -> None:
        assert self._loop is not None  # set before the first command or hold
        self._loop.call_soon_threadsafe(callback)
