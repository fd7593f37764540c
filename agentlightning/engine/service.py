"""The engine in its own thread, for one asyncio loop.

The thread takes commands, steps while there is work, and waits on a condition otherwise. Per step
there is one wake-up of the loop, however many requests have tokens."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, nullcontext

import torch

from agentlightning.engine.engine import Engine, Generation
from agentlightning.errors import AgentLightningError, BackendError, UnavailableError
from agentlightning.gateway.generation import GenerationRequest, SampledToken

logger = logging.getLogger(__name__)


class _Stream:
    """A request's tokens between the engine's thread, which appends, and the loop, which pops. The
    loop is woken for every token, or of a whole answer only at the end."""

    def __init__(self, request: GenerationRequest, touched: set[_Stream]) -> None:
        self.request = request
        self.tokens: deque[SampledToken] = deque()
        self.error: AgentLightningError | None = None
        self.ready = asyncio.Event()
        self.generation: Generation | None = None
        self.ended = False
        self._touched = touched

    def put(self, token: SampledToken) -> None:
        self.tokens.append(token)
        self.ended = token.finish_reason is not None
        if self.ended or not self.request.whole:
            self._touched.add(self)

    def fail(self, error: AgentLightningError) -> None:
        self.error = error
        self.ended = True
        self._touched.add(self)


class _Turn:
    """An exclusive use of the engine: requested, `begun`, `over`."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.over = False


class EngineService:
    """Generates with an engine from coroutines of one loop: a `TokenGenerator`. Call `start` and
    `close` once each. `write` updates the engine's weights, if they are not the trained ones
    themselves."""

    enforces = False

    def __init__(self, engine: Engine, write: Callable[[], object] = lambda: None) -> None:
        # its sizes and statistics may be read at any time, its methods called in `exclusive`
        self.engine = engine
        self._write = write
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._changed = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()
        self._touched: set[_Stream] = set()
        self._open: set[_Stream] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._owner: asyncio.Task[object] | None = None
        self._one_turn = asyncio.Lock()
        self._turn: _Turn | None = None
        self._closed = False
        self._idle = 0.0
        self._idle_since: float | None = None

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the thread after its current step; running requests get UnavailableError."""
        with self._changing():
            self._closed = True
        if self._thread.is_alive():
            self._thread.join()

    @property
    def version(self) -> int:
        """The policy version that is sampled from."""
        return self.engine.version

    @property
    def generated_tokens(self) -> int:
        """The number of tokens sampled so far."""
        return self.engine.statistics.generated_tokens

    @property
    def idle_seconds(self) -> float:
        """The time that the thread has waited so far, for requests or for an exclusive user."""
        with self._changed:
            since = self._idle_since
            return self._idle + (0.0 if since is None else time.monotonic() - since)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[list[SampledToken]]:
        """See `TokenGenerator.generate`. BackendError(status=500) if the engine failed in the
        request, UnavailableError if the service is closed."""
        with self._submitted(request) as stream:
            ended = False
            while not ended:
                await stream.ready.wait()
                stream.ready.clear()
                if stream.error is not None:
                    raise stream.error
                ended = stream.ended
                yield [stream.tokens.popleft() for _ in range(len(stream.tokens))]

    @asynccontextmanager
    async def exclusive(self) -> AsyncGenerator[Engine]:
        """Hold the engine between two steps: the caller has the weights and the cores, and requests
        wait. Not reentrant."""
        self._bind()
        async with self._one_turn:
            self._check_open()  # it may have ended while others had their turn
            self._turn = turn = _Turn()
            with self._changing():
                self._commands.append(lambda: self._stand_still(turn))
            self._owner = asyncio.current_task()
            try:
                await turn.begun.wait()
                self._check_open()
                yield self.engine
            finally:
                self._owner = self._turn = None
                with self._changing():
                    turn.over = True

    async def update_weights(self, version: int, write: Callable[[], object] | None = None) -> None:
        """Sample with the model's current weights (after `write`) from now on, as `version`; inside
        or outside of `exclusive`. Running calls continue with them."""

        def update() -> None:
            (write or self._write)()
            self.engine.update_weights(version)

        inside = self._owner is not None and self._owner is asyncio.current_task()
        async with nullcontext() if inside else self.exclusive():
            # In a thread of its own, since agents may hold all of the loop's; where this task is
            # cancelled, the end of the block waits for it.
            with ThreadPoolExecutor(1) as thread:
                await asyncio.get_running_loop().run_in_executor(thread, update)

    # --- on the loop ---

    def _bind(self) -> None:
        self._check_open()
        loop = asyncio.get_running_loop()
        self._loop = self._loop or loop
        if self._loop is not loop:
            raise UnavailableError(
                "this engine service belongs to another event loop; make one service per loop"
            )

    def _check_open(self) -> None:
        if self._closed or not self._thread.is_alive():
            raise UnavailableError(
                "the engine is not running: call start() first, and not after close()"
            )

    @contextmanager
    def _submitted(self, request: GenerationRequest) -> Generator[_Stream]:
        self._bind()
        self.engine.check(request)
        stream = _Stream(request, self._touched)
        self._open.add(stream)
        try:
            with self._changing():
                self._commands.append(lambda: self._begin(stream))
            yield stream
        finally:
            self._open.discard(stream)
            if not stream.ended:
                with self._changing():
                    self._commands.append(lambda: self._abandon(stream))

    @contextmanager
    def _changing(self) -> Generator[None]:
        with self._changed:
            yield
            self._changed.notify()

    def _end_all(self, error: AgentLightningError) -> None:
        for stream in self._open:
            if not stream.ended:
                stream.fail(error)
            stream.ready.set()
        if self._turn is not None:
            self._turn.begun.set()

    # --- on the engine's thread ---

    def _begin(self, stream: _Stream) -> None:
        try:
            stream.generation = self.engine.submit(stream.request, stream.put, stream.fail)
        except BackendError as error:
            stream.fail(error)

    def _abandon(self, stream: _Stream) -> None:
        if stream.generation is not None:
            self.engine.cancel(stream.generation)

    def _stand_still(self, turn: _Turn) -> None:
        self._to_loop(turn.begun.set)
        self._wait(lambda: self._closed or turn.over)

    def _run(self) -> None:
        # Values too small to matter cost CPUs hundreds of cycles each; the setting belongs to the
        # thread.
        torch.set_flush_denormal(True)
        error: AgentLightningError = UnavailableError(
            "the engine was closed while the request was in flight"
        )
        busy = False
        try:
            while True:
                if not busy:
                    self._wait(lambda: self._closed or bool(self._commands))
                while self._commands and not self._closed:
                    self._commands.popleft()()
                if self._closed:
                    break
                busy = self.engine.step()
                if self._touched:
                    ready = [stream.ready for stream in self._touched]
                    self._touched.clear()
                    self._to_loop(lambda ready=ready: [event.set() for event in ready])
        except Exception as fault:
            logger.exception("The engine's thread ended.")
            error = UnavailableError(f"the engine failed: {type(fault).__name__}: {fault}")
        self._closed = True
        if self._loop is not None and not self._loop.is_closed():
            self._to_loop(lambda: self._end_all(error))

    def _wait(self, until: Callable[[], bool]) -> None:
        with self._changed:
            self._idle_since = time.monotonic()
            self._changed.wait_for(until)
            self._idle += time.monotonic() - self._idle_since
            self._idle_since = None

    def _to_loop(self, callback: Callable[[], object]) -> None:
        assert self._loop is not None  # set before the first command
        self._loop.call_soon_threadsafe(callback)
