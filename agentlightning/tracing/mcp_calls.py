"""Records each tool call of an MCP session (package `mcp`) as an operation, and gives its recorded
result where an attempt is walked again.

All clients and frameworks on that package make these calls by `ClientSession.call_tool`, which is
patched once an agent imports it. Other requests go to the server. Outside a rollout, and in a
thread or task without the attempt's context, the session works as usual."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Final

from agentlightning.semconv import OPERATION_MCP, OPERATION_NAME
from agentlightning.tracing.context import current_binding
from agentlightning.tracing.emit import shown
from agentlightning.tracing.operation import Operation
from agentlightning.types import Attributes

logger = logging.getLogger(__name__)

_MODULE: Final = "mcp.client.session"
_CALLBACKS: Final = ("_sampling_callback", "_elicitation_callback")


@functools.cache
def record_mcp_calls() -> None:
    """Record the calls of `mcp`, or have them recorded from its import on. Called before each run
    of an agent; repeating it costs nothing."""
    sys.meta_path.insert(0, _Finder())
    module = sys.modules.get(_MODULE)
    if module is not None:
        _patch(module)


class _Finder(MetaPathFinder):
    """Has the module of sessions patched when it is imported. The finders of others find it, since
    instrumentation may have put one there too."""

    _finding = False  # under the import lock of that module

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _MODULE or self._finding:
            return None
        self._finding = True
        try:
            spec = find_spec(fullname)
        finally:
            self._finding = False
        if spec is not None and spec.loader is not None:
            spec.loader = _PatchingLoader(spec.loader)
        return spec


class _PatchingLoader(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        _patch(module)


def _patch(module: Any) -> None:
    try:
        session = module.ClientSession
        session.call_tool = _recorded(session.call_tool, module.types.CallToolResult, module)
    except AttributeError as error:  # in a version to come
        logger.warning("tool calls of MCP sessions are not recorded here: %s", error)


def _recorded(call_tool: Any, kind: Any, module: Any) -> Any:
    @functools.wraps(call_tool)
    async def recorded(
        session: Any, name: str, arguments: Any = None, *rest: Any, **options: Any
    ) -> Any:
        binding = current_binding()
        # the second round of a call that asked for input
        rounds = any(options.get(name) for name in ("input_responses", "request_state"))
        refused = rounds or not isinstance(arguments, dict | None)
        if binding is None or binding.tracer.closed or refused:
            return await call_tool(session, name, arguments, *rest, **options)
        server = getattr(getattr(session, "server_info", None), "name", "")
        marks: Attributes = {OPERATION_NAME: shown(name), OPERATION_MCP: shown(server)}
        with Operation(marks) as running:
            running.set_input(**{shown(key): value for key, value in (arguments or {}).items()})
            if (found := running.recorded_result()) is not None:
                result = kind.model_validate(found.value)
                running.set_output(found.value)
                return result
            asked = _times_asked(session, module)
            result = await call_tool(session, name, arguments, *rest, **options)
            # what the server asked meanwhile, perhaps of a model, is to be asked again
            if type(result) is kind and asked == _times_asked(session, module):
                with suppress(ValueError):  # it may hold what is no JSON
                    output = result.model_dump(mode="json", by_alias=True, exclude_unset=True)
                    if kind.model_validate(output) == result:
                        running.set_output(output)
            return result

    return recorded


class _Counting:
    """A callback by which a session answers its server, with the number of its calls."""

    def __init__(self, callback: Any) -> None:
        self._callback = callback
        self.times = 0

    def __call__(self, *args: Any) -> Any:
        self.times += 1
        return self._callback(*args)


def _times_asked(session: Any, module: Any) -> int:
    """How often a server has asked for a sample or for input, since this was first called."""
    times = 0
    for name in _CALLBACKS:
        callback = getattr(session, name, None)
        if callback is not getattr(module, f"_default{name}", None):
            if not isinstance(callback, _Counting):
                callback = _Counting(callback)
                setattr(session, name, callback)
            times += callback.times
    return times
