"""Games of up to twenty calls, too long to be written down: groups are drawn, and the variance of
estimates that are known to be unbiased is compared, with and without forks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from agentlightning.data.transitions import Transition
from tests.gradients.enumeration import (
    ANSWERS,
    FORK,
    RLOO,
    TREE,
    Enumeration,
    Outcome,
    Play,
    Run,
)
from tests.transitions import transition

CALLS: Final = 20
STATES: Final = 6

# R of the calls that were answered well; a rollout that ends before one answered it badly.
REWARDS: Final[Mapping[str, Callable[[Sequence[bool]], float]]] = {
    "every call counts": lambda well: sum(well) / CALLS,
    "calls 2 and 12 decide": lambda well: float(well[2] and well[12]),
    "calls 0 and 1 decide": lambda well: float(well[0] and well[1]),
    "calls 16 and 17 decide": lambda well: float(well[16] and well[17]),
}


@dataclass(frozen=True)
class Design:
    """How a group is sampled: `rollouts` of them, of which number i is forked at these calls, as
    far as it has them, once each."""

    rollouts: int
    calls: Callable[[int], Sequence[int]] = lambda rollout: ()


DESIGNS: Final[Mapping[str, Design]] = {
    "8 rollouts": Design(8),
    "4 rollouts, each forked at another call": Design(4, lambda rollout: [2 + 5 * rollout]),
    "4 rollouts, each forked at call 10": Design(4, lambda rollout: [10]),
    "2 rollouts, forked at every fifth call": Design(2, lambda rollout: range(2, CALLS, 5)),
    "1 rollout, forked at all calls": Design(1, lambda rollout: range(CALLS)),
}


class LongGame:
    """A random policy for one of `REWARDS`; about a third of the rollouts end before the last
    call."""

    def __init__(self, reward: str, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        logits = self._rng.normal(size=(STATES, ANSWERS))
        logits[:, 0] -= 3.5
        self._policy = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        self._following = self._rng.integers(0, STATES, (STATES, ANSWERS))
        self._good = self._rng.integers(1, ANSWERS, STATES)
        self._reward = REWARDS[reward]

    def play(self, before: Sequence[tuple[int, int]] = ()) -> Play:
        """A rollout that begins with these choices."""
        choices = list(before)
        while len(choices) < CALLS and not (choices and choices[-1][1] == 0):
            state = int(self._following[choices[-1]]) if choices else 0
            choices.append((state, int(self._rng.choice(ANSWERS, p=self._policy[state]))))
        gradients = np.zeros((len(choices), STATES, ANSWERS))
        calls: list[Transition] = []
        prompt = [30]
        for index, (state, answer) in enumerate(choices):
            gradients[index, state] = -self._policy[state]
            gradients[index, state, answer] += 1
            calls.append(transition(prompt, [10 + answer], call_index=index))
            prompt = [*prompt, 10 + answer, 30 + int(self._following[state, answer])]
        well = [answer == self._good[state] for state, answer in choices]
        well += [False] * (CALLS - len(well))
        chances = np.array([self._policy[choice] for choice in choices])
        reward = self._reward(well)
        return Play(
            tuple(choices), tuple(calls), gradients.reshape(len(choices), -1), chances, reward
        )

    def group(self, design: Design) -> Outcome:
        runs = [Run(self.play()) for _ in range(design.rollouts)]
        for rollout in range(design.rollouts):
            path = runs[rollout].path
            runs += [
                Run(self.play(path.choices[:call]), rollout, call)
                for call in design.calls(rollout)
                if call < len(path.calls)
            ]
        return Outcome(1.0, tuple(runs))


def variances(groups: int) -> dict[str, dict[str, float]]:
    """Of each design and credit, the variance with as many sampled tokens as `rloo` with eight
    rollouts has, relative to that, in each game."""
    found: dict[str, dict[str, float]] = {}
    for seed, reward in enumerate(REWARDS):
        best = 0.0
        for name, design in DESIGNS.items():
            game = LongGame(reward, seed)
            drawn = [game.group(design) for _ in range(groups)]
            enumerated = Enumeration([Outcome(1 / groups, one.runs) for one in drawn])
            weights = enumerated.weights("constant")
            for credit in [RLOO, TREE] if design.rollouts == 8 else [FORK, TREE]:
                estimate = enumerated.estimate(enumerated.advantages(credit.credit()), weights)
                noise = estimate.variance * estimate.tokens
                best = best or noise
                found.setdefault(f"{name} | {credit}", {})[reward] = float(f"{noise / best:.3g}")
    return found
