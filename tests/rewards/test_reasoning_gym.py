"""Any generator of reasoning-gym is a dataset by name, and its scorer a reward."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentlightning.cli.run_file import load_config
from agentlightning.datasets.tasks import load_dataset
from agentlightning.errors import ConfigError, InvalidError
from agentlightning.rewards import reasoning_gym_score
from agentlightning.runner.command import CommandOutput

SUMS = {"reasoning_gym": "chain_sum", "size": 20, "seed": 1}


def stored(source: dict[str, Any]) -> list[Any]:
    """The tasks as a store gives them back."""
    return json.loads(json.dumps(load_dataset(source)))


# of every kind: plain, with tuples, fractions, NumPy's text, several answers, partial credit, and
# random numbers of the process
@pytest.mark.parametrize(
    "name",
    [
        *("chain_sum", "gsm_symbolic", "arc_agi", "rearc", "knights_knaves", "list_functions"),
        *("countdown", "puzzle24", "n_queens", "spiral_matrix", "string_insertion"),
        *("binary_matrix", "tower_of_hanoi", "word_sorting"),
    ],
)
def test_a_right_answer_is_worth_one_and_a_seed_is_always_the_same_tasks(name: str) -> None:
    source = {"reasoning_gym": name, "size": 8, "seed": 1}
    tasks = stored(source)
    assert [reasoning_gym_score(task, task["answer"]) for task in reversed(tasks)] == [1.0] * 8
    again = subprocess.run(
        [sys.executable, "-c", f"import json\n{CHILD}\nprint(json.dumps(load_dataset({source})))"],
        capture_output=True,
        check=True,
    )
    assert json.loads(again.stdout) == tasks


def test_a_generator_that_depends_on_the_process_is_scored_by_the_task_that_was_asked() -> None:
    source = {"reasoning_gym": "polynomial_multiplication", "size": 8, "seed": 1}
    for hashes in ("1", "2"):
        code = f"import json\n{CHILD}\nprint(json.dumps(load_dataset({source})))"
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hashes},
            capture_output=True,
            check=True,
        )
        tasks = json.loads(done.stdout)
        assert [reasoning_gym_score(task, task["answer"]) for task in tasks] == [1.0] * 8


CHILD = "from agentlightning.datasets.tasks import load_dataset"


def test_reading_tasks_leaves_the_random_numbers_of_the_process_alone() -> None:
    random.seed(5)
    expected = random.random()
    random.seed(5)
    load_dataset({**SUMS, "reasoning_gym": "list_functions", "seed": 77})
    assert random.random() == expected


def test_another_seed_shares_no_tasks_where_there_are_many() -> None:
    first, second = (
        {task["question"] for task in load_dataset({**SUMS, "size": 300, "seed": seed})}
        for seed in (1, 2)
    )
    assert len(first) > 290 and not first & second


def test_an_answer_is_read_from_a_text_an_output_or_nothing() -> None:
    task = stored(SUMS)[0]
    right = task["answer"]
    assert reasoning_gym_score(task, f" {right}\n") == 1.0
    assert reasoning_gym_score(task, f"<answer>1</answer> or <answer>{right}</answer>.") == 1.0
    assert reasoning_gym_score(task, CommandOutput(stdout=f"{right}\n", stderr="")) == 1.0
    wrong = (None, "", "I do not know", "三", "9" * 10_000, "<answer></answer>")
    assert [reasoning_gym_score(task, text) for text in wrong] == [0.0] * 6
    hard = stored({**SUMS, "reasoning_gym": "prime_factorization", "size": 1})[0]
    assert reasoning_gym_score(hard, "two times three") == 0.0  # its scorer raises
    for other in ({"question": "1+1"}, "1+1", None, {"source": {"reasoning_gym": "chain_sum"}}):
        with pytest.raises(InvalidError, match="no generator of reasoning-gym made"):
            reasoning_gym_score(other, "2")


@pytest.mark.parametrize(
    "name",
    [
        *("binary_matrix", "n_queens", "spiral_matrix", "string_insertion", "countdown"),
        *("puzzle24", "intermediate_integration", "polynomial_multiplication"),
        "simple_integration",
    ],
)
def test_an_answer_is_never_run_as_code(name: str, tmp_path: Path) -> None:
    task = stored({"reasoning_gym": name, "size": 1, "seed": 1})[0]
    mark = tmp_path / "written"
    octal = "".join(f"\\{ord(letter):03o}" for letter in f"open('{mark}','w')")
    for attack in (
        f"__import__('os').system('touch {mark}')",
        f"[open('{mark}', 'w')]",
        f"S('{octal}')",
        f'N("{octal}")',
        "9**9**9**9",
        "(9**99999)",
    ):
        assert reasoning_gym_score(task, attack) <= 0.05
    assert not mark.exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"reasoning_gym": "chain_sums"}, "did you mean 'chain_sum'.*countdown"),
        ({"reasoning_gym": None}, "no generator of this name"),
        ({"min_termz": 2}, "no option 'min_termz'; did you mean 'min_terms'.*max_digits"),
        ({"level": 2}, "no option 'level'; did you mean 'levels'"),
        ({"min_terms": "two"}, r"Expected `int`, got `str` - at `\$.min_terms`"),
        ({"min_terms": -2}, "min_terms must be positive"),
        ({"seed": None}, "give a seed, and held-out tasks another one"),
        ({"seed": object()}, "object"),
        ({"size": 0}, "size must be positive"),
        ({"levels": 3}, "'levels': 3.*Expected `array`"),
        ({"levels": [40]}, "no level 40; the highest is 10"),
        ({"levels": [-1]}, "Invalid level: -1"),
        ({"reasoning_gym": "gsm_symbolic", "levels": [1]}, "No curriculum"),
        ({"reasoning_gym": "survo", "levels": [3]}, "max_empty must be <= 9"),
    ],
)
def test_what_is_wrong_with_a_generator_is_said(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_dataset({**SUMS, **changes})


@pytest.mark.parametrize("missing", ["reasoning_gym", "magiccube"])
def test_a_missing_package_is_named_with_what_installs_it(missing: str) -> None:
    code = f"import sys\nsys.modules[{missing!r}] = None\n{CHILD}\nload_dataset({SUMS})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ConfigError: a dataset of reasoning-gym needs a package" in done.stderr
    assert "pip install 'agent-lightning-next[reasoning-gym]'" in done.stderr


def test_levels_set_the_options_that_are_not_given() -> None:
    tasks = load_dataset({**SUMS, "levels": [0, 4], "max_digits": 1})
    assert [task["level"] for task in tasks] == [0] * 20 + [4] * 20
    terms = [task["metadata"]["num_terms"] for task in tasks]
    assert set(terms[:20]) == {2} and set(terms[20:]) <= set(range(2, 7)) and max(terms) > 3
    assert {task["metadata"]["num_digits"] for task in tasks} == {1}


def test_a_run_file_names_a_generator(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("agent: a.py:a\ntrain_dataset: {reasoning_gym: chain_sum, size: 20, seed: 1}\n")
    assert load_dataset(load_config(file).train_dataset) == load_dataset(SUMS)
    changed = load_config(file, ["train_dataset.seed=2"])
    assert load_dataset(changed.train_dataset) != load_dataset(SUMS)
