"""Tables of what combinations of return, baseline and aggregation estimate, over random small games.

    python -m tests.gradients [--games 150] [--forked 20] [--groups 150] [--out benchmarks/results/gradients.json]

The numbers are exact for each game (`enumeration.py`); medians and extremes are over games. Games
of twenty calls are sampled (`long_games.py`)."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from tests.gradients.enumeration import (
    FORK,
    OF_TURN,
    RLOO,
    STEP,
    TREE,
    Combination,
    Enumeration,
    Estimate,
    FloatArray,
    Game,
    Plan,
    cosine,
    error,
    forked_groups,
    groups_of,
    noise,
    scale,
)
from tests.gradients.long_games import REWARDS, variances

AGGREGATIONS: Final = ("constant", "token-mean", "sequence-mean", "rollout-mean")
BASELINES: Final = (
    Combination("identical", "none"),
    RLOO,
    Combination("identical", "dr_grpo"),
    Combination("identical", "grpo"),
    Combination("identical", "gigpo"),
    Combination("identical", "gigpo", options={"std": False}),
    Combination("identical", "reinforce++"),
    Combination("identical", "reinforce++_baseline"),
    Combination("identical", OF_TURN),
    Combination("identical", OF_TURN, options={"std": True}),
    Combination("identical", OF_TURN, options={"others": True}),
    TREE,
)
RETURNS: Final = (
    Combination("air", "rloo", {"alpha": 0.05}),
    Combination("air", "rloo", {"alpha": 0.2}),
    Combination("air", "grpo", {"alpha": 0.05}),
    Combination("air_dense", "none"),
    Combination("air_dense", "rloo", equal_rewards=True),
    Combination("air_dense", "grpo"),
    Combination("discounted", "rloo", {"gamma": 0.9}, equal_rewards=True),
    Combination("discounted", "none", {"gamma": 1.0}),
    Combination("discounted", "rloo", {"gamma": 1.0}, equal_rewards=True),
    Combination("discounted", "rloo", {"gamma": 1.0}),
    Combination("discounted", "grpo", {"gamma": 1.0}),
)

FEW: Final = 8  # rollouts of a game that are few enough for groups of three, and for forks

PLANS: Final[Mapping[str, Plan]] = {
    "none": lambda path: [],
    "call 1": lambda path: [1] if len(path.calls) > 1 else [],
    "all calls": lambda path: range(len(path.calls)),
    "calls in state 1": lambda path: [
        call for call, (state, _) in enumerate(path.choices) if state == 1
    ],
    "the last call, if it failed": lambda path: [len(path.calls) - 1] * (path.reward == 0),
}


def games(count: int, most: int = 99) -> Iterator[tuple[int, Game]]:
    """So many games with at most so many rollouts, of which some earn more than others."""
    seed = 0
    while count:
        game = Game(seed)
        usable = len(game.paths) <= most and np.linalg.norm(game.gradient()) > 0.01
        if usable and np.linalg.norm(game.gradient(steps=True)) > 0.01:
            yield seed, game
            count -= 1
        seed += 1


def judged(estimate: Estimate, game: Game, best: Estimate) -> dict[str, float]:
    """An estimate of one game; its noise is relative to the best one's."""
    gradient = game.gradient()
    return {
        "cosine": cosine(estimate.mean, gradient),
        "error": error(estimate.mean, gradient),
        "scale": scale(estimate.mean, gradient),
        "with steps": cosine(estimate.mean, game.gradient(steps=True)),
        "error with steps": error(estimate.mean, game.gradient(steps=True)),
        "noise": noise(estimate, gradient) / noise(best, gradient),
    }


def enumerated(seed: int, game: Game) -> dict[str, dict[str, float]]:
    """All combinations in one game: by name and number of groups in a step."""
    groups = Enumeration(groups_of(game, 3 if len(game.paths) <= FEW else 2))
    others = groups.others(seed)
    weights: dict[tuple[str, str], FloatArray] = {}
    for aggregation in AGGREGATIONS:
        weights[aggregation, "1"] = groups.weights(aggregation)
        weights[aggregation, "16"] = STEP * groups.weights(aggregation, others)
    best = groups.estimate(groups.advantages(RLOO.credit()), weights["constant", "1"])
    found: dict[str, dict[str, float]] = {}
    for combination in (*BASELINES, *RETURNS):
        advantages = groups.advantages(combination.credit())
        for (aggregation, step), of in weights.items():
            if step == "1" or not combination.credit().needs_batch:
                estimate = groups.estimate(advantages, of)
                name = f"{combination} | {aggregation} | {step}"
                found[name] = judged(estimate, game, best)
    return found


def forked(_: int, game: Game) -> dict[str, dict[str, float]]:
    """Forks in one game, beside `rloo` with four rollouts."""
    four = Enumeration(groups_of(game, 4))
    best = four.estimate(four.advantages(RLOO.credit()), four.weights("constant"))
    found = {"4 rollouts, none forked | rloo": judged(best, game, best)}
    cases = [(size, plan) for plan in PLANS for size in (2, 1) if plan == "all calls" or size == 2]
    for size, plan in cases:
        outcomes = forked_groups(game, size, PLANS[plan])
        if len(outcomes) > 1500:
            continue
        groups = Enumeration(outcomes)
        apart = Enumeration(outcomes, independent=True)
        for where, combination, name in (
            (groups, FORK, "fork"),
            (groups, TREE, "tree"),
            (apart, TREE, "tree, as if independent"),
            (apart, RLOO, "rloo, as if independent"),
        ):
            advantages = where.advantages(combination.credit())
            estimate = where.estimate(advantages, where.weights("constant"))
            found[f"{size} rollouts, {plan} forked | {name}"] = judged(estimate, game, best)
    return found


def over_games(found: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """Medians and extremes of each combination."""
    names = dict.fromkeys(name for of in found for name in of)
    return {name: _summary([of[name] for of in found if name in of]) for name in names}


def _summary(games: Sequence[Mapping[str, float]]) -> dict[str, float]:
    def column(name: str) -> list[float]:
        return [game[name] for game in games]

    made = {
        "games": len(games),
        "worst cosine": min(column("cosine")),
        "worst cosine with steps": min(column("with steps")),
        "against": statistics.mean(value < 0 for value in column("cosine")),
        "against with steps": statistics.mean(value < 0 for value in column("with steps")),
        "largest error": max(column("error")),
        "largest noise": max(column("noise")),
    }
    for name in ("cosine", "error", "scale", "with steps", "error with steps", "noise"):
        made[name] = statistics.median(column(name))
    return {name: float(f"{value:.5g}") for name, value in made.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--games", type=int, default=150)
    parser.add_argument("--forked", type=int, default=20, help="games in which rollouts are forked")
    parser.add_argument("--groups", type=int, default=150, help="drawn in games of twenty calls")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/gradients.json"))
    arguments = parser.parse_args()
    started = time.process_time()
    found: dict[str, Any] = {
        "combinations": over_games([enumerated(*of) for of in games(arguments.games)]),
        "forks": over_games([forked(*of) for of in games(arguments.forked, most=FEW)]),
    }
    found["twenty calls"] = variances(arguments.groups)
    found["cpu_seconds"] = round(time.process_time() - started)
    arguments.out.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    for title, rows in (("combination", found["combinations"]), ("forks", found["forks"])):
        print(
            f"\n{title:62} cosine  worst  scale  noise   most  error | R + Σr: cosine  worst against"
        )
        for name, row in rows.items():
            if name.endswith("| 1") and f"{name[:-1]}16" in rows:
                continue  # a step of one group
            print(
                f"{name:62} {row['cosine']:6.3f} {row['worst cosine']:6.3f} {row['scale']:6.2f} "
                f"{row['noise']:6.2f} {row['largest noise']:6.2f} {row['error']:6.3f} | "
                f"{row['with steps']:14.3f} {row['worst cosine with steps']:6.3f} "
                f"{row['against with steps']:7.2f}"
            )
    print(f"\n{'variance, games of twenty calls':62} {', '.join(REWARDS)}")
    for name, row in found["twenty calls"].items():
        print(f"{name:62} {', '.join(f'{value:.2f}' for value in row.values())}")
    print(f"\n{found['cpu_seconds']} CPU seconds; all numbers are in {arguments.out}")


if __name__ == "__main__":
    main()
