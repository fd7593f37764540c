"""A judge in the place of a reward function: it ranks the rollouts of a group, and gives each its
rank as reward."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import msgspec

from agentlightning.algorithm.base import RunContext
from agentlightning.algorithm.regrading import ranked
from agentlightning.data.recordings import Recorded
from agentlightning.errors import BackendError, TrainingError
from agentlightning.rewards import RelativeJudge
from agentlightning.tracing.scores import SCORED_BY, give_score

_NO_RANKING: Final = 422  # the judge answered, and ranked nothing


async def judge_group(
    context: RunContext, judge: RelativeJudge, rollout_ids: Sequence[str]
) -> float | None:
    """Have the judge rank the rollouts that succeeded, at least two, and give them rewards. Returns
    its agreement with itself; None if there was nothing to judge, or the process before has judged
    them.

    A group of which the judge gives no ranking gets no reward. TrainingError if it cannot be
    asked."""
    store = context.store
    succeeded = await store.query_rollouts(rollout_id_in=rollout_ids, status_in=["succeeded"])
    names = [rollout.rollout_id for rollout in succeeded]
    recorded = [await store.query_spans(name, "latest") for name in names]
    by = f"judge {judge.llm.model}"
    judged = [any(span.attributes.get(SCORED_BY) == by for span in spans) for spans in recorded]
    if len(judged) < 2 or all(judged):
        return None
    found = [Recorded(*pair) for pair in zip(succeeded, recorded, strict=True)]
    try:
        ranking = await ranked(found, _with_key(judge))
    except BackendError as error:
        if error.status != _NO_RANKING:
            raise TrainingError(
                f"the judge cannot be asked: {error}. What was run is kept: fix it, and resume"
            ) from error
        context.progress.note(f"a group got no reward: {error}")
        return None
    if context.spending is not None:
        context.spending.add_call({judge.llm.model: ranking.tokens})
    for each, score in zip(found, ranking.scores, strict=True):
        await give_score(store, each.rollout, {"judge": score}, None, by)
    return ranking.agreement


def _with_key(judge: RelativeJudge) -> RelativeJudge:
    """The judge with the key of the environment, unless it has one of its own."""
    llm = judge.llm
    key = llm.api_key or os.environ.get("OPENAI_API_KEY")
    return replace(judge, llm=msgspec.structs.replace(llm, api_key=key))
