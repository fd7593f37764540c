"""Rewards and comments that a rollout gets from others than its agent: people, graders, judges."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

from agentlightning import semconv
from agentlightning.errors import ConflictError, InvalidError
from agentlightning.store.base import LightningStore
from agentlightning.tracing.context import AttemptTracer
from agentlightning.tracing.rewards import reward_attributes
from agentlightning.types import Attributes, Rollout

SCORED_BY: Final = "agentlightning.reward.by"
COMMENT: Final = "agentlightning.reward.comment"


async def give_score(
    store: LightningStore,
    rollout: Rollout,
    given: Mapping[str, float],
    comment: str | None,
    by: str,
) -> None:
    """Give a rollout these rewards by name, which from then on are its final ones, and a comment;
    `by` is who gives them. InvalidError without either; ConflictError for a rollout without an
    attempt."""
    if not given and not comment:
        raise InvalidError("give a reward, a comment, or both")
    attempt = await store.get_latest_attempt(rollout.rollout_id)
    if attempt is None:
        raise ConflictError(f"rollout {rollout.rollout_id} has no attempt yet that could be scored")
    attributes: Attributes = {SCORED_BY: by}
    if given:
        attributes |= reward_attributes(given) | {semconv.REWARD_RETURNED: True}
    if comment:
        attributes[COMMENT] = comment
    tracer = AttemptTracer(rollout.rollout_id, attempt.attempt_id)
    now = time.time()
    tracer.record(semconv.ANNOTATION, attributes, start_time=now, end_time=now)
    await store.add_many_spans(tracer.drain())
