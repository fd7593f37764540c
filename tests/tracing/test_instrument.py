"""Switching on published instrumentation, and keeping the OpenAI Agents SDK from uploading.

The frameworks are not installed where tests run: stand-ins of the same names, as distributions of their own, are on the
path of a process of their own. What the real packages record is in test_steps.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.errors import ConfigError

AGENTS_TRACING = """
from agents.tracing.processors import default_processor
class _Multi: _processors = ()
class _Provider: _multi_processor = _Multi()
_provider = _Provider()
_Multi._processors = ("the user's own", default_processor())
disabled = None
def get_trace_provider(): return _provider
def set_trace_processors(processors): _Multi._processors = tuple(processors)
def set_tracing_disabled(value):
    global disabled
    disabled = value
"""
AGENTS = "from agents.tracing import set_tracing_disabled"
INSTRUMENTOR = """
class {name}:
    is_instrumented_by_opentelemetry = False
    times = 0
    def instrument(self, **options):
        if {fails}:
            raise RuntimeError("requires another version")
        type(self).times += 1
        type(self).options = options
        type(self).is_instrumented_by_opentelemetry = True
"""


def install(site: Path, distribution: str, modules: dict[str, str] | None = None) -> None:
    """A distribution with these modules, source by file."""
    about = site / f"{distribution.replace('-', '_')}-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    for name, source in (modules or {}).items():
        file = site / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """OpenAI Agents and CrewAI with their instrumentation, and LangChain without."""
    prefix = "openinference-instrumentation-"
    processor = "_default = object()\ndef default_processor(): return _default\n"
    sdk = {"__init__.py": AGENTS, "tracing/__init__.py": AGENTS_TRACING, "tracing/processors.py": processor}
    install(tmp_path, "openai-agents", {f"agents/{file}": source for file, source in sdk.items()})
    agents = INSTRUMENTOR.format(name="OpenAIAgentsInstrumentor", fails=False)
    install(tmp_path, f"{prefix}openai-agents", {"openinference/instrumentation/openai_agents.py": agents})
    install(tmp_path, "crewai")
    crewai = INSTRUMENTOR.format(name="CrewAIInstrumentor", fails=True)
    install(tmp_path, f"{prefix}crewai", {"openinference/instrumentation/crewai.py": crewai})
    install(tmp_path, "langchain-core")
    return tmp_path


def told(site: Path, program: str) -> Any:
    """What the program prints as JSON, and what it logs."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), *sys.path])}
    environment.pop("OPENAI_AGENTS_DISABLE_TRACING", None)
    start = "import json, os, sys\nfrom agentlightning.tracing.instrument import instrument, quiet_openai_agents\n"
    command = [sys.executable, "-c", start + program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def test_all_that_is_installed_is_switched_on_once_and_what_fails_is_left_out(site: Path) -> None:
    program = """
first, second = instrument(), instrument()
from openinference.instrumentation.openai_agents import OpenAIAgentsInstrumentor as made
print(json.dumps([first, second, made.times, made.options]))
"""
    (first, second, times, options), log = told(site, program)
    assert (first, second, times) == (["openai-agents"], ["openai-agents"], 1)
    assert options["exclusive_processor"] is False  # the user's own processors stay
    assert "crewai is left without instrumentation: requires another version" in log


def test_what_was_asked_for_by_name_must_work(site: Path) -> None:
    program = """
def refusal(name):
    try: instrument(name)
    except Exception as error: return f"{type(error).__name__}: {error}"
print(json.dumps([refusal("crewai"), refusal("langchain")]))
"""
    (fails, lacks), _ = told(site, program)
    assert fails == "ConfigError: crewai cannot be instrumented: requires another version"
    assert lacks == (
        "ConfigError: to instrument langchain you need openinference-instrumentation-langchain: "
        "pip install openinference-instrumentation-langchain"
    )


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="no instrumentation is known for 'langchian'; did you mean 'langchain'"):
        agl.instrument("langchian")


def test_only_what_uploads_is_taken_out_of_an_imported_sdk_and_only_once(site: Path) -> None:
    program = """
import agents.tracing as tracing
from agents.tracing.processors import default_processor
quiet_openai_agents()
after = list(tracing.get_trace_provider()._multi_processor._processors)
tracing.set_trace_processors([*after, default_processor()])  # the user wants it
quiet_openai_agents()
kept = len(tracing.get_trace_provider()._multi_processor._processors)
print(json.dumps([after, kept, tracing.disabled, os.environ.get("OPENAI_AGENTS_DISABLE_TRACING")]))
"""
    (after, kept, disabled, variable), log = told(site, program)
    assert after == ["the user's own"]
    assert kept == 2
    assert disabled is None
    assert variable is None
    assert log.count("does not upload its traces to api.openai.com") == 1


def test_an_sdk_that_cannot_be_read_does_not_trace_at_all(site: Path) -> None:
    program = """
import agents.tracing as tracing
del tracing._Multi._processors
quiet_openai_agents()
print(json.dumps(tracing.disabled))
"""
    assert told(site, program)[0] is True


def test_an_sdk_that_is_not_imported_is_kept_quiet_without_importing_it(site: Path) -> None:
    program = """
quiet_openai_agents()
before = os.environ["OPENAI_AGENTS_DISABLE_TRACING"], "agents" in sys.modules
instrument("openai-agents")  # asked for after all
import agents.tracing as tracing
print(json.dumps([*before, tracing.disabled, list(tracing.get_trace_provider()._multi_processor._processors)]))
"""
    assert told(site, program)[0] == ["1", False, False, ["the user's own"]]


def test_without_the_sdk_nothing_happens(tmp_path: Path) -> None:
    program = 'quiet_openai_agents(); print(json.dumps("OPENAI_AGENTS_DISABLE_TRACING" in os.environ))'
    assert told(tmp_path, program)[0] is False
