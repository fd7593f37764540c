"""`import agentlightning` is quick, light and complete."""

from __future__ import annotations

import contextlib
import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import agentlightning as agl
from agentlightning.errors import AgentLightningError


def test_every_public_name_is_there_and_an_unknown_one_lists_them() -> None:
    for name in agl.__all__:
        assert getattr(agl, name) is not None
    with pytest.raises(AttributeError, match="emit_reward"):
        _ = agl.emit_rewards  # type: ignore[attr-defined]


def test_the_namesake_of_another_maker_is_reported_at_import(tmp_path: Path) -> None:
    information = tmp_path / "agentlightning-0.3.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: agentlightning\nVersion: 0.3.0\n"
    )
    command = [sys.executable, "-c", "import agentlightning"]
    beside = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(tmp_path)}
    )
    assert "two distributions provide the package 'agentlightning'" in beside.stderr
    assert "pip uninstall" in beside.stderr
    assert subprocess.run(command, capture_output=True, text=True).stderr == ""


OBVIOUS = (
    True,
    None,
    Path("x"),
    "x",
    (1, 2),
    2,
    0.5,
    np.int64(2),
    np.float32(0.5),
    np.bool_(True),
    np.str_("x"),
)
CONSTRUCTORS = (
    "Trainer",
    "GRPO",
    "PPO",
    "SFT",
    "APO",
    "Baseline",
    "AdamW",
    "LoRA",
    "RewardSpec",
    "RolloutConfig",
)


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_a_setting_takes_an_obvious_value_or_says_what_it_must_be(name: str) -> None:
    constructor = getattr(agl, name)
    fields = getattr(constructor, "__struct_fields__", None)
    for setting in fields or [*inspect.signature(constructor.__init__).parameters][1:]:
        for value in OBVIOUS:
            with contextlib.suppress(AgentLightningError):
                constructor(**{setting: value})
    with pytest.raises(AgentLightningError, match=r"is \(1, 2\); it must be "):
        constructor(**{NUMBERS[name]: (1, 2)})


NUMBERS = dict.fromkeys(CONSTRUCTORS[1:4], "steps") | {
    "Trainer": "n_runners",
    "APO": "beam_width",
    "Baseline": "samples",
    "AdamW": "warmup_steps",
    "LoRA": "rank",
    "RewardSpec": "length_penalty",
    "RolloutConfig": "max_attempts",
}


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_a_number_of_numpy_is_the_number(name: str) -> None:
    setting = NUMBERS[name]
    made = getattr(agl, name)(**{setting: np.int64(2)})
    found = getattr(getattr(made, "config", made), setting)
    assert type(found) is int and found == 2


def test_answers_of_models_and_cells_of_tables_are_compared_as_they_are() -> None:
    assert agl.rewards.exact_match(None, "Oslo") == 0 == agl.rewards.numeric_equal(None, 34)
    number: Any = np.int64(34)
    assert agl.rewards.exact_match("34", 34) == 1 == agl.rewards.exact_match("34", number)
    assert (
        agl.rewards.exact_match("Oslo", ("Bergen", "Oslo"))
        == 1
        == agl.rewards.numeric_equal("34", number)
    )


def line_of(agent: Any) -> str:
    return agent._program.line


def test_a_command_is_a_line_a_path_or_words(tmp_path: Path) -> None:
    program = tmp_path / "my agent"
    assert line_of(agl.command(program)) == f"'{program}'"
    assert line_of(agl.command(("python", "-c", "print(1)"))) == "python -c 'print(1)'"
