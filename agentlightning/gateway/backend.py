"""The interface of what answers an LLM call behind the gateway: one small protocol for the embedded
engine and for HTTP servers.

A backend receives a `ModelCall`, whose sampling the gateway has decided, and yields events as
tokens are produced. It does not know rollouts, spans or the store, nor which protocol the agent
speaks."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, Final, Literal, Protocol, TypeAlias, runtime_checkable

import msgspec

from agentlightning.arrays import TokenIds
from agentlightning.errors import BackendError
from agentlightning.types import FinishReason, TokenCapture

# Names the session to a gateway further upstream, which cannot know the attempt.
SESSION_HEADER = "x-agentlightning-session"
# Why an answer that a stop string cut is not trained: its server did not say how many tokens it
# sampled, so that those of the string may be missing.
STOPPED_BY_STRING = "ended by a stop string"
# Why an answer is not trained whose server said nothing known of its end.
ENDED_OTHERWISE = "ended for an unknown reason"
# Why an answer sampled under a grammar is not trained.
CONSTRAINED = "constrained by a grammar"
# Why an answer is not trained during which its server failed to load other weights.
WEIGHTS_UNKNOWN = "sampled by weights that nobody knows"

UNSUPPORTED = "unsupported_parameter"  # the code of a refusal of a request field


class Sampling(msgspec.Struct, frozen=True):
    """The effective sampling of one call. `top_k=0` and `top_p=1.0` mean no truncation;
    `temperature=0` is greedy (argmax, with logprobs of temperature 1). None leaves the choice to
    the backend: a hosted model has defaults of its own, and some refuse other values. `seed` fixes
    the random numbers of the call."""

    temperature: float | None = 1.0
    top_p: float | None = 1.0
    top_k: int | None = 0
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    n: int = 1


LEFT_OPEN: Final = Sampling(temperature=None, top_p=None, top_k=None)
"""Where neither run nor agent decides, the backend does: a server's defaults are its maker's
recommendation."""


class ModelCall(msgspec.Struct, frozen=True, kw_only=True):
    """One answer to be made: to a chat's `messages`, or a continuation of `prompt` (text or token
    ids) as it stands.

    `session` names the attempt (prefix affinity, recorded ids), None if unknown. `request_id` is
    unique to the call; ids of tool calls are derived from it. `messages`, `tools` and `tool_choice`
    are as in the OpenAI chat-completions protocol. `max_tokens_name` is the agent's word for the
    limit: newer models of OpenAI's refuse the older name, and many other servers ignore the newer
    one. `logprobs` asks for `Delta.logprob_entries`, with the `top_logprobs` likeliest tokens in
    each. Without `stream` nobody sees the answer before its end, and a backend yields it in as few
    pieces as it can. `extra` holds request fields for backends that pass them through; a backend
    that cannot honour one raises BackendError(status=400)."""

    model: str
    messages: list[dict[str, Any]]
    request_id: str = ""
    prompt: str | tuple[int, ...] | None = None
    tools: list[dict[str, Any]] = []
    tool_choice: Any = None
    sampling: Sampling = Sampling()
    max_tokens_name: Literal["max_tokens", "max_completion_tokens"] = "max_completion_tokens"
    session: str | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    stream: bool = False
    extra: dict[str, Any] = {}


class Started(msgspec.Struct, frozen=True):
    """First event: the exact prompt (empty if the backend does not return it), how much of it was
    recorded ids, and who answers (empty: the backend itself). `extra` are fields of the answer as a
    whole that the agent gets as they are (`system_fingerprint`); `dropped` names hints of the call
    that are not followed."""

    prompt_token_ids: TokenIds
    spliced_tokens: int = 0
    replica: str = ""
    extra: dict[str, Any] = {}
    dropped: tuple[str, ...] = ()


class Delta(msgspec.Struct, frozen=True):
    """Newly produced part of one choice: an OpenAI `delta` object (content, tool_calls,
    reasoning_content …) that may be empty while text is held back, with the token ids and logprobs
    behind it and the policy version that sampled them. The text of a continued prompt is `content`
    too. `logprob_entries`, one per token where the call asked for `logprobs`, are entries of
    OpenAI's `logprobs.content`: `{token, logprob, bytes, top_logprobs}`, decoded or raw JSON."""

    index: int
    delta: dict[str, Any]
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    version: int = 0
    logprob_entries: tuple[Any, ...] = ()


class Finished(msgspec.Struct, frozen=True):
    """Last event of one choice. `stop_string` is the stop string that ended it. `untrainable` says
    why the choice must not be trained, where the backend knows it. `version` is the policy version
    in force at the end, where the backend cannot tell which tokens were sampled by which: the
    deltas then name the oldest it may have been. `versions` are those of the whole choice,
    run-length, where the backend tells them no earlier."""

    index: int
    finish_reason: FinishReason
    untrainable: str | None = None
    stop_string: str | None = None
    version: int | None = None
    versions: list[list[int]] = []


class Usage(msgspec.Struct, frozen=True):
    """Token counts as a remote backend reports them, over all choices; the embedded engine's are
    its ids' own. `details` are OpenAI's `prompt_tokens_details` and `completion_tokens_details`
    where it gives them."""

    prompt_tokens: int
    completion_tokens: int
    details: dict[str, Any] = {}


def token_count(value: Any) -> int | None:
    """A number of tokens; None for anything else."""
    with suppress(TypeError, ValueError, OverflowError):
        number = None if isinstance(value, bool) else float(value)
        if number is not None and 0 <= number < 2**53 and number == int(number):
            return int(number)
    return None


BackendEvent: TypeAlias = Started | Delta | Finished | Usage


class RelayedCall(msgspec.Struct, frozen=True):
    """A request that a backend answers in the agent's own protocol: `body`, the fields as the agent
    wrote them, goes to `{base_url}/{path}` with the backend's own name for `model`, and with those
    of the agent's headers that are let through (lower-case names)."""

    path: str
    model: str
    body: dict[str, msgspec.Raw]
    headers: dict[str, str]
    session: str | None = None


class RelayedAnswer(msgspec.Struct, frozen=True):
    """The answer, as it comes: `parts` are the bytes of the body, `headers` those that are let
    through."""

    status: int
    headers: dict[str, str]
    parts: AsyncGenerator[bytes, None]
    replica: str = ""


class NotRelayedError(BackendError):
    """The server has no such endpoint: it is no longer among the backend's `relays`."""


class Backend(Protocol):
    """Answers calls. `name` is what spans say of it, such as its URL. `captures_tokens` says
    whether exact ids and logprobs are returned. `relays` are the endpoints (`embeddings`,
    `responses` …) that it answers in their own protocol; all others reach it as `ModelCall`s. A
    `seeded` backend gets a seed with every call of an attempt, others only in a deterministic run,
    as a seed slows them down."""

    name: str
    captures_tokens: bool
    seeded: bool

    @property
    def relays(self) -> frozenset[str]: ...

    def answer(self, call: ModelCall) -> AsyncGenerator[BackendEvent, None]:
        """Yield Started, then deltas, one Finished per choice, and Usage where it is reported.

        Closing the iterator cancels the generation.

        Raises BackendError with an HTTP status and a code for everything that cannot be
        answered."""
        ...

    def relay(self, call: RelayedCall) -> AbstractAsyncContextManager[RelayedAnswer]:
        """The backend's own answer to an endpoint among `relays`, refusals and all. Leaving the
        block early cancels it.

        NotRelayedError where it turns out that its server has no such endpoint, but could be asked
        by `answer`. BackendError where it cannot be reached, or refuses the gateway's key."""
        ...

    async def count_tokens(self, call: ModelCall) -> int:
        """The number of tokens of the call's prompt. BackendError 400 where the backend cannot
        count."""
        ...

    async def close(self) -> None:
        """End connections, once the calls under way have been answered. What its owner closes (an
        engine) stays."""
        ...


class Recital(msgspec.Struct, frozen=True):
    """Recorded tokens of an answer that is given again; `spliced_tokens` and `extra` are those of
    its `Started`."""

    tokens: TokenCapture
    spliced_tokens: int
    extra: dict[str, Any]


@runtime_checkable
class Reciter(Protocol):
    """A backend whose tokens become text here, so that recorded ones can be said again."""

    def recite(self, call: ModelCall, recital: Recital) -> AsyncGenerator[BackendEvent, None]:
        """The events of an answer, as if its tokens were sampled now."""
        ...

    def prime(self, session: str | None, recital: Recital) -> None:
        """Remember an answer as if it had been sampled in the session, for the prompts that go on
        from it."""
        ...

    async def prompt_ids(self, call: ModelCall) -> TokenIds:
        """The token ids of the call's prompt. BackendError as `answer`."""
        ...


def unsupported(name: str, why: str) -> BackendError:
    """The refusal of a request field that a backend cannot honour."""
    return BackendError(f"{name} is not supported: {why}", status=400, code=UNSUPPORTED)
