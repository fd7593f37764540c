"""An algorithm of your own picks tasks by what happened, measures that, and keeps its state through
a kill."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.algorithm.rl.sampling import TaskSampler
from agentlightning.data.credit import RewardedGroup
from agentlightning.errors import ConfigError
from tests import agents
from tests.algorithm.test_resume import Killed, rollouts_of
from tests.algorithm.test_write_an_algorithm import SETTINGS, written
from tests.test_trainer import WORDS, trainer

__all__ = ["written"]
POOLS = [
    {"word": word, "index": i, "pool": ("easy", "hard")[i % 2]} for i, word in enumerate(WORDS)
]


def pools(folder: Path, **settings: Any) -> Any:
    from agentlightning.config import make_algorithm

    return make_algorithm(
        {"name": f"{folder}/pools.py:Pools"}
        | SETTINGS
        | {"steps": 4, "checkpoint_every": 1}
        | settings
    )


def weights(folder: Path) -> bytes:
    return (sorted(folder.glob("checkpoints/step-*"))[-1] / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_pools_survive_a_kill_to_the_last_bit(tmp_path: Path, written: Path) -> None:
    """The same tasks, metrics and weights as without the kill, and the pools have moved by what was
    earned."""
    run, left = tmp_path / "run", tmp_path / "left"
    whole = pools(written)
    killed = Killed(agents.vowels, 31, run, left)  # in the third step
    result = trainer(tmp_path, algorithm=whole, deterministic=True).fit(killed, POOLS)
    resumed = pools(written)
    again = trainer(tmp_path, run_dir=left, algorithm=resumed, deterministic=True).fit(
        agents.vowels, POOLS, resume=True
    )
    assert again.stopped_because == "all steps done"
    assert resumed.state() == whole.state() != pools(written).state()
    assert weights(left) == weights(run)
    asked = [
        [
            (one.rollout_id.split("-", 1)[1], one.input["word"])
            for one in rollouts_of(place, lambda _: True)
        ]
        for place in (run, left)
    ]
    assert sorted(asked[0]) == sorted(asked[1])
    for before, after in zip(result.metrics[1:], again.metrics[1:], strict=True):
        names = [name for name in before.values if name.startswith("pool/")]
        assert sorted(names) == ["pool/easy", "pool/hard"]
        assert [before.values[name] for name in names] == [after.values[name] for name in names]


def test_tasks_are_picked_by_index_with_numbers_of_the_seed() -> None:
    def pick(tasks: Sequence[str], rng: random.Random) -> int:
        return rng.randrange(len(tasks))

    first, second = (TaskSampler("abcdefgh", 1, pick=pick) for _ in range(2))
    assert [first.take() for _ in range(9)] == [second.take() for _ in range(9)]
    restored = TaskSampler("abcdefgh", 1, pick=pick)
    restored.state = second.state
    assert restored.take() == first.take()
    with pytest.raises(ConfigError, match="next_task returned 2"):
        TaskSampler("ab", 1, pick=lambda tasks, rng: 2).take()


class Counts(agl.GRPO):
    """Counts steps."""

    kept: Any = 0

    def state(self) -> Any:
        return self.kept

    def restore(self, state: Any) -> None:
        self.kept = state


class Forgetful(agl.GRPO):
    def state(self) -> Any:
        return 1


class Picks(agl.GRPO):
    def next_task(self, tasks: Sequence[Any], rng: random.Random) -> int:
        return 0


def test_what_cannot_be_restored_is_refused_before_anything_is_loaded() -> None:
    for kept in ((1, 2), {1: 2}, float("nan"), object(), {"a": {2, 3}}):
        with pytest.raises(ConfigError, match="JSON does not preserve"):
            agl.Trainer(algorithm=type("Odd", (Counts,), {"kept": kept})())
    with pytest.raises(ConfigError, match="defines state and not restore"):
        agl.Trainer(algorithm=Forgetful())
    with pytest.raises(ConfigError, match="leave them out"):
        Picks(difficulty=(0.1, 0.9))


@pytest.mark.parametrize(
    ("answer", "said"),
    [({"reward": 1.0}, "measured already"), ({"x": float("inf")}, "no.* finite")],
)
def test_a_metric_of_your_own_has_a_name_and_a_value(
    tmp_path: Path, answer: dict[str, float], said: str
) -> None:
    class Measures(agl.GRPO):
        def step_done(self, groups: Sequence[RewardedGroup]) -> Mapping[str, float]:
            assert all(group.task["pool"] in ("easy", "hard") for group in groups)
            return answer

    with pytest.raises(ConfigError, match=said):
        trainer(tmp_path, algorithm=Measures(**SETTINGS)).fit(agents.vowels, POOLS)


LEVELS = [{"level": level, "number": number} for level in (3, 0, 1.5) for number in range(4)]


def test_the_level_rises_when_the_last_tasks_are_solved() -> None:
    algorithm = agl.GRPO(rise_at=0.75, rise_window=4)
    rng = random.Random(1)

    def picked() -> set[float]:
        return {LEVELS[algorithm.next_task(LEVELS, rng)]["level"] for _ in range(50)}

    def step(*rewards: float) -> float:
        return algorithm.step_done([RewardedGroup([[]], [reward]) for reward in rewards])["risen"]

    assert picked() == {0}
    assert step(1.0, 1.0, 1.0) == 0  # too few
    assert step(0.0, 0.0) == 0
    assert step(1.0, 1.0) == 0
    assert step(0.5) == 0  # mean 0.625 of the last four
    assert step(1.0, 0.5) == 1
    assert picked() == {1.5}
    assert step(1.0, 1.0, 1.0) == 1  # those before the rise do not count
    resumed = agl.GRPO(rise_at=0.75, rise_window=4)
    resumed.restore(algorithm.saved_state())
    assert resumed.step_done([RewardedGroup([[]], [1.0])]) == {"risen": 2}
    algorithm = resumed
    assert picked() == {3}
    assert step(1.0, 1.0, 1.0, 1.0) == 3
    assert picked() == {3}


def test_a_curriculum_needs_levels() -> None:
    for tasks in (POOLS, ["easy"], [{"level": None}], [{"level": "high"}]):
        with pytest.raises(ConfigError, match="rise_at needs tasks that have a level, a number"):
            agl.GRPO(rise_at=0.5).next_task(tasks, random.Random(1))
    with pytest.raises(ConfigError, match="leave them out"):
        agl.GRPO(rise_at=0.5, difficulty=(0.1, 0.9))
    with pytest.raises(ConfigError, match="rise_window"):
        agl.GRPO(rise_at=0.5, rise_window=0)


def test_a_curriculum_trains_level_after_level(tmp_path: Path) -> None:
    tasks = [{**task, "level": at} for at, task in enumerate(POOLS)]
    algorithm = agl.GRPO(**SETTINGS, rise_at=-1.0, rise_window=1)
    result = trainer(tmp_path, algorithm=algorithm).fit(agents.vowels, tasks)
    assert [step.values["risen"] for step in result.metrics] == [*range(1, len(result.metrics) + 1)]
