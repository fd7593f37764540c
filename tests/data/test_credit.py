"""Returns, baselines and their way together: worked examples, other frameworks' numbers, and what
is refused."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.data import credit
from agentlightning.data.credit import Returns, RewardedGroup
from agentlightning.data.credit_table import BASELINES, RETURNS, make_credit
from agentlightning.data.tool_statuses import ToolStatus
from agentlightning.data.transitions import Transition
from agentlightning.errors import ConfigError
from tests import transitions
from tests.golden import INPUTS, MASK, OUTPUTS

FloatArray = npt.NDArray[np.float64]


def transition(
    reward: float | None = None,
    tools: Sequence[tuple[str, int]] = (),
    prompt: Sequence[int] = (1,),
    response: Sequence[int] = (2, 3),
) -> Transition:
    statuses = tuple(ToolStatus(tool, status, None) for tool, status in tools)  # type: ignore[arg-type]
    return transitions.transition(prompt, response, reward=reward, tools=statuses)


FLIGHT = [transition(tools=[("memory", 1)]), transition(tools=[("search", 1)]), transition()]
FLIGHT_WEIGHTS = {"memory": 0.3, "search": 0.2}


def of(values: Sequence[Sequence[float]], groups: Sequence[int] | None = None) -> Returns:
    """Rollouts with these returns, one token per transition; in one group unless told."""
    lengths = [len(one) for one in values]
    return Returns(
        values=np.array([value for one in values for value in one], np.float64),
        rollouts=np.repeat(np.arange(len(values)), lengths),
        tokens=np.ones(sum(lengths), np.int64),
        groups=np.zeros(len(values), np.int64) if groups is None else np.array(groups),
        rewards=np.zeros(len(values)),
    )


def test_the_flight() -> None:
    assert credit.air_dense(1.0, FLIGHT, tool_weights=FLIGHT_WEIGHTS).tolist() == [0.3, 0.2, 1.0]
    assert credit.air(1.0, FLIGHT, alpha=0.2, tool_weights=FLIGHT_WEIGHTS) == pytest.approx(
        [0.86, 0.84, 0.8]
    )
    assert credit.air(1.0, FLIGHT) == pytest.approx([1.0, 1.0, 0.95])
    added_up = credit.discounted(1.0, FLIGHT, gamma=1.0, tool_weights=FLIGHT_WEIGHTS)
    assert added_up == pytest.approx([1.5, 1.2, 1.0])
    assert credit.identical(1.0, FLIGHT).tolist() == [1.0, 1.0, 1.0]


def test_rewards_that_were_given_and_the_final_one_both_count() -> None:
    """A1 S1 A2, with 0.2 for S1 and 1.0 in the end."""
    calls = [transition(), transition(reward=0.2), transition()]
    assert credit.air_dense(1.0, calls).tolist() == [0.0, 0.2, 1.0]
    assert credit.air(1.0, calls, alpha=0.5) == pytest.approx([0.5, 0.6, 0.5])
    assert credit.discounted(1.0, calls, gamma=0.5) == pytest.approx([0.35, 0.7, 1.0])
    assert credit.discounted(
        1.0, [transition(), transition(reward=0.5)], gamma=0.0
    ) == pytest.approx([0.0, 1.5])


def test_what_was_given_goes_before_how_tools_went_and_tools_called_at_once_are_averaged() -> None:
    calls = [
        transition(reward=0.1, tools=[("a", -1)]),
        transition(tools=[("a", 1), ("a", -1), ("b", 1), ("b", 1)]),
        transition(tools=[("c", -1)]),
    ]
    assert credit.intermediate(calls).tolist() == [0.1, 0.5, -1.0]
    assert credit.intermediate(calls, {"a": 1.0, "b": 0.2}) == pytest.approx([0.1, 0.1, 0.0])


def test_a_tree_compares_with_who_reached_the_same_state() -> None:
    """Rollouts 0 and 1 took the same first step, 2 another; 3 is a sub-agent's conversation that
    nobody else had."""
    first, second, third = [1], [1, 7, 1], [1, 8, 1]
    group = [
        [transition(prompt=first), transition(prompt=second)],
        [transition(prompt=first), transition(prompt=second)],
        [transition(prompt=first), transition(prompt=third)],
        [transition(prompt=first), transition(prompt=[9])],
    ]
    values = credit.tree(RewardedGroup(group, [1.0, 0.0, 0.5, 0.5]))
    assert values[0] == pytest.approx([1.0 - 1 / 3, 1.0])
    assert values[1] == pytest.approx([-2 / 3, -1.0])
    assert values[2] == pytest.approx([0.0, 0.0])
    assert values[3] == pytest.approx([0.0, 0.0])


def golden(*, cut_at_gaps: bool = False) -> Returns:
    """The golden batch, one transition per row; or one per run of sampled tokens, with the row's
    reward in its last."""
    transitions: list[tuple[int, int, float]] = []  # rollout, tokens, reward
    for row, mask in enumerate(MASK):
        positions = np.flatnonzero(mask)
        runs = (
            np.split(positions, np.flatnonzero(np.diff(positions) > 1) + 1)
            if cut_at_gaps
            else [positions]
        )
        transitions += [(row, len(run), 0.0) for run in runs]
        transitions[-1] = (*transitions[-1][:2], INPUTS["rewards"][row])
    rollouts, tokens, values = map(np.array, zip(*transitions, strict=True))
    groups = np.unique(INPUTS["index"], return_inverse=True)[1]
    return Returns(values.astype(np.float64), rollouts, tokens, groups, np.array(INPUTS["rewards"]))


def same(actual: FloatArray, key: str) -> None:
    """`actual`, per transition or per token, is the golden output at the sampled tokens."""
    if actual.shape == (len(MASK),):
        actual = np.repeat(actual, MASK.sum(1))
    np.testing.assert_allclose(actual, np.array(OUTPUTS[key])[MASK], atol=1e-5, rtol=0)


def test_group_baselines_equal_verl_and_rllm() -> None:
    same(credit.grpo(golden()), "verl.grpo(std,ddof1,eps1e-6)")
    same(credit.dr_grpo(golden()), "verl.grpo(no_std)")
    same(credit.rloo(golden()), "verl.rloo")
    np.testing.assert_allclose(
        credit.grpo(golden(), ddof=0), OUTPUTS["rllm.grpo(ddof0,eps1e-6)"], atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("gamma", [1.0, 0.95])
def test_reinforce_plus_plus_equals_verl_and_skips_observations(gamma: float) -> None:
    """verl's episode is the row with its observations: here, the calls of a rollout."""
    returns = golden(cut_at_gaps=True)
    assert len(returns.values) > len(MASK)
    same(
        credit.reinforce_plus_plus(returns, gamma=gamma, across_calls=True, whiten_over="tokens"),
        f"verl091.reinforce_pp(gamma={gamma}).adv",
    )


def test_reinforce_plus_plus_baseline_equals_verl() -> None:
    same(
        credit.reinforce_plus_plus_baseline(golden(), whiten_over="tokens"),
        "verl.reinforce_pp_baseline",
    )


def test_gae_equals_verl_across_observations() -> None:
    returns = golden(cut_at_gaps=True)
    values = np.array(INPUTS["values"])[MASK]
    advantages, targets = credit.gae(returns, values, gamma=0.99, lam=0.95, across_calls=True)
    same(targets, "verl.gae(.99,.95).returns")
    same(
        credit.whiten(advantages, returns.token_rollouts, over="tokens"),
        "verl.gae(.99,.95).adv(whitened)",
    )


COMPARING = [credit.grpo, credit.dr_grpo, credit.rloo, credit.reinforce_plus_plus_baseline]


@pytest.mark.parametrize("baseline", COMPARING)
def test_a_group_of_one_and_equal_rollouts_have_no_advantage(
    baseline: Callable[[Returns], FloatArray],
) -> None:
    assert baseline(of([[0.7, 0.7], [0.1], [0.4]], groups=[0, 1, 1]))[:2].tolist() == [0.0, 0.0]
    assert baseline(of([[0.1] * 3] * 7)).tolist() == [0.0] * 21


def test_where_returns_differ_within_a_rollout_its_mean_counts() -> None:
    returns = of([[0.0, 1.0], [0.0]])  # means 0.5 and 0
    assert credit.dr_grpo(returns).tolist() == [-0.25, 0.75, -0.25]
    assert credit.rloo(returns).tolist() == [0.0, 1.0, -0.5]
    total = np.var([0.5, 0.0], ddof=1) + np.mean([0.25, 0.0])
    assert credit.grpo(returns) == pytest.approx(
        np.array([-0.25, 0.75, -0.25]) / (total**0.5 + 1e-6)
    )


ROLLOUTS = st.lists(
    st.lists(st.floats(-1, 1, width=16), min_size=1, max_size=6), min_size=2, max_size=6
)


THOROUGH = hypothesis.settings(
    max_examples=60, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)


@THOROUGH
@given(ROLLOUTS)
def test_what_is_divided_by_a_spread_has_at_most_that_spread_however_returns_differ_within_rollouts(
    values: list[list[float]],
) -> None:
    returns = of(values)
    for divided in (credit.grpo(returns), credit.whiten(returns.values, returns.rollouts)):
        of_rollouts = [
            np.mean(divided[returns.rollouts == index] ** 2) for index in range(len(values))
        ]
        assert np.mean(of_rollouts) <= 1 + 1e-6


def test_a_rollout_without_calls_counts_by_its_reward() -> None:
    silent = Returns(
        np.array([1.0]), np.array([1]), np.array([1]), np.zeros(2, np.int64), np.array([0.5, 1.0])
    )
    assert credit.dr_grpo(silent).tolist() == [0.25]


def test_each_call_is_an_episode_unless_the_rollout_is() -> None:
    returns = Returns(
        np.array([1.0, 2.0, 0.0]),
        np.array([0, 0, 1]),
        np.array([2, 1, 2]),
        np.arange(2),
        np.zeros(2),
    )
    alone = [0.5, 1.0, 2.0, 0.0, 0.0]
    joined = [0.5 * (1 + 0.5 * 2), 1 + 0.5 * 2, 2.0, 0.0, 0.0]
    for across, expected in ((False, alone), (True, joined)):
        whitened = credit.whiten(expected, returns.token_rollouts)
        assert credit.reinforce_plus_plus(returns, gamma=0.5, across_calls=across) == pytest.approx(
            whitened
        )
    advantages, targets = credit.gae(returns, np.zeros(5), gamma=0.5, lam=1.0)
    assert (advantages.tolist(), targets.tolist()) == (alone, alone)


def run(groups: Sequence[RewardedGroup], **settings: Any) -> list[list[float]]:
    """The advantage of each token, one list per transition."""
    usual: dict[str, Any] = {
        "returns": "identical",
        "returns_options": {},
        "baseline": "grpo",
        "baseline_options": {},
    }
    credited = make_credit(**(usual | settings)).advantages(groups)
    return [item.advantages.tolist() for group in credited for rollout in group for item in rollout]


TWO = RewardedGroup([FLIGHT, [transition(), transition(tools=[("memory", -1)])]], [1.0, 0.0])


@pytest.mark.parametrize("baseline", ["grpo", "dr_grpo", "rloo", "reinforce++_baseline"])
def test_equal_rewards_train_nothing_unless_asked(baseline: str) -> None:
    equal = RewardedGroup(TWO.transitions, [0.5, 0.5])
    for settings in (
        {"returns": "air"},
        {"returns": "air_dense"},
        {"returns": "discounted"},
        {"returns": halving},
    ):
        chosen = settings | {"baseline": baseline}
        assert run([equal, TWO], **chosen)[:5] == [[0.0, 0.0]] * 5
        assert run([equal, TWO], **chosen)[5:] != [[0.0, 0.0]] * 5
        assert run([equal], **chosen, equal_rewards=True) != [[0.0, 0.0]] * 5


def test_every_combination_that_is_not_refused_gives_each_token_an_advantage() -> None:
    worked = 0
    for returns in RETURNS:
        for baseline in BASELINES:
            for options in ({}, {"across_calls": True}) if baseline == "reinforce++" else ({},):
                try:
                    found = run(
                        [TWO, TWO], returns=returns, baseline=baseline, baseline_options=options
                    )
                except ConfigError:
                    continue
                worked += 1
                assert [len(one) for one in found] == [2] * 10
    assert worked == 4 * 7 + 4  # `across_calls`, `tree`, `fork`, and `gdpo` with `identical`


def test_what_does_not_go_together_is_refused_with_the_reason() -> None:
    for settings, reason in (
        ({"returns": "tree"}, "give baseline='none'"),
        ({"baseline": "gae"}, "take algorithm ppo"),
        (
            {"baseline": "reinforce++", "baseline_options": {"across_calls": True}},
            "give returns='air_dense'",
        ),
        ({"returns": "discounted", "returns_options": {"alpha": 0.1}}, "no option 'alpha'"),
        ({"returns": "air", "returns_options": {"alpha": 2.0}}, "between 0 and 1"),
        ({"returns": "air", "returns_options": {"alpha": "much"}}, "alpha is 'much'"),
        ({"baseline_options": {"ddof": 1.5}}, "ddof is 1.5; it must be a whole number"),
        (
            {"baseline": "reinforce++", "baseline_options": {"whiten_over": "calls"}},
            "whiten_over is 'calls'; known: rollouts, tokens",
        ),
        ({"returns_options": {"alpha": 0.1}}, "it has none"),
        ({"returns": "aire"}, "did you mean 'air'"),
        ({"baseline": 3}, "or a function"),
        ({"equal_rewards": True}, "leave it out"),
        ({"equal_rewards": True, "returns": "air", "baseline": "none"}, "leave it out"),
    ):
        with pytest.raises(ConfigError, match=reason):
            run([TWO], **settings)


def halving(reward: float, transitions: Sequence[Transition], *, by: float = 0.5) -> FloatArray:
    return reward * by ** np.arange(len(transitions))[::-1]


def against_the_best(returns: Returns) -> FloatArray:
    return returns.values - returns.per_group(np.max)[returns.rollouts]


def test_a_function_of_your_own_is_a_return_or_a_baseline() -> None:
    found = run([TWO], returns=halving, returns_options={"by": 0.1}, baseline="none")
    assert found == [pytest.approx([value] * 2) for value in (0.01, 0.1, 1.0, 0.0, 0.0)]
    assert run([TWO], baseline=against_the_best) == [[0.0] * 2] * 3 + [[-1.0] * 2] * 2
    assert (
        run([TWO], returns=functools.partial(halving, by=0.1), baseline=credit.no_baseline) == found
    )
    assert (
        run([TWO], returns=f"{__name__}:halving", returns_options={"by": 0.1}, baseline="none")
        == found
    )


def test_a_function_that_gives_something_else_is_named() -> None:
    with pytest.raises(
        ConfigError, match="<lambda> must return a finite number for each of 3 transitions"
    ):
        run([TWO], returns=lambda reward, transitions: [reward])
    with pytest.raises(ConfigError, match="5 transitions or each of their tokens, not"):
        run([TWO], baseline=lambda returns: returns.values * np.nan)
    with pytest.raises(ConfigError, match=r"baseline <lambda> failed: KeyError: 'x' \(.*credit.py"):
        run([TWO], baseline=lambda returns: {}["x"])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"returns": lambda reward, calls: [reward]}, "'calls', which nothing fills: .*transiti"),
        ({"returns": lambda rewards: rewards}, "'rewards', .*did you mean 'reward'"),
        ({"returns": lambda reward, /: [reward]}, "'reward', which nothing fills"),
        ({"returns": lambda reward, *, by: [reward]}, "'<lambda>' needs the option 'by'"),
        ({"baseline": lambda returns, best: returns}, "baseline '<lambda>' has the parameter 'be"),
        ({"baseline": lambda returns, values: values}, "needs the values of a critic"),
        ({"returns": lambda group: [], "baseline": "grpo"}, "give baseline='none'"),
        (
            {"returns": lambda reward: [], "baseline": lambda returns, terms: []},
            "would ignore returns",
        ),
    ],
)
def test_a_function_says_by_its_parameters_what_it_needs(
    settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        run([TWO], **settings)


def missing_one(group: RewardedGroup) -> list[list[float]]:
    """Of two rollouts that earned nothing; of two that earned 1 there is one too many."""
    pairs = zip(group.rewards, group.transitions, strict=True)
    made = [[reward] * len(calls) for reward, calls in pairs]
    return (made * 2)[: int(1 + sum(group.rewards))]


def test_a_return_that_compares_a_group_must_know_each_of_its_rollouts() -> None:
    assert run([TWO], returns=missing_one, baseline="none") == [[1.0] * 2] * 3 + [[0.0] * 2] * 2
    groups = [RewardedGroup([[transition()]] * 2, [reward] * 2) for reward in (0.0, 1.0)]
    with pytest.raises(
        ConfigError,
        match="missing_one must return an array for each of 2 rollouts of a group, not 1",
    ):
        run(groups, returns=missing_one, baseline="none")


PAGE = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")


def test_the_pages_functions_compute_what_they_say(tmp_path: Path) -> None:
    (body,) = re.findall(r"^```python\n(# credit\.py\n.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "page_credit.py").write_text(body)
    later, median = (
        f"{tmp_path}/page_credit.py:{name}" for name in ("later", "against_the_median")
    )
    middle = (0.25 + 0.5 + 1.0) / 3 / 2
    found = run([TWO], returns=later, baseline=median)
    assert found == [pytest.approx([value - middle] * 2) for value in (0.25, 0.5, 1.0, 0.0, 0.0)]


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "gigpo"])
@pytest.mark.parametrize("huge", [1e9, 1e12])
def test_a_huge_reward_changes_only_its_own_group(name: str, huge: float) -> None:
    usual = transitions.group_of(0.0, 0.5, 1.0)
    made = make_credit("identical", {}, name, {})

    def of_usual(*groups: RewardedGroup) -> list[float]:
        return [float(item.advantages[0]) for calls in made.advantages(groups)[0] for item in calls]

    alone = of_usual(usual)
    assert any(alone) and of_usual(usual, transitions.group_of(huge, 0.0)) == alone


@pytest.mark.parametrize("name", ["grpo", "gigpo", "gdpo"])
def test_equal_within_rounding_is_equal_in_float64(name: str) -> None:
    made = make_credit("identical", {}, name, {})

    def largest(*rewards: float) -> float:
        return max(
            abs(float(item.advantages[0]))
            for calls in made.advantages([transitions.group_of(*rewards)])[0]
            for item in calls
        )

    assert largest(0.1 + 0.2, 0.3, 0.3) == 0.0
    assert largest(1e9, 1e9 + 0.5, 1e9 + 1) > 0.1
