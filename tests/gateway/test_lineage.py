"""Credit of forks that were really walked again: what they share with their sources is known from
the calls that the gateway wrote."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import agentlightning as agl
from agentlightning.algorithm.rl.batch import make_batches
from agentlightning.data.aggregation import aggregation_weights
from agentlightning.data.credit import fork as fork_returns
from agentlightning.data.credit_table import make_credit
from agentlightning.data.recordings import rewarded_group
from agentlightning.data.transitions import TracedRollout, trace_rollout
from agentlightning.errors import ConfigError
from agentlightning.types import AttemptedRollout
from tests.gateway.test_replay import RETRIED, again, converse, end, ended, fork
from tests.gateway.world import World, world

pytestmark = pytest.mark.anyio


@pytest.fixture
async def there(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path) as built:
        yield built


async def traced(there: World, attempted: AttemptedRollout) -> TracedRollout:
    return trace_rollout(await ended(there, attempted), await there.spans(attempted))


async def said(there: World, attempted: AttemptedRollout, *texts: str) -> AttemptedRollout:
    """The rollout, ended after this conversation."""
    await converse(there, attempted, *texts)
    await end(there, attempted)
    return attempted


async def test_forks_and_what_they_share_are_compared_by_lineage(there: World) -> None:
    """A fork of call 1, and a fork of its call 2: two answers were sampled at each, and the first
    answer is in all rollouts but one."""
    texts = ("hello", "count", "weather")
    source, other = await there.attempt(), await there.attempt()
    await said(there, source, *texts)
    await said(there, other, *texts)
    first = await said(there, await fork(there, source, 1), *texts)
    second = await said(there, await fork(there, first, 2), *texts)
    members = [await traced(there, one) for one in (second, source, other, first)]
    assert [len(one.transitions) for one in members] == [1, 3, 3, 2]
    group = replace(rewarded_group(members, 0.0), rewards=[0.0, 1.0, 0.5, 0.5])
    assert group.lineage.shares.tolist() == [0.25, 0.5, 1.0, 0.25]
    # by hand, share · (V − b): in the last call of the source, b is of all others
    assert [values.tolist() for values in fork_returns(group)] == [
        pytest.approx([0.25 * (0 - 0.5)]),
        pytest.approx([1 * (0.625 - 0.5), 0.5 * (1 - 0.25), 0.5 * (1 - 0.625 / 1.5)]),
        pytest.approx([1 * (0.5 - 0.625)] * 3),
        pytest.approx([0.5 * (0.25 - 1), 0.25 * (0.5 - 0)]),
    ]
    make_credit("tree", {}, "none", {}).advantages([group])
    algorithm = agl.GRPO(
        returns="fork", baseline="none", aggregation="constant", constant_length=4, group_size=4
    )
    sequences = make_batches(algorithm, [group], {"policy": None})["policy"].sequences
    weights = np.concatenate(aggregation_weights(sequences, "constant", 4))
    assert weights.tolist() == [1 / (2 * 4)] * len(weights)  # as for two rollouts
    with pytest.raises(ConfigError, match="give returns='fork' or 'tree'"):
        make_credit("identical", {}, "rloo", {}).advantages([group])
    # without its source a fork is a try like any other
    alone = replace(rewarded_group([members[0], members[2]], 0.0), rewards=[0.0, 1.0])
    assert alone.lineage.shares.tolist() == [1.0, 1.0]
    make_credit("identical", {}, "rloo", {}).advantages([alone])


async def test_forks_of_a_rollout_that_does_not_count_are_tries_of_one_state(there: World) -> None:
    source = await said(there, await there.attempt(), "hello", "count")
    forks = [await said(there, await fork(there, source, 1), "hello", "count") for _ in range(3)]
    group = rewarded_group([await traced(there, one) for one in forks], 0.0)
    assert group.lineage.shares.tolist() == pytest.approx([1 / 3] * 3)


async def test_the_source_may_have_been_interrupted(there: World) -> None:
    """The second attempt has the first one's answer, and so has the fork."""
    interrupted = await there.attempt(config=RETRIED)
    await converse(there, interrupted, "hello")
    source = await said(there, await again(there, interrupted), "hello", "count")
    forked = await said(there, await fork(there, source, 1), "hello", "count")
    group = rewarded_group([await traced(there, one) for one in (source, forked)], 0.0)
    assert [len(calls) for calls in group.transitions] == [2, 1]
    assert group.lineage.shares.tolist() == [0.5, 0.5]


async def test_a_fork_with_an_answer_of_yours_is_no_try_of_the_policy(there: World) -> None:
    source = await said(there, await there.attempt(), "hello", "count")
    given = await fork(there, source, 1, answer="Good day.")
    await said(there, given, "hello", "count", "hello")
    members = [await traced(there, one) for one in (source, given)]
    with pytest.raises(ConfigError, match="an answer of yours at call 1"):
        make_credit("fork", {}, "none", {}).advantages([rewarded_group(members, 0.0)])
