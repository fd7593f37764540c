"""`agl.instrument`: switch on the published OpenTelemetry instrumentation of the agent frameworks that are installed.

Knows which package instruments which framework and where each is wanting; patches nothing itself, and knows neither
attempts nor spans. Nothing of OpenTelemetry or of a framework is imported before it is asked for.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from agentlightning.errors import ConfigError, nearest

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Framework:
    """Distributions that must be installed, and what switches its instrumentation on."""

    distributions: tuple[str, ...]
    switch_on: Callable[[], None]

    def missing(self) -> list[str]:
        return [name for name in self.distributions if not _installed(name)]


def instrument(*names: str) -> list[str]:
    """Let these frameworks report their tools and agents as spans; without names, all for which that is installed.

    To be called before agents are built; in a process where it was done already it does nothing. Returns the names that
    are on. ConfigError for an unknown name, a package that is missing (with the command that installs it), or one that
    does not fit its framework's version."""
    for name in names:
        if name not in _FRAMEWORKS:
            raise ConfigError(f"no instrumentation is known for {name!r}; {nearest(name, _FRAMEWORKS)}")
        if missing := _FRAMEWORKS[name].missing():
            raise ConfigError(f"to instrument {name} you need {' and '.join(missing)}: pip install {' '.join(missing)}")
    switched_on: list[str] = []
    for name in names or [name for name, framework in _FRAMEWORKS.items() if not framework.missing()]:
        try:
            _FRAMEWORKS[name].switch_on()
        except Exception as error:
            if names:
                raise ConfigError(f"{name} cannot be instrumented: {error}") from error
            logger.warning("%s is left without instrumentation: %s", name, error)
        else:
            switched_on.append(name)
    return switched_on


def quiet_openai_agents() -> None:
    """Keep the OpenAI Agents SDK, if it is installed, from sending its traces to OpenAI, wherever its model is.

    Once it is imported, only the processor that uploads is taken out, and those through which instrumentation listens
    stay. Before that its tracing is switched off by its environment variable: to import it would take seconds, also in
    programs that do not use it. To be called before each run of an agent; after the first it costs nothing."""
    if not _installed("openai-agents"):
        return
    if "agents.tracing" in sys.modules:
        _take_out_upload()
    else:
        os.environ.setdefault("OPENAI_AGENTS_DISABLE_TRACING", "1")


@functools.cache
def _take_out_upload() -> None:
    tracing = importlib.import_module("agents.tracing")
    uploading = importlib.import_module("agents.tracing.processors").default_processor()
    # The SDK can add processors and replace them all, but lists them only in private.
    registered = getattr(getattr(tracing.get_trace_provider(), "_multi_processor", None), "_processors", None)
    if registered is None:
        tracing.set_tracing_disabled(True)
        logger.warning("tracing of the OpenAI Agents SDK is off: what uploads to OpenAI cannot be told from the rest")
    elif uploading in registered:
        tracing.set_trace_processors([processor for processor in registered if processor is not uploading])
        logger.warning(
            "the OpenAI Agents SDK does not upload its traces to api.openai.com while it runs in rollouts; if you want "
            "it to, call agents.add_trace_processor(agents.tracing.processors.default_processor()) in your agent"
        )


@functools.cache
def _installed(distribution: str) -> bool:
    try:
        version(distribution)
    except PackageNotFoundError:
        return False
    return True


def _openinference(distribution: str, package: str, name: str, **options: Any) -> _Framework:
    """A framework that OpenInference's `package` instruments, whose instrumentor is called `name`."""

    def switch_on() -> None:
        if package == "openai-agents":
            # It may have been switched off to keep it quiet.
            importlib.import_module("agents").set_tracing_disabled(False)
            quiet_openai_agents()
        module = importlib.import_module(f"openinference.instrumentation.{package.replace('-', '_')}")
        instrumentor = getattr(module, name)()
        if not instrumentor.is_instrumented_by_opentelemetry:
            instrumentor.instrument(raise_exception_on_conflict=True, **options)

    return _Framework((distribution, f"openinference-instrumentation-{package}"), switch_on)


def _agent_framework() -> None:
    # Its own spans are on from the start, without arguments and results.
    importlib.import_module("agent_framework.observability").enable_instrumentation(enable_sensitive_data=True)


_FRAMEWORKS: Final = {
    "langchain": _openinference("langchain-core", "langchain", "LangChainInstrumentor"),
    # By default it would take out every other processor, the user's own too.
    "openai-agents": _openinference(
        "openai-agents", "openai-agents", "OpenAIAgentsInstrumentor", exclusive_processor=False
    ),
    "autogen": _openinference("autogen-agentchat", "autogen-agentchat", "AutogenAgentChatInstrumentor"),
    "crewai": _openinference("crewai", "crewai", "CrewAIInstrumentor"),
    "agent-framework": _Framework(("agent-framework-core", "opentelemetry-sdk"), _agent_framework),
    "openai": _openinference("openai", "openai", "OpenAIInstrumentor"),
    "anthropic": _openinference("anthropic", "anthropic", "AnthropicInstrumentor"),
}
