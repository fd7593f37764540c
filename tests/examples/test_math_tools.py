"""Math with tools: the calculator, the generator, Calc-X, the grading, and the agent against a
scripted endpoint."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.examples.endpoint import calling, scripted
from tests.examples.loading import EXAMPLES, load_example
from tests.examples.training import save_llama, steps_of, train
from tests.frameworks.world import bin_of

MATH = EXAMPLES / "math_tools"
math = load_example("math_tools", "calculator", "grading", "tasks", "demonstrations")
NUMBER = {"kind": "word", "answer": "40"}
POLYNOMIAL = {"kind": "product", "answer": "4*x+12"}


# --- the calculator ---


def test_the_calculator_remembers_what_it_solved() -> None:
    calculator = math.calculator.Calculator()
    assert calculator.solve("3*x+5=20") == "x: 5"
    assert calculator.calculate("x", "*", 7) == "result: 35"
    assert calculator.calculate(7.0, "/", "2") == "result: 3.5"
    assert calculator.expand("4*(x+3)") == "result: 4*x+12"


@pytest.mark.parametrize(
    ("tool", "arguments", "error"),
    [
        ("calculate", ("x", "+", "1"), "Error: x is unknown"),
        ("calculate", ("1", "/", "0"), "Error: division by 0"),
        ("solve", ("3*x+5",), "Error: an equation has one ="),
        ("solve", ("x*x=4",), "Error: the equation is not linear"),
        ("expand", ("__import__('os').getcwd()",), "Error: cannot read"),
        ("expand", ("9^9^9",), "Error: exponent"),
        ("expand", ("(a+b+c+d)^8*(e+f+g+h)^8",), "Error: too large"),
        ("expand", ("(" * 99,), "Error: cannot read"),
        ("expand", ("x" * 200,), "Error: more than 100 characters"),
        ("expand", ("\ud800",), "Error: cannot read"),
    ],
)
def test_what_it_cannot_do_is_said_at_once(tool: str, arguments: tuple, error: str) -> None:
    with pytest.raises(ValueError, match=r"^Error: ") as raised:
        getattr(math.calculator.Calculator(), tool)(*arguments)
    assert str(raised.value).startswith(error)


# --- grading ---


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
def test_the_last_number_is_the_answer(answer: str, reward: float) -> None:
    assert math.grading.grade(NUMBER, answer) == reward


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("result: 4*x+12", 1.0),
        ("So 4*(x+3) = 4*x + 12.", 1.0),
        ("4*(x+3)", 0.0),  # the question itself
        ("4*x+6+6", 0.0),  # not collected
        ("4*3+4*x", 0.0),  # 4*(3+x) without its brackets
        ("4*x+13, 4*x+12, 4*x+11", 0.0),  # naming many
        ("", 0.0),
    ],
)
def test_a_polynomial_counts_when_it_is_multiplied_out(answer: str, reward: float) -> None:
    assert math.grading.grade(POLYNOMIAL, answer) == reward


# --- the generator ---


def test_each_task_has_the_answer_that_its_calculation_gives() -> None:
    for task in math.tasks.train_tasks(400, seed=1):
        calculator, value = math.calculator.Calculator(), math.demonstrations.argument
        question, kind = task["question"], task["kind"]
        if kind in ("equation", "steps"):
            result = calculator.solve(value(question, "equation"))
        if kind in ("word", "steps"):
            operator = math.tasks.operator_of(task)
            result = calculator.calculate(
                value(question, "left"), operator, value(question, "right")
            )
        if kind == "product":
            result = calculator.expand(value(question, "product"))
        assert math.grading.grade(task, result) == 1.0
        assert len(task["answer"]) <= 3 or kind == "product"


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
import asyncio, json, sys
from agent import answer_of, run
from openai import AsyncOpenAI

async def main():
    async with AsyncOpenAI(base_url=sys.argv[1], api_key="any", max_retries=0) as client:
        print(answer_of(await run("3*x+5=20, x*7?", client=client)), "agentlightning" in sys.modules)

asyncio.run(main())
"""


@pytest.mark.slow
def test_the_agent_solves_then_calculates_then_answers() -> None:
    calls = (
        calling("solve", {"equation": "3*x+5=20"}),
        calling("calculate", {"left": "x", "operator": "*", "right": 7}, 2),
    )
    with scripted(*calls, {"content": "result: 35"}) as (url, requests):
        command = [bin_of("experiments") / "python", "-c", PROGRAM, url]  # where AutoGen is
        done = subprocess.run(
            command, cwd=MATH, capture_output=True, text=True, timeout=60, check=False
        )
    assert done.stdout == "result: 35 False\n", done.stderr  # the agent knows nothing of training
    told = [message["content"] for message in requests[-1]["messages"] if message["role"] == "tool"]
    assert (told, len(requests)) == (["x: 5", "result: 35"], 3)


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
