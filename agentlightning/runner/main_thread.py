"""Code that works in the main thread only, such as a grader that sets an alarm: how it is found,
and what to do.

A plain function runs in a thread in the runner's process, and in the main thread in a process of
its own. In a thread, `signal.signal` raises; many graders catch that with everything else and
answer 0."""

from __future__ import annotations

import ast
import inspect
import logging
import re
import signal
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any, Final

from agentlightning.errors import ConfigError
from agentlightning.runner.agent import LitAgent, NamedAgent, is_async
from agentlightning.runner.clients import causes

logger = logging.getLogger(__name__)

ADVICE: Final = (
    "Plain functions run in a thread here. Run the agent with isolation='process', where it has "
    "the main thread; or declare it with `async def`"
)
# of Python; of Math-Verify
_RAISED: Final = re.compile(r"main thread|signal\.alarm|threaded environment")
_ALARMS: Final = ("alarm", "setitimer")
_SHARED: Final = (
    *("chdir", "umask", "_exit", "closerange", "redirect_stdout", "redirect_stderr"),
    *("interrupt_main", "all_tasks"),
)
_OF_SIGNAL: Final = (signal, *(getattr(signal, name) for name in _ALARMS if hasattr(signal, name)))
_NO_GRADERS: Final = sys.stdlib_module_names - {"__main__"} | {"transformers"}
"""Packages whose alarms no agent meets: Transformers sets one while it asks at a terminal whether
to trust a model."""


def needs_main_thread(error: BaseException) -> bool:
    """Whether this exception, or one that led to it, is about not being in the main thread."""
    return any(
        isinstance(cause, ValueError | RuntimeError)
        and any(_RAISED.search(str(part)) for part in cause.args)
        for cause in causes(error)
    )


def needs_process(agent: LitAgent[Any]) -> bool:
    """Whether the source of its module changes what all rollouts of a process share or, for a sync
    agent, sets alarms or handlers of signals."""
    try:
        loaded = agent.loaded() if isinstance(agent, NamedAgent) else agent
        module = sys.modules[str(loaded.__module__)]
        if _calls(module, *_SHARED):
            return True
        return _calls(module, "signal", *_ALARMS) and not is_async(loaded.entry_point("train"))
    except (ConfigError, KeyError, OSError, TypeError, SyntaxError):
        # not loaded, no source, or for val only
        return False


class AlarmWatch:
    """Warns once if the program has code that sets alarms, which fails in the threads of agents."""

    def __init__(self) -> None:
        self._modules = 0
        self._warned = False

    def check(self, module: str) -> None:
        """Check the agent's `module` and what it imports; again only if more is loaded. Called
        after an agent's run, since graders are often imported in it."""
        if self._warned or len(sys.modules) == self._modules:
            return
        self._modules = len(sys.modules)
        imported = (module, *_imports(module))
        inside = tuple(f"{name}." for name in imported)
        loaded = [name for name in list(sys.modules) if name in imported or name.startswith(inside)]
        found = sorted(
            name for name in loaded if (name == module or _has_signal(name)) and _alarms(name)
        )
        if found:
            self._warned = True
            logger.warning(
                "%s can set alarms (signal.alarm), which raises outside the main thread; a grader "
                "that catches the error gives 0 to everything. %s",
                ", ".join(found[:3]),
                ADVICE,
            )


def _imports(module: str) -> Iterator[str]:
    """The modules and packages that the source of a module imports from; none without a source."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (KeyError, OSError, TypeError, SyntaxError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def _has_signal(name: str) -> bool:
    own: dict[str, Any] = getattr(sys.modules.get(name), "__dict__", {})
    return any(value is part for value in list(own.values()) for part in _OF_SIGNAL)


def _alarms(name: str) -> bool:
    module = sys.modules.get(name)
    if module is None or name.partition(".")[0] in _NO_GRADERS:
        return False
    try:
        return _calls(module, *_ALARMS)
    except (OSError, TypeError, SyntaxError):  # there is no source, as in a notebook
        return False


def _calls(module: ModuleType, *names: str) -> bool:
    """Whether the source of a module has calls of functions of these names. OSError, TypeError or
    SyntaxError without a source."""
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Attribute) and called.attr in names:
                return True
            if isinstance(called, ast.Name) and called.id in names:
                return True
    return False


watch: Final = AlarmWatch()
"""The watch of this process."""
