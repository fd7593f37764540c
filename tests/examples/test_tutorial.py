"""The tutorial: its page shows the files as they are, and its steps, shortened, run in order and teach the agent."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.frameworks.world import bin_of

ROOT = Path(__file__).parents[2]
TUTORIAL = ROOT / "examples" / "tutorial"
AGL = (sys.executable, "-m", "agentlightning.cli.main")


def tasks(name: str) -> list[dict]:
    return [json.loads(line) for line in (TUTORIAL / name).read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("name", ["agent.py", "rewarded.py", "run.yaml"])
def test_the_page_shows_the_files_as_they_are(name: str) -> None:
    page = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    assert (TUTORIAL / name).read_text(encoding="utf-8") in page


def test_the_agent_knows_nothing_of_training_and_its_tool_knows_every_answer() -> None:
    text = (TUTORIAL / "agent.py").read_text(encoding="utf-8")
    assert "agentlightning" not in text and "agl" not in text
    (stock,) = (
        node.value for node in ast.parse(text).body if isinstance(node, ast.Assign) and "STOCK" in ast.dump(node)
    )
    known = ast.literal_eval(stock)
    train, heldout = tasks("tasks.jsonl"), tasks("heldout.jsonl")
    assert all(known[task["item"]] == task["answer"] and task["item"] in task["question"] for task in train + heldout)
    assert {task["item"] for task in train} == set(known)
    assert not {task["question"] for task in train} & {task["question"] for task in heldout}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_steps_train_the_agent_as_it_is_and_serve_what_it_learned(tmp_path: Path) -> None:
    packages = next((bin_of("frameworks").parent / "lib").glob("python*/site-packages"))  # where LangChain is
    plain = {name: value for name, value in os.environ.items() if not name.startswith("OPENAI_")}
    environment = {**plain, "PYTHONPATH": str(packages), "OMP_NUM_THREADS": "1"}
    shop = shutil.copytree(TUTORIAL, tmp_path / "shop", ignore=shutil.ignore_patterns("__pycache__"))

    def run(*command: str, **more: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            command, cwd=shop, env={**environment, **more}, capture_output=True, text=True, timeout=400, check=False
        )
        assert done.returncode == 0, done.stderr
        return done

    shorter = ("--steps", "5", "--set", "algorithm.tasks_per_step=6", "--n-runners", "2")
    trained = json.loads(run(*AGL, "train", *shorter, "--json").stdout.splitlines()[-1])
    assert trained["reward"]["after"] > trained["reward"]["before"]

    serving = subprocess.Popen(
        (*AGL, "serve", trained["checkpoint"], "--port", "0"),
        cwd=shop,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert serving.stderr is not None
        found = re.search(r"http://\S+/v1", serving.stderr.readline())
        assert found
        where = {"OPENAI_BASE_URL": found[0], "OPENAI_API_KEY": "any"}
        question = ("agent.py", "The lamp: how many are left?")
        recorded = run(*AGL, "record", "--instrument", "langchain", "--", sys.executable, *question, **where)
        assert recorded.stdout.strip()
        assert "call gpt-5-mini" in recorded.stderr
    finally:
        serving.send_signal(signal.SIGTERM)
        serving.communicate(timeout=240)
