"""A run file and its flags become one checked configuration; whatever is wrong is named with its
path."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from agentlightning.cli.main import run
from agentlightning.cli.run_file import check_files, load_config
from agentlightning.config import CommandConfig, convert, make_algorithm
from agentlightning.errors import ConfigError
from agentlightning.learner.policy_config import AdamW

COMPLETE = """
agent: agent.py:flight
model: Qwen/Qwen3-0.6B
train_dataset: data/train.jsonl
algorithm: {name: grpo, learning_rate: 5e-4}
n_runners: 8
"""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(COMPLETE, encoding="utf-8")
    return path


def test_assignments_change_the_file_and_flags_change_both(run_file: Path) -> None:
    config = load_config(run_file)  # paths are relative to the file, names are not paths
    assert config.agent == f"{run_file.parent}/agent.py:flight"
    assert config.train_dataset == f"{run_file.parent}/data/train.jsonl"
    assert (config.model, config.algorithm) == (
        "Qwen/Qwen3-0.6B",
        {"name": "grpo", "learning_rate": 5e-4},
    )
    assert load_config(run_file, ["agent=package.module:flight"]).agent == "package.module:flight"
    assignments = ["seed=3", "n_runners=16", "algorithm.group_size=4", "time_limit=1.5h"]
    config = load_config(run_file, assignments, {"seed": 7, "port": None, "algorithm": "grpo"})
    assert (config.seed, config.n_runners, config.port, config.time_limit) == (7, 16, 0, 5400.0)
    assert config.algorithm == {"name": "grpo", "learning_rate": 5e-4, "group_size": 4}
    config = load_config(None, (), {"agent": "a.py:f", "model": "m", "train_dataset": "t.csv"})
    assert (config.agent, config.algorithm, config.isolation) == (
        "a.py:f",
        {"name": "grpo"},
        "auto",
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("n_runnerz: 8", r"run\.yaml: unknown key 'n_runnerz'; did you mean 'n_runners'"),
        ("group_size: 4", "unknown key 'group_size'; write algorithm.group_size"),
        ("learning_rate: 1e-4", "write optimizer.learning_rate"),
        ("rank: 8", "write lora.rank"),
        (
            "store: nowhere/all.sqlite",
            "there is no folder nowhere for the store all.sqlite|no folder .*/nowhere for",
        ),
        ("seed: many", r"run\.yaml: seed: expected `int`, got `str`"),
        ("seed: 1\nseed: 2", r"the key 'seed' is given twice \(line 8\)"),
        ("seed: [", r"run\.yaml is not YAML"),
        ("time_limit: 4 minutes", "time_limit: .* is no duration"),
        ("time_limit: 0s", "time_limit: .* is zero"),
        ("5: x", r"unknown key 5"),
        (
            "dtype: float16",
            r"run\.yaml: dtype: 'float16' is none of its values; did you mean 'bfloat16'",
        ),
        ("models: {judge: gpt}", r"run\.yaml: models\.judge: expected `object`, got `str`"),
        (
            "models: {judge: {endpiont: x}}",
            r"models\.judge: unknown key 'endpiont'; did you mean 'endpoint'",
        ),
        (
            "models: {judge: {endpoint: x, frozen: false}}",
            r"models\.judge\.frozen: False is none of its values",
        ),
        ("trackers: [5]", r"trackers\[0\]: expected"),
    ],
)
def test_a_key_that_is_wrong_is_named(run_file: Path, text: str, message: str) -> None:
    run_file.write_text(COMPLETE + text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        load_config(run_file)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: m", "lacks: agent, train_dataset; add the keys or give --agent, --train"),
        ("", "holds no keys"),
        ("- a\n", "holds no keys"),
        ("agent: {comand: echo}", "agent: unknown key 'comand'; did you mean 'command'"),
        (
            "agent: {command: echo, reward: std}",
            r"agent.reward: 'std' is none of its values; did you mean 'stdout'",
        ),
        ("agent: {command: echo, env: {A: 1}}", r"agent.env.A: expected `str`"),
    ],
)
def test_a_file_without_what_is_needed_is_refused(run_file: Path, text: str, message: str) -> None:
    run_file.write_text(
        f"{text}\ntrain_dataset: t.csv" if "agent" in text else text, encoding="utf-8"
    )
    with pytest.raises(ConfigError, match=message):
        load_config(run_file)


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("seed", "is not an assignment"),
        ("seed.x=1", "has no keys of its own"),
        ("seed=[", "is no YAML value"),
    ],
)
def test_an_assignment_that_makes_no_sense_is_refused(
    run_file: Path, assignment: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(run_file, ["seed=1", assignment])


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"name": "gpro"}, r"no algorithm 'gpro'; did you mean 'grpo'"),
        ({"group_sise": 4}, r"algorithm: unknown key 'group_sise'; did you mean 'group_size'"),
        ({"steps": "ten"}, r"algorithm\.steps: expected `int`, got `str`"),
        ({"unrewarded": "zero"}, r"algorithm\.unrewarded"),
        (
            {"level": "turns"},
            r"algorithm\.level: 'turns' is none of its values; did you mean 'transition'",
        ),
        ({"max_tokens": 0}, "max_tokens is 0; it must be at least 1"),
        ({"rollout": {"timeout": 5}}, r"algorithm\.rollout: unknown key 'timeout'; did you mean"),
        (
            {"rollout": {"retry_condition": ["fail"]}},
            r"algorithm\.rollout\.retry_condition\[0\]: .* did you mean",
        ),
        ({"name": "json:dumps"}, r"json:dumps is no dataclass"),
    ],
)
def test_a_wrong_algorithm_is_refused_with_the_key(spec: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_algorithm(spec)
    assert convert({"warmup_steps": 2, "learning_rate": 1}, AdamW, "optimizer") == AdamW(
        warmup_steps=2, learning_rate=1.0
    )


def test_an_agent_may_be_a_command_which_runs_beside_its_run_file(run_file: Path) -> None:
    (run_file.parent / "grade.py").write_text(
        "def grade(task, output): return 1.0", encoding="utf-8"
    )
    for grader in ("grade.py:grade", "python grade.py"):
        command = f"agent: {{command: python agent.py, reward: stdout, grader: '{grader}'}}"
        run_file.write_text(COMPLETE.replace("agent: agent.py:flight", command), encoding="utf-8")
        agent = load_config(run_file, ["agent.env.SIZE=large", "agent.reward=auto"]).agent
        assert isinstance(agent, CommandConfig)
        assert (agent.command, agent.cwd, agent.env) == (
            "python agent.py",
            str(run_file.parent),
            {"SIZE": "large"},
        )
        agent.load().check()
    assert load_config(run_file, ["agent=other.py:agent"]).agent == "other.py:agent"


def test_an_agent_on_the_command_line_takes_the_place_of_the_files(
    run_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("agent.py", "other.py", "data/train.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    run_file.write_text(COMPLETE.replace("learning_rate: 5e-4", "group_size: 4"))
    monkeypatch.chdir(tmp_path)
    for words in ((), ("run.yaml",)):  # where the folder has one, it need not be named
        assert run(["train", *words, "--agent", "other.py:mine", "--print-config", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (
            found["agent"] == f"{tmp_path}/other.py:mine" and found["algorithm"]["group_size"] == 4
        )
    run_file.write_text("environment: {name: verifiers:x}\ntrain_dataset: data/train.jsonl\n")
    assert load_config(run_file, (), {"agent": "other.py:mine"}).environment is None
    assert load_config(None, (), {"agent": "a.py:f", "train_dataset": "t.csv"}).algorithm == {
        "name": "grpo"
    }


def test_printed_settings_are_a_run_file_with_all_defaults_and_no_secrets(
    run_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("agent.py", "data/train.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    run_file.write_text(
        COMPLETE.replace("learning_rate: 5e-4", "group_size: 4") + "api_key: a-secret-of-mine\n"
    )
    flags = ["--steps", "3", "--set", "lora.rank=4", "--run-dir", "elsewhere", "--print-config"]
    assert run(["train", *flags]) == 0
    printed = capsys.readouterr().out
    assert (
        not {"secret", "elsewhere"} & set(re.findall(r"\w+", printed)) and not Path("runs").exists()
    )
    values = yaml.safe_load(printed)
    assert values["algorithm"] | {"steps": 3, "group_size": 4, "epochs": 1} == values["algorithm"]
    assert values["lora"]["rank"] == 4 and values["optimizer"]["schedule"] == "constant"
    Path("printed.yaml").write_text(printed)
    assert run(["train", "printed.yaml", "--print-config"]) == 0
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"model": "./nowhere"}, "model path ./nowhere does not exist"),
        ({"model": "nowhere.py:make"}, "model: no file nowhere.py"),
        ({"agent": "nowhere.py:agent"}, "agent: no file nowhere.py"),
        ({"train_dataset": "nowhere.jsonl"}, "train_dataset: no dataset file nowhere.jsonl"),
        ({"val_dataset": "nowhere.jsonl"}, "val_dataset: no dataset file nowhere.jsonl"),
    ],
)
def test_missing_files_are_named_before_libraries_load(flags: dict[str, str], message: str) -> None:
    complete = {
        "agent": "package:agent",
        "model": "Qwen/Qwen3-0.6B",
        "train_dataset": "hf:me/tasks/all.jsonl",
    }
    check_files(load_config(None, (), complete))
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_files(load_config(None, (), complete | flags))


def test_initials_find_the_setting_they_stand_for() -> None:
    with pytest.raises(ConfigError, match="unknown key 'lr'; did you mean 'learning_rate'"):
        convert({"lr": 1e-4}, AdamW, "optimizer")


def test_a_sampler_by_url_takes_the_place_of_a_named_one(run_file: Path) -> None:
    for given in ("embedded", "{sglang: start, program: python}"):
        run_file.write_text(f"{COMPLETE}\nsampler: {given}\n", encoding="utf-8")
        assert load_config(run_file, ["sampler.vllm=http://host:8000/v1"]).sampler == {
            "vllm": "http://host:8000/v1"
        }
    changed = load_config(run_file, ["sampler.program=/opt/python"]).sampler
    assert changed == {"sglang": "start", "program": "/opt/python"}
