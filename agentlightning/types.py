"""The nouns of the vocabulary: small, immutable, the same in every process.

This module knows no store, no HTTP and no tensors. Every noun is a `msgspec.Struct`: `msgspec.json.encode` writes
it and `msgspec.json.decode(..., type=...)` checks it at the edge. Times are seconds since the epoch (float).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import msgspec

from agentlightning.errors import ConfigError, InvalidError, imported

if not TYPE_CHECKING:  # names of Agent Lightning 0.3
    from agentlightning import __getattr__ as __getattr__

Mode: TypeAlias = Literal["train", "val", "test"]
RolloutStatus: TypeAlias = Literal["queuing", "preparing", "running", "requeuing", "succeeded", "failed", "cancelled"]
AttemptStatus: TypeAlias = Literal[
    "preparing", "running", "succeeded", "failed", "timeout", "unresponsive", "cancelled"
]
RunStatus: TypeAlias = Literal["running", "succeeded", "failed", "cancelled"]
StatusCode: TypeAlias = Literal["UNSET", "OK", "ERROR"]
FinishReason: TypeAlias = Literal["stop", "length", "tool_calls", "content_filter", "abort"]
KeyScope: TypeAlias = Literal["read", "worker", "grader", "trainer", "admin"]
AttributeValue: TypeAlias = str | bool | int | float | Sequence[str | bool | int | float]
Attributes: TypeAlias = dict[str, AttributeValue]

UNATTRIBUTED: Final = "unattributed"
"""The rollout, and its only attempt, that hold the spans and calls nobody could attribute."""


class Noun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all nouns: strict about unknown fields. Each noun repeats `frozen` and `kw_only`: type checkers do not
    inherit the first, msgspec does not inherit the second."""


# --- rollouts and attempts ---------------------------------------------------------------------------------------


class RolloutConfig(Noun, frozen=True, kw_only=True):
    """How a rollout is supervised. `timeout_seconds` counts from an attempt's start, `unresponsive_seconds` from its
    last call or span, both without the time its calls are held back; None switches a clock off. An attempt that ends in
    one of `retry_condition` is tried again while fewer than `max_attempts` were made."""

    timeout_seconds: float | None = None
    unresponsive_seconds: float | None = None
    max_attempts: int = 1
    retry_condition: tuple[AttemptStatus, ...] = ()

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise ConfigError(f"max_attempts is {self.max_attempts}; it must be at least 1")
        for name in ("timeout_seconds", "unresponsive_seconds"):
            seconds = getattr(self, name)
            if seconds is not None and not seconds > 0:
                raise ConfigError(f"{name} is {seconds}; it must be positive, or None for no limit")


class EnqueueRolloutRequest(Noun, frozen=True, kw_only=True):
    """One rollout to be queued. `rollout_id` may be given by the caller to make a repeated request harmless.
    Rollouts of a higher `priority` are leased first."""

    input: Any
    rollout_id: str | None = None
    priority: int = 0
    mode: Mode = "train"
    resources_id: str | None = None
    run_id: str | None = None
    group_id: str | None = None
    group_index: int | None = None
    config: RolloutConfig = RolloutConfig()
    metadata: dict[str, Any] = {}


class Rollout(Noun, frozen=True, kw_only=True):
    """One execution request of the agent on one task."""

    rollout_id: str
    input: Any
    start_time: float
    end_time: float | None = None
    status: RolloutStatus = "queuing"
    priority: int = 0
    mode: Mode = "train"
    resources_id: str | None = None
    run_id: str | None = None
    group_id: str | None = None
    group_index: int | None = None
    config: RolloutConfig = RolloutConfig()
    metadata: dict[str, Any] = {}


class Attempt(Noun, frozen=True, kw_only=True):
    """One try at a rollout by one worker. `sequence_id` counts from 1 within the rollout. `held_seconds` is for how
    long its calls were held back: so much later its timeout is."""

    rollout_id: str
    attempt_id: str
    sequence_id: int
    start_time: float
    end_time: float | None = None
    status: AttemptStatus = "preparing"
    worker_id: str | None = None
    last_heartbeat_time: float | None = None
    held_seconds: float = 0.0
    metadata: dict[str, Any] = {}


class Lease(Noun, frozen=True, kw_only=True):
    """The right to move an attempt. `token` is a fencing token: a larger one was issued later and wins."""

    token: int
    expires: float


class AttemptedRollout(Rollout, frozen=True, kw_only=True):
    """A rollout together with the attempt just started on it.

    `lease` and the keys are present where the attempt was handed to a worker; `api_key` lets its holder call the
    gateway and write spans of this attempt, and nothing else. `reward_key` may give the attempt's rewards as well."""

    attempt: Attempt
    lease: Lease | None = None
    api_key: str | None = None
    reward_key: str | None = None


class Outcome(Noun, frozen=True, kw_only=True):
    """What a rollout's latest attempt came to: its final reward, and the reason why it failed."""

    rollout_id: str
    reward: float | None = None
    error: str | None = None


class Heartbeat(Noun, frozen=True, kw_only=True):
    """The store's answer to a heartbeat: what the attempt is now, and until when the lease holds."""

    status: AttemptStatus
    lease_expires: float | None = None


class Group(Noun, frozen=True, kw_only=True):
    """The G rollouts of one task. `finished_index` numbers groups of a run in the order they became complete."""

    group_id: str
    run_id: str | None
    size: int
    rollout_ids: tuple[str, ...] = ()
    finished_index: int | None = None


class FinishedRollouts(Noun, frozen=True, kw_only=True):
    """Rollouts in the order they became terminal; `cursor` asks for what comes after them."""

    rollouts: tuple[Rollout, ...]
    cursor: int


# --- spans -------------------------------------------------------------------------------------------------------


class SpanStatus(Noun, frozen=True, kw_only=True):
    status_code: StatusCode = "UNSET"
    description: str | None = None


class SpanEvent(Noun, frozen=True, kw_only=True):
    name: str
    attributes: Attributes = {}
    timestamp: float | None = None


class SpanLink(Noun, frozen=True, kw_only=True):
    trace_id: str
    span_id: str
    attributes: Attributes = {}


class SampledChoice(Noun, frozen=True, kw_only=True):
    """What the policy sampled for one choice: ids and the logprob of each under the distribution sampled from.

    `versions` is run-length: `((3, 10), (4, 2))` is ten tokens of policy version 3, then two of version 4."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    versions: tuple[tuple[int, int], ...] = ()


class TokenCapture(Noun, frozen=True, kw_only=True):
    """Exact token ids of one LLM call, stored as binary beside its span.

    A store in this process returns `store.codec.Numbers` for the tuples, and their encoders take `codec.plain`."""

    prompt_token_ids: tuple[int, ...]
    choices: tuple[SampledChoice, ...]


class Span(Noun, frozen=True, kw_only=True):
    """One OpenTelemetry span of an attempt. `tokens` is set on the gateway's spans of token-capturing backends."""

    rollout_id: str
    attempt_id: str
    sequence_id: int
    trace_id: str
    span_id: str
    name: str
    start_time: float
    end_time: float
    parent_id: str | None = None
    status: SpanStatus = SpanStatus()
    attributes: Attributes = {}
    events: tuple[SpanEvent, ...] = ()
    links: tuple[SpanLink, ...] = ()
    resource: Attributes = {}
    tokens: TokenCapture | None = None


# --- resources ---------------------------------------------------------------------------------------------------


class LLM(Noun, frozen=True, kw_only=True, tag="llm", tag_field="resource_type"):
    """A model endpoint for the agent.

    `gateway` says that Agent Lightning's gateway answers there, as for what a Trainer serves: inside a rollout
    `endpoint` and `api_key` then name the attempt. Any other endpoint is left exactly as it is given."""

    endpoint: str
    model: str
    api_key: str | None = None
    sampling_parameters: dict[str, Any] = {}
    gateway: bool = False

    def get_base_url(self, rollout_id: str | None = None, attempt_id: str | None = None) -> str:
        """The URL to give an OpenAI client; with both ids, and behind the gateway, the one that attributes its calls to
        that attempt: `http://host/v1` → `http://host/rollout/R/attempt/A/v1`."""
        if (rollout_id is None) != (attempt_id is None):
            raise ConfigError("get_base_url takes both rollout_id and attempt_id, or neither")
        if rollout_id is None or not self.gateway or "/rollout/" in self.endpoint:
            return self.endpoint
        root = self.endpoint.rstrip("/").removesuffix("/v1")
        return f"{root}/rollout/{rollout_id}/attempt/{attempt_id}/v1"


class FrozenModel(Noun, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An OpenAI-compatible endpoint for a Trainer to put behind its gateway, beside what is trained: its calls are
    recorded, sampled as the agent asks, and never trained. `model` is its name there, if another than here; `api_key`
    its key, which no agent sees."""

    endpoint: str
    frozen: Literal[True]
    model: str | None = None
    api_key: str | None = None


class PromptTemplate(Noun, frozen=True, kw_only=True, tag="prompt_template", tag_field="resource_type"):
    """A prompt with placeholders: `{name}` for `f-string`, `{{ name }}` for `jinja` and `poml`."""

    template: str
    engine: Literal["f-string", "jinja", "poml"] = "f-string"

    def format(self, **values: Any) -> str:
        """The filled-in prompt. ConfigError names a placeholder that got no value, or says that `poml` is missing."""
        if self.engine == "poml":
            return _fill_poml(self.template, values)
        import jinja2.sandbox  # here, so that agents without jinja templates do not pay for its import

        try:
            if self.engine == "jinja":
                environment = jinja2.sandbox.SandboxedEnvironment(undefined=jinja2.StrictUndefined)
                return environment.from_string(self.template).render(**values)
            return self.template.format(**values)
        except (KeyError, IndexError, ValueError, AttributeError, jinja2.TemplateError) as error:
            raise ConfigError(f"cannot fill the prompt template: {error}; values given: {sorted(values)}") from None


def _fill_poml(template: str, values: dict[str, Any]) -> str:
    """POML's own package runs a Node program for it, about half a second each time."""
    poml = imported("poml", "a template in POML", "poml>=0.0.8")
    try:
        return str(poml.poml(template, context=values, chat=False, format="dict")["messages"])
    except RuntimeError as error:
        raise ConfigError(f"cannot fill the POML template: {error}; values given: {sorted(values)}") from None


Resource: TypeAlias = LLM | PromptTemplate
NamedResources: TypeAlias = dict[str, Resource]


class ResourcesUpdate(Noun, frozen=True, kw_only=True):
    """One immutable version of the named resources. `parent_id` names the version it was made from, `run_id` the run
    that made it."""

    resources_id: str
    resources: NamedResources
    version: int
    create_time: float
    run_id: str | None = None
    parent_id: str | None = None
    metadata: dict[str, Any] = {}


# --- runs and workers --------------------------------------------------------------------------------------------


class Run(Noun, frozen=True, kw_only=True):
    """One training, evaluation or optimisation job. `manifest` is its resolved config, versions, data hash, seeds. A
    reader calls a run `stopped` that was running when its store's process died."""

    run_id: str
    kind: str
    start_time: float
    status: RunStatus | Literal["stopped"] = "running"
    end_time: float | None = None
    policy_version: int = 0
    manifest: dict[str, Any] = {}


class Metrics(Noun, frozen=True, kw_only=True):
    """What a run measured at one step."""

    run_id: str
    step: int
    time: float
    values: dict[str, float]


class Worker(Noun, frozen=True, kw_only=True):
    worker_id: str
    status: Literal["idle", "busy", "gone"] = "idle"
    last_heartbeat_time: float | None = None
    current_rollout_id: str | None = None
    current_attempt_id: str | None = None
    heartbeat_stats: dict[str, Any] = {}


# --- access and upkeep -------------------------------------------------------------------------------------------


class ApiKey(Noun, frozen=True, kw_only=True):
    """A key that was issued, without its secret."""

    key_id: str
    name: str
    scopes: tuple[KeyScope, ...]
    create_time: float
    expire_time: float | None = None
    revoke_time: float | None = None


class IssuedKey(ApiKey, frozen=True, kw_only=True):
    """A key at the only moment its secret is known."""

    api_key: str


class Credential(Noun, frozen=True, kw_only=True):
    """What the holder of a key may do. One of an `attempt`, (rollout_id, attempt_id), may call the gateway for it and
    add its spans, those with rewards only if `rewards`; one without may do what its scopes say. With a
    `worker_id` the attempt is the one that this worker holds at present."""

    name: str
    scopes: tuple[KeyScope, ...] = ()
    attempt: tuple[str, str] | None = None
    rewards: bool = False
    worker_id: str | None = None


class Deleted(Noun, frozen=True, kw_only=True):
    """How much was removed."""

    rollouts: int = 0
    attempts: int = 0
    spans: int = 0


# --- queries -----------------------------------------------------------------------------------------------------


class Filter(Noun, frozen=True, kw_only=True, omit_defaults=True):
    """What rows have to be like: a condition on one field, or `and`, `or`, `not` of other filters.

    `{"field": "status", "op": "in", "value": ["failed", "cancelled"]}`, `{"op": "and", "of": [...]}`. Nothing is
    asked of an empty `and`; an empty `or` matches nothing. `Condition`, `And`, `Or` and `Not` make one in Python."""

    op: Literal["eq", "ne", "in", "contains", "lt", "le", "gt", "ge", "exists", "and", "or", "not"]
    field: str | None = None
    value: Any = None
    of: tuple[Filter, ...] = ()

    def __post_init__(self) -> None:
        if self.op in ("and", "or", "not"):
            if self.field is not None or self.value is not None:
                raise InvalidError(f"a filter with op {self.op!r} takes `of`, neither `field` nor `value`")
            if self.op == "not" and len(self.of) != 1:
                raise InvalidError(f"a filter with op 'not' takes one filter in `of`, not {len(self.of)}")
        elif self.field is None or self.of:
            raise InvalidError(f"a filter with op {self.op!r} takes `field` and `value`, and no `of`")


def Condition(
    field: str,
    op: Literal["eq", "ne", "in", "contains", "lt", "le", "gt", "ge", "exists"],
    value: Any = None,
) -> Filter:
    """`Condition("metadata.score", "ge", 0.5)`"""
    return Filter(op=op, field=field, value=value)


def And(of: Sequence[Filter]) -> Filter:
    return Filter(op="and", of=tuple(of))


def Or(of: Sequence[Filter]) -> Filter:
    return Filter(op="or", of=tuple(of))


def Not(negated: Filter) -> Filter:
    return Filter(op="not", of=(negated,))


class Order(Noun, frozen=True, kw_only=True):
    """One sort key. Rows that lack the field come `first` or `last` in either direction."""

    field: str
    descending: bool = False
    nulls: Literal["first", "last"] = "last"


class RolloutPage(Noun, frozen=True, kw_only=True):
    """Some of the rollouts a query matches. `next_cursor` asks for those after them, None where there are no more;
    `total` counts all that match, where that was asked for."""

    items: tuple[Rollout, ...]
    total: int | None = None
    next_cursor: str | None = None


class SpanPage(Noun, frozen=True, kw_only=True):
    """Some of the spans a query matches; see `RolloutPage`."""

    items: tuple[Span, ...]
    total: int | None = None
    next_cursor: str | None = None
