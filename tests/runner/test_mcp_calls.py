"""MCP sessions are tested in environments with the package `mcp`, in both of its major versions."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.frameworks.world import ROOT, bin_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def run(environment: str, *arguments: object) -> str:
    done = subprocess.run(
        [bin_of(environment) / "python", *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert done.returncode == 0 and "skipped" not in done.stdout, done.stdout + done.stderr
    return done.stdout


def test_calls_of_sessions_are_recorded_and_given() -> None:
    tests = "tests/runner/test_mcp_sessions.py"
    run("experiments", "-m", "pytest", "-q", "-p", "no:cacheprovider", tests)


@pytest.mark.parametrize("environment", ["experiments", "crewai"])
def test_a_session_works_as_it_does_outside_a_rollout(environment: str, tmp_path: Path) -> None:
    written = run(environment, "tests/runner/agents/mcp_probe.py", tmp_path / "ran.txt")
    outside, inside, again = json.loads(written)
    assert inside["found"] == outside["found"]
    assert inside["ran"] == outside["ran"]
    assert outside["found"]["cancelled"] and outside["found"]["progress"] == [[1, 2]]
    names = ["count", "wait", "wait", "wait", "nothing", "count", "told", "tell"]
    ended = ["UNSET", "UNSET", "ERROR", "ERROR", "UNSET", "UNSET", "UNSET", "UNSET"]
    assert inside["spans"] == [list(pair) for pair in zip(names, ended, strict=True)]
    assert again["ran"] == ["wait 30.0", "wait 20.0"]  # these had failed
    assert again["found"] == outside["found"] | {"progress": []}
