"""Math with tools: the calculator, the problems, Calc-X, the grading, and the agent against a
scripted endpoint."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agentlightning.errors import ConfigError
from tests.examples.endpoint import calling, scripted
from tests.examples.loading import EXAMPLES, load_example
from tests.examples.training import save_llama, steps_of, train
from tests.frameworks.world import bin_of

MATH = EXAMPLES / "math_tools"
math = load_example("math_tools", "calculator", "grading", "tasks", "demonstrations")


# --- the calculator ---


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("12*7", "84"),
        ("1/3*4200", "1400"),  # exact, as no decimals would be
        ("0.1+0.2", "0.3"),
        ("(3+4)*-2^3", "-56"),
        ("2/3", "0.6666666667"),
    ],
)
def test_the_calculator_computes(expression: str, result: str) -> None:
    assert math.calculator.calculate(expression) == result


@pytest.mark.parametrize(
    ("expression", "error"),
    [
        ("", "Error: cannot read"),
        ("12*", "Error: cannot read"),
        ("twelve", "Error: cannot read"),
        ("True", "Error: cannot read"),
        ("1e999", "Error: cannot read"),
        ("1j", "Error: cannot read"),
        ("7//2", "Error: cannot read"),
        ("1/0", "Error: division by 0"),
        ("5/(2-2)", "Error: division by 0"),
        ("9**9**9", "Error: exponent 9"),
        ("2**-1", "Error: exponent -1"),
        ("2**0.5", "Error: exponent 0.5"),
        ("((9**8)**8)**8", "Error: too large"),
        ("(" * 99, "Error: cannot read"),
        ("1+" * 99 + "1", "Error: more than 100 characters"),
        ("__import__('os').getcwd()", "Error: cannot read"),
        ("\ud800", "Error: cannot read"),
        ("1\x00", "Error: cannot read"),
    ],
)
def test_what_it_cannot_compute_is_said_at_once(expression: str, error: str) -> None:
    began = time.perf_counter()
    with pytest.raises(ValueError, match=r"^Error: ") as raised:
        math.calculator.calculate(expression)
    assert str(raised.value).startswith(error)
    assert time.perf_counter() - began < 1


# --- the problems ---


def test_a_problem_that_is_worked_out_in_prose_is_read_as_calculations() -> None:
    question = "She has 1,200 clams and peels 12 a minute, 5 at once. How long?"
    worked = "To peel: 1200 clams / 12 clams/minute = 100 minutes\nSo 100+5 = 105 minutes."
    steps = [["1200", "/", "12"], ["100", "+", "5"]]
    assert math.tasks.steps_of(question, worked, "105") == steps
    assert math.tasks.steps_of(question, worked, "100") == []  # another answer
    assert math.tasks.steps_of(question, "0.2*12 = 2.4", "2.4") == []  # where 0.2 is from
    assert math.tasks.steps_of(question, "12/5 = 2", "2") == []  # rounded
    assert math.tasks.steps_of(question, "12/0 = 5", "5") == []
    assert math.tasks.steps_of(question, "She has 100.", "100") == []


def test_the_steps_of_each_problem_earn_its_reward() -> None:
    for task in math.tasks.train_tasks(300, seed=1):
        results = [math.calculator.calculate("".join(step)) for step in task["steps"]]
        assert math.grading.grade(task, results[-1]) == 1.0
        assert 1 <= len(results) <= math.tasks.MOST_STEPS
        assert "units" not in task["question"]


def test_no_problem_is_on_both_sides_of_the_split() -> None:
    train, held_out = math.tasks.train_tasks(300, seed=1), math.tasks.held_out_tasks(60)
    combinations = [
        {tuple(math.tasks.numbers(task["question"])) for task in side} for side in (train, held_out)
    ]
    assert not combinations[0] & combinations[1]
    assert train == math.tasks.train_tasks(300, seed=1) != math.tasks.train_tasks(300, seed=2)


def test_a_missing_generator_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(ConfigError, match=r"agent-lightning-next\[reasoning-gym\]"):
        math.tasks.problems(1, 987, held_out=False)


# --- grading ---


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("{}", 1.0),
        ("{}.0", 1.0),
        ("it is {} minutes", 1.0),
        ("1{}", 0.0),
        ("-1 {}", 0.0),  # the scorer takes the first number
        ("unknown", 0.0),
        ("", 0.0),
    ],
)
def test_the_scorer_of_the_generator_says_what_is_right(answer: str, reward: float) -> None:
    (task,) = math.tasks.train_tasks(1, seed=1)
    assert math.grading.grade(task, answer.format(task["answer"])) == reward


def test_digits_of_another_script_are_digits() -> None:
    (task,) = math.tasks.train_tasks(1, seed=1)
    arabic = task["answer"].translate({ord("0") + digit: 0x660 + digit for digit in range(10)})
    assert math.grading.grade(task, arabic) == 1.0
    assert math.grading.grade(task, "\u0661" + arabic) == 0.0


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("result: 40", 1.0),
        ("40.1", 0.0),  # beyond the tolerance
        (" ".join(map(str, range(100))), 0.0),  # naming many
        ("40 or 41", 0.0),
        ("8*5", 0.0),  # not worked out
        ("33 7/1", 0.0),  # 33 + 7 as a mixed number
    ],
)
def test_of_calc_x_the_last_number_is_the_answer(answer: str, reward: float) -> None:
    assert math.grading.grade({"answer": "40"}, answer) == reward


# --- demonstrations ---


def test_demonstrations_are_right_at_times_and_can_be_written_as_lines(tmp_path: Path) -> None:
    file = tmp_path / "shown.jsonl"
    command = [sys.executable, MATH / "demonstrations.py", "--count", "200", "--seed", "1"]
    subprocess.run([*command, "--out", file], check=True, env=os.environ)
    shown = [json.loads(line) for line in file.read_text().splitlines()]
    assert shown == math.demonstrations.demonstrations(200, 1)
    answers = {one["question"]: one for one in math.tasks.train_tasks(200, 1)}
    rewards = [
        math.grading.grade(answers[messages[1]["content"]], messages[-1]["content"])
        for messages in (one["messages"] for one in shown)
    ]
    assert 0.2 < sum(rewards) / 200 < 0.6
    results = [m["content"] for one in shown for m in one["messages"] if m["role"] == "tool"]
    assert 0.02 < sum(result.startswith("Error") for result in results) / len(results) < 0.2


def test_a_mistake_is_another_number_or_operator() -> None:
    generator = random.Random(1)
    spoiled = {
        math.demonstrations.spoiled(["12", "*", "7"], ["12", "7", "5"], generator)
        for _ in range(300)
    }
    assert {"12*7", "12*5", "12+7", "5*7", "12**7"} <= spoiled


# --- Calc-X ---

ROWS = [
    {
        "id": "ape__1",
        "question": "12 cakes for 3?",
        "chain": "<gadget>12/3</gadget>",
        "result": "4",
        "source": "calc",
    },
    {"id": "ape__2", "question": "2 of 3?", "chain": "", "result": "2/3", "source": "calc"},
    {"id": "aqua__3", "question": "Which? A) 1 B) 2", "chain": "", "result": "B", "source": "calc"},
    {"id": "ape__4", "question": "1,400 and 50?", "chain": "", "result": "1_450", "source": "calc"},
    {"id": "ape__5", "question": "1,000 by 3?", "chain": "", "result": "1_000/3", "source": "calc"},
    {
        "id": "aqua__6",
        "question": "The diagonal of 50?",
        "chain": "",
        "result": "50*sqrt(2)",
        "source": "calc",
    },
]


def test_calc_x_is_read_as_it_is_published(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    path = tmp_path / "data" / "train-00000-of-00001.parquet"
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(ROWS), path)
    tasks = math.tasks.calc_x_tasks(tmp_path)
    # neither letter nor formula
    assert [task["id"] for task in tasks] == ["ape__1", "ape__2", "ape__4", "ape__5"]
    assert math.grading.grade(tasks[1], "0.66667") == math.grading.grade(tasks[1], "4/6") == 1.0
    assert math.grading.grade(tasks[2], "1,450") == 1.0 > math.grading.grade(tasks[2], "1")
    assert math.grading.grade(tasks[3], "333.333") == 1.0
    assert math.grading.grade(tasks[0], "12 / 3 = 4") == 1.0


# --- the agent ---

PROGRAM = """
import asyncio, sys
from agent import answer_of, run
from openai import AsyncOpenAI

async def main():
    async with AsyncOpenAI(base_url=sys.argv[1], api_key="any", max_retries=0) as client:
        print(answer_of(await run("12*7-4?", client=client)), "agentlightning" in sys.modules)

asyncio.run(main())
"""


@pytest.mark.slow
def test_the_agent_calculates_until_it_answers() -> None:
    calls = (
        calling("calculate", {"expression": "12*7"}),
        calling("calculate", {"expression": "84-"}, 2),
        calling("calculate", {"expression": "84-4"}, 3),
    )
    with scripted(*calls, {"content": "80"}) as (url, requests):
        command = [bin_of("experiments") / "python", "-c", PROGRAM, url]  # where AutoGen is
        done = subprocess.run(
            command, cwd=MATH, capture_output=True, text=True, timeout=60, check=False
        )
    assert done.stdout == "80 False\n", done.stderr  # the agent knows nothing of training
    told = [message["content"] for message in requests[-1]["messages"] if message["role"] == "tool"]
    assert told == ["84", "Error: cannot read 84-", "80"]


# --- training ---


@pytest.mark.slow
def test_a_model_from_a_folder_is_trained_with_an_adapter_on_problems_of_calc_x(
    tmp_path: Path,
) -> None:
    model = save_llama(tmp_path / "llama", [row["question"] for row in ROWS])
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in ROWS[:2])
        )
    done = train("math_tools", "--air", "--out", tmp_path, "--model", model, "--calc-x", tmp_path)
    assert done.returncode == 0, done.stderr
    assert [one["step"] for one in steps_of(tmp_path / "run")] == [1]
    assert list((tmp_path / "run" / "checkpoints").glob("*/adapter_config.json"))
