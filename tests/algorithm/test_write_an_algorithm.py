"""The code of the page on writing an algorithm does what the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentlightning.config import make_algorithm
from agentlightning.data.credit import RewardedGroup
from agentlightning.data.transitions import Transition
from agentlightning.errors import ConfigError
from tests import agents
from tests.test_trainer import TASKS, trainer

DOCS = Path(__file__).parents[2] / "docs"
SETTINGS = {"steps": 1, "tasks_per_step": 3, "group_size": 4, "max_tokens": 6, "temperature": 2.0}


def files_of(page: str) -> dict[str, str]:
    return dict(
        re.findall(r"```python\n# (\w+\.py)[^\n]*\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    )


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A folder with the files of the page."""
    for name, code in files_of("training.md").items():
        (tmp_path / name).write_text(code)
    return tmp_path


def call(name: str, tokens: int) -> Transition:
    ids = np.ones(tokens, np.int32)
    return Transition(
        name, "attempt", name, 0, 0, "policy", ids, ids, np.zeros(tokens, np.float32), ids, "stop"
    )


def test_an_algorithm_is_a_file_of_under_60_lines_that_trains_from_a_run_file(
    written: Path,
) -> None:
    assert max(len(code.splitlines()) for code in files_of("training.md").values()) < 60
    named = {"name": f"{written}/fading.py:Fading", "loss": f"{written}/spo.py:spo", "fade": 0.5}
    result = trainer(written, algorithm=make_algorithm(named | SETTINGS)).fit(agents.vowels, TASKS)
    assert result.metrics[-1].values["policy_version"] == 1
    assert result.metrics[-1].values["grad_norm"] > 0


def test_its_credit_is_what_its_docstring_says(written: Path) -> None:
    fading: Any = make_algorithm({"name": f"{written}/fading.py:Fading", "fade": 0.5})
    group = RewardedGroup([[call("a", 1), call("a", 2), call("a", 1)], [call("b", 3)]], [1.0, 0.0])
    (first, second), *_ = fading.advantages([group])
    assert [item.advantages.tolist() for item in first] == [[0.125], [0.25, 0.25], [0.5]]
    assert [item.advantages.tolist() for item in second] == [[-0.5, -0.5, -0.5]]
    with pytest.raises(ConfigError, match=r"fade is 2\.0"):
        make_algorithm({"name": f"{written}/fading.py:Fading", "fade": 2.0})


def test_its_loss_aggregation_and_token_weights_train_together(written: Path) -> None:
    named = {name: f"{written}/{name}.py:{name}" for name in ("by_level", "group_mean", "prompts")}
    weights = {"name": named["prompts"], "weight": 0.01}
    settings = {
        "name": "grpo",
        "loss": named["by_level"],
        "aggregation": named["group_mean"],
        "token_weights": weights,
    }
    tasks = [{**task, "level": 2} for task in TASKS]
    values = (
        trainer(written, algorithm=make_algorithm(settings | SETTINGS))
        .fit(agents.vowels, tasks)
        .metrics[-1]
        .values
    )
    assert values["loss/level"] == 2
    assert values["observation_loss"] > 0 and values["tokens_observed"] > 0


def test_its_correction_leaves_out_what_has_moved(written: Path) -> None:
    named = {"name": f"{written}/near.py:near", "most": 0.05}
    algorithm = make_algorithm({"name": "grpo", "correction": named})
    behaviour, proximal = torch.tensor([0.5, 0.5, 0.1]).log(), torch.tensor([0.54, 0.56, 0.2]).log()
    transitions = torch.zeros(3, dtype=torch.int64)
    _, kept, _ = algorithm.corrections.of(behaviour, proximal, proximal, transitions=transitions)
    assert kept.tolist() == [True, False, False]
