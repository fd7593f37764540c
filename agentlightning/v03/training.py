"""What a Trainer takes as 0.3's did: `adapter=`."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any, cast

from agentlightning.algorithm.apo import APO
from agentlightning.algorithm.base import Algorithm
from agentlightning.algorithm.function import FunctionAlgorithm
from agentlightning.errors import ConfigError, nearest
from agentlightning.v03.adapters import Adapter, TracerTraceToTriplet, TraceToMessages


def with_adapter(algorithm: Algorithm | None, adapter: Any) -> Algorithm:
    """The function, given this adapter, or a TracerTraceToTriplet with these options. APO reads conversations as
    TraceToMessages does, and may be given it.

    ConfigError for another algorithm, on which it would have no effect: the message says what to write instead."""
    if isinstance(adapter, Mapping):
        options = cast(Mapping[str, Any], adapter)
        known = inspect.signature(TracerTraceToTriplet).parameters
        if (unknown := next((name for name in options if name not in known), None)) is not None:
            raise ConfigError(f"adapter has no option {unknown!r}; {nearest(unknown, known)}")
        adapter = TracerTraceToTriplet(**options)
    if not isinstance(adapter, Adapter):
        raise ConfigError(f"adapter is a {type(adapter).__name__}; give an agl.TraceAdapter, or a mapping of options")
    if isinstance(algorithm, FunctionAlgorithm):
        algorithm = copy.copy(algorithm)
        algorithm.adapter = adapter
        return algorithm
    if isinstance(algorithm, APO) and type(adapter) is TraceToMessages:
        return algorithm
    instead = "say by returns=, baseline= and reward= of agl.GRPO how calls are rewarded"
    if isinstance(adapter, TracerTraceToTriplet) and adapter.agent_match is not None:
        pattern = f".*({adapter.agent_match}).*"
        instead = f"write algorithm=agl.GRPO(agents={pattern!r}), or the agents' whole names: agents='writer|rewriter'"
    raise ConfigError(
        "adapter is only for functions decorated by agl.algo: other algorithms read the gateway's exact tokens. "
        f"Leave it out; {instead}"
    )
