"""Generators of the package `reasoning-gym` by name, and their scorers as rewards.

A generator is given as `{"reasoning_gym": NAME, "seed": 1, option: value}`; with `levels`, its
curriculum sets the options that are not given. A task has this and its `index` as `source`, from
which the scorer makes it anew: JSON would lose tuples and keys that scorers need."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, Final

import msgspec

from agentlightning.errors import ConfigError, InvalidError, imported, nearest

# Their scorers run an answer as code of Python or SymPy, in this process.
_RUN_ANSWERS: Final = (
    "binary_matrix",
    "n_queens",
    "spiral_matrix",
    "string_insertion",
    "countdown",
    "puzzle24",
    "intermediate_integration",
    "polynomial_multiplication",
    "simple_integration",
)
_HARMLESS: Final = re.compile(
    r"""(?xas)
    (?!.*\*\*[\s(]*-?(?:\d{3}|\d+[\s)]*\*\*))  # numbers too large to compute
    (?:[\d\s()\[\],.+*/'"-]
    |\b(?:[A-E]+|[a-zQX_]|a?(?:sin|cos|tan)h?|sec|csc|cot|exp|log|ln|sqrt|pi|Abs|Integral)\b)*"""
)


def reasoning_gym_tasks(source: Mapping[str, Any]) -> Iterator[Any]:
    """The tasks of a generator, at each of its `levels` if these are given. ConfigError if there is
    none of this name, a package is missing, or an option is unknown, wrong or out of its range."""
    try:
        for level in msgspec.convert(source.get("levels", [None]), list[int | None]):
            own = {**source, "levels": [level]}
            key = msgspec.json.encode(own)
            for index in range(len(_generator(key))):
                made = _made(key, index) | {"source": {**own, "index": index}, "level": level}
                yield msgspec.to_builtins(made, str_keys=True, enc_hook=str)
    except (AssertionError, ValueError, TypeError) as error:
        raise ConfigError(f"{source}: {error}") from None


@lru_cache(maxsize=64)
def _generator(source: bytes) -> Any:
    factory = imported(
        "reasoning_gym.factory", "a dataset of reasoning-gym", "agent-lightning-next[reasoning-gym]"
    )
    given = msgspec.json.decode(source)
    name = given.pop("reasoning_gym")
    (level,) = given.pop("levels")
    if name not in factory.DATASETS:
        raise ValueError(f"no generator of this name; {nearest(str(name), factory.DATASETS)}")
    kind, settings = factory.DATASETS[name]
    options = {"levels", *settings.__dataclass_fields__}
    for unknown in given.keys() - options:
        raise ValueError(f"no option {unknown!r}; {nearest(unknown, options)}")
    if level is not None:
        curriculum = factory.create_curriculum(name)
        curriculum.set_global_level(level)
        if level != (top := curriculum.get_max_level()):
            raise ValueError(f"no level {level}; the highest is {top}")
        given = msgspec.to_builtins(curriculum.generate_configuration()) | given
    config = msgspec.convert(given, settings)
    if config.seed is None:
        raise ValueError("give a seed, and held-out tasks another one")
    # task i of seed 1 is task i - 1 of seed 2: neighbours would share all tasks but one
    config.seed = random.Random(config.seed).getrandbits(31)
    return kind(config)


@lru_cache(maxsize=4096)
def _made(source: bytes, index: int) -> Any:
    before = random.getstate()
    random.seed(index)  # some draw from the random numbers of the whole process
    made = _generator(source)[index]
    random.setstate(before)
    return made


def reasoning_gym_score(task: Any, answer: Any) -> float:
    """The score of an answer by the task's generator: 1.0 for a right one; some generators give
    parts of it for answers that are nearly right, or only well-formed.

    `answer` is a text, of which what its last <answer> has counts, or else all of it; or what
    graders get of a program (its stdout) or a stored rollout. 0.0 for none, for one that the scorer
    fails on, and, where a scorer would run it as code, for one with names other than variables and
    functions of mathematics. InvalidError if no generator made the task."""
    text = getattr(answer, "answer", getattr(answer, "stdout", answer)) or ""
    text = text.rpartition("<answer>")[2].partition("</answer>")[0].strip()
    try:
        source = {**task["source"]}
        index = source.pop("index")
        right = task["answer"]
        runs = source["reasoning_gym"] in _RUN_ANSWERS
    except (KeyError, TypeError):
        raise InvalidError(f"no generator of reasoning-gym made {task!r:.100}") from None
    if not text or (runs and not _HARMLESS.fullmatch(text)):
        return 0.0
    key = msgspec.json.encode(source)
    # of sets in another order, some generators make another task in another process
    made = _made(key, index) | {"answer": right}
    try:
        return float(_generator(key).score_answer(text, made))
    except Exception:  # noqa: BLE001 - of scorers that expect an answer of the right form
        return 0.0
