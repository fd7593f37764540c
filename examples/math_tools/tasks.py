"""Word problems of grade school: those of reasoning-gym's `gsm_symbolic`, and Calc-X read from its
files.

`gsm_symbolic` has templates, each a wording with places for names, things and numbers, and works
each problem out in prose. Used are the problems whose prose can be read as at most three
calculations, with numbers that are in the problem, results of earlier calculations, or a few
constants such as the days of a week. A task is a JSON object: `id`, `question`, `answer`, its
`source` for the scorer, and `steps`, the calculations, which only demonstrations use."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from calculator import read, shown

from agentlightning.datasets.tasks import load_dataset
from agentlightning.errors import ConfigError
from agentlightning.rewards import extract_number
from agentlightning.rewards.reasoning_gym import reasoning_gym_tasks

MOST_STEPS = 3
HELD_OUT = 5  # of the combinations of numbers, one in so many
SOURCE = {"reasoning_gym": "gsm_symbolic", "size": 1000}
CONSTANTS = {"2", "3", "4", "7", "12", "60", "100"}
REQUEST = " Give the result as your final answer. Do not include units."
NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?")
# numbers, operators (`x` between spaces; no slash of a unit, as in clams/minute), and what ends one
PIECE = re.compile(rf"{NUMBER.pattern}|(?<=[\s\d])x(?=\s)|[-+*×÷]|/(?!\s*[A-Za-z])|[=\n(:;%]")
SIGNS = {"x": "*", "×": "*", "÷": "/"}
CALC_X = "https://huggingface.co/datasets/MU-NLPC/Calc-X"
CALC_X_SPLITS = ("train", "validation", "test")
DIGIT_GROUPS = re.compile(r"(?<=\d)_(?=\d)")  # 1_450, as Calc-X writes 1450
FORMULA_MARKS = re.compile(r"[*^]|[a-z]\(")  # 50*sqrt(2)


def train_tasks(n: int, seed: int) -> list[dict]:
    """`n` training tasks; the same seed gives the same list."""
    return problems(n, seed, held_out=False)


def held_out_tasks(n: int) -> list[dict]:
    """The first `n` held-out tasks, none of whose numbers training tasks have together."""
    return problems(n, 0, held_out=True)


def problems(n: int, seed: int, *, held_out: bool) -> list[dict]:
    """`n` different problems from one side of the split. ConfigError if reasoning-gym is
    missing."""
    found: dict[str, dict] = {}
    part = 1000 * seed
    while len(found) < n:
        for made in reasoning_gym_tasks({**SOURCE, "seed": part}):
            question = made["question"].removesuffix(REQUEST)
            steps = steps_of(question, made["metadata"]["answer_cot"], made["answer"])
            if steps and is_held_out(question) == held_out:
                task = {"id": question, "question": question, "steps": steps}
                found.setdefault(question, task | {key: made[key] for key in ("answer", "source")})
        part += 1
    return list(islice(found.values(), n))


def is_held_out(question: str) -> bool:
    """Which side of the split a problem's numbers are on, the same in every process."""
    return zlib.crc32(" ".join(numbers(question)).encode()) % HELD_OUT == 0


def numbers(text: str) -> list[str]:
    """`$1,200 for 8.0 kg` → `1200`, `8`"""
    return [plain(number) for number in NUMBER.findall(text)]


def plain(number: str) -> str:
    number = number.replace(",", "")
    return number.rstrip("0").rstrip(".") if "." in number else number


def steps_of(question: str, worked: str, answer: str) -> list[list[str]]:
    """The calculations of a problem that is worked out in prose, each a list of numbers and
    operators in turn: `She has 10 jars * 15 = 150 brownies` → `[["10", "*", "15"]]`. Empty
    where the prose cannot be read, has too many, or leads to another answer."""
    known = {*numbers(question), *CONSTANTS}
    steps: list[list[str]] = []
    result = ""
    for step, right in calculations(worked):
        try:
            result = shown(read("".join(step)))
        except ValueError:
            return []
        if result != right or not known.issuperset(step[::2]):
            return []
        known.add(result)
        steps.append(step)
    return steps if result == plain(answer) and len(steps) <= MOST_STEPS else []


def calculations(worked: str) -> Iterator[tuple[list[str], str]]:
    """What stands before each = back to where no calculation goes on, and the number after it."""
    pieces = [SIGNS.get(piece, plain(piece)) for piece in PIECE.findall(worked)]
    for place, piece in enumerate(pieces[:-1]):
        if piece != "=" or not pieces[place + 1][0].isdigit():
            continue
        step: list[str] = []
        for earlier in reversed(pieces[:place]):
            is_number = earlier[0].isdigit()
            if is_number == bool(len(step) % 2) or not (is_number or earlier in "+-*/"):
                break
            step.insert(0, earlier)
        step = step[1 - len(step) % 2 :]
        if len(step) > 1:
            yield step, pieces[place + 1]


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
            "tasks.train_tasks takes problems of reasoning-gym"
        )
    return files


def _keys(row: object) -> str:
    return ", ".join(map(str, row)) if isinstance(row, dict) else f"a {type(row).__name__}"
