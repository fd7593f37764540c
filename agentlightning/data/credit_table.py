"""Says which return, baseline and loss go together, and how a batch's rewards become its
advantages.

| | a group's baseline or none | reinforce++, gae: an episode per call | across calls |
|---|---|---|---|
| `identical`, `air`, `discounted` | yes | yes | no: every call contains R |
| `air_dense` | each call for its own reward alone | the same | yes: it contains each reward once |
| `tree`, `fork` | `none` only: they are baselines themselves | no | no |

`gdpo` needs `identical`: it compares the terms of R, not returns. A group that holds a fork and its
source needs `tree`, `fork`, or a function of yours that takes the group.

`gae` is for algorithms with a critic. Every row goes with every loss; `policy_gradient` only with
one optimiser step per batch. What a function of yours takes is in its parameters; what it computes
is not known, so that only what cannot work is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NoReturn, TypeAlias

import numpy as np

from agentlightning.data import credit as formulas
from agentlightning.data.credit import Float64Array, Returns, RewardedGroup
from agentlightning.data.functions import (
    call,
    find_function,
    function_name,
    is_ours,
    takes,
    unwrapped,
)
from agentlightning.data.rewards import PLAIN, RewardSpec
from agentlightning.data.sequences import CreditedTransition
from agentlightning.data.transitions import FloatArray
from agentlightning.errors import ConfigError

CreditFunction: TypeAlias = Callable[..., Any]

RETURNS: Final[dict[str, CreditFunction]] = {
    "identical": formulas.identical,
    "air": formulas.air,
    "air_dense": formulas.air_dense,
    "discounted": formulas.discounted,
    "tree": formulas.tree,
    "fork": formulas.fork,
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


# Of the functions here: each call's return has R in it; the rewards of single calls are in it;
# rollouts of equal R have equal returns.
_REPEAT_REWARD: Final = (formulas.identical, formulas.air, formulas.discounted)
_INTERMEDIATE: Final = (formulas.air, formulas.air_dense, formulas.discounted)
_FOLLOW_REWARD: Final = (formulas.identical, formulas.tree, formulas.fork)
# A rollout is compared with no other of its group; all groups of a step are needed at once.
_ALONE: Final = (formulas.no_baseline, formulas.reinforce_plus_plus, formulas.gae)
_WHITEN: Final = (
    formulas.gdpo,
    formulas.reinforce_plus_plus,
    formulas.reinforce_plus_plus_baseline,
    formulas.gae,
)


@dataclass(frozen=True)
class Credit:
    """A return and a baseline that go together. Without `equal_rewards`, a group whose R are all
    equal is not trained on, even if its calls differ."""

    returns: CreditFunction
    baseline: CreditFunction
    equal_rewards: bool = False
    reward: RewardSpec = PLAIN

    @property
    def compares_group(self) -> bool:
        """Whether a rollout is known to need others of its task to compare with."""
        known = is_ours(self.baseline) and unwrapped(self.baseline) not in _ALONE
        return known or takes(self.returns, "group")

    @property
    def knows_forks(self) -> bool:
        """Whether a group may hold a fork beside its source."""
        return takes(self.returns, "group")

    @property
    def needs_batch(self) -> bool:
        """Whether all groups of a step are needed at once, as for whitening."""
        return unwrapped(self.baseline) in _WHITEN

    def refuse_forks(self) -> NoReturn:
        """Raises the ConfigError of a credit that does not know forks."""
        raise ConfigError(
            "a fork and its source have the same answers up to a call, and returns "
            f"{_name(self.returns)!r} takes them for independent tries; give returns='fork' or "
            "'tree', and baseline='none'"
        )

    def advantages(
        self, groups: Sequence[RewardedGroup], values: Sequence[FloatArray] | None = None
    ) -> list[list[list[CreditedTransition]]]:
        """For each group and each of its rollouts, its transitions with an advantage per sampled
        token.

        `values` are a critic's, float32[T] per transition, in order; default: 0. ConfigError if a
        user's function returns a wrong shape or values that are not finite."""
        for group in groups:
            if not self.knows_forks and (group.lineage.shares < 1).any():
                self.refuse_forks()
        rollouts = [calls for group in groups for calls in group.transitions]
        transitions = [transition for calls in rollouts for transition in calls]
        if not transitions:
            return [[[] for _ in group.transitions] for group in groups]
        tokens = np.array([len(transition.response_ids) for transition in transitions], np.int64)
        found = [values for group in groups for values in self._returned(group)]
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
        )
        terms = _terms(groups)
        estimates = (
            np.zeros(tokens.sum()) if values is None else np.concatenate(values, dtype=np.float64)
        )
        answer = call(
            f"baseline {_name(self.baseline)}",
            self.baseline,
            returns=returns,
            values=estimates,
            terms=terms,
            weights={name: self.reward.weight_of(name) for name in terms},
        )
        if takes(self.baseline, "values"):
            advantages, targets = answer
            of_tokens = [advantages, estimates, targets]
        else:
            advantages = np.asarray(answer, np.float64)
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

    def _returned(self, group: RewardedGroup) -> list[Any]:
        """The returns of each rollout of a group."""
        named = f"returns {_name(self.returns)}"
        if not takes(self.returns, "group"):
            return [
                call(named, self.returns, reward=reward, transitions=calls) if calls else ()
                for reward, calls in zip(group.rewards, group.transitions, strict=True)
            ]
        found = list(call(named, self.returns, group=group))
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
    if takes(second, "values") and not critic:
        raise ConfigError(
            f"baseline {_name(second)!r} needs the values of a critic: take algorithm ppo "
            "(agl.PPO), which trains one, or call credit.gae in a baseline of your own that "
            "knows them"
        )
    if takes(first, "group") and second is not formulas.no_baseline:
        raise ConfigError(
            f"returns {_name(first)!r} compares with other rollouts already, and a second "
            "baseline would repeat it; give baseline='none'"
        )
    if takes(second, "terms") and first is not formulas.identical:
        raise ConfigError(
            f"baseline {_name(second)!r} compares the terms of R and would ignore returns "
            f"{_name(first)!r}; give returns='identical'"
        )
    if baseline_options.get("across_calls") and first in _REPEAT_REWARD:
        raise ConfigError(
            f"across_calls adds up the rewards of a rollout's calls, and returns {_name(first)!r} "
            "puts R in each: R would count once per call; give returns='air_dense'"
        )
    if reward.base == "sum" and first in _INTERMEDIATE:
        raise ConfigError(
            f"reward.base 'sum' puts intermediate rewards into R, and returns {_name(first)!r} "
            "adds them to it: they would count twice; give base='final' or returns='identical'"
        )
    if equal_rewards and (first in _FOLLOW_REWARD or second in _ALONE):
        raise ConfigError(
            "equal_rewards trains on groups whose rewards are equal but whose calls differ, and "
            f"with returns {_name(first)!r} and baseline {_name(second)!r} they do not: leave it "
            "out"
        )
    first = partial(first, **returns_options)
    return Credit(first, partial(second, **baseline_options), equal_rewards, reward)


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
