"""What a call of the store looks like on the wire: one noun per call that takes more than a path.

Shared by the HTTP client and the server, so that neither can drift from the other. Both ends speak msgpack or JSON.
"""

from __future__ import annotations

from typing import Any

from agentlightning.types import (
    AttemptStatus,
    Mode,
    NamedResources,
    Noun,
    RolloutConfig,
    RolloutStatus,
    RunStatus,
)


class StartRollout(Noun, frozen=True, kw_only=True):
    input: Any
    mode: Mode = "train"
    resources_id: str | None = None
    config: RolloutConfig | None = None
    metadata: dict[str, Any] | None = None
    worker_id: str | None = None


class LeaseRollouts(Noun, frozen=True, kw_only=True):
    """`timeout` is how many seconds to wait for work."""

    limit: int = 1
    worker_id: str | None = None
    timeout: float = 0.0


class QueryRollouts(Noun, frozen=True, kw_only=True):
    rollout_id_in: list[str] | None = None
    status_in: list[RolloutStatus] | None = None
    mode_in: list[Mode] | None = None
    run_id: str | None = None
    group_id: str | None = None
    limit: int | None = None
    offset: int = 0


class WaitForRollouts(Noun, frozen=True, kw_only=True):
    """`timeout` is how many seconds to wait for all of them; None has no limit."""

    rollout_ids: list[str]
    timeout: float | None = None


class UpdateRollout(Noun, frozen=True, kw_only=True):
    status: RolloutStatus | None = None
    metadata: dict[str, Any] | None = None


class StartAttempt(Noun, frozen=True, kw_only=True):
    worker_id: str | None = None


class UpdateAttempt(Noun, frozen=True, kw_only=True):
    status: AttemptStatus | None = None
    metadata: dict[str, Any] | None = None
    lease: int | None = None


class BeatHeart(Noun, frozen=True, kw_only=True):
    lease: int


class QuerySpans(Noun, frozen=True, kw_only=True):
    attempt_id: str | None = None


class AddResources(Noun, frozen=True, kw_only=True):
    resources: NamedResources
    metadata: dict[str, Any] | None = None


class UpdateResources(Noun, frozen=True, kw_only=True):
    resources: NamedResources


class StartRun(Noun, frozen=True, kw_only=True):
    kind: str
    manifest: dict[str, Any]
    run_id: str | None = None


class UpdateRun(Noun, frozen=True, kw_only=True):
    status: RunStatus


class CreateGroup(Noun, frozen=True, kw_only=True):
    size: int
    run_id: str | None = None
    group_id: str | None = None


class CompleteGroups(Noun, frozen=True, kw_only=True):
    """`timeout` is how many seconds to wait for the first group numbered above `cursor`."""

    cursor: int = 0
    limit: int = 100
    timeout: float = 0.0


class UpdateWorker(Noun, frozen=True, kw_only=True):
    heartbeat_stats: dict[str, Any] | None = None


class VerifyKey(Noun, frozen=True, kw_only=True):
    api_key: str


class ErrorBody(Noun, frozen=True, kw_only=True, forbid_unknown_fields=False):
    message: str
    type: str = "error"


class ErrorReply(Noun, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """The body of every answer that is not a success."""

    error: ErrorBody
