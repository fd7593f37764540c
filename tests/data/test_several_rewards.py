"""Several rewards of one rollout: named and weighed, normalised apart, compared by cost; calls
compared by state."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning import semconv
from agentlightning.data.credit import RewardedGroup
from agentlightning.data.credit_table import make_credit
from agentlightning.data.rewards import RewardSpec
from agentlightning.data.tool_statuses import ToolStatus
from agentlightning.data.transitions import TracedRollout, compare_costs
from agentlightning.errors import ConfigError
from agentlightning.types import Rollout
from tests.data.recordings import trace_stored
from tests.data.test_credit import THOROUGH
from tests.data.test_rewards import SUCCEEDED, agent, call, reward, span
from tests.transitions import transition

WEIGHTS = {"right": 1.0, "short": 0.5, "rude": -0.25}
GRADES = st.tuples(*[st.sampled_from([0.0, 0.25, 0.5, 1.0])] * 3)


def advantages(
    groups: list[RewardedGroup], baseline: str, spec: RewardSpec | None = None, **settings: Any
) -> Any:
    usual: dict[str, Any] = {"returns": "identical", "returns_options": {}, "baseline_options": {}}
    credit = make_credit(baseline=baseline, reward=spec or RewardSpec(), **(usual | settings))
    return [
        [[float(item.advantages[0]) for item in rollout] for rollout in group]
        for group in credit.advantages(groups)
    ]


def named(*dimensions: tuple[str, float]) -> Any:
    about: dict[str, Any] = {}
    for index, (name, value) in enumerate(dimensions):
        about |= {semconv.reward_name(index): name, semconv.reward_value(index): value}
    return span("named", 5, 5, **about)


def test_named_rewards_are_weighed_and_each_is_a_term() -> None:
    spans = [call(0, 1), named(("right", 1.0), ("short", 0.4), ("rude", 1.0), ("other", 9.0))]
    traced = trace_stored(SUCCEEDED, spans, reward=RewardSpec(weights=WEIGHTS, length_penalty=10.0))
    assert traced.reward_terms == {
        "right": 1.0,
        "short": 0.2,
        "rude": -0.25,
        "length_penalty": -0.02,
    }
    assert traced.reward == pytest.approx(0.93)
    assert trace_stored(SUCCEEDED, spans).reward == 1.0  # what evaluation measures


def test_a_weight_of_a_reward_that_was_not_given_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"has short.*gave a reward of primary"):
        trace_stored(
            SUCCEEDED,
            [call(0, 1), reward(1.0, 2, final=True)],
            reward=RewardSpec(weights={"primary": 1, "short": 1}),
        )


@THOROUGH
@given(st.lists(st.lists(GRADES, min_size=2, max_size=5), min_size=1, max_size=4))
def test_gdpo_is_the_papers_formula(groups: list[list[tuple[float, float, float]]]) -> None:
    """A_k = (r_k − mean) / (std + ε) over the group, S = Σ w_k·A_k, A = (S − mean) / (std + ε) over
    the batch."""
    epsilon, sums = 1e-6, []
    for group in groups:
        rewards = np.array(group)
        apart = (rewards - rewards.mean(0)) / (rewards.std(0, ddof=1) + epsilon)
        sums.append((apart * np.array(list(WEIGHTS.values()))).sum(1))
    batch = np.concatenate(sums)
    expected = (batch - batch.mean()) / (batch.std(ddof=1) + epsilon)
    terms = [
        [{n: WEIGHTS[n] * r for n, r in zip(WEIGHTS, own, strict=True)} for own in group]
        for group in groups
    ]
    given_groups = [
        RewardedGroup(
            [[transition([1], [2])] for _ in own], [sum(one.values()) for one in own], own
        )
        for own in terms
    ]
    found = advantages(given_groups, "gdpo", RewardSpec(weights=WEIGHTS))
    np.testing.assert_allclose(np.concatenate(found)[:, 0], expected, atol=1e-5)


def test_rewards_of_one_sum_differ_where_they_are_normalised_apart() -> None:
    """Right and long, or wrong and short: GRPO sees two equal rewards, and learns nothing."""
    group = RewardedGroup(
        [[transition([1], [2])] for _ in "ab"],
        [1.0, 1.0],
        [{"right": 1.0, "short": 0.0}, {"right": 0.0, "short": 1.0}],
    )
    assert advantages([group], "grpo") == [[[0.0], [0.0]]]
    differing = advantages([group], "gdpo", RewardSpec(weights={"right": 2.0, "short": 1.0}))
    assert differing[0][0][0] > 0 > differing[0][1][0]
    with pytest.raises(ConfigError, match="give returns='identical'"):
        advantages([group], "gdpo", returns="air")


def traced(name: str, earned: float, calls: int, tokens: int, tools: int) -> TracedRollout:
    made = [
        transition(
            [1], [2] * tokens, rollout_id=name, tools=(ToolStatus("search", 1, None),) * tools
        )
        for _ in range(calls)
    ]
    rollout = Rollout(rollout_id=name, input={"level": "easy"}, start_time=0.0, status="succeeded")
    return TracedRollout(rollout, tuple(made), earned, reward_terms={"final": earned})


def test_a_group_is_compared_by_length_turns_and_tool_calls() -> None:
    spec = RewardSpec(relative_length=0.2, relative_turns=0.4, relative_tool_calls=0.1)
    group = [traced("a", 1.0, 1, 10, 0), traced("b", 1.0, 2, 15, 1), traced("c", 0.0, 3, 1, 2)]
    failed = TracedRollout(group[0].rollout, (), None)
    first, second, third, fourth = compare_costs([*group, failed], spec)
    assert first.reward_terms["relative_length"] == pytest.approx(0.2 * (0.5 - 7 / 27))
    assert first.reward_terms["relative_turns"] == pytest.approx(0.4 * 0.5)
    assert second.reward_terms["relative_turns"] == 0.0
    assert second.reward_terms["relative_tool_calls"] == pytest.approx(0.1 * (0.5 - 2 / 6))
    assert third.reward_terms["relative_length"] == 0.0  # the shortest of all, and wrong
    assert third.reward_terms["relative_tool_calls"] == pytest.approx(-0.05)
    assert fourth.reward is None
    for one in (first, second, third):
        assert one.reward == pytest.approx(sum(one.reward_terms.values()))
    assert compare_costs(group, RewardSpec()) == group


def state(value: Any, at: float, parent: str | None = None) -> Any:
    made = span(
        f"state{at}", at, at, parent, **({"state": value} if not isinstance(value, dict) else value)
    )
    return msgspec.structs.replace(made, name=semconv.ANNOTATION)


def states(*spans: Any) -> list[str | None]:
    return [one.state for one in trace_stored(SUCCEEDED, spans).transitions]


def test_a_state_holds_for_the_calls_after_it_until_the_next() -> None:
    spans = [
        call(0, 1),
        state("hall", 2),
        call(1, 3),
        call(2, 4),
        state({"state.x": 1, "state.y": 2}, 5),
        call(3, 6),
    ]
    assert states(*spans) == [None, '"hall"', '"hall"', '{"state.x":1,"state.y":2}']
    assert states(call(0, 1), state("late", 9)) == [None]


def test_agents_side_by_side_have_states_of_their_own() -> None:
    spans = [
        agent("a", 1, 9),
        agent("b", 1, 9),
        state("all", 0),
        state("kitchen", 2, "agent-a"),
        state("cellar", 3, "agent-b"),
        call(0, 4, "agent-a"),
        call(1, 4.1, "agent-b"),
        call(2, 5),
        call(3, 1.5, "agent-a"),
    ]
    assert states(*spans) == ['"kitchen"', '"cellar"', '"cellar"', '"all"']


STEPS = st.lists(
    st.tuples(
        st.lists(
            st.tuples(st.sampled_from("xyz"), st.sampled_from([0.0, 0.5, 1.0])),
            min_size=1,
            max_size=5,
        ),
        st.sampled_from([0.0, 1.0, 2.0]),
    ),
    min_size=2,
    max_size=5,
)


def gigpo_of_the_paper(rollouts: Any, weight: float, gamma: float, std: bool) -> list[list[float]]:
    """A = A_E + ω·A_S, call by call: eqs. 3, 6, 7 and 8 of arXiv:2505.10978, with a loop for each
    of its sums."""

    def normalised(value: float, others: list[float]) -> float:
        spread = np.std(others, ddof=1) if len(others) > 1 else 0.0
        return (
            0.0
            if spread < 1e-9
            else float((value - np.mean(others)) / (spread + 1e-6 if std else 1.0))
        )

    discounted = []
    for steps, final in rollouts:
        given_rewards = [r for _, r in steps]
        given_rewards[-1] += final
        discounted.append(
            [
                sum(gamma ** (k - t) * given_rewards[k] for k in range(t, len(steps)))
                for t in range(len(steps))
            ]
        )
    out = []
    for index, (steps, final) in enumerate(rollouts):
        of_rollout = normalised(final, [other for _, other in rollouts])
        of_steps = []
        for t, (where, _) in enumerate(steps):
            same = [
                discounted[other][k]
                for other, (theirs, _) in enumerate(rollouts)
                for k, (there, _) in enumerate(theirs)
                if there == where
            ]
            of_steps.append(of_rollout + weight * normalised(discounted[index][t], same))
        out.append(of_steps)
    return out


@THOROUGH
@given(STEPS, st.sampled_from([0.5, 1.0]), st.booleans(), st.booleans())
def test_gigpo_is_the_papers_formula_of_named_states_and_of_prompts(
    rollouts: Any, weight: float, std: bool, is_named: bool
) -> None:
    calls = [
        [
            transition(
                [1] if is_named else [ord(where)],
                [2, 3],
                reward=r,
                state=where if is_named else None,
            )
            for where, r in steps
        ]
        for steps, _ in rollouts
    ]
    group = RewardedGroup(calls, [final for _, final in rollouts])
    found = advantages(
        [group, group],
        "gigpo",
        returns="discounted",
        returns_options={"gamma": 0.9},
        baseline_options={"weight": weight, "std": std},
    )
    equal = len({final for _, final in rollouts}) == 1  # groups of equal rewards are left alone
    for own, expected in zip(found[0], gigpo_of_the_paper(rollouts, weight, 0.9, std), strict=True):
        assert own == pytest.approx([0.0] * len(own) if equal else expected, abs=1e-4)
    assert found[0] == found[1]
