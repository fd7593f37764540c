"""Carries out the calls of the same name, with a transaction and their fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from agentlightning.store import attempts, pages, records, rollouts, spans, workers


def _by_name(*handlers: Callable[..., Any]) -> Mapping[str, Callable[..., Any]]:
    return {handler.__name__: handler for handler in handlers}


WRITES: Final = _by_name(
    *(rollouts.enqueue_many_rollouts, rollouts.create_group),
    *(
        attempts.start_rollout,
        attempts.update_rollout,
        attempts.cancel_rollout,
        attempts.start_attempt,
    ),
    *(attempts.heartbeat, attempts.extend_attempts, spans.get_next_span_sequence_id),
    *(records.add_resources, records.start_run, records.update_run, records.next_policy_version),
    *(records.add_metrics, workers.update_worker),
    *(records.issue_key, attempts.issue_attempt_key, workers.issue_worker_key, records.revoke_key),
)
READS: Final = _by_name(
    *(pages.page_rollouts, pages.page_spans, rollouts.get_rollout_by_id, rollouts.get_group),
    *(attempts.query_attempts, attempts.get_latest_attempt, spans.query_spans, records.get_time),
    *(
        records.query_resources,
        records.get_latest_resources,
        records.get_resources_by_id,
        records.query_runs,
    ),
    *(records.query_metrics, workers.query_workers, records.statistics),
    records.query_keys,
)
LOOK_UPS: Final = {"get_rollout_by_id", "get_resources_by_id", "get_time"}  # of few rows
SEARCHES: Final = {"page_rollouts", "page_spans", "statistics"}  # may have to look at every row
