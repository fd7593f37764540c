"""An agent of its own for each rollout: what one rollout keeps on `self` (a client, a history, an environment) is never
another's.

A copy is `copy.deepcopy`'s, with two exceptions that are shared: what cannot be copied (locks, clients, open files)
and what is large (an index, a loaded model). Knows agents' state; does not know how agents are called.
"""

from __future__ import annotations

import copy
import inspect
import io
import logging
import pickle
from collections.abc import Callable
from typing import Any, Final, cast

from agentlightning.errors import ConfigError
from agentlightning.runner.agent import FunctionAgent, LitAgent, NamedAgent

logger = logging.getLogger(__name__)

LARGEST_COPIED: Final = 1 << 20  # bytes of an attribute when pickled; a larger one is shared


def own_copies(agent: LitAgent[Any]) -> Callable[[], LitAgent[Any]]:
    """What makes a copy of `agent` for one rollout. ConfigError for an agent that refuses to be copied."""
    if isinstance(agent, NamedAgent):
        agent = agent.loaded()
    holder: Any = getattr(agent.function, "__self__", agent.function) if isinstance(agent, FunctionAgent) else agent
    if inspect.isfunction(holder) or inspect.isclass(holder):
        return cast("Callable[[], LitAgent[Any]]", lambda: cast("Any", agent))
    shared = {id(holder): holder}
    for name, value in getattr(holder, "__dict__", {}).items():
        if why := _why_shared(value, shared):
            shared[id(value)] = value
            logger.info("the agent's %s is shared by all rollouts: it %s", name, why)
    del shared[id(holder)]

    def made() -> LitAgent[Any]:
        return copy.deepcopy(agent, dict(shared))

    try:
        made()
    except Exception as error:
        raise ConfigError(
            f"the agent cannot be copied for each rollout: {type(error).__name__}: {error}. "
            "Define __deepcopy__ in its class; one that returns self lets all rollouts share the agent"
        ) from error
    return made


def _why_shared(value: Any, known: dict[int, Any]) -> str | None:
    """Why an attribute is not copied; None where it is. What is `known` within it does not count."""
    if type(value).__module__.startswith("asyncio"):
        return "limits or tells several tasks"
    try:
        _Measuring(known).dump(value)
    except _TooLargeError:
        return f"is larger than {LARGEST_COPIED >> 20} MiB"
    except Exception:  # noqa: BLE001 - as a local function is, which can be copied all the same
        try:
            copy.deepcopy(value, dict(known))
        except Exception as error:  # noqa: BLE001
            return f"cannot be copied ({type(error).__name__})"
    return None


class _TooLargeError(Exception):
    pass


class _Measuring(pickle.Pickler):
    """Pickles to nowhere, up to a limit."""

    def __init__(self, known: dict[int, Any]) -> None:
        super().__init__(_Limited(), pickle.HIGHEST_PROTOCOL)
        self._known = known

    def persistent_id(self, obj: Any) -> int | None:
        return id(obj) if id(obj) in self._known else None


class _Limited(io.RawIOBase):
    _written = 0

    def write(self, data: Any) -> int:
        self._written += len(data)
        if self._written > LARGEST_COPIED:
            raise _TooLargeError
        return len(data)
