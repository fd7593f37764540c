"""`agl.instrument`: switches on published OpenTelemetry instrumentation of agent frameworks.

It finds instrumentation and knows its gaps; it patches nothing itself. OpenTelemetry and frameworks
are imported only when asked for."""

from __future__ import annotations

import functools
import importlib
import logging
import os
import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from typing import Any, Final

from agentlightning.errors import ConfigError, nearest
from agentlightning.tracing.context import AttemptTracer

logger = logging.getLogger(__name__)

_GROUP: Final = "opentelemetry_instrumentor"
INSTRUMENT: Final = "AGL_INSTRUMENT"
"""The variable that has agents of other processes instrumented: names with commas between them, or
`all`."""


def instrument(*names: str) -> list[str]:
    """Record the tools and agents of these frameworks as spans. Without names: of all whose
    instrumentation is installed, except `OTEL_PYTHON_DISABLED_INSTRUMENTATIONS`.

    A name is an entry point of the group `opentelemetry_instrumentor`, or its beginning
    (`autogen`); `agent_framework` and `pydantic_ai` need no package. Call it before you create
    agents; a second call does nothing. Returns the names that are on. ConfigError for a name that
    is not installed or cannot be switched on; without names, a warning."""
    switches = _switches()
    left_out = (
        os.environ.get("OTEL_PYTHON_DISABLED_INSTRUMENTATIONS", "").replace(" ", "").split(",")
    )
    chosen = [found for name in names for found in _matching(name, switches)]
    switched_on: list[str] = []
    for name in chosen or [
        name for name in switches if name not in left_out and "*" not in left_out
    ]:
        try:
            switches[name]()
        except Exception as error:
            if names:
                raise ConfigError(f"{name} cannot be instrumented: {error}") from error
            # many packages do not install the framework that they instrument
            conflict = getattr(error, "conflict", None)
            present = conflict and (conflict.found or getattr(conflict, "found_any", None))
            lacking = isinstance(error, ModuleNotFoundError) or (conflict and not present)
            level = logging.DEBUG if lacking else logging.WARNING
            logger.log(level, "%s is left without instrumentation: %s", name, error)
        else:
            switched_on.append(name)
    return switched_on


def instrument_from_environment() -> list[str]:
    """Instrument the frameworks that the environment names."""
    return _instrument_named(os.environ.get(INSTRUMENT, ""))


def _instrument_named(listed: str) -> list[str]:
    names = [name for name in listed.split(",") if name]
    return instrument(*(name for name in names if name != "all")) if names else []


def instrument_agents(names: str, *, here: bool) -> list[str]:
    """Instrument the agents of child processes from now on and, with `here`, of this one, before
    they are imported: names with commas between them, or `all`."""
    found = _instrument_named(names) if here else []
    os.environ[INSTRUMENT] = names
    return found


def quiet_openai_agents() -> None:
    """Keep the OpenAI Agents SDK, if installed, from sending its traces to OpenAI.

    If it is imported, only its uploading processor is removed; those of instrumentation stay. If
    not, its environment variable switches tracing off: importing it takes seconds, also in programs
    that do not use it. Called before each run of an agent; repeating it costs nothing."""
    if not _installed("openai-agents"):
        return
    if "agents.tracing" in sys.modules:
        _take_out_upload()
    else:
        os.environ.setdefault("OPENAI_AGENTS_DISABLE_TRACING", "1")


def tracer_class() -> type[AttemptTracer]:
    """The tracer that also collects what OpenTelemetry's SDK traces, if that is installed and not
    disabled."""
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() != "true":
        with suppress(ImportError):
            from agentlightning.tracing.opentelemetry import OpenTelemetryTracer

            return OpenTelemetryTracer
    return AttemptTracer


@functools.cache
def _take_out_upload() -> None:
    tracing = importlib.import_module("agents.tracing")
    uploading = importlib.import_module("agents.tracing.processors").default_processor()
    # The SDK can add processors and replace them all, but lists them only in private.
    registered = getattr(
        getattr(tracing.get_trace_provider(), "_multi_processor", None), "_processors", None
    )
    if registered is None:
        tracing.set_tracing_disabled(True)
        logger.warning(
            "tracing of the OpenAI Agents SDK is off: its uploads to OpenAI cannot be told apart"
        )
    elif uploading in registered:
        tracing.set_trace_processors(
            [processor for processor in registered if processor is not uploading]
        )
        logger.warning(
            "the OpenAI Agents SDK does not upload its traces to api.openai.com while it runs in "
            "rollouts; if you want it to, call "
            "agents.add_trace_processor(agents.tracing.processors.default_processor()) in your "
            "agent"
        )


@functools.cache
def _installed(distribution: str) -> bool:
    try:
        version(distribution)
    except PackageNotFoundError:
        return False
    return True


def _switches() -> dict[str, Callable[[], None]]:
    # Two packages may announce one name: OpenInference's comes before Traceloop's.
    announced = sorted(entry_points(group=_GROUP), key=lambda entry: entry.value, reverse=True)
    found = {
        entry.name: functools.partial(_switch_on, entry)
        for entry in sorted(announced, key=lambda e: e.name)
    }
    return found | {
        name: switch for name, (distribution, switch) in _OWN.items() if _installed(distribution)
    }


def _matching(name: str, known: Collection[str]) -> list[str]:
    plain = name.replace("-", "_")
    written = {known_name.replace("-", "_"): known_name for known_name in known}
    found = (
        [plain]
        if plain in written
        else [candidate for candidate in written if candidate.startswith(f"{plain}_")]
    )
    if not found:
        raise ConfigError(
            f"nothing that is installed instruments {name!r}; {nearest(name, known)}. There may "
            "be a package for it: pip install "
            f"openinference-instrumentation-{plain.replace('_', '-')}"
        )
    return [written[match] for match in found]


def _switch_on(entry: EntryPoint) -> None:
    options: dict[str, Any] = {}
    if entry.name == "openai_agents":
        # It may have been switched off to keep it quiet.
        importlib.import_module("agents").set_tracing_disabled(False)
        quiet_openai_agents()
        # By default OpenInference's would take out every other processor, the user's own too.
        options = {"exclusive_processor": False}
    instrumentor = entry.load()()
    if not instrumentor.is_instrumented_by_opentelemetry:
        instrumentor.instrument(raise_exception_on_conflict=True, **options)


# Frameworks that report by themselves once they are asked to, and their distributions.
_OWN: Final[dict[str, tuple[str, Callable[[], None]]]] = {
    "agent_framework": (
        "agent-framework-core",
        # its own spans are on from the start, without arguments and results
        lambda: importlib.import_module("agent_framework.observability").enable_instrumentation(
            enable_sensitive_data=True
        ),
    ),
    "pydantic_ai": (
        "pydantic-ai-slim",
        lambda: importlib.import_module("pydantic_ai").Agent.instrument_all(),
    ),
}
