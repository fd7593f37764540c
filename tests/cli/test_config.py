"""A run file and its flags become one checked configuration; whatever is wrong is named with its path."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from agentlightning.cli.config import CommandConfig, build, load_config
from agentlightning.errors import ConfigError
from agentlightning.learner.base import AdamW
from agentlightning.store.redaction import settings_without_secrets
from agentlightning.types import LLM, FrozenModel, PromptTemplate

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


def test_paths_in_a_run_file_are_relative_to_it_and_names_stay_as_they_are(run_file: Path) -> None:
    config = load_config(run_file)
    assert config.agent == f"{run_file.parent}/agent.py:flight"
    assert config.train_dataset == f"{run_file.parent}/data/train.jsonl"
    assert config.model == "Qwen/Qwen3-0.6B"
    assert load_config(run_file, ["agent=package.module:flight"]).agent == "package.module:flight"


def test_numbers_in_scientific_notation_are_numbers(run_file: Path) -> None:
    assert load_config(run_file).algorithm == {"name": "grpo", "learning_rate": 5e-4}


def test_assignments_change_the_file_and_flags_change_both(run_file: Path) -> None:
    config = load_config(
        run_file, ["seed=3", "n_runners=16", "algorithm.group_size=4"], {"seed": 7, "port": None, "algorithm": "grpo"}
    )
    assert (config.seed, config.n_runners, config.port) == (7, 16, 0)
    assert config.algorithm == {"name": "grpo", "learning_rate": 5e-4, "group_size": 4}


def test_flags_alone_make_a_configuration() -> None:
    config = load_config(None, (), {"agent": "a.py:f", "model": "m", "train_dataset": "t.csv"})
    assert (config.agent, config.algorithm, config.isolation) == ("a.py:f", {"name": "grpo"}, "auto")


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("n_runnerz: 8", r"run\.yaml: unknown key 'n_runnerz'; did you mean 'n_runners'"),
        ("seed: many", r"run\.yaml: seed: expected `int`, got `str`"),
        ("seed: 1\nseed: 2", r"the key 'seed' is given twice \(line 8\)"),
        ("seed: [", r"run\.yaml is not YAML"),
        ("time_limit: 4 minutes", "is no duration"),
        ("5: x", r"unknown key 5"),
        ("dtype: float16", r"run\.yaml: dtype: 'float16' is none of its values; did you mean 'bfloat16'"),
        ("models: {judge: gpt}", r"run\.yaml: models\.judge: expected `object`, got `str`"),
        ("models: {judge: {endpiont: x}}", r"models\.judge: unknown key 'endpiont'; did you mean 'endpoint'"),
        ("models: {judge: {endpoint: x, frozen: false}}", r"models\.judge\.frozen: False is none of its values"),
        ("trackers: [5]", r"trackers\[0\]: expected"),
    ],
)
def test_a_key_that_is_wrong_is_named(run_file: Path, extra: str, message: str) -> None:
    run_file.write_text(COMPLETE + extra, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        load_config(run_file)


def test_a_run_file_can_name_prompts_and_an_endpoint_instead_of_a_model(run_file: Path) -> None:
    run_file.write_text(
        "agent: a.py:f\ntrain_dataset: t.csv\ninitial_resources:\n"
        "  prompt: {resource_type: prompt_template, template: 'Say {word}'}\n"
        "  llm: {resource_type: llm, endpoint: 'http://h/v1', model: m}\n"
        "models: {judge: {endpoint: 'http://j/v1', frozen: true}}\n",
        encoding="utf-8",
    )
    config = load_config(run_file)
    assert config.model is None
    assert config.initial_resources == {
        "prompt": PromptTemplate(template="Say {word}"),
        "llm": LLM(endpoint="http://h/v1", model="m"),
    }
    assert config.models == {"judge": FrozenModel(endpoint="http://j/v1", frozen=True)}


@pytest.mark.parametrize(
    ("assignment", "advice"),
    [
        ("group_size=4", "write algorithm.group_size"),
        ("learning_rate=1e-4", "write optimizer.learning_rate"),
        ("rank=8", "write lora.rank"),
        ("traced=1", "did you mean 'trackers'?"),
    ],
)
def test_a_key_of_a_part_is_told_with_the_part(run_file: Path, assignment: str, advice: str) -> None:
    run_file.write_text("agent: a.py:a\nmodel: m\ntrain_dataset: t.jsonl", encoding="utf-8")
    with pytest.raises(ConfigError, match=re.escape(f"unknown key {assignment.partition('=')[0]!r}; {advice}")):
        load_config(run_file, [assignment])


def test_a_run_file_beside_flags_that_make_one_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="`agl init` makes a project"):
        load_config(None, (), {"agent": "a.py:a"})
    Path("run.yaml").touch()
    with pytest.raises(ConfigError, match=r"not read beside --agent: agl train run\.yaml --agent"):
        load_config(None, (), {"agent": "a.py:a"})
    with pytest.raises(ConfigError, match=r"an agent is named by --agent a.py:a"):
        load_config(Path("a.py:a"))


def test_what_is_missing_is_listed_with_its_flags(run_file: Path) -> None:
    run_file.write_text("model: m", encoding="utf-8")
    with pytest.raises(ConfigError, match="lacks: agent, train_dataset; add the keys or give --agent, --train"):
        load_config(run_file)


@pytest.mark.parametrize("text", ["", "- a\n", "7"])
def test_a_file_without_keys_is_refused(run_file: Path, text: str) -> None:
    run_file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match="holds no keys"):
        load_config(run_file)


@pytest.mark.parametrize(
    ("assignment", "message"),
    [("seed", "is no assignment"), ("seed.x=1", "has no keys of its own"), ("seed=[", "is no YAML value")],
)
def test_an_assignment_that_makes_no_sense_is_refused(run_file: Path, assignment: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(run_file, ["seed=1", assignment])


def test_fields_are_built_with_their_types_checked() -> None:
    made = build(AdamW, {"warmup_steps": 2, "learning_rate": 1}, "optimizer")
    assert made == AdamW(warmup_steps=2, learning_rate=1.0)
    with pytest.raises(ConfigError, match="optimizer: unknown key 'warmup_step'; did you mean 'warmup_steps'"):
        build(AdamW, {"warmup_step": 2}, "optimizer")
    with pytest.raises(ConfigError, match=r"optimizer\.warmup_steps: expected `int`, got `float`"):
        build(AdamW, {"warmup_steps": 2.5}, "optimizer")


COMMAND = "agent: {command: python agent.py, reward: stdout}"


def test_an_agent_may_be_a_command_which_runs_beside_its_run_file(run_file: Path) -> None:
    run_file.write_text(COMPLETE.replace("agent: agent.py:flight", COMMAND), encoding="utf-8")
    agent = load_config(run_file, ["agent.env.SIZE=large"]).agent
    assert isinstance(agent, CommandConfig)
    assert (agent.command, agent.cwd, agent.env) == ("python agent.py", str(run_file.parent), {"SIZE": "large"})
    assert load_config(run_file, ["agent=other.py:agent"]).agent == "other.py:agent"


def test_the_grader_of_a_command_is_a_command_or_a_function(run_file: Path) -> None:
    (run_file.parent / "grade.py").write_text("def grade(task, output): return 1.0", encoding="utf-8")
    for grader in ("grade.py:grade", "python grade.py"):
        text = COMPLETE.replace("agent: agent.py:flight", f"agent: {{command: echo, grader: '{grader}'}}")
        run_file.write_text(text, encoding="utf-8")
        agent = load_config(run_file).agent
        assert isinstance(agent, CommandConfig)
        agent.load().check()


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        ("{comand: echo}", "agent: unknown key 'comand'; did you mean 'command'"),
        ("{command: echo, reward: std}", r"agent.reward: 'std' is none of its values; did you mean 'stdout'"),
        ("{command: echo, env: {A: 1}}", r"agent.env.A: expected `str`"),
    ],
)
def test_a_command_is_checked_like_the_rest(run_file: Path, agent: str, message: str) -> None:
    run_file.write_text(COMPLETE.replace("agent.py:flight", agent), encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        load_config(run_file)


def test_a_sampler_by_url_takes_the_place_of_a_named_one(run_file: Path) -> None:
    run_file.write_text(COMPLETE + "\nsampler: embedded\n", encoding="utf-8")
    assert load_config(run_file, ["sampler.vllm=http://host:8000/v1"]).sampler == {"vllm": "http://host:8000/v1"}
    run_file.write_text(COMPLETE + "\nsampler: {sglang: start, program: python}\n", encoding="utf-8")
    assert load_config(run_file, ["sampler.vllm=http://host:8000/v1"]).sampler == {"vllm": "http://host:8000/v1"}
    changed = load_config(run_file, ["sampler.program=/opt/python"]).sampler
    assert changed == {"sglang": "start", "program": "/opt/python"}


def test_a_key_among_flags_is_left_out_of_what_is_kept() -> None:
    flags = ["--api-key", "first", "--dtype", "bfloat16", "--api-key=second"]
    kept = settings_without_secrets({"sampler": {"sglang": "start", "flags": flags, "api_key": "third"}})
    assert kept == {"sampler": {"sglang": "start", "flags": ["--api-key", "--dtype", "bfloat16", "--api-key"]}}


@pytest.mark.parametrize(("written", "seconds"), [("5m", 300.0), ("1.5h", 5400.0), ("90s", 90.0), ("90", 90.0)])
def test_a_time_limit_takes_units(run_file: Path, written: str, seconds: float) -> None:
    assert load_config(run_file, [f"time_limit={written}"]).time_limit == seconds


@pytest.mark.parametrize("written", ["5x", "soon", "0s", "-5m", "٣m"])
def test_a_time_limit_that_is_none_is_refused(run_file: Path, written: str) -> None:
    with pytest.raises(ConfigError, match=r"time_limit: .* is (no|zero)"):
        load_config(run_file, [f"time_limit={written}"])
