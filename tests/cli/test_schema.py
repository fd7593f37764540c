"""The JSON schema of run files takes those that work and refuses those that do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from agentlightning.cli.main import run
from agentlightning.cli.run_file import read_value

CLONE = Path(__file__).parents[2]
RUN_FILES = sorted(
    {*CLONE.glob("examples/**/*.yaml"), *CLONE.glob("agentlightning/templates/**/run.yaml")}
)


@pytest.fixture
def schema(capsys: pytest.CaptureFixture[str]) -> Any:
    assert run(["train", "--schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator.check_schema(schema)
    return schema


def test_every_run_file_of_the_examples_is_valid(schema: Any) -> None:
    files = [path for path in RUN_FILES if path.parent.name != "kubernetes"]
    assert len(files) > 5
    for path in files:
        jsonschema.validate(read_value(path.name, path.read_text()), schema)


def test_a_wrong_key_or_value_is_not(schema: Any) -> None:
    needed = {"agent": "agent.py:agent", "train_dataset": "tasks.jsonl"}
    for algorithm in (
        "rloo",
        "mine.py:Mine",
        {"name": "mine.py:Mine", "anything": 1},
        {"steps": 3},
    ):
        jsonschema.validate({**needed, "algorithm": algorithm}, schema)
    wrong: list[dict[str, Any]] = [
        {"sede": 1},
        {"seed": "one"},
        {"algorithm": {"name": "grpo", "group_sise": 4}},
        {"algorithm": {"steps": "many"}},
        {"algorithm": "gpro"},
        {"optimizer": {"learning_rat": 1e-3}},
        {"time_limit": "soon"},
        {"models": {"judge": {"endpoint": "x", "frozen": False}}},
    ]
    for values in wrong:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**needed, **values}, schema)
