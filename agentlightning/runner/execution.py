"""Runs one agent once, in the event loop or in a thread, until it ends or is stopped, whatever it
raises or returns.

It does not know the store: its caller stops it, and gets an `AttemptEnd`.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from agentlightning.errors import AgentLightningError, ConfigError, InvalidError
from agentlightning.runner.agent import LitAgent, is_async
from agentlightning.runner.clients import guard_clients
from agentlightning.runner.environment import serves_model
from agentlightning.runner.hints import add_hint
from agentlightning.runner.main_thread import ADVICE, needs_main_thread, watch
from agentlightning.runner.signals import is_interrupt
from agentlightning.semconv import ANNOTATION, REWARD_RETURNED
from agentlightning.store.redaction import text_without_secrets
from agentlightning.tracing.context import AttemptTracer, bind
from agentlightning.tracing.emit import emit_exception, shown_error
from agentlightning.tracing.instrument import quiet_openai_agents
from agentlightning.tracing.mcp_calls import record_mcp_calls
from agentlightning.tracing.recorded import RecordedOperation, RecordedOperations
from agentlightning.tracing.rewards import read_reward, reward_attributes
from agentlightning.types import AttemptedRollout, AttemptStatus, NamedResources, Span

logger = logging.getLogger(__name__)

GRACE_SECONDS = 5.0  # how long a cancelled agent may clean up before it is left behind
AGENT_THREAD = "agentlightning-agent"  # of a sync agent
NOT_SERVED = (
    "the agent takes neither `llm` nor `resources`, and would call the API that this process's "
    "environment names. Take `llm`, or run it with isolation='process', where the environment "
    "names the model that is served; if it calls no model, say isolation='none'"
)
ISOLATE = "isolation='process' runs agents where they can be killed"


class Hook:
    """Called around every attempt. Override the methods you need: they are awaited in the runner's
    event loop, hook by hook.

    The order is on_rollout_start, on_trace_start, the agent, on_trace_end, on_rollout_end. In all
    of them `emit_*` records spans of the attempt; `on_trace_end` may emit a reward. All but
    `on_rollout_end` count towards the attempt's timeout. If the agent raises, `on_trace_end` and
    `on_rollout_end` still run; if the attempt is stopped (timeout, cancellation), only
    `on_rollout_end` does. A hook that raises fails the attempt."""

    async def on_rollout_start(
        self, *, agent: LitAgent[Any], runner: Any, rollout: AttemptedRollout
    ) -> None:
        """The attempt is leased and its resources are loaded."""

    async def on_trace_start(
        self, *, agent: LitAgent[Any], runner: Any, tracer: AttemptTracer, rollout: AttemptedRollout
    ) -> None:
        """The agent is about to start. `tracer.get_last_trace()` lists the spans recorded so
        far."""

    async def on_trace_end(
        self, *, agent: LitAgent[Any], runner: Any, tracer: AttemptTracer, rollout: AttemptedRollout
    ) -> None:
        """The agent has returned or raised. A returned reward is recorded after this."""

    async def on_rollout_end(
        self, *, agent: LitAgent[Any], runner: Any, rollout: AttemptedRollout, spans: Sequence[Span]
    ) -> None:
        """Everything is done but reporting the end to the store. `spans` were recorded in this
        process; LLM calls are recorded by the gateway."""


@dataclass(frozen=True)
class AttemptEnd:
    """The end of an attempt: its status and, unless it succeeded, the reason, without secrets, and
    the exception, if there was one."""

    status: AttemptStatus
    reason: str | None = None
    error: BaseException | None = None

    def __post_init__(self) -> None:
        if self.reason is not None:
            object.__setattr__(self, "reason", text_without_secrets(self.reason))


@dataclass(eq=False)
class RunningAttempt:
    """One attempt of one agent, from on_rollout_start to on_rollout_end. The agent runs in
    `process` (an `AgentProcess`), if there is one; hooks run here. The attributes after `started`
    are the runner's."""

    runner: Any
    agent: LitAgent[Any]
    hooks: tuple[Hook, ...]
    rollout: AttemptedRollout
    tracer: AttemptTracer
    process: Any = None
    started: float = field(default_factory=time.monotonic)
    recorded: list[RecordedOperation] = field(default_factory=list[RecordedOperation])
    unsent: list[Span] = field(default_factory=list[Span])
    sending: asyncio.Lock = field(default_factory=asyncio.Lock)
    defects: int = 0  # how often the server has failed at what is unsent
    refusal: AgentLightningError | None = None  # of spans that were dropped
    ended_by_store: bool = False
    unrun: str = "its runner was stopped"  # why it is handed back, if it is

    @property
    def ids(self) -> tuple[str, str]:
        return self.rollout.rollout_id, self.rollout.attempt.attempt_id

    @property
    def lease_token(self) -> int | None:
        return self.rollout.lease.token if self.rollout.lease else None

    def __post_init__(self) -> None:
        self._stopped: asyncio.Future[AttemptEnd] = asyncio.get_running_loop().create_future()

    def stop(self, status: AttemptStatus, reason: str) -> None:
        """Cancel the agent; the outcome has this `status`. Later calls do nothing."""
        if not self._stopped.done():
            self._stopped.set_result(AttemptEnd(status, reason))

    async def run(self, resources: NamedResources) -> AttemptEnd:
        """Run to the end, or until stopped. Of exceptions in the agent, only Ctrl-C is raised."""
        with bind(self.tracer):
            outcome = await self._supervised(resources)
            if outcome.error is not None:
                emit_exception(outcome.error)
            ended = await guarded(
                self._call_hooks("on_rollout_end", spans=self.tracer.get_last_trace())
            )
            if ended.error is not None:
                emit_exception(ended.error)
                if outcome.status == "succeeded":
                    outcome = _failed(ended.error)
        return outcome

    async def _supervised(self, resources: NamedResources) -> AttemptEnd:
        """Run the agent in a task of its own, so that it can be cancelled, or abandoned if it does
        not stop."""
        task = asyncio.create_task(
            guarded(self._traced(resources)), name=f"agent of {self.tracer.attempt_id}"
        )
        try:
            await asyncio.wait({task, self._stopped}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await self._cancel(task)
            raise
        if not self._stopped.done():
            return self._end_of(task.result())
        await self._cancel(task)
        return self._stopped.result()

    async def _cancel(self, task: asyncio.Task[AgentResult]) -> None:
        """Cancel the agent's task and give it time to clean up."""
        task.cancel()
        await asyncio.wait({task}, timeout=GRACE_SECONDS)
        if not task.done():
            logger.warning(
                "the agent of attempt %s goes on %g s after it was cancelled and is abandoned; %s",
                self.tracer.attempt_id,
                GRACE_SECONDS,
                ISOLATE,
            )

    def _end_of(self, result: AgentResult) -> AttemptEnd:
        """The agent ended in time. A returned reward becomes the last span."""
        if result.error is not None:
            return _failed(result.error)
        try:
            record_result(self.tracer, result.value)
        except InvalidError as error:
            return _failed(error)
        return AttemptEnd("succeeded")

    async def _traced(self, resources: NamedResources) -> Any:
        """Call the agent, with the hooks around it."""
        if self.process is None:
            self.agent = self.agent.own_copy()
        await self._call_hooks("on_rollout_start")
        await self._call_hooks("on_trace_start", tracer=self.tracer)
        result = await guarded(self._call_agent(resources))
        if self._stopped.done():  # it did not let itself be cancelled
            return result.value
        hooks = await guarded(self._call_hooks("on_trace_end", tracer=self.tracer))
        if result.error is not None:
            if hooks.error is not None:
                emit_exception(hooks.error)
            raise result.error
        if hooks.error is not None:
            raise hooks.error
        return result.value

    async def _call_agent(self, resources: NamedResources) -> Any:
        if self.process is not None:
            return await self.process.run(self.rollout, resources, self.tracer, self.recorded)
        self.tracer.recorded = RecordedOperations(self.recorded)
        if (
            self.runner.isolation == "auto"
            and self.agent.reads_environment()
            and serves_model(resources, self.rollout)
        ):
            raise ConfigError(NOT_SERVED)
        try:
            return await call_agent(self.agent, self.rollout, resources)
        except asyncio.CancelledError:
            if not is_async(self.agent.entry_point(self.rollout.mode)):
                logger.warning(
                    "the agent of attempt %s runs on in its thread; %s",
                    self.tracer.attempt_id,
                    ISOLATE,
                )
            raise

    async def _call_hooks(self, name: str, **arguments: Any) -> None:
        for hook in self.hooks:
            method = cast("Callable[..., Awaitable[None]]", getattr(hook, name))
            await method(agent=self.agent, runner=self.runner, rollout=self.rollout, **arguments)


@dataclass(frozen=True)
class AgentResult:
    """The result of the user's code: a value or an exception."""

    value: Any = None
    error: BaseException | None = None


async def call_agent(
    agent: LitAgent[Any], rollout: AttemptedRollout, resources: NamedResources
) -> Any:
    """Call the agent. Async agents run in this event loop, sync ones in a thread. What it raises
    may get a note that names the cause."""
    entry_point = _prepared_call(agent, rollout, resources)
    try:
        if is_async(entry_point.func):
            return await entry_point()
        try:
            result = await in_own_thread(entry_point)
        finally:
            watch.check(str(agent.__module__))
    except Exception as error:
        add_hint(error, rollout.input, resources)
        raise
    return _no_coroutine(result)


def call_blocking(
    agent: LitAgent[Any], rollout: AttemptedRollout, resources: NamedResources
) -> AgentResult:
    """Call a sync agent in this thread, and in a copy of its context."""
    try:
        value = contextvars.copy_context().run(_prepared_call(agent, rollout, resources))
        return AgentResult(value=_no_coroutine(value))
    except BaseException as error:  # noqa: BLE001 - anything an agent raises is the result of its attempt
        add_hint(error, rollout.input, resources)
        return AgentResult(error=_raisable(error))


def _prepared_call(
    agent: LitAgent[Any], rollout: AttemptedRollout, resources: NamedResources
) -> functools.partial[Any]:
    """The agent's call, whose libraries are prepared: here, where its module is imported, whichever
    process this is."""
    quiet_openai_agents()
    guard_clients()
    record_mcp_calls()
    return functools.partial(agent.entry_point(rollout.mode), rollout.input, resources, rollout)


def _no_coroutine(value: Any) -> Any:
    if inspect.iscoroutine(value):
        value.close()
        raise InvalidError(
            "the agent returned a coroutine from a plain function; declare it with `async def`"
        )
    return value


async def guarded(work: Awaitable[Any]) -> AgentResult:
    """Await the user's code. Only Ctrl-C and a cancellation of the awaiting task pass; SystemExit,
    a KeyboardInterrupt of its own and the like end the agent, not the runner."""
    try:
        return AgentResult(value=await work)
    except KeyboardInterrupt as error:
        if is_interrupt(error):
            raise
        return AgentResult(error=_raisable(error))
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        return AgentResult(error=error)
    except BaseException as error:  # noqa: BLE001 - anything an agent raises is the result of its attempt
        return AgentResult(error=error)


async def in_own_thread(function: Callable[[], Any]) -> Any:
    """Call a blocking function in a daemon thread with the context of the caller.

    Each call has its own thread: a call that hangs cannot be stopped, and must neither block a pool
    nor keep the process alive. If the awaiting task is cancelled, the thread is abandoned."""
    loop = asyncio.get_running_loop()
    answered: asyncio.Future[AgentResult] = loop.create_future()
    context = contextvars.copy_context()

    def deliver(result: AgentResult) -> None:
        if not answered.done():
            answered.set_result(result)

    def work() -> None:
        try:
            result = AgentResult(value=context.run(function))
        except BaseException as error:  # noqa: BLE001 - carried over to the loop, where it is raised again
            result = AgentResult(error=error)
        if not loop.is_closed():
            loop.call_soon_threadsafe(deliver, result)

    threading.Thread(target=work, name=AGENT_THREAD, daemon=True).start()
    result = await answered
    if result.error is not None:
        raise _raisable(result.error)
    return result.value


def _raisable(error: BaseException) -> BaseException:
    """The error of an agent, to be raised elsewhere: no coroutine can raise StopIteration, and
    KeyboardInterrupt would pass for Ctrl-C."""
    if isinstance(error, StopIteration | KeyboardInterrupt):
        carried = RuntimeError(f"the agent raised {type(error).__name__}")
        carried.__cause__ = error
        return carried
    return error


def record_result(tracer: AttemptTracer, result: Any) -> None:
    """Record what an agent returned as spans: None, a reward in a form of `read_reward`, or a list
    of spans. InvalidError for anything else."""
    if result is None:
        return
    if isinstance(result, list):
        spans = cast("list[Any]", result)
        strangers = [type(span).__name__ for span in spans if not isinstance(span, Span)]
        if strangers:
            raise InvalidError(
                f"the agent returned a list with a {strangers[0]}; expected agentlightning.Span "
                "objects"
            )
        for span in spans:
            tracer.adopt(span)
        return
    given = read_reward(result, "the agent's result")
    if not given.final:
        raise InvalidError(
            "the agent returned a reward with final=false, but a returned reward is final; emit "
            "it instead"
        )
    tracer.record(ANNOTATION, {**reward_attributes(*given), REWARD_RETURNED: True})


def _failed(error: BaseException) -> AttemptEnd:
    advice = f". {ADVICE}" if needs_main_thread(error) else ""
    return AttemptEnd("failed", f"{type(error).__name__}: {shown_error(error)}{advice}", error)
