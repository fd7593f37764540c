"""A call that one rollout's code makes with another rollout's client is refused before it is sent.

Which rollout the running code belongs to is known here, by its context; whose call it would be is in its URL and key.
The two differ where a client in a global was made from the `llm` of whichever rollout came first. Knows HTTPX, on which
the SDKs of OpenAI and Anthropic stand, and what is built upon them; other HTTP clients go unseen.
"""

from __future__ import annotations

import functools
import re
import sys
from typing import Any, Final

from agentlightning.store.keys import claimed_attempt
from agentlightning.tracing.context import current_binding

_MODULES: Final = ("httpx", "httpx2")  # the second is what openai 3 stands on
_PATH: Final = re.compile(r"/rollout/([^/]+)/attempt/([^/]+)/")


class ForeignClientError(BaseException):
    """The agent called a model with the client of another rollout. No `Exception`: SDKs try those again, and agents
    survive them."""


def guard_clients() -> None:
    """Check the calls of the HTTP clients that are imported by now. To be called before each run of an agent; it costs
    nothing where that was done."""
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
    binding = current_binding()
    if binding is None:
        return
    found = _PATH.search(url)
    bearer = headers.get("authorization", "").removeprefix("Bearer ")
    key = bearer or headers.get("x-api-key") or headers.get("x-goog-api-key", "")
    named = found.groups() if found else claimed_attempt(key)
    if named is not None and named[:2] != (binding.tracer.rollout_id, binding.tracer.attempt_id):
        raise ForeignClientError(
            f"this call of attempt {binding.tracer.attempt_id} would have been recorded for attempt {named[1]}, whose "
            "client made it. Make the client inside the agent, from its own `llm`, and keep it in no global; or make "
            "it from the environment and run the agent with isolation='process'"
        )
