"""An agent of its own for each rollout: what one rollout keeps on `self` (a client, a history, an environment) is never
another's.

A copy is `copy.deepcopy`'s, with two exceptions that are shared: what cannot be copied (locks, clients, open files)
and what is large (an index, a loaded model). Knows agents' state; does not know how agents are called.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import io
import logging
import pickle
import types
import weakref
from collections.abc import Callable
from typing import Any, Final, cast

from agentlightning.errors import ConfigError
from agentlightning.runner.agent import FunctionAgent, LitAgent, NamedAgent

logger = logging.getLogger(__name__)

_NEVER_COPIED: Final = (type, types.FunctionType, types.BuiltinFunctionType, weakref.ref)  # and some not pickled
LARGEST_COPIED: Final = 1 << 20  # bytes of an attribute when pickled; a larger one is shared


def own_copies(agent: LitAgent[Any]) -> Callable[[], LitAgent[Any]]:
    """What makes a copy of `agent` for one rollout. ConfigError for an agent that refuses to be copied."""
    if isinstance(agent, NamedAgent):
        agent = agent.loaded()
    holders: list[Any] = [_object_of(agent.function) if isinstance(agent, FunctionAgent) else agent]
    given: dict[str, Any] = {}
    if isinstance(partial := holders[0], functools.partial):
        given = {**{str(index): one for index, one in enumerate(partial.args)}, **partial.keywords}
        holders.append(_object_of(cast("Any", partial.func)))
    elif inspect.isfunction(partial) or inspect.isclass(partial):
        return cast("Callable[[], LitAgent[Any]]", lambda: cast("Any", agent))
    shared = {id(holder): holder for holder in holders}
    for holder in holders:
        given |= getattr(holder, "__dict__", {})
    for name, value in given.items():
        if why := _why_shared(value, shared):
            shared[id(value)] = value
            logger.info("the agent's %s is shared by all rollouts: it %s", name, why)
    for holder in holders:
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


def _object_of(function: Any) -> Any:
    """What a method is bound to; else what is called itself."""
    return getattr(function, "__self__", function)


def _why_shared(value: Any, known: dict[int, Any]) -> str | None:
    """Why what an agent keeps is not copied; None where it is. What is `known` within it does not count."""
    if type(value).__module__.partition(".")[0] == "asyncio":
        return "limits or tells several tasks"
    try:
        _Measuring(known).dump(value)
    except _SharedError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - of a stranger's object
        if not hasattr(value, "__deepcopy__"):  # a copy that breaks off leaves half-made objects to `__del__`
            return f"cannot be copied ({type(error).__name__})"
    return None


class _SharedError(Exception):
    pass


class _Measuring(pickle.Pickler):
    """Pickles to nowhere, up to a limit, what `copy.deepcopy` would copy."""

    def __init__(self, known: dict[int, Any]) -> None:
        super().__init__(_Limited(), pickle.HIGHEST_PROTOCOL)
        self._known = known

    def persistent_id(self, obj: Any) -> int | None:
        if isinstance(obj, asyncio.Semaphore):
            self._known[id(obj)] = obj  # it limits all rollouts, whatever holds it
        return id(obj) if id(obj) in self._known or isinstance(obj, _NEVER_COPIED) else None


class _Limited(io.RawIOBase):
    _written = 0

    def write(self, data: Any) -> int:
        self._written += len(data)
        if self._written > LARGEST_COPIED:
            raise _SharedError(f"is larger than {LARGEST_COPIED >> 20} MiB")
        return len(data)
