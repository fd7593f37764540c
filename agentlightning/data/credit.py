"""Credit: rewards → return per transition → baseline → advantage per sampled token; each arrow is
one pure function.

A return is a function `(reward, transitions, **options) → float64[T]` of R and the transitions of
ONE rollout; or `(group, **options) → list of float64[T]`, as `tree`, and then a baseline already. A
baseline is a function `(returns, **options) → advantages`, float64[N], one per transition, or
float64[M], one per sampled token of a batch. It may also take a critic's `values`, or, to compare
them instead of the returns, the `terms` of R, float64[R] by name, and the factor of each in
`weights`. Its statistics are over rollouts, which count equally whatever their length: the mean is
the mean of their mean returns; the variance is that of the means plus the mean of the variances
within rollouts. A group of one has nothing to compare and gets 0. You can pass your own function
with the same parameters.

Suffixes give shapes: T transitions of a rollout, in call order; R rollouts and N transitions of a
batch; M its sampled tokens, transition by transition; G rollouts of a group."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import chain
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from agentlightning.data.lineage import Answers, Lineage
from agentlightning.data.sequences import Origin
from agentlightning.data.statistics import Float64Array, IndexArray, mean_by, spread_of, standard
from agentlightning.data.transitions import Transition
from agentlightning.errors import ConfigError
from agentlightning.store.sources import CallName
from agentlightning.types import Rollout

ToolWeights: TypeAlias = float | Mapping[str, float]
WhitenOver: TypeAlias = Literal["rollouts", "tokens"]
Share: TypeAlias = Annotated[float, (0, 1)]
"""From 0 to 1."""


@dataclass(frozen=True)
class RewardedGroup:
    """The rollouts of one task that count. For each: its transitions, in call order; its reward;
    the `terms` that add up to the reward, by name; its record, whose `input` is the task; and its
    answers, which tell what forks share with their sources."""

    transitions: Sequence[Sequence[Transition]]
    rewards: Sequence[float]
    terms: Sequence[Mapping[str, float]] = ()
    rollouts: Sequence[Rollout] = ()
    answers: Sequence[Answers] = ()

    @cached_property
    def lineage(self) -> Lineage:
        return Lineage(self.rollouts, self.answers or [{} for _ in self.rewards])

    @property
    def mean(self) -> float:
        """The mean reward of a try: a rollout and its forks are one together."""
        return float(np.average(self.rewards, weights=self.lineage.shares))

    @property
    def task(self) -> Any:
        """The agent's input; None without records."""
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
        terms = self.terms[index] if self.terms else {}
        share = float(self.lineage.shares[index])
        made = Origin(group, self.rewards, reward=self.rewards[index], terms=terms, share=share)
        if self.rollouts:
            record = self.rollouts[index]
            return replace(made, task=record.input, metadata=record.metadata)
        return made


def identical(reward: float, transitions: Sequence[Transition]) -> Float64Array:
    """x_t = R: every call gets the whole reward (LightningRL, arXiv:2508.03680)."""
    return np.full(len(transitions), reward, np.float64)


def air(
    reward: float,
    transitions: Sequence[Transition],
    *,
    alpha: Share = 0.05,
    tool_weights: ToolWeights = 1.0,
) -> Float64Array:
    """x_t = α·r_t + (1 − α)·R: automatic intermediate rewarding (LightningRL), with r_t of
    `intermediate`. A call gets its own r_t and none of what it brings about in later ones, so with
    a large α the gradient is that of nothing."""
    return alpha * intermediate(transitions, tool_weights) + (1 - alpha) * reward


def air_dense(
    reward: float, transitions: Sequence[Transition], *, tool_weights: ToolWeights = 1.0
) -> Float64Array:
    """x_t = r_t of `intermediate`; the last transition gets R plus the rewards given to it (not its
    tools' status).

    These are the rewards of the calls, to be added up across calls (`reinforce_plus_plus`, `gae`).
    Under a baseline that adds up nothing, each call is trained for its own reward alone, whatever
    follows from it; that is the gradient of nothing, and may point against R + Σr. `discounted`
    with γ = 1 adds up.

    RunningAttempt: memory 0.3, search 0.2 and an answer worth 1.0 → [0.3, 0.2, 1.0]."""
    values = intermediate(transitions, tool_weights)
    values[-1] = reward + (transitions[-1].reward or 0.0)
    return values


def discounted(
    reward: float,
    transitions: Sequence[Transition],
    *,
    gamma: Share = 0.9,
    tool_weights: ToolWeights = 0.0,
) -> Float64Array:
    """x_t = Σ_k γ^k·r_{t+k} with r_t of `intermediate`, and R added to the last; by default tools'
    status counts nothing. With γ = 1 and an unbiased baseline its gradient is that of E[R + Σr]."""
    earned = intermediate(transitions, tool_weights)
    earned[-1] += reward
    return discount(earned, np.full(len(earned), gamma))


def tree(group: RewardedGroup) -> list[Float64Array]:
    """x_t = R_i − the mean R of the other rollouts that reached the same state; one float64[T] per
    rollout.

    A state is the prompt of a call. A rollout reached it if one of its prompts starts with it, and
    counts once. For each call, the deepest state on its path that another rollout reached is used,
    or else the whole group. The baseline does not depend on the call itself, so it is unbiased.
    Forks are compared by lineage (`fork`)."""
    prompts = [
        {transition.prompt_ids.tobytes() for transition in transitions}
        for transitions in group.transitions
    ]
    states = sorted(set[bytes]().union(*prompts), key=len, reverse=True)

    @cache
    def reached(state: bytes) -> list[int]:
        return [
            rollout
            for rollout, own in enumerate(prompts)
            if any(prompt.startswith(state) for prompt in own)
        ]

    shared = [state for state in states if len(reached(state)) > 1]

    def on_path(call: Transition, _: CallName | None) -> Iterable[list[int]]:
        return map(reached, filter(call.prompt_ids.tobytes().startswith, shared))

    return _by_lineage(group, on_path)


def fork(group: RewardedGroup) -> list[Float64Array]:
    """x_t = s·(V − b) for rollouts and their forks; one float64[T] per rollout.

    V is the mean R of the rollouts that contain the answer; b that of those that do not and passed
    its state, or else of all that do not. A rollout counts by its share (`Lineage.shares`) in both.
    s is the sum of the shares of those that contain the answer, so that many answers in one state
    weigh as much as one. An answer that all contain gets 0. Otherwise unbiased if which calls are
    forked depends on the state alone, not on what was sampled or earned from there on."""
    states = group.lineage.states
    passed = [{states[name] for name in own.values()} for own in group.lineage.answers]

    def at_state(_: Transition, answer: CallName | None) -> Iterable[list[int]]:
        state = answer and states[answer]
        return [[rollout for rollout, own in enumerate(passed) if state in own]]

    return _by_lineage(group, at_state)


def _by_lineage(
    group: RewardedGroup, reached: Callable[[Transition, CallName | None], Iterable[list[int]]]
) -> list[Float64Array]:
    """s·(V − b) of each call, where b is that of the first rollouts that `reached` gives which are
    not all with the call's answer, or else of the group; 0 if all are."""
    shares = group.lineage.shares
    answers = group.lineage.answers
    held = [set(own.values()) for own in answers]
    rewards = np.asarray(group.rewards, np.float64)

    def advantage(rollout: int, call: Transition) -> float:
        answer = answers[rollout].get((call.rollout_id, call.attempt_id, call.call_index))
        holders = [other for other, own in enumerate(held) if answer in own] or [rollout]
        for members in chain(reached(call, answer), [range(len(rewards))]):
            others = [other for other in members if other not in holders]
            if others:
                differences = rewards - rewards[rollout]
                value = np.average(differences[holders], weights=shares[holders])
                baseline = np.average(differences[others], weights=shares[others])
                return float(shares[holders].sum() * (value - baseline))
        return 0.0

    return [
        np.array([advantage(rollout, call) for call in calls], np.float64)
        for rollout, calls in enumerate(group.transitions)
    ]


def intermediate(
    transitions: Sequence[Transition], tool_weights: ToolWeights = 1.0
) -> Float64Array:
    """r_t of each transition, float64[T]: its own rewards if given, else the mean of w_tool ·
    status (+1 returned, −1 failed) over its tool calls, else 0.

    `tool_weights` is one w for all tools, or a mapping from name to w, where other tools weigh 0.
    It is a mean, so calling more tools at once earns no more."""
    return np.array([_earned(transition, tool_weights) for transition in transitions], np.float64)


def _earned(transition: Transition, tool_weights: ToolWeights) -> float:
    if transition.reward is not None:
        return transition.reward
    statuses = [
        tool.status
        * (tool_weights.get(tool.tool, 0.0) if isinstance(tool_weights, Mapping) else tool_weights)
        for tool in transition.tools
    ]
    return sum(statuses) / len(statuses) if statuses else 0.0


def discount(rewards_T: npt.ArrayLike, gammas_T: npt.ArrayLike) -> Float64Array:
    """G_t = r_t + γ_t·G_{t+1}; γ_t discounts from t to the next."""
    values = np.array(rewards_T, np.float64)
    gammas = np.asarray(gammas_T, np.float64)
    for index in range(len(values) - 2, -1, -1):
        values[index] += gammas[index] * values[index + 1]
    return values


@dataclass(frozen=True)
class Returns:
    """The returns of a batch.

    Fields:
        values: float64[N], of each transition, rollout by rollout.
        rollouts: int64[N], the rollout of each transition.
        tokens: int64[N], how many tokens each transition sampled.
        groups: int64[R], the group of each rollout.
        rewards: float64[R], R of each rollout.
        equal_rewards: if False, groups whose R are all equal are not compared.
        calls: the transitions."""

    values: Float64Array
    rollouts: IndexArray
    tokens: IndexArray
    groups: IndexArray
    rewards: Float64Array
    equal_rewards: bool = True
    calls: Sequence[Transition] = ()

    @cached_property
    def states(self) -> IndexArray:
        """A number for the state of each transition, int64[N]. Calls of one group share it if the
        agent named equal states or, if it named none, if their prompts are equal."""
        numbers: dict[tuple[int, str | bytes], int] = {}
        groups = self.groups[self.rollouts].tolist()
        states = (
            call.prompt_ids.tobytes() if call.state is None else call.state for call in self.calls
        )
        return np.array(
            [numbers.setdefault(key, len(numbers)) for key in zip(groups, states, strict=True)],
            np.int64,
        )

    @cached_property
    def means(self) -> Float64Array:
        """The mean return of each rollout, float64[R]; R for a rollout without transitions."""
        first = self.rewards.copy()
        # averaging differences gives equal returns exactly their mean
        first[self.rollouts[::-1]] = self.values[::-1]
        return first + mean_by(self.rollouts, self.values - first[self.rollouts], len(first))

    @cached_property
    def within(self) -> Float64Array:
        """The variance of the returns within each rollout, float64[R]."""
        return mean_by(
            self.rollouts, (self.values - self.means[self.rollouts]) ** 2, len(self.means)
        )

    def per_group(self, statistic: Callable[..., npt.ArrayLike], *of: Float64Array) -> Float64Array:
        """`statistic` over each group's rollouts of the arrays `of` (default: mean returns),
        repeated for each rollout: float64[R]."""
        out = np.empty(len(self.groups))
        for group in np.unique(self.groups):
            out[self.groups == group] = statistic(
                *(array[self.groups == group] for array in of or (self.means,))
            )
        return out

    @cached_property
    def compared(self) -> npt.NDArray[np.bool_]:
        """Whether each transition's rollout has others in its group to compare with, bool[N]."""
        others = self.per_group(len) > 1
        if not self.equal_rewards:
            others &= self.per_group(spread_of, self.rewards) > 0
        return others[self.rollouts]

    @cached_property
    def token_rollouts(self) -> IndexArray:
        """The rollout of each sampled token, int64[M]."""
        return np.repeat(self.rollouts, self.tokens)


def no_baseline(returns: Returns) -> Float64Array:
    """A_t = x_t, as in REINFORCE (Williams 1992)."""
    return returns.values


def dr_grpo(returns: Returns) -> Float64Array:
    """A_t = x_t − mean over the group (Dr. GRPO, arXiv:2503.20783)."""
    return np.where(
        returns.compared, returns.values - returns.per_group(_mean)[returns.rollouts], 0.0
    )


def grpo(returns: Returns, *, epsilon: float = 1e-6, ddof: int = 1) -> Float64Array:
    """A_t = (x_t − mean) / (std + ε) over the group (GRPO, arXiv:2402.03300), with std² = Σ (mean
    of a rollout − mean)² / (G − `ddof`) + the mean of the variances within rollouts; the second
    term is 0 if each rollout has one return.

    0 if all are equal."""
    mean = returns.per_group(_mean)[returns.rollouts]
    spread = returns.per_group(partial(spread_of, ddof=ddof), returns.means, returns.within)[
        returns.rollouts
    ]
    return np.where(
        returns.compared & (spread > 0), (returns.values - mean) / (spread + epsilon), 0.0
    )


def rloo(returns: Returns) -> Float64Array:
    """A_t = x_t − mean over the other rollouts of the group (RLOO, arXiv:2402.14740)."""
    others = returns.per_group(_mean_of_others)[returns.rollouts]
    return np.where(returns.compared, returns.values - others, 0.0)


def gigpo(
    returns: Returns, *, weight: float = 1.0, std: bool = True, epsilon: float = 1e-6
) -> Float64Array:
    """A_t = A of the rollout + `weight` · A of the step (GiGPO, arXiv:2505.10978). The first is (R
    − mean) / (std + ε) over the group; the second (x_t − mean) / (std + ε) over all calls of the
    group in the same state (`Returns.states`), 0 for the only call in its state. Without `std`
    neither is divided."""
    of_rollout = standard(returns.rewards, returns.groups, epsilon, std)[returns.rollouts]
    of_step = standard(returns.values, returns.states, epsilon, std)
    return np.where(returns.compared, of_rollout + weight * of_step, 0.0)


def gdpo(
    returns: Returns,
    terms: Mapping[str, Float64Array],
    weights: Mapping[str, float],
    *,
    epsilon: float = 1e-6,
) -> Float64Array:
    """Each term k of R is normalised separately (GDPO, arXiv:2601.05242): S = Σ_k w_k · (r_k −
    mean) / (std + ε) over the group, and A = (S − mean) / (std + ε) over the rollouts of the batch.
    r_k is the term before its weight w_k. A term that is equal throughout the group adds 0, and so
    does a missing one."""
    sums = np.zeros(len(returns.groups))
    for name, weighted in terms.items():
        if weight := weights.get(name, 1.0):
            sums += weight * standard(weighted / weight, returns.groups, epsilon)
    differs = returns.per_group(np.any, sums) > 0
    return np.where(differs, standard(sums, np.zeros_like(returns.groups), epsilon), 0.0)[
        returns.rollouts
    ]


def reinforce_plus_plus(
    returns: Returns,
    *,
    gamma: Share = 1.0,
    across_calls: bool = False,
    whiten_over: WhitenOver = "rollouts",
) -> Float64Array:
    """Discounted per token from the end of the episode, then whitened over the batch (REINFORCE++,
    arXiv:2501.03262), float64[M].

    Each transition is an episode that ends in its return; with `across_calls` the whole rollout is
    one, with rewards at the ends of transitions. Tokens observed between calls are not steps."""
    ends = returns.values
    if across_calls:
        gammas = np.append(gamma ** returns.tokens[1:].astype(np.float64), 0.0)
        gammas[:-1][np.diff(returns.rollouts) != 0] = 0.0
        ends = discount(ends, gammas)
    last = np.repeat(np.cumsum(returns.tokens) - 1, returns.tokens)
    remaining = (last - np.arange(len(last))).astype(np.float64)
    return whiten(
        np.repeat(ends, returns.tokens) * gamma**remaining,
        returns.token_rollouts,
        whiten_over,
    )


def reinforce_plus_plus_baseline(
    returns: Returns, *, whiten_over: WhitenOver = "rollouts"
) -> Float64Array:
    """A_t = x_t − mean over the group, whitened over the batch (REINFORCE++-baseline,
    arXiv:2501.03262), float64[M]."""
    whitened = whiten(
        np.repeat(dr_grpo(returns), returns.tokens), returns.token_rollouts, whiten_over
    )
    return np.where(np.repeat(returns.compared, returns.tokens), whitened, 0.0)


def gae(
    returns: Returns,
    values: npt.ArrayLike,
    *,
    gamma: Share = 1.0,
    lam: Share = 0.95,
    across_calls: bool = False,
    whiten_over: Literal["rollouts", "tokens", None] = None,
) -> tuple[Float64Array, Float64Array]:
    """(advantages, value targets), float64[M] each, from a critic's values of the sampled tokens:
    δ_k = r_k + γ·V_{k+1} − V_k, A_k = δ_k + γλ·A_{k+1} (GAE, arXiv:1506.02438). With `whiten_over`,
    advantages (not targets) are whitened over the batch, as in PPO.

    Episodes are those of `reinforce_plus_plus`."""
    values = np.asarray(values, np.float64)
    if values.shape != returns.token_rollouts.shape:
        raise ConfigError(
            f"values have shape {values.shape}; {returns.token_rollouts.shape} tokens were sampled"
        )
    ends = np.cumsum(returns.tokens) - 1
    rewards = np.zeros(len(values))
    rewards[ends] = returns.values
    continues = np.ones(len(values))  # whether the next token is of the same episode
    continues[ends] = np.append(np.diff(returns.rollouts) == 0, False) if across_calls else 0.0
    deltas = rewards + gamma * continues * np.append(values[1:], 0.0) - values
    advantages = discount(deltas, gamma * lam * continues)
    targets = advantages + values
    return advantages if whiten_over is None else whiten(
        advantages, returns.token_rollouts, whiten_over
    ), targets


def whiten(
    values_M: npt.ArrayLike, rollouts_M: IndexArray, over: WhitenOver = "rollouts"
) -> Float64Array:
    """(v − mean) / sqrt(variance + 1e-8). Over `rollouts`, each rollout counts equally, and the
    variance is that of their means (with Bessel's correction) plus the mean variance within. Over
    `tokens`, as in verl, all tokens count equally (with Bessel's correction). 0 if all are
    equal."""
    values = np.asarray(values_M, np.float64)
    samples = values
    within = np.zeros(1)
    if over == "rollouts":
        _, own = np.unique(rollouts_M, return_inverse=True)
        samples = mean_by(own, values)
        within = mean_by(own, (values - samples[own]) ** 2)
    spread = spread_of(samples, within)
    return (
        (values - _mean(samples)) / np.sqrt(spread**2 + 1e-8)
        if spread > 0
        else np.zeros_like(values)
    )


def _mean(values: Float64Array) -> float:
    """The mean; exact if all values are equal (a plain sum is off by 1e-17)."""
    return float(values[0] + (values - values[0]).mean())


def _mean_of_others(values: Float64Array) -> Float64Array:
    differences = values - values[0]
    return values[0] + (differences.sum() - differences) / max(1, len(values) - 1)
