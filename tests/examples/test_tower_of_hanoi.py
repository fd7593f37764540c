"""The tower of Hanoi: its rules, its puzzles, and a player against a real endpoint."""

from __future__ import annotations

import random
from collections import deque
from contextlib import suppress

import pytest

from tests.examples.loading import load_example

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
