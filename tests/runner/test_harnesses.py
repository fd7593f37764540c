"""Harness presets: what each is given, without the tool; and the real tools where they are
installed."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.cli.main import run
from agentlightning.cli.run_file import load_config
from agentlightning.errors import ConfigError
from agentlightning.runner.command import CommandFailedError
from agentlightning.runner.environment import agent_environment
from agentlightning.runner.harnesses import PRESETS
from agentlightning.runner.runner import Runner
from agentlightning.store.sql import SqlStore

ENDPOINT = "http://127.0.0.1:9/rollout/r/attempt/a/v1"
LLM = agl.LLM(endpoint=ENDPOINT, model='my"model', api_key="attempt-key")


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The variables that a preset gives, and what it writes."""
    for name in (
        "ANTHROPIC_AUTH_TOKEN",
        "GH_TOKEN",
        "CODEX_HOME",
        "XDG_CONFIG_HOME",
        "PGPASSFILE",
        "my_api_key",
    ):
        monkeypatch.setenv(name, "the user's")
    monkeypatch.setenv("KEPT", "1")

    def of(name: str) -> tuple[dict[str, str], dict[str, str]]:
        variables = agent_environment(LLM, "r", "a", "http://127.0.0.1:9", "attempt-key")
        environment = PRESETS[name].environment(variables, tmp_path)
        written = {
            str(path.relative_to(tmp_path)): path.read_text()
            for path in tmp_path.rglob("*")
            if path.is_file()
        }
        return environment, written

    return of


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_names_the_attempts_model_and_nothing_of_the_users(
    given: Any, tmp_path: Path, name: str
) -> None:
    environment, written = given(name)
    assert environment["HOME"] == str(tmp_path) and environment["KEPT"] == "1"
    assert "the user's" not in environment.values() and not [
        key for key in environment if key.startswith("OTEL_")
    ]
    assert 'my"model' in environment["OPENAI_MODEL"] and environment["OPENAI_BASE_URL"] == ENDPOINT
    assert "attempt-key" not in "".join(written.values())
    for path, text in written.items():
        (tomllib if path.endswith(".toml") else json).loads(text)


# --- a program that stands in for a harness -------------------------------------------------------


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put a script of sh by the name of a harness on the PATH."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")

    def install(script: str = "true", program: str = "codex") -> None:
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        (folder / program).write_text(f"#!/bin/sh\n{script}\n")
        (folder / program).chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    return install


def test_a_harness_that_cannot_run_says_how_to_install_it(installed: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"install 0\.169\.0 or newer: npm install -g @openai/codex"
    ):
        agl.harness("codex").check()
    with pytest.raises(ConfigError, match=r"there is no harness 'claude'.*claude-code"):
        agl.harness("claude")
    installed()
    agl.harness("codex").check()


@pytest.mark.anyio
async def test_an_attempt_works_in_a_copy_and_only_its_grader_rewards_it(
    store: SqlStore, tmp_path: Path, installed: Any
) -> None:
    installed('echo "$@" >> notes; cat >> notes; pwd; echo \'{"reward": 1}\'')
    (tmp_path / "repo").mkdir()
    (tmp_path / "repo" / "notes").write_text("begun\n")
    seen: list[agl.CommandOutput] = []

    def grade(task: Any, output: agl.CommandOutput) -> float:
        seen.append(output)
        assert (output.directory / "notes").read_text().endswith(f"-- {task['prompt']}\n")
        return 0.5

    async def reward(**options: Any) -> float | None:
        agent = agl.harness(
            "codex", prompt="{task[prompt]}", workspace=tmp_path / "repo", **options
        )
        rollout = await Runner(store, agent).run_one({"prompt": "--fix it"}, {"llm": LLM})
        return agl.find_final_reward(await store.query_spans(rollout.rollout_id))

    assert await reward(grader=grade) == 0.5
    script = 'sh -c \'d=$(sed "s/.*directory...//; s/.}$//"); wc -l < "${d}/notes"\''
    assert await reward(grader=script) == 2
    assert await reward() is None  # whatever it prints
    assert (tmp_path / "repo" / "notes").read_text() == "begun\n" and not seen[0].directory.exists()
    with pytest.raises(ConfigError, match="has no 'promt'"):
        await Runner(store, agl.harness("codex", prompt="{task[promt]}")).run_one(
            {"prompt": "x"}, {"llm": LLM}
        )
    with pytest.raises(ConfigError, match="a harness needs a model"):
        await Runner(store, agl.harness("codex")).run_one("x", {})


@pytest.mark.anyio
async def test_a_harness_can_neither_borrow_its_graders_credentials_nor_swap_what_is_graded(
    store: SqlStore, tmp_path: Path, installed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GH_TOKEN", "the user's")
    installed()
    agent = agl.harness("codex", grader="sh -c 'echo ${GH_TOKEN:-0.25}'")
    rollout = await Runner(store, agent).run_one("x", {"llm": LLM})
    assert agl.find_final_reward(await store.query_spans(rollout.rollout_id)) == 0.25
    installed(f'd=$(pwd) && cd / && rm -r "$d" && ln -s {tmp_path} "$d"')
    with pytest.raises(CommandFailedError, match="a link in the place"):
        await Runner(store, agent).run_one("x", {"llm": LLM})


def test_a_run_file_names_a_harness(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    for agent, problem in (
        ("{harness: codex, prompt: '{task}', arguments: [-m, x], workspace: repo}", None),
        ("{harness: codx}", "no harness 'codx'"),
        ("{harness: codex, command: x}", "either command"),
        ("{command: x, prompt: y}", "either command"),
        ("{harness: codex, reward: stdout}", "either command"),
        ("{grader: x}", "either command"),
    ):
        file.write_text(f"agent: {agent}\ntrain_dataset: x.jsonl\n")
        loaded: Any = load_config(file).agent
        if problem is None:
            assert loaded.workspace == str(tmp_path / "repo") and loaded.load()
        else:
            with pytest.raises(ConfigError, match=problem):
                loaded.load()


def test_agl_record_sets_up_a_harness(
    installed: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    installed('echo "$1 $(grep ^model\\  "$CODEX_HOME/config.toml") $HOME"')
    options = [
        "--backend",
        "http://127.0.0.1:9/v1",
        "--kind",
        "vllm",
        "--store",
        f"{tmp_path}/s.sqlite",
    ]
    assert run(["record", *options, "--harness", "codex", "--", "exec"]) == 2
    assert "--harness needs --model NAME" in capfd.readouterr().err
    assert run(["record", *options, "--harness", "codex", "--model", "m", "--", "exec"]) == 0
    out = capfd.readouterr().out
    assert out.startswith('exec model = "m" ') and os.environ["HOME"] not in out.split()
