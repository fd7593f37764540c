"""The nouns of the vocabulary: small, immutable, the same in every process.

This module knows no store, no HTTP and no tensors. Every noun is a `msgspec.Struct`:
`msgspec.json.encode` writes it (token ids with `enc_hook=plain`) and `msgspec.json.decode(...,
type=...)` checks it at the edge. Times are seconds since the epoch (float)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import msgspec

from agentlightning.arrays import Logprobs, TokenIds, float32, int32
from agentlightning.errors import ConfigError, check_settings, imported
from agentlightning.filters import And as And
from agentlightning.filters import Condition as Condition
from agentlightning.filters import Filter as Filter
from agentlightning.filters import Not as Not
from agentlightning.filters import Or as Or
from agentlightning.filters import Order as Order

if not TYPE_CHECKING:  # names of Agent Lightning 0.3
    from agentlightning import __getattr__ as __getattr__

Mode: TypeAlias = Literal["train", "val", "test"]
RolloutStatus: TypeAlias = Literal[
    "queuing", "preparing", "running", "requeuing", "succeeded", "failed", "cancelled"
]
AttemptStatus: TypeAlias = Literal[
    "preparing", "running", "succeeded", "failed", "timeout", "unresponsive", "cancelled"
]
RunStatus: TypeAlias = Literal["running", "succeeded", "failed", "cancelled"]
StatusCode: TypeAlias = Literal["UNSET", "OK", "ERROR"]
FinishReason: TypeAlias = Literal["stop", "length", "tool_calls", "content_filter", "abort"]
Varying: TypeAlias = Literal["dates", "uuids", "durations", "folders"]
KeyScope: TypeAlias = Literal["read", "worker", "grader", "trainer", "admin"]
AttributeValue: TypeAlias = str | bool | int | float | Sequence[str | bool | int | float]
Attributes: TypeAlias = dict[str, AttributeValue]

UNATTRIBUTED: Final = "unattributed"
"""The id of the rollout, and of its only attempt, that holds spans and calls without an attempt of
their own."""


class Noun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all nouns; refuses unknown fields. Each noun repeats `frozen` and `kw_only`: type
    checkers do not inherit the first, msgspec does not inherit the second."""


_SECONDS: Final = frozenset({int, float, type(None)})


class RolloutConfig(Noun, frozen=True, kw_only=True):
    """Timeouts and retries of a rollout.

    `timeout_seconds` counts from an attempt's start, `unresponsive_seconds` from its last call or
    span. Both stand still while the gateway holds its calls; None is no limit. An attempt whose
    status is in `retry_condition` is retried until there were `max_attempts`. With `retry: replay`
    the next attempt gets the recorded answers of those before it for the same calls, and goes on
    where they were interrupted; `rerun` samples all anew. Where calls are replayed, in a retry or a
    fork, operations and MCP tools of the agent `run` again, or their `recorded` results are given.
    ConfigError if `max_attempts` or a limit is not positive."""

    timeout_seconds: float | None = None
    unresponsive_seconds: float | None = None
    max_attempts: int = 1
    retry_condition: tuple[AttemptStatus, ...] = ()
    retry: Literal["rerun", "replay"] = "rerun"
    tools: Literal["run", "recorded"] = "run"

    def __post_init__(self) -> None:
        seconds = {type(self.timeout_seconds), type(self.unresponsive_seconds)}
        plain = type(self.max_attempts) is int and self.retry in ("rerun", "replay")
        plain &= self.tools in ("run", "recorded")
        if not plain or not seconds <= _SECONDS:
            check_settings(self)  # here alone: every rollout that is decoded has one
        if self.max_attempts < 1:
            raise ConfigError(f"max_attempts is {self.max_attempts}; it must be at least 1")
        for name in ("timeout_seconds", "unresponsive_seconds"):
            limit = getattr(self, name)
            if limit is not None and not limit > 0:
                raise ConfigError(f"{name} is {limit}; it must be positive, or None for no limit")


class ForkSource(Noun, frozen=True, kw_only=True):
    """The recorded attempt that a fork walks again, the last one of its rollout by default: its
    calls get the recorded answers, except call `at` and those that go on from it, which are live.

    With an `answer`, call `at` gets this text instead of one that is sampled. A call that asks
    something else than the record is refused, or with `on_divergence: live` answered and not
    trained. What is in `replace` may differ from the record, and is sent as recorded. ConfigError
    for a field of another type or range."""

    rollout_id: str
    at: int
    attempt_id: str | None = None
    answer: str | None = None
    on_divergence: Literal["fail", "live"] = "fail"
    replace: tuple[Varying, ...] = ()

    def __post_init__(self) -> None:
        check_settings(self, least={"at": 0})


class EnqueueRolloutRequest(Noun, frozen=True, kw_only=True):
    """One rollout to queue. With a `rollout_id` of your own, repeating the request changes nothing.
    Rollouts with a higher `priority` are leased first. One with a `source` is a fork."""

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
    source: ForkSource | None = None


class Rollout(Noun, frozen=True, kw_only=True):
    """One request to run the agent on one task: `input` is the task. Times are seconds since the
    epoch; `end_time` is None until the rollout has ended.

    `reward` is the final reward of the latest attempt, and `error` the reason why it failed; the
    store writes them with the spans and the end of the attempt."""

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
    source: ForkSource | None = None
    reward: float | None = None
    error: str | None = None


class Attempt(Noun, frozen=True, kw_only=True):
    """One try at a rollout by one worker. `sequence_id` counts from 1 within the rollout.
    `held_seconds` is how long the gateway held its calls; its timeout moves by as much."""

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
    """The right to change an attempt. `token` is a fencing token: the largest one, issued last,
    wins."""

    token: int
    expires: float


class AttemptedRollout(Rollout, frozen=True, kw_only=True):
    """A rollout and the attempt that was just started on it.

    A worker that leased it also gets `lease` and two keys. `api_key` may only call the gateway and
    write spans of this attempt; `reward_key` may also write its rewards."""

    attempt: Attempt
    lease: Lease | None = None
    api_key: str | None = None
    reward_key: str | None = None


class Heartbeat(Noun, frozen=True, kw_only=True):
    """The store's answer to a heartbeat: the attempt's status, and when its lease ends."""

    status: AttemptStatus
    lease_expires: float | None = None


class Group(Noun, frozen=True, kw_only=True):
    """The rollouts of one task that are compared. `finished_index` numbers a run's groups in the
    order they finished. A group of forks names the group of their sources, `source_id`."""

    group_id: str
    run_id: str | None
    size: int
    rollout_ids: tuple[str, ...] = ()
    finished_index: int | None = None
    source_id: str | None = None


class FinishedRollouts(Noun, frozen=True, kw_only=True):
    """Rollouts in the order they ended. Pass `cursor` to get the next ones."""

    rollouts: tuple[Rollout, ...]
    cursor: int


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
    """The sampled token ids int32[T] of one choice, and the logprob float32[T] of each under the
    distribution it was sampled from, as arrays. `versions` is run-length encoded: `((3, 10), (4,
    2))` is ten tokens of policy version 3, then two of 4. InvalidError for ids beyond 32 bits."""

    token_ids: TokenIds
    logprobs: Logprobs
    finish_reason: FinishReason
    versions: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "token_ids", int32(self.token_ids))
        msgspec.structs.force_setattr(self, "logprobs", float32(self.logprobs))


class TokenCapture(Noun, frozen=True, kw_only=True):
    """Exact token ids of one LLM call, arrays, stored as binary beside its span."""

    prompt_token_ids: TokenIds
    choices: tuple[SampledChoice, ...]

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "prompt_token_ids", int32(self.prompt_token_ids))


class Link(Noun, frozen=True, kw_only=True):
    """The link of a call to what it goes on from: an earlier `call` of its attempt, by index, with
    whose messages and answer it shares `messages`. `tokens` says whether its prompt starts with
    that call's prompt and answer; None without token ids."""

    call: int
    messages: int
    tokens: bool | None


class Span(Noun, frozen=True, kw_only=True):
    """One OpenTelemetry span of an attempt: an LLM call, a tool, an agent's step, a reward or an
    annotation.

    Times are seconds since the epoch. `tokens` holds the exact token ids of a call, if its backend
    returns them."""

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


OWN_ENDPOINT: Final = "/v1"
"""The endpoint of a server's own models, wherever its runners reach it."""


class LLM(Noun, frozen=True, kw_only=True, tag="llm", tag_field="resource_type"):
    """A model's endpoint: OpenAI-compatible URL, model name and key.

    With `gateway`, Agent Lightning's gateway answers there, as for the models that a Trainer
    serves. Inside a rollout, `endpoint` and `api_key` then name the attempt; `/v1` is that of the
    server that the runner leases from. Without it, the endpoint stays as you gave it."""

    endpoint: str
    model: str
    api_key: str | None = None
    sampling_parameters: dict[str, Any] = {}
    gateway: bool = False

    def get_base_url(self, rollout_id: str | None = None, attempt_id: str | None = None) -> str:
        """The base URL for an OpenAI client. With both ids and behind the gateway, the URL that
        attributes calls to that attempt: `http://host/v1` → `http://host/rollout/R/attempt/A/v1`.
        ConfigError with only one id."""
        if (rollout_id is None) != (attempt_id is None):
            raise ConfigError("get_base_url takes both rollout_id and attempt_id, or neither")
        if rollout_id is None or not self.gateway or "/rollout/" in self.endpoint:
            return self.endpoint
        root = self.endpoint.rstrip("/").removesuffix("/v1")
        return f"{root}/rollout/{rollout_id}/attempt/{attempt_id}/v1"


class FrozenModel(Noun, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model that is not trained, at an OpenAI-compatible endpoint behind the Trainer's gateway.
    Its calls are recorded and sampled as the agent asks. `model` is its name at the endpoint;
    default: its name here. Agents never see `api_key`."""

    endpoint: str
    frozen: Literal[True]
    model: str | None = None
    api_key: str | None = None


class PromptTemplate(
    Noun, frozen=True, kw_only=True, tag="prompt_template", tag_field="resource_type"
):
    """A prompt with placeholders: `{name}` for `f-string`, `{{ name }}` for `jinja` and `poml`."""

    template: str
    engine: Literal["f-string", "jinja", "poml"] = "f-string"

    def format(self, **values: Any) -> str:
        """The prompt with its placeholders filled. ConfigError names a placeholder without a value,
        or says that the package `poml` is missing."""
        if self.engine == "poml":
            return _fill_poml(self.template, values)
        # here, so that agents without jinja templates do not pay for its import
        import jinja2.sandbox

        try:
            if self.engine == "jinja":
                environment = jinja2.sandbox.SandboxedEnvironment(undefined=jinja2.StrictUndefined)
                return environment.from_string(self.template).render(**values)
            return self.template.format(**values)
        except (KeyError, IndexError, ValueError, AttributeError, jinja2.TemplateError) as error:
            raise ConfigError(
                f"cannot fill the prompt template: {error}; values given: {sorted(values)}"
            ) from None


def _fill_poml(template: str, values: dict[str, Any]) -> str:
    """POML's package starts a Node program for this, which takes about half a second."""
    poml = imported("poml", "a template in POML", "poml>=0.0.8")
    try:
        return str(poml.poml(template, context=values, chat=False, format="dict")["messages"])
    except RuntimeError as error:
        raise ConfigError(
            f"cannot fill the POML template: {error}; values given: {sorted(values)}"
        ) from None


class PromptText(Noun, frozen=True, kw_only=True):
    """A text that a program `sent` at a `place` of its requests, and the `text` that replaces it.
    Both write what varies as `{hole1}`, `{hole2}` …, in this order."""

    place: str
    sent: str
    text: str


class PromptCandidate(Noun, frozen=True, kw_only=True, tag="prompts", tag_field="resource_type"):
    """New texts for an unchanged program, by component; the gateway puts them into its calls."""

    components: dict[str, PromptText]


Resource: TypeAlias = LLM | PromptTemplate | PromptCandidate
NamedResources: TypeAlias = dict[str, Resource]


class ResourcesUpdate(Noun, frozen=True, kw_only=True):
    """One immutable version of the named resources. It was made from version `parent_id`, by the
    run `run_id`."""

    resources_id: str
    resources: NamedResources
    version: int
    create_time: float
    run_id: str | None = None
    parent_id: str | None = None
    metadata: dict[str, Any] = {}


class Run(Noun, frozen=True, kw_only=True):
    """One training, evaluation or optimisation. `manifest` holds its settings, seed, versions and
    data hashes. Readers show the status `stopped` for a run that was running when its process
    died."""

    run_id: str
    kind: str
    start_time: float
    status: RunStatus | Literal["stopped"] = "running"
    end_time: float | None = None
    policy_version: int = 0
    manifest: dict[str, Any] = {}


class Metrics(Noun, frozen=True, kw_only=True):
    """The metrics of a run at one step."""

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


class ApiKey(Noun, frozen=True, kw_only=True):
    """An issued key, without its secret."""

    key_id: str
    name: str
    scopes: tuple[KeyScope, ...]
    create_time: float
    expire_time: float | None = None
    revoke_time: float | None = None


class IssuedKey(ApiKey, frozen=True, kw_only=True):
    """A newly issued key with its secret, which is not stored."""

    api_key: str


class Credential(Noun, frozen=True, kw_only=True):
    """The rights of the holder of a key. With an `attempt`, (rollout_id, attempt_id): call the
    gateway for it and add its spans, and its rewards if `rewards`. Otherwise: what its scopes say.
    With a `worker_id`, the attempt is whichever this worker holds now."""

    name: str
    scopes: tuple[KeyScope, ...] = ()
    attempt: tuple[str, str] | None = None
    rewards: bool = False
    worker_id: str | None = None


class Deleted(Noun, frozen=True, kw_only=True):
    """Counts of what was removed."""

    rollouts: int = 0
    attempts: int = 0
    spans: int = 0


class RolloutPage(Noun, frozen=True, kw_only=True):
    """Some of the rollouts a query matches. `next_cursor` asks for those after them, None where
    there are no more; `total` counts all that match, where that was asked for."""

    items: tuple[Rollout, ...]
    total: int | None = None
    next_cursor: str | None = None


class SpanPage(Noun, frozen=True, kw_only=True):
    """Some of the spans a query matches; see `RolloutPage`."""

    items: tuple[Span, ...]
    total: int | None = None
    next_cursor: str | None = None
