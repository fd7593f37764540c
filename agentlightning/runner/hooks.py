"""`Hook`: code of the user's that runs around every attempt. Knows nothing of how attempts are run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from agentlightning.tracing.context import AttemptTracer
from agentlightning.types import AttemptedRollout, Span

if TYPE_CHECKING:
    from agentlightning.runner.agent import LitAgent
    from agentlightning.runner.runner import Runner


class Hook:
    """Override what you need; all methods are awaited in the runner's event loop, in the order hooks were given.

    The sequence is on_rollout_start, on_trace_start, the agent, on_trace_end, on_rollout_end. `emit_*` calls in any of
    them belong to the attempt, so a reward may be emitted in `on_trace_end`. All but `on_rollout_end` run within the
    attempt's timeout. When the agent raises, `on_trace_end` and `on_rollout_end` still run; when the attempt is
    stopped (timeout, cancellation), only `on_rollout_end` does. A hook that raises fails the attempt."""

    async def on_rollout_start(self, *, agent: LitAgent[Any], runner: Runner, rollout: AttemptedRollout) -> None:
        """The attempt was leased and its resources were found."""

    async def on_trace_start(
        self, *, agent: LitAgent[Any], runner: Runner, tracer: AttemptTracer, rollout: AttemptedRollout
    ) -> None:
        """The agent is about to start. `tracer.get_last_trace()` lists the spans recorded so far."""

    async def on_trace_end(
        self, *, agent: LitAgent[Any], runner: Runner, tracer: AttemptTracer, rollout: AttemptedRollout
    ) -> None:
        """The agent returned or raised; a returned reward is recorded after this."""

    async def on_rollout_end(
        self, *, agent: LitAgent[Any], runner: Runner, rollout: AttemptedRollout, spans: Sequence[Span]
    ) -> None:
        """Everything is done except telling the store. `spans` are those recorded in this process (LLM calls are
        recorded by the gateway and are not among them)."""
