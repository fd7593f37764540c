"""Every call of the store as one noun: its arguments, what it returns, where it is in the REST interface, who may.

`LightningStore` makes these and `perform`s them; `SqlStore` carries them out; the HTTP client and the server send and
receive them, so that the three cannot drift apart. A field that the route names travels in the path, the others in the
body (of GET and DELETE: in the query). Bodies are JSON or msgpack.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Final, Generic, TypedDict, TypeVar, get_args

from agentlightning.types import (
    ApiKey,
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    Credential,
    Deleted,
    EnqueueRolloutRequest,
    Filter,
    FinishedRollouts,
    Group,
    Heartbeat,
    IssuedKey,
    KeyScope,
    Metrics,
    NamedResources,
    Noun,
    Order,
    ResourcesUpdate,
    Rollout,
    RolloutPage,
    RolloutStatus,
    Run,
    RunStatus,
    Span,
    SpanPage,
    Worker,
)

T = TypeVar("T")
IN_QUERY: Final = ("GET", "DELETE")  # the methods whose fields travel in the query, as they have no body


class Call(Noun, Generic[T], frozen=True, kw_only=True):
    """One call; T is what it returns. A `scope` of "trainer" is that of keys that may do all but administer the store.
    A call that is not `repeatable` may have been carried out although its answer was lost. `timeout` fields are how
    many seconds to wait for something to answer with."""

    route: ClassVar[str]
    scope: ClassVar[KeyScope] = "trainer"
    repeatable: ClassVar[bool] = True

    def may_repeat(self) -> bool:
        """Whether doing it twice does no more than doing it once."""
        return self.repeatable

    @classmethod
    def returns(cls) -> Any:
        """The type T."""
        return get_args(cls.__orig_bases__[0])[0]  # pyright: ignore[reportAttributeAccessIssue]


class PageCall(Call[T], frozen=True, kw_only=True):
    """One page of what matches `where`, sorted by `order`, from a `cursor` on; counting the `total` costs a scan. A
    page ends early, with a cursor, once its rows have `most_bytes`. A server gives at most 1,000 rows or 16 MiB."""

    scope = "read"
    most_bytes: int | None = None
    where: Filter | None = None
    order: tuple[Order, ...] = ()
    limit: int | None = None
    offset: int = 0
    cursor: str | None = None
    with_total: bool = False


class Page(TypedDict, total=False):
    """What a method that asks for a page takes besides."""

    cursor: str | None
    offset: int
    with_total: bool


# --- rollouts ----------------------------------------------------------------------------------------------------


class EnqueueRollouts(Call[list[Rollout]], frozen=True, kw_only=True):
    route = "POST /rollouts"
    requests: list[EnqueueRolloutRequest]


class StartRollout(Call[AttemptedRollout], frozen=True, kw_only=True):
    route = "POST /rollouts/start"
    scope = "worker"
    request: EnqueueRolloutRequest
    attempt_id: str | None = None
    worker_id: str | None = None


class LeaseRollouts(Call[list[AttemptedRollout]], frozen=True, kw_only=True):
    """At most 1,000 are leased, whatever the `limit`. `lease_id` is a name of the caller's choice for this call: asked
    again with it, the store answers with what it leased the first time."""

    route = "POST /rollouts/lease"
    scope = "worker"
    limit: int = 1
    worker_id: str | None = None
    timeout: float = 0.0
    lease_id: str | None = None


class QueryRollouts(PageCall[RolloutPage], frozen=True, kw_only=True):
    route = "POST /rollouts/query"


class WaitForRollouts(Call[list[Rollout]], frozen=True, kw_only=True):
    route = "POST /rollouts/wait"
    scope = "read"
    rollout_ids: list[str]
    timeout: float | None = None


class FinishedAfter(Call[FinishedRollouts], frozen=True, kw_only=True):
    route = "GET /finished-rollouts"
    scope = "read"
    cursor: int = 0
    limit: int = 100
    timeout: float = 0.0
    run_id: str | None = None


class GetRollout(Call[Rollout | None], frozen=True, kw_only=True):
    route = "GET /rollouts/{rollout_id}"
    scope = "read"
    rollout_id: str


class UpdateRollout(Call[Rollout], frozen=True, kw_only=True):
    route = "PATCH /rollouts/{rollout_id}"
    rollout_id: str
    status: RolloutStatus | None = None
    metadata: dict[str, Any] | None = None

    def may_repeat(self) -> bool:
        return self.status != "requeuing"  # again, it would end the attempt that was started meanwhile


class CancelRollout(Call[Rollout], frozen=True, kw_only=True):
    route = "POST /rollouts/{rollout_id}/cancel"
    rollout_id: str


# --- attempts ----------------------------------------------------------------------------------------------------


class StartAttempt(Call[AttemptedRollout], frozen=True, kw_only=True):
    route = "POST /rollouts/{rollout_id}/attempts"
    scope = "worker"
    rollout_id: str
    attempt_id: str | None = None
    worker_id: str | None = None


class QueryAttempts(Call[list[Attempt]], frozen=True, kw_only=True):
    route = "GET /rollouts/{rollout_id}/attempts"
    scope = "read"
    rollout_id: str


class GetLatestAttempt(Call[Attempt | None], frozen=True, kw_only=True):
    route = "GET /rollouts/{rollout_id}/attempts/latest"
    scope = "read"
    rollout_id: str


class UpdateAttempt(Call[Attempt], frozen=True, kw_only=True):
    route = "PATCH /rollouts/{rollout_id}/attempts/{attempt_id}"
    scope = "worker"
    rollout_id: str
    attempt_id: str
    status: AttemptStatus | None = None
    metadata: dict[str, Any] | None = None
    lease: int | None = None


class BeatHeart(Call[Heartbeat], frozen=True, kw_only=True):
    route = "POST /rollouts/{rollout_id}/attempts/{attempt_id}/heartbeat"
    scope = "worker"
    rollout_id: str
    attempt_id: str
    lease: int


class ExtendAttempts(Call[None], frozen=True, kw_only=True):
    """Calls of these attempts, each a (rollout_id, attempt_id), are held back for the next `seconds`: that much later
    their timeout and their silence run out, and their leases as before. Seconds that were said before count once, so
    that it may be said again at any time. Attempts that are not active are passed over."""

    route = "POST /attempts/extend"
    scope = "worker"
    attempts: list[tuple[str, str]]
    seconds: float


# --- spans -------------------------------------------------------------------------------------------------------


class AddSpans(Call[list[int]], frozen=True, kw_only=True):
    """Returns the sequence id each span is stored under."""

    route = "POST /spans"
    scope = "grader"
    spans: list[Span]


class NextSpanSequenceId(Call[int], frozen=True, kw_only=True):
    # Repeated after a lost answer it skips a number, which harms nobody.
    route = "POST /rollouts/{rollout_id}/attempts/{attempt_id}/next-span-sequence-id"
    scope = "worker"
    rollout_id: str
    attempt_id: str


class GetSpans(Call[list[Span]], frozen=True, kw_only=True):
    route = "GET /rollouts/{rollout_id}/spans"
    scope = "read"
    rollout_id: str
    attempt_id: str | None = None


class QuerySpans(PageCall[SpanPage], frozen=True, kw_only=True):
    route = "POST /spans/query"


# --- resources ---------------------------------------------------------------------------------------------------


class AddResources(Call[ResourcesUpdate], frozen=True, kw_only=True):
    route = "POST /resources"
    resources: NamedResources
    resources_id: str | None = None
    run_id: str | None = None
    parent_id: str | None = None
    metadata: dict[str, Any] | None = None


class QueryResources(Call[list[ResourcesUpdate]], frozen=True, kw_only=True):
    route = "GET /resources"
    scope = "read"


class GetLatestResources(Call[ResourcesUpdate | None], frozen=True, kw_only=True):
    route = "GET /latest-resources"
    scope = "read"


class GetResources(Call[ResourcesUpdate | None], frozen=True, kw_only=True):
    route = "GET /resources/{resources_id}"
    scope = "read"
    resources_id: str


# --- runs and groups ---------------------------------------------------------------------------------------------


class StartRun(Call[Run], frozen=True, kw_only=True):
    route = "POST /runs"
    kind: str
    manifest: dict[str, Any]
    run_id: str | None = None


class QueryRuns(Call[list[Run]], frozen=True, kw_only=True):
    route = "GET /runs"
    scope = "read"


class UpdateRun(Call[Run], frozen=True, kw_only=True):
    route = "PATCH /runs/{run_id}"
    run_id: str
    status: RunStatus


class NextPolicyVersion(Call[int], frozen=True, kw_only=True):
    # Repeated after a lost answer it skips a number; no number is given twice.
    route = "POST /runs/{run_id}/next-policy-version"
    run_id: str


class AddMetrics(Call[None], frozen=True, kw_only=True):
    route = "POST /runs/{run_id}/metrics"
    run_id: str
    metrics: Metrics


class QueryMetrics(Call[list[Metrics]], frozen=True, kw_only=True):
    route = "GET /runs/{run_id}/metrics"
    scope = "read"
    run_id: str


class CompleteGroupsAfter(Call[list[Group]], frozen=True, kw_only=True):
    route = "GET /runs/{run_id}/complete-groups"
    scope = "read"
    run_id: str
    cursor: int = 0
    limit: int = 100
    timeout: float = 0.0


class CreateGroup(Call[Group], frozen=True, kw_only=True):
    route = "POST /groups"
    size: int
    run_id: str | None = None
    group_id: str | None = None


class GetGroup(Call[Group | None], frozen=True, kw_only=True):
    route = "GET /groups/{group_id}"
    scope = "read"
    group_id: str


# --- workers and the whole ---------------------------------------------------------------------------------------


class UpdateWorker(Call[Worker], frozen=True, kw_only=True):
    route = "PUT /workers"
    scope = "worker"
    worker_id: str
    heartbeat_stats: dict[str, Any] | None = None


class QueryWorkers(Call[list[Worker]], frozen=True, kw_only=True):
    route = "GET /workers"
    scope = "read"


class Statistics(Call[dict[str, int]], frozen=True, kw_only=True):
    route = "GET /statistics"
    scope = "read"


class GetTime(Call[float], frozen=True, kw_only=True):
    """The time by the store's own clock, which stamps all that is stored, in seconds since the epoch. It stands still
    while the machine sleeps."""

    route = "GET /time"
    scope = "read"


class IssueWorkerKey(Call[str], frozen=True, kw_only=True):
    """A key that stands for whatever attempt the worker holds at present, for agents whose client is made once for many
    attempts. A worker that uses it may hold one attempt at a time."""

    route = "POST /workers/key"
    scope = "worker"
    worker_id: str


# --- administration ----------------------------------------------------------------------------------------------


class AdminCall(Call[T], frozen=True, kw_only=True):
    """Needs an admin key, and leaves a line in the log. `actor` is filled in by the server."""

    scope = "admin"
    actor: str = "this process"


class DeleteRollouts(AdminCall[Deleted], frozen=True, kw_only=True):
    """Remove what belongs to the rollouts that match; those not yet terminal are left, or cancelled first if
    `unfinished`. `scrub` leaves no trace of what was removed in a SQLite file, which is written anew, a little at a
    time between other writes."""

    route = "POST /rollouts/delete"
    where: Filter
    unfinished: bool = False
    scrub: bool = False


class IssueKey(AdminCall[IssuedKey], frozen=True, kw_only=True):
    route = "POST /keys"
    repeatable = False
    name: str
    scopes: list[KeyScope]
    lifetime_seconds: float | None = None


class IssueAttemptKey(AdminCall[str], frozen=True, kw_only=True):
    """A further key of one attempt; with `rewards` it may also write the attempt's rewards."""

    route = "POST /rollouts/{rollout_id}/attempts/{attempt_id}/keys"
    rollout_id: str
    attempt_id: str
    rewards: bool = False


class RevokeKey(AdminCall[ApiKey], frozen=True, kw_only=True):
    """End a key."""

    route = "DELETE /keys/{key_id}"
    key_id: str


class FindKey(Call[Credential | None], frozen=True, kw_only=True):
    """What the holder of a key may do; None for a key that is not valid, or no longer. ConflictError for the key of a
    worker that holds no attempt, or several."""

    route = "POST /keys/find"
    scope = "admin"
    api_key: str


class QueryKeys(Call[list[ApiKey]], frozen=True, kw_only=True):
    route = "GET /keys"
    scope = "admin"


class CheckStore(AdminCall[list[str]], frozen=True, kw_only=True):
    """Everything that is wrong with what is stored, in words; empty if nothing is."""

    route = "POST /check"


class ImportRollout(AdminCall[bool], frozen=True, kw_only=True):
    """Store a rollout as it was elsewhere; False if it is stored already."""

    route = "POST /rollouts/import"
    rollout: Rollout
    attempts: list[Attempt]
    spans: list[Span]


# --- on the wire -------------------------------------------------------------------------------------------------


class ErrorBody(Noun, frozen=True, kw_only=True, forbid_unknown_fields=False):
    message: str
    type: str = "error"


class ErrorReply(Noun, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """The body of every answer that is not a success."""

    error: ErrorBody


def all_calls() -> Iterator[type[Call[Any]]]:
    """Every kind of call, in the order of this page."""
    for value in list(globals().values()):
        if isinstance(value, type) and issubclass(value, Call) and "route" in vars(value):
            yield value


def path_fields(route: str) -> list[str]:
    """`POST /rollouts/{rollout_id}/cancel` → `["rollout_id"]`."""
    return [part[1:-1] for part in route.split("/") if part.startswith("{")]
