"""A setting is defined once: run file, flags, schema and `Trainer` agree on its name, default and
bounds."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import msgspec
import pytest

import agentlightning as agl
from agentlightning.algorithm.evaluation import SUPERVISED
from agentlightning.cli.run_file import load_config
from agentlightning.cli.schema import run_file_schema
from agentlightning.config import FIELDS, RunConfig, make_algorithm
from agentlightning.errors import ConfigError
from agentlightning.learner.policy_config import AdamW
from tests import agents
from tests.test_trainer import TASKS


def test_the_trainer_takes_every_setting_of_a_run_file_by_the_same_name_and_default() -> None:
    taken = inspect.signature(agl.Trainer).parameters
    defaults = RunConfig()
    for name in FIELDS:
        assert f"{name}: " in (agl.Trainer.__doc__ or "")
        if isinstance(value := getattr(defaults, name), str | int | None):
            assert taken[name].default == value
    assert run_file_schema()["properties"].keys() == {*FIELDS}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("n_runners", -1, "n_runners is -1; it must be at least 0"),
        ("port", 65_536, "port is 65536; it must be at most 65535"),
        ("threads", 0, "threads is 0; it must be at least 1"),
        ("time_limit", 0, "time_limit is 0.*; it must be above 0"),
        ("learner", "gpu", "learner is 'gpu'; write torch"),
    ],
)
def test_a_bound_holds_in_a_run_file_and_in_python(
    tmp_path: Path, name: str, value: Any, message: str
) -> None:
    run_file = tmp_path / "run.yaml"
    run_file.write_text(f"agent: a.py:f\ntrain_dataset: t.csv\n{name}: {value}\n")
    settings: dict[str, Any] = {name: value}
    with pytest.raises(ConfigError, match=message):
        load_config(run_file)
    with pytest.raises(ConfigError, match=message):
        agl.Trainer(**settings)


def test_none_is_the_default_of_every_setting() -> None:
    settings: dict[str, Any] = dict.fromkeys(inspect.signature(agl.Trainer).parameters)
    assert agl.Trainer(**settings).config.optimizer == AdamW()
    assert agl.Trainer(n_workers=3).config.n_runners == 3


def test_a_trainer_made_from_a_run_file_runs_its_agent_on_its_tasks(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_bytes(b"\n".join(map(msgspec.json.encode, TASKS[:2])))
    run_file = tmp_path / "run.yaml"
    run_file.write_text(
        f"agent: {agents.__name__}:never_calls\ntrain_dataset: tasks.jsonl\nval_dataset: tasks.jsonl\n"
        "algorithm: baseline\nrun_dir: run\nisolation: none\n"
    )
    trainer = agl.Trainer(**msgspec.structs.asdict(load_config(run_file)), progress=False)
    assert len(trainer.fit().evaluations[0].tasks) == 2
    with pytest.raises(ConfigError, match="give an agent"):
        agl.Trainer(algorithm=agl.Baseline()).fit(train_dataset=TASKS)


def test_a_run_file_that_changes_one_limit_of_rollouts_keeps_the_others() -> None:
    algorithm = make_algorithm({"name": "grpo", "rollout": {"retry": "rerun"}})
    assert algorithm.rollout == msgspec.structs.replace(SUPERVISED, retry="rerun")
    with pytest.raises(ConfigError, match="unknown key 'retri'"):
        make_algorithm({"name": "grpo", "rollout": {"retri": "rerun"}})
