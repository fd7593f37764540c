"""Mathematical problems: four kinds made by a generator, and Calc-X read from its files.

- `word`: a short word problem, whose first word says which operator it takes.
- `equation`: a linear equation with an integer root.
- `product`: a product to be multiplied out; the answer is a polynomial.
- `steps`: solve an equation, then calculate with its root.

A task is a plain JSON object: `id`, `kind`, `question`, `answer`. The generator writes a small
language on purpose: the name of a tool's argument stands before its value in the question, which is
what a tiny transformer can copy. One combination of numbers in ten, and one pair of opening and
things in eight, is held out."""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Sequence
from pathlib import Path

from calculator import Calculator

from agentlightning.datasets.tasks import load_dataset
from agentlightning.errors import ConfigError
from agentlightning.rewards import extract_number

KINDS = ("word", "equation", "product", "steps")
RIGHT_FIRST_TOOL = {"word": "calculate", "equation": "solve", "product": "expand", "steps": "solve"}
OPENINGS = {
    "+": ("Total of the", "Total number of", "Total, over all"),
    "-": ("Difference of the", "Difference between the", "Difference, counting"),
    "*": ("Rows of", "Rows with equal", "Rows full of"),
    "/": ("Share the", "Share out the", "Share, equally,"),
}
THINGS = ("apples", "books", "boxes", "cards", "coins", "pens", "seats", "stamps", "tiles", "trees")
SOLVING = ("Solve the", "Solve this", "Solve for x the")
EXPANDING = ("Expand the", "Expand this", "Expand and collect the")
STEPPING = {
    "+": "Raise the root of the",
    "-": "Lower the root of the",
    "*": "Scale the root of the",
}
CALC_X = "https://huggingface.co/datasets/MU-NLPC/Calc-X"
CALC_X_SPLITS = ("train", "validation", "test")
DIGIT_GROUPS = re.compile(r"(?<=\d)_(?=\d)")  # 1_450, as Calc-X writes 1450
FORMULA_MARKS = re.compile(r"[*^]|[a-z]\(")  # 50*sqrt(2)


def is_heldout(key: str, share: int = 10) -> bool:
    """Which side of the split a combination is on: the same in every process and on every
    machine."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") % share == 0


def make_task(kind: str, generator: random.Random, heldout: bool) -> dict:
    """One random task of a kind from one side of the split."""
    while True:
        question, answer, numbers, pair = {
            "word": _word,
            "equation": _equation,
            "product": _product,
            "steps": _steps,
        }[kind](generator)
        if is_heldout(numbers) == heldout and (
            pair is None or is_heldout(pair, share=8) == heldout
        ):
            return {
                "id": f"{kind}:{question}",
                "kind": kind,
                "question": question,
                "answer": answer,
            }


def operator_of(task: dict) -> str | None:
    """The operator a word problem or a task of two steps takes; None for the others."""
    for openings in (OPENINGS, STEPPING):
        for operator, starts in openings.items():
            if task["kind"] in ("word", "steps") and task["question"].startswith(starts):
                return operator
    return None


def _word(generator: random.Random) -> tuple[str, str, str, str | None]:
    operator = generator.choice(sorted(OPENINGS))
    opening, things = generator.choice(OPENINGS[operator]), generator.choice(THINGS)
    left, right = generator.sample(range(2, 40), 2)
    if operator == "-":
        left, right = max(left, right), min(left, right)
    elif operator in "*/":
        right = right % 20 + 2
        left = left * right if operator == "/" else left
    answer = Calculator().calculate(left, operator, right)
    return (
        f"{opening} {things}: left {left}, right {right}.",
        answer.removeprefix("result: "),
        f"{left}{operator}{right}",
        f"{opening} {things}",
    )


def _linear(generator: random.Random) -> tuple[str, int]:
    """An equation, and its root."""
    root, factor, added = generator.sample(range(2, 20), 3)
    return f"{factor}*x+{added}={factor * root + added}", root


def _equation(generator: random.Random) -> tuple[str, str, str, None]:
    equation, root = _linear(generator)
    return f"{generator.choice(SOLVING)} equation {equation}.", str(root), equation, None


def _product(generator: random.Random) -> tuple[str, str, str, None]:
    factor, added = generator.sample(range(2, 30), 2)
    product = f"{factor}*({added}+x)"
    return (
        f"{generator.choice(EXPANDING)} product {product}.",
        f"{factor}*x+{factor * added}",
        product,
        None,
    )


def _steps(generator: random.Random) -> tuple[str, str, str, None]:
    equation, root = _linear(generator)
    operator = generator.choice(sorted(STEPPING))
    right = (
        generator.randrange(2, root) if operator == "-" and root > 2 else generator.randrange(2, 20)
    )
    answer = Calculator().calculate(root, operator, right).removeprefix("result: ")
    question = f"{STEPPING[operator]} equation {equation}: left x, right {right}."
    return question, answer, f"{equation}{operator}{right}", None


def make_tasks(n: int, generator: random.Random, heldout: bool) -> list[dict]:
    """`n` tasks whose kinds take turns, each round in random order."""
    order: list[str] = []
    while len(order) < n:
        order += generator.sample(KINDS, len(KINDS))
    return [make_task(kind, generator, heldout) for kind in order[:n]]


def train_tasks(n: int, seed: int) -> list[dict]:
    """`n` training tasks; the same seed gives the same list."""
    return make_tasks(n, random.Random(f"train/{seed}"), heldout=False)


def heldout_tasks(n: int) -> list[dict]:
    """The first `n` held-out tasks: none of their numbers is in `train_tasks`, and no word
    problem's words are."""
    return make_tasks(n, random.Random("heldout"), heldout=True)


def calc_x_tasks(folder: str | Path, split: str = "train") -> list[dict]:
    """The problems of a split of Calc-X whose answer is a number, from `<split>*.jsonl` or
    `.parquet` files in `folder` (or its `data`), in the layout of the hub: `id`, `question`,
    `result`, and `chain`, which is not used.

    A problem is left out where `result` is not a number as a whole: the letter of a multiple
    choice, or a formula. ConfigError says what is missing."""
    files = _calc_x_files(Path(folder), split)
    tasks: list[dict] = []
    for file in files:
        for number, row in enumerate(load_dataset(file), start=1):
            if not isinstance(row, dict) or not {"id", "question", "result"} <= row.keys():
                raise ConfigError(
                    f"{file}, row {number}: Calc-X has id, question and result; found {_keys(row)}"
                )
            answer = DIGIT_GROUPS.sub("", str(row["result"]))
            if not FORMULA_MARKS.search(answer) and extract_number(answer) is not None:
                tasks.append(
                    {
                        "id": row["id"],
                        "kind": "calc_x",
                        "question": row["question"],
                        "answer": answer,
                    }
                )
    if not tasks:
        raise ConfigError(f"{folder}: no row of {split} has a number for its result")
    return tasks


def _calc_x_files(folder: Path, split: str) -> Sequence[Path]:
    if split not in CALC_X_SPLITS:
        raise ConfigError(f"Calc-X has no split {split!r}; it has {', '.join(CALC_X_SPLITS)}")
    files = [
        one
        for ending in ("parquet", "jsonl")
        for one in sorted(folder.glob(f"**/{split}*.{ending}"))
    ]
    if not files:
        raise ConfigError(
            f"no {split}*.parquet or {split}*.jsonl in {folder}. Calc-X is at {CALC_X}: hf "
            f"download MU-NLPC/Calc-X --repo-type dataset --local-dir {folder}. Without it, "
            "tasks.train_tasks makes word problems, equations, products and problems of two "
            "steps"
        )
    return files


def _keys(row: object) -> str:
    return ", ".join(map(str, row)) if isinstance(row, dict) else f"a {type(row).__name__}"
