"""The clients by which an agent calls its model: a ready one of OpenAI's SDK, and a check of all
that stand on HTTPX.

Constructing `AsyncOpenAI` costs about 18 ms; deriving one from another that shares its connections
costs 0.05 ms. So a runner owns one `ClientPool`, bound to its event loop, and `openai_client`
derives from it.

A call that one rollout's code makes with another rollout's client is refused before it is sent.
Which rollout the running code belongs to is known by its context; whose call it would be is in its
URL and key. The two differ where a client in a global was made from the `llm` of whichever rollout
came first. Every other call of a rollout gets a `traceparent` that names the operation around it.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

from agentlightning.errors import imported
from agentlightning.store.keys import WORKER_PREFIX, claimed_attempt
from agentlightning.tracing.context import current_binding
from agentlightning.types import LLM

if TYPE_CHECKING:
    from openai import AsyncOpenAI

CONNECTIONS = 4096  # more than any runner's concurrency: a call must never wait for a connection
# below what servers use (uvicorn: 5 s), so that no call is sent into a closing connection
KEEP_ALIVE_SECONDS = 2.0
CONNECT_SECONDS = 30.0
# a long generation, or a call held while weights are updated; the attempt's timeout is shorter
ANSWER_SECONDS = 1800.0


class ClientPool:
    """Connections shared by all agents of `loop`. Use it and close it inside that loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._base: AsyncOpenAI | None = None

    def client(self, llm: LLM) -> AsyncOpenAI:
        """A client for `llm` that shares the pool's connections."""
        if self._base is None:
            self._base = make_client(llm)
        return self._base.with_options(base_url=llm.endpoint, api_key=_key(llm))

    async def close(self) -> None:
        if self._base is not None:
            await self._base.close()


current_pool: ContextVar[ClientPool | None] = ContextVar("agentlightning_client_pool", default=None)


def openai_client(llm: LLM) -> AsyncOpenAI:
    """An `openai.AsyncOpenAI` for `llm`, whose calls belong to that attempt.

    Inside a rollout it shares the runner's connections and needs no closing; elsewhere it has its
    own. It never retries (`max_retries=0`): if an answer was lost on its way, the gateway may have
    recorded it, and a second one would be trained too. A failed call fails the attempt, which
    `RolloutConfig` can retry as a whole. For agents that are not trained,
    `.with_options(max_retries=…)` changes this. ConfigError if `openai` is not installed."""
    pool = current_pool.get()
    try:
        shares = pool is not None and pool.loop is asyncio.get_running_loop()
    except RuntimeError:  # a sync agent, in its thread; it may have a loop of its own as well
        shares = False
    return pool.client(llm) if pool is not None and shares else make_client(llm)


def make_client(llm: LLM) -> AsyncOpenAI:
    """A client with its own connections. ConfigError if `openai` is not installed."""
    openai = imported("openai", "openai_client", "openai>=2.8,<4")
    guard_clients()  # this import may have been the first of httpx
    base = openai.DefaultAsyncHttpxClient.__bases__[0]  # of httpx2, or of httpx before openai 3
    limits = importlib.import_module(base.__module__.partition(".")[0]).Limits(
        max_connections=CONNECTIONS,
        max_keepalive_connections=CONNECTIONS,
        keepalive_expiry=KEEP_ALIVE_SECONDS,
    )
    timeout = openai.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS)
    try:  # openai's own client over aiohttp where it brings one (3.x): half the CPU of a call
        http: Any = openai.DefaultAioHttpClient(limits=limits, timeout=timeout)
    except RuntimeError:  # how openai says that its aiohttp transport is not installed
        http = openai.DefaultAsyncHttpxClient(limits=limits, timeout=timeout)
    return openai.AsyncOpenAI(
        base_url=llm.endpoint, api_key=_key(llm), max_retries=0, timeout=timeout, http_client=http
    )


def _key(llm: LLM) -> str:
    # the SDK refuses to be made without a key; a gateway without keys ignores it
    return llm.api_key or "none"


# --- clients of other rollouts --------------------------------------------------------------------

_MODULES: Final = ("httpx", "httpx2")  # the second is what openai 3 stands on
_TRACEPARENT: Final = "traceparent"
_PATH: Final = re.compile(r"/rollout/([^/]+)/attempt/([^/]+)/")


class ForeignClientError(BaseException):
    """The agent called a model with another rollout's client. Not an `Exception`, which SDKs would
    retry and agents survive."""


def is_of_attempt(url: str) -> bool:
    """Whether a URL is an attempt's own."""
    return _PATH.search(url) is not None


def lost_connection(error: BaseException | None) -> bool:
    """Whether an agent failed since a client of `httpx` or an SDK got no answer at an attempt's own
    URL."""
    for cause in causes(error):
        # an exception of somebody else's; httpx raises where it knows no request
        with suppress(Exception):
            answered = getattr(cause, "response", None) is not None
            if (
                not answered
                and "Timeout" not in type(cause).__name__
                and is_of_attempt(str(cause.request.url))
            ):
                return True
    return False


def causes(error: BaseException | None) -> Iterator[Any]:
    """Yield an exception and those that led to it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def guard_clients() -> None:
    """Check and place calls of the HTTP clients imported so far. Called before each run of an agent
    and by `make_client`; repeating it costs nothing."""
    for name in _MODULES:
        if (module := sys.modules.get(name)) is not None and hasattr(module, "AsyncClient"):
            _guard(module)


@functools.cache
def _guard(module: Any) -> None:
    for client in (module.Client, module.AsyncClient):
        client.send = _checked(client.send)


def _checked(send: Any) -> Any:
    @functools.wraps(send)
    def checked(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        _check(str(request.url), request.headers)
        return send(self, request, *args, **kwargs)

    return checked


def _check(url: str, headers: Any) -> None:
    """Refuse a call with another rollout's client, and name the enclosing span in one with this
    rollout's. ForeignClientError."""
    binding = current_binding()
    if binding is None:
        return
    found = _PATH.search(url)
    bearer = headers.get("authorization", "").removeprefix("Bearer ")
    key = bearer or headers.get("x-api-key") or headers.get("x-goog-api-key", "")
    named = found.groups() if found else claimed_attempt(key)
    if named is None and not key.startswith(WORKER_PREFIX):
        return  # it goes elsewhere
    if named is not None and named[:2] != (binding.tracer.rollout_id, binding.tracer.attempt_id):
        raise ForeignClientError(
            f"this call of attempt {binding.tracer.attempt_id} would have been recorded for "
            f"attempt {named[1]}, whose client made it. Make the client inside the agent, from "
            "its own `llm`, and keep it in no global; or make it from the environment and run "
            "the agent with isolation='process'"
        )
    if binding.parent_id is not None and _TRACEPARENT not in headers:
        headers[_TRACEPARENT] = f"00-{binding.tracer.trace_id}-{binding.parent_id}-01"
