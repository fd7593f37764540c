"""What answers an LLM call behind the gateway: one small protocol for the embedded engine and for HTTP servers.

A backend receives a `ChatCall` (an OpenAI chat request whose sampling the gateway has already decided) and yields
events as tokens are produced. It does not know rollouts, spans or the store.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from agentlightning.types import FinishReason

# Names the session to a gateway further upstream, which cannot know the attempt.
SESSION_HEADER = "x-agentlightning-session"
# Why an answer that a stop string cut is not trained.
STOPPED_BY_STRING = "ended by a stop string"


@dataclass(frozen=True)
class Sampling:
    """The effective sampling of one call. `top_k=0` and `top_p=1.0` mean no truncation; `temperature=0` is greedy
    (argmax, with logprobs of temperature 1). `seed` fixes the random numbers of the call."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    n: int = 1


@dataclass(frozen=True)
class ChatCall:
    """One chat completion to be made. `session` names the attempt (prefix affinity, recorded ids), None if unknown.

    `request_id` is unique to the call; ids of tool calls are derived from it. `messages`, `tools` and `tool_choice` are
    as in the OpenAI chat-completions protocol. `logprobs` asks for `Delta.tokens`. Without `stream` nobody sees the
    answer before its end, and a backend may yield it in one piece. `extra` holds request fields for backends that pass
    them through; a backend that cannot honour one raises BackendError(status=400)."""

    request_id: str
    model: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    tool_choice: Any = None
    sampling: Sampling = field(default_factory=Sampling)
    session: str | None = None
    logprobs: bool = False
    stream: bool = False
    extra: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class Started:
    """First event: the exact prompt (empty where the backend does not tell) and how much of it was recorded ids."""

    prompt_token_ids: tuple[int, ...]
    spliced_tokens: int = 0


@dataclass(frozen=True)
class Delta:
    """Newly produced part of one choice: an OpenAI `delta` object (content, tool_calls …) that may be empty while
    text is held back, with the token ids and logprobs behind it and the policy version that sampled them. `tokens`
    are the bytes of each token, present where the call asked for `logprobs`."""

    index: int
    delta: dict[str, Any]
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    version: int = 0
    tokens: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class Finished:
    """Last event of one choice. `untrainable` says why the choice must not be trained, where the backend knows it,
    such as a stop string that ended the text without the policy having sampled an end."""

    index: int
    finish_reason: FinishReason
    untrainable: str | None = None


@dataclass(frozen=True)
class Usage:
    """Token counts as a remote backend reports them, over all choices; the embedded engine's are its ids' own."""

    prompt_tokens: int
    completion_tokens: int


BackendEvent: TypeAlias = Started | Delta | Finished | Usage


class Backend(Protocol):
    """Answers chat calls. `captures_tokens` says whether exact ids and logprobs are returned."""

    captures_tokens: bool

    def chat(self, call: ChatCall) -> AsyncGenerator[BackendEvent, None]:
        """Yield Started, then deltas, one Finished per choice, and Usage where it is reported.

        Closing the iterator cancels the generation.

        Raises BackendError with an HTTP status and a code for everything that cannot be answered."""
        ...
