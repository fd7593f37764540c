"""The tower of Hanoi: its rules, its puzzles, and a player against a real endpoint."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from agentlightning import semconv
from agentlightning.data.recordings import Recorded, finished_rollouts, recorded_groups
from agentlightning.learner.tiny import make_policy
from agentlightning.store.sql import SqlStore
from agentlightning.types import Span
from tests.examples.loading import EXAMPLES, load_example
from tests.gateway.test_replay import values

game = load_example("tower_of_hanoi", "tower", "agent", "tasks", "rollout", "demonstrations")


@pytest.mark.parametrize("goal", "ABC")
def test_the_best_way_is_the_shortest_from_every_position(goal: str) -> None:
    """Compared with a search of all positions from the goal; moves can be taken back."""
    far = {goal * 4: 0}
    left = deque(far)
    while left:
        position = left.popleft()
        for way in game.tower.WAYS:
            tower = game.tower.Tower(position, goal)
            with suppress(ValueError):
                tower.move(way)
            if tower.position not in far:
                far[tower.position] = far[position] + 1
                left.append(tower.position)
    assert len(far) == 81
    for position, moves in far.items():
        assert game.tower.distance(position, goal) == moves
        if moves:
            tower = game.tower.Tower(position, goal)
            tower.move(game.tower.best_way(position, goal))
            assert far[tower.position] == moves - 1


@pytest.mark.parametrize(
    ("arguments", "result"),
    [
        ('{"way": "AC"}', "to C: CAB"),
        ('{"way": "BA"}', "Error: too large, to C: AAB"),
        ('{"way": "CA"}', "Error: no disk, to C: AAB"),
        ('{"way": "AA"}', "Error: no way, to C: AAB"),
        ('{"peg": "A"}', "Error: no way, to C: AAB"),
        ('["A', "Error: no way, to C: AAB"),
    ],
)
def test_a_move_tells_the_position(arguments: str, result: str) -> None:
    assert game.agent.use(game.tower.Tower("AAB", "C"), arguments) == result


def test_puzzles_are_far_from_their_goal_and_the_scorer_knows_their_opening() -> None:
    train, held_out = game.tasks.train(), game.tasks.held_out()
    ways = [{(task["position"], task["goal"]) for task in tasks} for tasks in (train, held_out)]
    assert [len(one) for one in ways] == [len(train), len(held_out)] == [64, 24]
    assert not ways[0] & ways[1]
    for task in [*train[:8], *held_out[:8]]:
        tower = game.tower.Tower(task["position"], task["goal"])
        while way := game.tower.best_way(tower.position, task["goal"]):
            assert game.tasks.solved(task, tower.moves) == 0
            tower.move(way)
        assert len(tower.moves) >= game.tasks.LEAST
        assert game.tasks.solved(task, tower.moves) == 1


def test_demonstrations_are_right_in_form_and_poor_in_judgement() -> None:
    generator = random.Random(1)
    shown = [game.demonstrations.demonstrate(generator) for _ in range(400)]
    assert 0.1 < sum(won for _, won in shown) / len(shown) < 0.6
    results = [
        message["content"]
        for one, _ in shown
        for message in one["messages"]
        if message["role"] == "tool"
    ]
    assert 0.1 < sum(text.startswith("Error: ") for text in results) / len(results) < 0.4


def states(spans: Sequence[Span]) -> list[str]:
    """The positions before each call."""
    named = [span for span in spans if "state" in span.attributes]
    return [span.attributes["state"] for span in sorted(named, key=lambda one: one.start_time)]


async def recorded(directory: Path) -> list[Recorded]:
    store = await SqlStore.open(directory / "store.sqlite")
    (group,) = [one async for one in recorded_groups(store, finished_rollouts())]
    await store.close()
    return group


@pytest.mark.slow
def test_games_that_are_forked_at_call_8_begin_as_their_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The player is deterministic given its answers: no fork asks what the record does not have.
    The command is that of the README, with one puzzle."""
    monkeypatch.setattr(game.demonstrations, "STOPS", 0.0)
    monkeypatch.setattr(game.demonstrations, "LONG", 0.0)
    generator = random.Random(1)
    shown = [game.demonstrations.demonstrate(generator)[0] for _ in range(200)]
    policy = make_policy(shown, tools=[game.agent.MOVE], seed=1, vocabulary_size=300, steps=20)
    policy.save(tmp_path / "start")
    settings = ["name=grpo", "returns=fork", "baseline=none", "group_size=5", "forks=[8]"]
    small = ["steps=1", "tasks_per_step=1", "temperature=0.5"]
    command = ["train", "run.yaml", "--model", str(tmp_path / "start"), "--run-dir", str(tmp_path)]
    for one in [*settings, *small]:
        command += ["--set", f"algorithm.{one}"]
    # in a process of its own: modules of other examples and tests are called `agent` too
    program = [sys.executable, "-m", "agentlightning.cli.main", *command]
    subprocess.run(program, cwd=EXAMPLES / "tower_of_hanoi", check=True, timeout=300)
    group = asyncio.run(recorded(tmp_path))
    positions = {one.rollout.rollout_id: states(one.spans) for one in group}
    forks = [one for one in group if one.rollout.source]
    assert forks, positions
    for fork in forks:
        assert fork.rollout.status == "succeeded"
        flags = values(fork.spans, semconv.CALL_FLAG)
        assert len(flags) > 8
        assert flags == [semconv.REPLAYED] * 8 + [None] * (len(flags) - 8)
        source = positions[fork.rollout.source.rollout_id]
        assert positions[fork.rollout.rollout_id][:9] == source[:9]
        assert len(set(source[:9])) > 1
