"""Hints for the two commonest mistakes of agents: a field that the task lacks, and a client with
another address."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final, cast
from urllib.parse import urlsplit

from agentlightning.runner.clients import causes, is_of_attempt
from agentlightning.types import LLM, NamedResources

_FIELDS: Final = 20  # of a task, that are named


def add_hint(error: BaseException, task: Any, resources: NamedResources) -> None:
    """Add a note to what an agent raised, if the cause is known."""
    hint = _missing_field(error, task) or _other_address(error, resources)
    if hint is not None and hint not in getattr(error, "__notes__", ()):
        error.add_note(hint)


def _missing_field(error: BaseException, task: Any) -> str | None:
    """`the task has: question, tool`, where code that holds the task looked for another key."""
    if not isinstance(error, KeyError) or not isinstance(task, Mapping) or error.args[:1] == ():
        return None
    fields = list(cast("Mapping[Any, Any]", task))
    innermost = error.__traceback__
    while innermost is not None and innermost.tb_next is not None:
        innermost = innermost.tb_next
    held = innermost is not None and any(
        value is task for value in innermost.tb_frame.f_locals.values()
    )
    if not held or error.args[0] in fields:
        return None
    return f"the task has: {', '.join(map(str, fields[:_FIELDS]))}{', …' * (len(fields) > _FIELDS)}"


def _other_address(error: BaseException, resources: NamedResources) -> str | None:
    """Where the failed call of an HTTP client went, unless that is one of the agent's resources."""
    own = [
        _address(resource.endpoint) for resource in resources.values() if isinstance(resource, LLM)
    ]
    for cause in causes(error):
        # an exception of somebody else's; httpx raises where it knows no request
        with suppress(Exception):
            url = str(cause.request.url)
            if own and not is_of_attempt(url) and _address(url) not in own:
                return (
                    f"this call went to {_address(url)}, and the model of this run is at {own[0]}: "
                    "make the client from `llm`, or run the agent with --isolation process, where "
                    "the environment names this model"
                )
    return None


def _address(url: str) -> str:
    """`https://key@api.example.com/v1` → `https://api.example.com`."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
