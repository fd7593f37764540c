"""Says which return, baseline and loss go together, and how a batch's rewards become its
advantages.

| | a group's baseline or none | reinforce++, gae: an episode per call | across calls |
|---|---|---|---|
| `identical`, `air`, `discounted` | yes | yes | no: every call contains R |
| `air_dense` | yes | yes | yes: it contains each reward once |
| `tree` | `none` only: it is a baseline itself | no | no |

`gdpo` needs `identical`: it compares the terms of R, not returns.

`gae` is for algorithms with a critic. Every row goes with every loss; `policy_gradient` only with
one optimiser step per batch. The table follows from what `@returns` and `@baseline` declare, also
for your own functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import numpy as np

from agentlightning.data import credit as formulas
from agentlightning.data.credit import Float64Array, Returns, property_of
from agentlightning.data.references import find_function, function_name, trial
from agentlightning.data.rewards import PLAIN, RewardSpec
from agentlightning.data.sequences import CreditedTransition, Origin
from agentlightning.data.tool_statuses import ToolStatus
from agentlightning.data.transitions import FloatArray, Transition
from agentlightning.errors import ConfigError
from agentlightning.types import Rollout

CreditFunction: TypeAlias = Callable[..., Any]

RETURNS: Final[dict[str, CreditFunction]] = {
    "identical": formulas.identical,
    "air": formulas.air,
    "air_dense": formulas.air_dense,
    "discounted": formulas.discounted,
    "tree": formulas.tree,
}
BASELINES: Final[dict[str, CreditFunction]] = {
    "none": formulas.no_baseline,
    "grpo": formulas.grpo,
    "dr_grpo": formulas.dr_grpo,
    "rloo": formulas.rloo,
    "gigpo": formulas.gigpo,
    "gdpo": formulas.gdpo,
    "reinforce++": formulas.reinforce_plus_plus,
    "reinforce++_baseline": formulas.reinforce_plus_plus_baseline,
    "gae": formulas.gae,
}


@dataclass(frozen=True)
class RewardedGroup:
    """The rollouts of one task that count. For each: its transitions, in call order; its reward;
    the `terms` that add up to the reward, by name; and its record, whose `input` is the task."""

    transitions: Sequence[Sequence[Transition]]
    rewards: Sequence[float]
    terms: Sequence[Mapping[str, float]] = ()
    rollouts: Sequence[Rollout] = ()

    @property
    def task(self) -> Any:
        """The agent's input; None in a group made up for a trial."""
        return self.rollouts[0].input if self.rollouts else None

    def of_model(self, model: str) -> RewardedGroup:
        """The same with one model's calls only."""
        own = [
            [call for call in transitions if call.model == model]
            for transitions in self.transitions
        ]
        return replace(self, transitions=own)

    def origin(self, index: int, group: int) -> Origin:
        """Where sequences of the rollout at `index` come from; `group` is this group's number in
        the batch."""
        made = Origin(
            group,
            self.rewards,
            reward=self.rewards[index],
            terms=self.terms[index] if self.terms else {},
        )
        record = self.rollouts[index] if self.rollouts else None
        return (
            made if record is None else replace(made, task=record.input, metadata=record.metadata)
        )

    @classmethod
    def trial(cls, *rewards: float) -> RewardedGroup:
        """Made-up rollouts of two calls each, to try functions on."""
        return cls(
            [
                [_trial_call(f"trial-{index}", call) for call in (0, 1)]
                for index in range(len(rewards))
            ],
            rewards,
        )


def _trial_call(rollout: str, index: int) -> Transition:
    ids = np.ones(2 - index, np.int32)
    tools = (ToolStatus("tool", 1, None),) if index == 0 else ()
    return Transition(
        rollout,
        "attempt",
        f"{rollout}-{index}",
        index,
        0,
        "policy",
        ids,
        ids,
        np.zeros(len(ids), np.float32),
        ids,
        "stop",
        agent="agent",
        tools=tools,
    )


@dataclass(frozen=True)
class Credit:
    """A return and a baseline that go together, with their options. Without `equal_rewards`, a
    group whose R are all equal is not trained on, even if its calls differ."""

    returns: CreditFunction
    baseline: CreditFunction
    returns_options: Mapping[str, Any]
    baseline_options: Mapping[str, Any]
    equal_rewards: bool = False
    reward: RewardSpec = PLAIN

    @property
    def compares_group(self) -> bool:
        """Whether a rollout needs others of its task to compare with."""
        return "group" in (
            property_of(self.returns, "compares"),
            property_of(self.baseline, "compares"),
        )

    @property
    def built_in(self) -> bool:
        return self.returns in RETURNS.values() and self.baseline in BASELINES.values()

    @property
    def needs_batch(self) -> bool:
        """Whether all groups of a step are needed at once, as for whitening."""
        return bool(property_of(self.baseline, "whitens"))

    def advantages(
        self, groups: Sequence[RewardedGroup], values: Sequence[FloatArray] | None = None
    ) -> list[list[list[CreditedTransition]]]:
        """For each group and each of its rollouts, its transitions with an advantage per sampled
        token.

        `values` are a critic's, float32[T] per transition, in order; default: 0. ConfigError if a
        user's function returns a wrong shape or values that are not finite."""
        rollouts = [calls for group in groups for calls in group.transitions]
        transitions = [transition for calls in rollouts for transition in calls]
        if not transitions:
            return [[[] for _ in group.transitions] for group in groups]
        tokens = np.array([len(transition.response_ids) for transition in transitions], np.int64)
        if property_of(self.returns, "compares") == "group":
            found = [values for group in groups for values in self._compared(group)]
        else:
            each = [
                pair
                for group in groups
                for pair in zip(group.rewards, group.transitions, strict=True)
            ]
            found = [
                self.returns(r, calls, **self.returns_options) if calls else () for r, calls in each
            ]
        of_rollouts = [np.asarray(values, np.float64) for values in found]
        for values_T, calls in zip(of_rollouts, rollouts, strict=True):
            _check(self.returns, values_T, len(calls), f"{len(calls)} transitions")
        returns = Returns(
            values=np.concatenate(of_rollouts),
            rollouts=np.repeat(np.arange(len(rollouts)), [len(calls) for calls in rollouts]),
            tokens=tokens,
            groups=np.repeat(np.arange(len(groups)), [len(group.rewards) for group in groups]),
            rewards=np.array([reward for group in groups for reward in group.rewards], np.float64),
            equal_rewards=self.equal_rewards,
            calls=transitions,
            terms=(terms := _terms(groups)),
            weights={name: self.reward.weight_of(name) for name in terms},
        )
        if property_of(self.baseline, "values"):
            estimates = (
                np.zeros(tokens.sum())
                if values is None
                else np.concatenate(values, dtype=np.float64)
            )
            advantages, targets = self.baseline(returns, estimates, **self.baseline_options)
            of_tokens = [advantages, estimates, targets]
        else:
            advantages = np.asarray(self.baseline(returns, **self.baseline_options), np.float64)
            of_tokens = [
                np.repeat(advantages, tokens) if advantages.shape == tokens.shape else advantages
            ]
        for array in of_tokens:
            _check(
                self.baseline,
                array,
                tokens.sum(),
                f"{len(tokens)} transitions or each of their tokens",
            )
        split = [np.split(array.astype(np.float32), np.cumsum(tokens)[:-1]) for array in of_tokens]
        credited = map(CreditedTransition, transitions, *split)
        return [
            [[next(credited) for _ in calls] for calls in group.transitions] for group in groups
        ]

    def _compared(self, group: RewardedGroup) -> list[Any]:
        """The returns of a function that compares a group, for each of its rollouts."""
        found = list(self.returns(group.rewards, group.transitions, **self.returns_options))
        if len(found) != len(group.transitions):
            raise ConfigError(
                f"{_name(self.returns)} must return an array for each of {len(group.transitions)} "
                f"rollouts of a group, not {len(found)}"
            )
        return found


def make_credit(
    returns: str | CreditFunction,
    returns_options: Mapping[str, Any],
    baseline: str | CreditFunction,
    baseline_options: Mapping[str, Any],
    *,
    equal_rewards: bool = False,
    reward: RewardSpec = PLAIN,
    critic: bool = False,
) -> Credit:
    """The credit described by these names, references (`file.py:function`) or functions, for this
    reward and with or without a critic. ConfigError, with the reason, if one is unknown, lacks an
    option, or does not go with the others."""
    first = find_function("returns", returns, RETURNS, returns_options)
    second = find_function("baseline", baseline, BASELINES, baseline_options)
    credit = Credit(
        first, second, dict(returns_options), dict(baseline_options), equal_rewards, reward
    )
    if property_of(second, "values") and not critic:
        raise ConfigError(
            f"baseline {_name(second)!r} needs the values of a critic: take algorithm ppo "
            "(agl.PPO), which trains one, or call credit.gae in a baseline of your own that "
            "knows them"
        )
    if property_of(first, "compares") == "group" and second is not formulas.no_baseline:
        raise ConfigError(
            f"returns {_name(first)!r} compares with other rollouts already, and a second "
            "baseline would repeat it; give baseline='none'"
        )
    if property_of(second, "terms") and first is not formulas.identical:
        raise ConfigError(
            f"baseline {_name(second)!r} compares the terms of R and would ignore returns "
            f"{_name(first)!r}; give returns='identical'"
        )
    if baseline_options.get("across_calls") and property_of(first, "repeats_reward"):
        raise ConfigError(
            f"across_calls adds up the rewards of a rollout's calls, and returns {_name(first)!r} "
            "puts R in each: R would count once per call; give returns='air_dense'"
        )
    if reward.base == "sum" and property_of(first, "intermediate"):
        raise ConfigError(
            f"reward.base 'sum' puts intermediate rewards into R, and returns {_name(first)!r} "
            "adds them to it: they would count twice; give base='final' or returns='identical'"
        )
    if equal_rewards and (
        property_of(first, "follows_reward") or property_of(second, "compares") == "nothing"
    ):
        raise ConfigError(
            "equal_rewards trains on groups whose rewards are equal but whose calls differ, and "
            f"with returns {_name(first)!r} and baseline {_name(second)!r} they do not: leave it "
            "out"
        )
    # A user's function may need fields that these made-up calls lack.
    excused = () if credit.built_in else (AssertionError, AttributeError, LookupError)
    options = f"returns_options {returns_options} or baseline_options {baseline_options}"
    with trial(f"credit with {options}", "a group of two rollouts", excused=excused):
        credit.advantages([RewardedGroup.trial(0.0, 1.0)])
    return credit


def _terms(groups: Sequence[RewardedGroup]) -> dict[str, Float64Array]:
    """The terms of R of each rollout, float64[R] by name; 0 if missing."""
    terms = [
        term for of in groups for term in of.terms or [{"final": reward} for reward in of.rewards]
    ]
    names = {name: None for term in terms for name in term}
    return {name: np.array([term.get(name, 0.0) for term in terms], np.float64) for name in names}


def _check(function: CreditFunction, values: Float64Array, count: int, of: str) -> None:
    if values.shape != (count,) or not np.isfinite(values).all():
        raise ConfigError(
            f"{_name(function)} must return a finite number for each of {of}, not {values!r:.200}"
        )


def _name(function: CreditFunction) -> str:
    return function_name(function, {**RETURNS, **BASELINES})
