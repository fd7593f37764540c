"""`import agentlightning` is quick, light and complete."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import agentlightning as agl

HEAVY = ("torch", "transformers", "numpy", "starlette", "uvicorn", "sqlite3", "aiohttp", "openai", "jinja2", "click")


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **environment},
    )


def test_importing_the_package_loads_nothing_heavy() -> None:
    done = run_python(f"import sys, agentlightning; print([m for m in {HEAVY!r} if m in sys.modules])")
    assert done.stdout.strip() == "[]", done.stderr


def test_defining_an_agent_loads_no_torch_web_framework_or_database() -> None:
    code = (
        "import sys, agentlightning as agl\n"
        "@agl.rollout\n"
        "async def agent(task, llm: agl.LLM): return 0.0\n"
        "agl.emit_reward, agl.Hook, agl.LitAgent, agl.Runner, agl.openai_client\n"
        "print([m for m in ('torch', 'numpy', 'starlette', 'uvicorn', 'sqlite3', 'openai') if m in sys.modules])"
    )
    done = run_python(code)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize("name", agl.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(agl, name) is not None


def test_an_unknown_name_is_an_attribute_error_that_lists_the_known_ones() -> None:
    with pytest.raises(AttributeError, match="emit_reward"):
        _ = agl.emit_rewards  # type: ignore[attr-defined]


def test_the_namesake_of_another_maker_is_reported_at_import(tmp_path: Path) -> None:
    information = tmp_path / "agentlightning-0.3.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: agentlightning\nVersion: 0.3.0\n")
    beside = run_python("import agentlightning", PYTHONPATH=str(tmp_path))
    assert "two distributions provide the package 'agentlightning'" in beside.stderr
    assert "pip uninstall" in beside.stderr
    alone = run_python("import agentlightning")
    assert alone.stderr == ""
