"""Switching on published instrumentation, and keeping the OpenAI Agents SDK from uploading.

The frameworks are not installed where tests run: stand-ins of the same names, as distributions of
their own, are on the path of a process of their own. What the real packages record is in
test_steps.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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


def install(
    site: Path, distribution: str, modules: dict[str, str] | None = None, announces: str = ""
) -> None:
    """A distribution with these modules, source by file, that announces `name = module:class`."""
    about = site / f"{distribution.replace('-', '_')}-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[opentelemetry_instrumentor]\n{announces}\n")
    for name, source in (modules or {}).items():
        file = site / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)


def install_instrumentor(site: Path, name: str, fails: bool | str = False) -> None:
    module = f"openinference.instrumentation.{name}"
    source = INSTRUMENTOR.format(name="Instrumentor", fails=fails is True)
    source = source if isinstance(fails, bool) else fails + source
    file = f"{module.replace('.', '/')}.py"
    install(
        site,
        f"openinference-instrumentation-{name}",
        {file: source},
        f"{name} = {module}:Instrumentor",
    )


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """OpenAI Agents with its instrumentation; of CrewAI's and of two others, which cannot be
    switched on."""
    processor = "_default = object()\ndef default_processor(): return _default\n"
    sdk = {
        "__init__.py": AGENTS,
        "tracing/__init__.py": AGENTS_TRACING,
        "tracing/processors.py": processor,
    }
    install(tmp_path, "openai-agents", {f"agents/{file}": source for file, source in sdk.items()})
    install_instrumentor(tmp_path, "openai_agents")
    install_instrumentor(tmp_path, "crewai", fails=True)
    install_instrumentor(tmp_path, "broken", fails="1 / 0\n")
    install_instrumentor(tmp_path, "absent", fails="import a_framework_that_is_not_there\n")
    return tmp_path


def told(site: Path, program: str) -> Any:
    """What the program prints as JSON, and what it logs."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), *sys.path])}
    environment.pop("OPENAI_AGENTS_DISABLE_TRACING", None)
    start = (
        "import json, os, sys\n"
        "from agentlightning.tracing.instrument import instrument, quiet_openai_agents\n"
    )
    command = [sys.executable, "-c", start + program]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def test_all_that_is_installed_is_switched_on_once_and_what_fails_is_left_out(site: Path) -> None:
    program = """
first, second = instrument(), instrument()
from openinference.instrumentation.openai_agents import Instrumentor as made
print(json.dumps([first, second, made.times, made.options]))
"""
    (first, second, times, options), log = told(site, program)
    assert (first, second, times) == (["openai_agents"], ["openai_agents"], 1)
    assert options["exclusive_processor"] is False  # the user's own processors stay
    assert "crewai is left without instrumentation: requires another version" in log
    assert "broken is left without instrumentation: division by zero" in log
    assert "absent" not in log  # packages of instrumentation bring no framework


def test_names_may_be_written_in_several_ways_and_opentelemetrys_own_variable_counts(
    site: Path,
) -> None:
    program = """
made = [instrument(name) for name in ("openai-agents", "openai_agents", "openai")]
os.environ["OTEL_PYTHON_DISABLED_INSTRUMENTATIONS"] = "openai_agents, crewai"
print(json.dumps([*made, instrument()]))
"""
    assert told(site, program)[0] == [["openai_agents"]] * 3 + [[]]


def test_what_was_asked_for_by_name_must_work(site: Path) -> None:
    program = """
def refusal(name):
    try: instrument(name)
    except Exception as error: return f"{type(error).__name__}: {error}"
print(json.dumps([refusal("crewai"), refusal("langgraph")]))
"""
    (fails, lacks), _ = told(site, program)
    assert fails == "ConfigError: crewai cannot be instrumented: requires another version"
    assert (
        "Known: absent, broken" in lacks
        and "pip install openinference-instrumentation-langgraph" in lacks
    )


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
    told_, log = told(site, program)
    assert told_ == [["the user's own"], 2, None, None]
    assert log.count("does not upload its traces to api.openai.com") == 1
    unreadable = (
        "import agents.tracing as tracing; del tracing._Multi._processors; quiet_openai_agents()"
    )
    # then it does not trace at all
    assert told(site, f"{unreadable}; print(json.dumps(tracing.disabled))")[0] is True


def test_an_sdk_that_is_not_imported_is_kept_quiet_without_importing_it(site: Path) -> None:
    program = """
quiet_openai_agents()
before = os.environ["OPENAI_AGENTS_DISABLE_TRACING"], "agents" in sys.modules
instrument("openai-agents")  # asked for after all
import agents.tracing as tracing
print(json.dumps([*before, tracing.disabled, list(tracing.get_trace_provider()._multi_processor._processors)]))
"""
    assert told(site, program)[0] == ["1", False, False, ["the user's own"]]
