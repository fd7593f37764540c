"""The process that leases rollouts and runs agents, hundreds at once in one event loop.

One timer extends all leases, sends spans, and learns which attempts were cancelled.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    aclosing,
    asynccontextmanager,
    contextmanager,
    nullcontext,
    suppress,
)
from itertools import count, product
from typing import Any, TypeVar

from agentlightning.errors import (
    AgentLightningError,
    ConfigError,
    ConflictError,
    ForbiddenError,
    InvalidError,
    NotFoundError,
)
from agentlightning.runner import reports
from agentlightning.runner.agent import AnyAgent, as_agent
from agentlightning.runner.clients import ClientPool, current_pool
from agentlightning.runner.environment import ResourceCache, current_server
from agentlightning.runner.execution import AttemptEnd, Hook, RunningAttempt
from agentlightning.runner.isolation import (
    AgentNotLoadedError,
    AgentProcess,
    Isolation,
    boot_of,
    usual_concurrency,
)
from agentlightning.runner.reports import patiently
from agentlightning.runner.shared import ChangeWatch
from agentlightning.runner.signals import exits_refused, listen_again
from agentlightning.store.base import LightningStore
from agentlightning.tracing.emit import first_of_group
from agentlightning.tracing.instrument import tracer_class
from agentlightning.tracing.logs import AttemptLogs
from agentlightning.types import (
    AttemptedRollout,
    Mode,
    NamedResources,
    Rollout,
    RolloutConfig,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

PATIENCE_SECONDS = 60.0  # with a store that cannot be reached or whose server fails
POLL_SECONDS = 20.0  # one long poll for work
HEARTBEAT_SECONDS = 10.0  # until a lease was seen; then a third of the shortest lease
GIVE_BACK_SECONDS = 5.0  # how long a cancelled runner tries to hand its attempts back
FAREWELL_SECONDS = 2.0  # for the report that it has ended


class Runner:
    """Leases rollouts from a store and runs an agent on them, `concurrency` at once (default 64;
    with processes, one per core).

    `worker_id` names this worker and must be unique; by default it is. `endpoint_override` is the
    gateway's URL seen from here, if the resources name another. While the store cannot be reached
    or its server fails, calls are repeated for PATIENCE_SECONDS; then `run` raises
    UnavailableError. After `idle_seconds` without work, `run` returns. ConfigError for an agent
    that cannot run.

    With `isolation="process"`, attempts run in `concurrency` processes, so that an agent that
    blocks, crashes or leaks harms no other attempt and can be killed. Other processes must be able
    to import the agent; if given by name (`module:name`, `file.py:name`), only they do. Hooks run
    here. With `auto`, attempts run here too. If a model is served and the agent takes neither `llm`
    nor `resources`, they fail: the agent would call another model."""

    def __init__(
        self,
        store: LightningStore,
        agent: AnyAgent,
        *,
        concurrency: int | None = None,
        worker_id: str | None = None,
        hooks: Sequence[Hook] = (),
        endpoint_override: str | None = None,
        idle_seconds: float = math.inf,
        isolation: Isolation = "auto",
    ) -> None:
        self.concurrency = usual_concurrency(isolation) if concurrency is None else concurrency
        if self.concurrency < 1:
            raise ConfigError(f"concurrency is {concurrency}; it must be at least 1")
        self.store = store
        self.agent = as_agent(agent)
        self.worker_id = worker_id or f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._hooks = tuple(hooks)
        self._make_tracer = tracer_class()
        self._boot = boot_of(self.agent, isolation)
        self.isolation = isolation
        self._process_names = (f"{self.worker_id}/{number}" for number in count(1))
        self._idle_seconds = idle_seconds
        self._resources = ResourceCache(store, endpoint_override)
        self._logs = AttemptLogs()
        self._attempts: set[RunningAttempt] = set()
        self._finished = 0
        self._idle_since = time.monotonic()
        self._failures: Counter[str] = Counter()
        self._stopping = asyncio.Event()
        self._attempt_ended = asyncio.Event()
        self._heartbeat_seconds = HEARTBEAT_SECONDS
        self._sending = set[asyncio.Task[None]]()
        self._shorter_lease = asyncio.Event()

    async def run(self) -> None:
        """Lease and run until `stop` is called. If cancelled, cancel the agents and return their
        attempts to the queue."""
        try:
            async with self._session(), asyncio.TaskGroup() as attempts:
                if self._boot is not None:
                    for _ in range(self.concurrency):
                        attempts.create_task(self._run_in_process())
                    return
                while leased := await self._lease():
                    for running in leased:
                        attempts.create_task(self._attempt(running))
        finally:
            self._stopping.clear()
            with suppress(AgentLightningError, TimeoutError):
                async with asyncio.timeout(FAREWELL_SECONDS):
                    await self._report(ended=True)

    def stop(self) -> None:
        """Lease nothing more; `run` returns when the running attempts have ended. Call it in the
        event loop."""
        self._stopping.set()

    async def run_one(
        self,
        task: Any,
        resources: NamedResources | None = None,
        mode: Mode = "train",
        config: RolloutConfig | None = None,
    ) -> Rollout:
        """Run the agent on one task, bypassing the queue, and return the finished rollout. For
        debugging: what the agent raises is recorded and then raised here. `resources` are stored as
        a new version."""
        resources_id = (
            (await self.store.add_resources(resources)).resources_id
            if resources is not None
            else None
        )
        async with self._session(), self._process() as process:
            worker_id = self.worker_id if process is None else process.worker_id
            rollout = await self.store.start_rollout(
                task, mode, resources_id, config, worker_id=worker_id
            )
            outcome = await self._attempt(self._begin(rollout, process))
        if outcome.error is not None:
            raise outcome.error
        ended = await self.store.get_rollout_by_id(rollout.rollout_id)
        if ended is None:
            raise NotFoundError(f"rollout {rollout.rollout_id} is gone from the store")
        return ended

    async def _lease(self, process: AgentProcess | None = None) -> list[RunningAttempt]:
        """The next attempts to run: one per process, otherwise at least one; none if the runner is
        to stop."""
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            while not self._stopping.is_set():
                if len(self._attempts) >= self.concurrency:
                    self._attempt_ended.clear()
                    ended = asyncio.create_task(self._attempt_ended.wait())
                    await _first_of(ended, stopping)
                    continue
                poll = asyncio.create_task(self._patiently(lambda: self._dequeue(process)))
                if await _first_of(poll, stopping) and (leased := poll.result()):
                    return leased
        finally:
            stopping.cancel()
        return []

    async def _dequeue(self, process: AgentProcess | None) -> list[RunningAttempt]:
        free = self.concurrency - len(self._attempts) if process is None else 1
        worker_id = self.worker_id if process is None else process.worker_id
        leased = await self.store.dequeue_many_rollouts(free, worker_id, POLL_SECONDS)
        return [self._begin(rollout, process) for rollout in leased]

    def _process(self) -> AbstractAsyncContextManager[AgentProcess | None]:
        """A process for the agent until the end of the block; None if the agent runs in this
        process."""
        if self._boot is None:
            return nullcontext()
        return aclosing(
            AgentProcess(
                self._boot,
                self._process_names,
                lambda worker_id: self._patiently(lambda: self.store.issue_worker_key(worker_id)),
            )
        )

    async def _run_in_process(self) -> None:
        """Run attempts in one process, one after the other. The process is the worker; its key is
        the attempt's."""
        async with self._process() as process:
            assert process is not None
            while leased := await self._lease(process):
                await self._attempt(leased[0])
                await process.renew()

    def _begin(
        self, rollout: AttemptedRollout, process: AgentProcess | None = None
    ) -> RunningAttempt:
        """Count a leased rollout as running; what is not run is returned to the queue."""
        tracer = self._make_tracer(rollout.rollout_id, rollout.attempt.attempt_id)
        running = RunningAttempt(self, self.agent, self._hooks, rollout, tracer, process)
        loop = asyncio.get_running_loop()
        tracer.hurry = lambda: loop.call_soon_threadsafe(self._send_now, running)
        self._attempts.add(running)
        self._adjust_heartbeat(rollout)
        return running

    async def _attempt(self, running: RunningAttempt) -> AttemptEnd:
        try:
            outcome = await self._finish(running, await self._execute(running))
        except asyncio.CancelledError:
            await self._give_back(running)
            raise
        except AgentNotLoadedError as error:
            # it stays counted until no process of this runner can lease it again
            running.unrun = str(error)
            raise
        except BaseException:
            self._forget(running)
            raise
        self._forget(running)
        return outcome

    def _forget(self, running: RunningAttempt) -> None:
        self._attempts.remove(running)
        self._finished += 1
        self._idle_since = time.monotonic()
        self._attempt_ended.set()

    async def _execute(self, running: RunningAttempt) -> AttemptEnd:
        try:
            resources = await self._patiently(lambda: self._resources.bound_to(running.rollout))
            running.recorded = await self._patiently(
                lambda: reports.recorded_operations(self.store, running.rollout)
            )
        except (ConfigError, NotFoundError) as error:
            return AttemptEnd("failed", str(error), error)
        clock = asyncio.create_task(self._time_out(running))
        try:
            with self._logs.open(running.tracer):
                outcome = await running.run(resources)
            if running.process is None:
                self._changes.check()
                listen_again()
            if isinstance(outcome.error, AgentNotLoadedError):
                raise outcome.error
            return outcome
        finally:
            clock.cancel()
            # before the last spans are sent, so that none is lost behind them unsaid
            running.tracer.close()

    async def _time_out(self, running: RunningAttempt) -> None:
        """Stop the agent at its timeout, plus the time the gateway held its calls, which the store
        knows."""
        timeout = running.rollout.config.timeout_seconds
        if timeout is None:
            return
        held = 0.0
        while (left := running.started + timeout + held - time.monotonic()) > 0:
            await asyncio.sleep(left)
            held = await reports.held_seconds(self.store, running)
        aside = f", the {held:g} s that its calls were held left out" if held else ""
        running.stop("timeout", f"the agent did not finish within {timeout:g} s{aside}")

    async def _finish(self, running: RunningAttempt, outcome: AttemptEnd) -> AttemptEnd:
        """Send the last spans and end the attempt, in one call: after that nothing may come."""
        if outcome.status == "succeeded" and running.refusal is not None:
            outcome = AttemptEnd(
                "failed", f"its spans were refused: {running.refusal}", running.refusal
            )
        ended = outcome
        if outcome.status == "failed":
            fault = await self._patiently(
                lambda: reports.infrastructure_fault(self.store, running, outcome)
            )
            if fault is not None:
                ended = AttemptEnd("unresponsive", f"{fault} ({outcome.reason})", outcome.error)
        try:
            await self._patiently(lambda: reports.end(self.store, running, ended))
        except (ConflictError, NotFoundError) as error:
            logger.warning(
                "attempt %s ended as %s too late, ignored: %s", running.ids[1], ended.status, error
            )
        except InvalidError as error:
            if error is not running.refusal:
                raise
            return await self._finish(running, outcome)  # without the spans, which are dropped
        if ended.status != "succeeded":
            self._log_failure(running, ended)
        return ended

    def _log_failure(self, running: RunningAttempt, outcome: AttemptEnd) -> None:
        """Log a failure. A broken agent fails thousands of times; the store has the reason of each
        attempt."""
        rollout_id, attempt_id = running.ids
        how = "timed out" if outcome.status == "timeout" else outcome.status
        reason = (outcome.reason or "").partition("\n")[0][:500]
        kind = f"{outcome.status} {type(outcome.error).__name__}"
        self._warn_seldom(kind, f"attempt {attempt_id} of rollout {rollout_id} {how}: {reason}")

    def _warn_seldom(self, kind: str, message: str) -> None:
        """Log the 1st, 2nd, 4th, 8th … of a kind."""
        self._failures[kind] = times = self._failures[kind] + 1
        if times & (times - 1) == 0:
            logger.warning("%s%s", message, f" ({times} like this)" if times > 1 else "")

    async def _give_back(self, running: RunningAttempt) -> None:
        """This runner cannot continue: let the store decide about a retry now, not when the lease
        ends."""
        try:
            async with asyncio.timeout(GIVE_BACK_SECONDS):
                await reports.end(self.store, running, AttemptEnd("unresponsive", running.unrun))
        except ConflictError:
            pass  # it has ended already
        except (TimeoutError, AgentLightningError) as error:
            logger.warning(
                "attempt %s could not be handed back, its lease will run out: %s",
                running.ids[1],
                error,
            )
        finally:
            self._forget(running)

    def _adjust_heartbeat(self, rollout: AttemptedRollout) -> None:
        """A third of the shortest lease seen. Both ends of a lease are on the store's clock, so
        ours may differ."""
        if rollout.lease is None:
            return
        interval = max(0.05, (rollout.lease.expires - rollout.attempt.start_time) / 3)
        if interval < self._heartbeat_seconds:
            self._heartbeat_seconds = interval
            self._shorter_lease.set()

    async def _heartbeats(self) -> None:
        """Each call is a task of its own and is not repeated while it runs, so that a slow answer
        delays no other call."""
        running: dict[tuple[Any, ...], asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._shorter_lease.clear()
                try:
                    async with asyncio.timeout(self._heartbeat_seconds):
                        await self._shorter_lease.wait()
                except TimeoutError:
                    if (
                        not self._attempts
                        and time.monotonic() - self._idle_since > self._idle_seconds
                    ):
                        self.stop()
                    running = {call: task for call, task in running.items() if not task.done()}
                    for call in [
                        *product((self._heartbeat, self._send_spans), self._attempts),
                        (self._report,),
                    ]:
                        if call not in running:
                            running[call] = tasks.create_task(call[0](*call[1:]))

    async def _heartbeat(self, running: RunningAttempt) -> None:
        """Extend the attempt's lease, and learn whether the store has ended it."""
        if running.lease_token is None:
            return
        with self._handling_refusals(running):
            beat = await self.store.heartbeat(*running.ids, running.lease_token)
            # An unresponsive attempt runs on as long as its next call or span can revive it.
            lost = beat.status == "unresponsive" and not await reports.is_revivable(
                self.store, running
            )
            if lost or beat.status not in ("preparing", "running", "unresponsive"):
                running.ended_by_store = True
                running.stop(beat.status, "the store had ended it")

    def _send_now(self, running: RunningAttempt) -> None:
        task = asyncio.create_task(self._send_spans(running))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _send_spans(self, running: RunningAttempt) -> None:
        """Send the spans recorded so far."""
        with self._handling_refusals(running):
            await reports.send(self.store, running)

    @contextmanager
    def _handling_refusals(self, running: RunningAttempt) -> Generator[None]:
        """Handle a refusal of the store for a running attempt; a failed call is repeated next
        time."""
        try:
            yield
        except (ForbiddenError, ConfigError):
            raise
        except InvalidError as error:
            running.stop("failed", f"its spans were refused: {error}")
        except (ConflictError, NotFoundError) as error:
            running.ended_by_store = True
            running.stop("cancelled", f"it is no longer this runner's: {error}")
        except AgentLightningError as error:
            self._warn_seldom(
                "call",
                f"a call for attempt {running.ids[1]} failed and is made again soon: {error}",
            )

    async def _report(self, *, ended: bool = False) -> None:
        stats = {
            "running": len(self._attempts),
            "finished": self._finished,
            "concurrency": self.concurrency,
            "ended": ended,
        }
        try:
            await self.store.update_worker(self.worker_id, stats)
        except (ForbiddenError, ConfigError):
            raise
        except AgentLightningError as error:
            self._warn_seldom(
                "report", f"worker {self.worker_id} could not report, tried again soon: {error}"
            )

    @asynccontextmanager
    async def _session(self) -> AsyncGenerator[None]:
        """The timer, the agents' connections and logs. An exception inside is raised alone, not as
        a group."""
        self._changes = ChangeWatch()
        pool = ClientPool(asyncio.get_running_loop())
        token = current_pool.set(pool)
        server = current_server.set(getattr(self.store, "url", None))  # which a client has
        try:
            async with asyncio.TaskGroup() as group:
                timer = group.create_task(self._heartbeats())
                with (
                    self._logs.installed(),
                    exits_refused() if self._boot is None else nullcontext(),
                ):
                    yield
                timer.cancel()
        except BaseExceptionGroup as errors:
            raise first_of_group(errors) from None
        finally:
            await asyncio.gather(*map(self._give_back, self._attempts))
            current_pool.reset(token)
            current_server.reset(server)
            await pool.close()

    async def _patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        return await patiently(call, PATIENCE_SECONDS)


async def _first_of(wanted: asyncio.Task[Any], stopping: asyncio.Task[Any]) -> bool:
    """Wait for either; unless `wanted` finishes, cancel it. True if `wanted` has a result."""
    try:
        await asyncio.wait({wanted, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not wanted.done():
            wanted.cancel()
    await asyncio.wait({wanted})
    return not wanted.cancelled()
