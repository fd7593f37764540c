"""Small games in which every rollout and every group can be written down: the exact expectation and
variance of the gradient that a return, a baseline and an aggregation estimate, beside the gradient
that they are to estimate.

In a game the policy makes one to three calls. In each state it chooses among two or three answers,
of which the first ends the rollout, so that lengths vary with what it chooses; answers have one to
three tokens, of which the first decides. Rewards come by call and at the end. Credit and
aggregation are the package's own functions; only sums and probabilities are computed here."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import structs

from agentlightning.data.aggregation import Tokens, weights_of
from agentlightning.data.credit import Returns, RewardedGroup
from agentlightning.data.credit_table import Credit, make_credit
from agentlightning.data.sequences import CreditedTransition, TrainingSequence, build_sequences
from agentlightning.data.statistics import standard
from agentlightning.data.transitions import Transition
from agentlightning.store.sources import CallName
from agentlightning.types import ForkSource, Rollout
from tests.transitions import transition

FloatArray: TypeAlias = npt.NDArray[np.float64]

STATES: Final = 3
ANSWERS: Final = 3
HORIZON: Final = 3
EARNED: Final = 0.3  # the reward of a call, up or down, where R is 0, 0.5 or 1
OF_TURN: Final = "of its turn"  # `of_turn`
STEP: Final = 16  # groups in a step, as in a training by default


class Play(NamedTuple):
    """One rollout that can happen: its choices (state, answer), its calls, the gradient of the log
    of each choice's probability float64[T, P], the probability of each choice, and R."""

    choices: tuple[tuple[int, int], ...]
    calls: tuple[Transition, ...]
    gradients: FloatArray
    chances: FloatArray
    reward: float

    @property
    def chance(self) -> float:
        return float(self.chances.prod())

    @property
    def earned(self) -> float:
        """Σr, the rewards of its calls."""
        return sum(call.reward or 0.0 for call in self.calls)

    @property
    def tokens(self) -> int:
        return sum(len(call.response_ids) for call in self.calls)


class Game:
    """A random game and a random policy for it, by seed. `policy` float64[S, A] are probabilities;
    `paths` all rollouts. A prompt ends with its state, from 30; an answer begins with its number,
    from 10."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        logits = rng.normal(size=(STATES, ANSWERS))
        logits[rng.random((STATES, ANSWERS)) < 0.2] = -np.inf
        logits[:, :2] = rng.normal(size=(STATES, 2))  # it can end, and it can go on
        self.policy = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        self._following = rng.integers(0, STATES, (STATES, ANSWERS))
        self._tokens = rng.integers(1, 4, (STATES, ANSWERS))
        self._steps = rng.choice([-EARNED, 0.0, 0.0, EARNED], (STATES, ANSWERS))
        self._rng = rng
        self.paths = list(self._grown(()))

    def _grown(self, choices: tuple[tuple[int, int], ...]) -> Iterator[Play]:
        """All rollouts that begin with these choices."""
        state = int(self._following[choices[-1]]) if choices else 0
        for answer in np.flatnonzero(self.policy[state]).tolist():
            chosen = (*choices, (state, answer))
            if answer == 0 or len(chosen) == HORIZON:
                yield self._path(chosen)
            else:
                yield from self._grown(chosen)

    def _path(self, choices: tuple[tuple[int, int], ...]) -> Play:
        prompt = [30]
        calls: list[Transition] = []
        gradients = np.zeros((len(choices), STATES, ANSWERS))
        for index, (state, answer) in enumerate(choices):
            said = [10 + answer] + [20] * (int(self._tokens[state, answer]) - 1)
            reward = float(self._steps[state, answer]) or None
            calls.append(transition(prompt, said, call_index=index, reward=reward))
            prompt = [*prompt, *said, 30 + int(self._following[state, answer])]
            gradients[index, state] = -self.policy[state]
            gradients[index, state, answer] += 1
        return Play(
            choices,
            tuple(calls),
            gradients.reshape(len(choices), -1),
            np.array([self.policy[choice] for choice in choices]),
            float(self._rng.choice([0.0, 0.5, 1.0])),
        )

    def continuations(self, path: Play, at: int) -> list[Play]:
        """All rollouts that begin with the first `at` choices of this one."""
        return [other for other in self.paths if other.choices[:at] == path.choices[:at]]

    def gradient(self, *, steps: bool = False) -> FloatArray:
        """The gradient of E[R], or with `steps` of E[R + Σr]."""
        return sum(
            path.chance * (path.reward + steps * path.earned) * path.gradients.sum(0)
            for path in self.paths
        )  # type: ignore[return-value]


Plan: TypeAlias = Callable[[Play], Sequence[int]]
"""The calls of a rollout that are forked."""


class Run(NamedTuple):
    """A rollout of a group. A fork walks the run number `source` again up to call `at`."""

    path: Play
    source: int | None = None
    at: int = 0

    @property
    def own(self) -> slice:
        return slice(self.at, None)


@dataclass(frozen=True)
class Outcome:
    """What a group can turn out to be."""

    chance: float
    runs: tuple[Run, ...]

    def group(self, *, independent: bool = False) -> RewardedGroup:
        """The group as credit sees it; with `independent`, as if forks shared nothing."""
        calls = [run.path.calls[run.own] for run in self.runs]
        rewards = [run.path.reward for run in self.runs]
        if independent or all(run.source is None for run in self.runs):
            return RewardedGroup(calls, rewards)
        return RewardedGroup(
            [
                [structs.replace(call, rollout_id=f"r{number}") for call in own]
                for number, own in enumerate(calls)
            ],
            rewards,
            rollouts=[_record(number, run) for number, run in enumerate(self.runs)],
            answers=[self._answers(number) for number in range(len(self.runs))],
        )

    def _answers(self, number: int) -> dict[CallName, CallName]:
        run = self.runs[number]
        own: dict[CallName, CallName] = {
            (f"r{number}", "a", index): (f"r{number}", "a", index)
            for index in range(len(run.path.calls))
        }
        if run.source is not None:
            given = list(self._answers(run.source).values())[: run.at]
            own |= dict(zip(own, given, strict=False))
        return own


def _record(number: int, run: Run) -> Rollout:
    source = None
    if run.source is not None:
        source = ForkSource(rollout_id=f"r{run.source}", attempt_id="a", at=run.at)
    return Rollout(rollout_id=f"r{number}", input="task", start_time=0.0, source=source)


def groups_of(game: Game, size: int) -> list[Outcome]:
    """All groups of so many rollouts, each once whatever their order."""
    alone = [Outcome(path.chance, (Run(path),)) for path in game.paths]
    return _groups(alone, size)


def forked_groups(game: Game, size: int, plan: Plan) -> list[Outcome]:
    """All groups of so many rollouts and one fork at each call that the plan chooses."""
    families: list[Outcome] = []
    for path in game.paths:
        forks = [game.continuations(path, at) for at in plan(path)]
        for chosen in itertools.product(*forks):
            runs = [
                Run(path),
                *(Run(fork, 0, at) for fork, at in zip(chosen, plan(path), strict=False)),
            ]
            chance = math.prod(run.path.chances[run.own].prod() for run in runs)
            families.append(Outcome(float(chance), tuple(runs)))
    return _groups(families, size)


def _groups(families: Sequence[Outcome], size: int) -> list[Outcome]:
    found: list[Outcome] = []
    for chosen in itertools.combinations_with_replacement(range(len(families)), size):
        orders = math.factorial(size)
        for count in Counter(chosen).values():
            orders //= math.factorial(count)
        chance = orders * math.prod(families[number].chance for number in chosen)
        runs: list[Run] = []
        for number in chosen:
            first = len(runs)
            runs += [
                run if run.source is None else run._replace(source=run.source + first)
                for run in families[number].runs
            ]
        found.append(Outcome(chance, tuple(runs)))
    return found


class Estimate(NamedTuple):
    """What is estimated, float64[P]; the variance of one group, summed over the parameters; and
    how many tokens a group samples on average."""

    mean: FloatArray
    variance: float
    tokens: float


class Enumeration:
    """All groups of a game, and what a credit and an aggregation make of them."""

    def __init__(self, outcomes: Sequence[Outcome], *, independent: bool = False) -> None:
        self.groups = [outcome.group(independent=independent) for outcome in outcomes]
        self.chances = np.array([outcome.chance for outcome in outcomes])
        runs = [(n, run) for n, outcome in enumerate(outcomes) for run in outcome.runs]
        self._gradients = np.concatenate([run.path.gradients[run.own] for _, run in runs])
        self._groups = np.concatenate(
            [np.full(len(run.path.calls[run.own]), number) for number, run in runs]
        )
        sampled = [
            sum(len(call.response_ids) for call in run.path.calls[run.own]) for _, run in runs
        ]
        self.tokens = float(self.chances @ np.bincount([n for n, _ in runs], sampled))

    def advantages(self, credit: Credit) -> FloatArray:
        """The advantage of each call. A baseline that looks at a whole step sees one group."""
        if credit.needs_batch:
            parts = [credit.advantages([group])[0] for group in self.groups]
        else:
            parts = credit.advantages(self.groups)
        return np.array(
            [item.advantages[0] for group in parts for rollout in group for item in rollout]
        )

    def weights(self, aggregation: str, among: Sequence[TrainingSequence] = ()) -> FloatArray:
        """The weight of each call's first token, in a step of its group alone, or of its group
        and these sequences."""
        found: list[float] = []
        for sequences in self.sequences:
            weights = weights_of(Tokens([*sequences, *among]), aggregation, 1)
            starts = np.cumsum([0, *(len(sequence.positions) for sequence in sequences[:-1])])
            found += weights[starts].tolist()
        return np.array(found)

    @cached_property
    def sequences(self) -> list[list[TrainingSequence]]:
        return [sequences_of(group, "") for group in self.groups]

    def others(self, seed: int) -> list[TrainingSequence]:
        """The sequences of the other groups of a step, drawn by chance."""
        rng = np.random.default_rng(seed)
        drawn: list[int] = rng.choice(len(self.groups), 100, p=self.chances).tolist()
        differ = [n for n in drawn if len(set(self.groups[n].rewards)) > 1][: STEP - 1]
        return [
            sequence
            for number, index in enumerate(differ)
            for sequence in sequences_of(self.groups[index], f"{number} ")
        ]

    def each(self, advantages: FloatArray, weights: FloatArray) -> FloatArray:
        """The estimate of each group, float64[N, P]."""
        each = np.zeros((len(self.groups), self._gradients.shape[1]))
        np.add.at(each, self._groups, (advantages * weights)[:, None] * self._gradients)
        return each

    def estimate(self, advantages: FloatArray, weights: FloatArray) -> Estimate:
        each = self.each(advantages, weights)
        mean = self.chances @ each
        variance = self.chances @ ((each - mean) ** 2).sum(1)
        return Estimate(mean, float(variance), self.tokens)


def sequences_of(group: RewardedGroup, name: str) -> list[TrainingSequence]:
    """The sequences of a group in a step, its rollouts called by their numbers behind `name`."""
    return [
        replace(sequence, rollout_id=f"{name}{number}")
        for number, calls in enumerate(group.transitions)
        for sequence in build_sequences(
            [
                CreditedTransition(call, np.ones(len(call.response_ids), np.float32))
                for call in calls
            ],
            "transition",
            group.origin(number, 0),
        )
    ]


def cosine(first: FloatArray, second: FloatArray) -> float:
    lengths = float(np.linalg.norm(first) * np.linalg.norm(second))
    return float(first @ second) / lengths if lengths > 1e-12 else 0.0


def scale(estimate: FloatArray, gradient: FloatArray) -> float:
    """How long the estimate is along the gradient, in lengths of the gradient."""
    return float(estimate @ gradient / (gradient @ gradient))


def noise(estimate: Estimate, gradient: FloatArray) -> float:
    """The variance with as many tokens as one group has, in squared lengths of what is estimated
    along the gradient; infinite if that is not positive. It is times tokens, so that it compares
    groups of any size."""
    along = scale(estimate.mean, gradient)
    if along <= 1e-9:
        return math.inf
    return estimate.variance * estimate.tokens / (along**2 * float(gradient @ gradient))


def error(estimate: FloatArray, gradient: FloatArray) -> float:
    """The least distance of the estimate, times any positive number, from the gradient, in lengths
    of the gradient: 0 if it points the same way, 1 if it points against it."""
    return math.sqrt(max(0.0, 1 - max(0.0, cosine(estimate, gradient)) ** 2))


def of_turn(returns: Returns, *, std: bool = False, others: bool = False) -> FloatArray:
    """x_t − the mean of the group's rollouts that still make a call t, 0 if no other does; divided
    by their standard deviation with `std`. With `others` the mean is that of the others, and 0 if
    there are none. It is no function of the package: some frameworks have it."""
    turns = np.array([call.call_index for call in returns.calls])
    keys = returns.groups[returns.rollouts] * HORIZON + turns
    if not others:
        return standard(returns.values, keys, 1e-6, std)
    counts = np.bincount(keys)[keys]
    sums = np.bincount(keys, returns.values)[keys]
    return returns.values - (sums - returns.values) / (counts - 1).clip(min=1)


@dataclass(frozen=True)
class Combination:
    """A return and a baseline, with their options."""

    returns: str
    baseline: str
    returns_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    equal_rewards: bool = False

    def __str__(self) -> str:
        options = [f"{key} {value}" for key, value in self.returns_options.items()]
        options += [f"{key} {value}" for key, value in self.options.items()]
        options += ["equal_rewards"] * self.equal_rewards
        return " ".join([self.returns, self.baseline, *options])

    def credit(self) -> Credit:
        baseline: Any = of_turn if self.baseline == OF_TURN else self.baseline
        return make_credit(
            self.returns,
            self.returns_options,
            baseline,
            self.options,
            equal_rewards=self.equal_rewards,
        )


RLOO: Final = Combination("identical", "rloo")
FORK: Final = Combination("fork", "none")
TREE: Final = Combination("tree", "none")
