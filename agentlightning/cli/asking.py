"""A question to an `agl server` over HTTP, beside what its store answers. Needs no more than the agent-side install."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
import msgspec

from agentlightning.errors import NotFoundError, UnavailableError
from agentlightning.store.wire import Answer, error_of

_SECONDS: Final = 10.0


@dataclass(frozen=True)
class Told:
    """What a server answered: its JSON, the text of its Date header, and our time halfway between question and answer
    (seconds since the epoch)."""

    body: Any
    date: str | None
    time: float


async def ask_server(server: str, path: str, key: str | None) -> Told:
    """GET `path` of a server. UnavailableError where it cannot be reached, NotFoundError where it has no such
    path, its own error where it refuses."""
    url = f"{server.rstrip('/')}{path}"
    headers = {"authorization": f"Bearer {key}"} if key else {}
    asked = time.time()
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_SECONDS)) as session,
            session.get(url, headers=headers) as answer,
        ):
            said = await answer.read()
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise UnavailableError(f"nothing answers at {url} ({error or 'in time'}); is `agl server` running?") from None
    if answer.status == 404:
        raise NotFoundError(f"the server has nothing at {url}")
    if answer.status >= 400:
        raise error_of(Answer(url=url, status=answer.status, content_type=answer.content_type, body=said))
    try:
        body = msgspec.json.decode(said)
    except msgspec.DecodeError:
        raise UnavailableError(f"what answers at {url} is no `agl server`: it does not speak JSON") from None
    return Told(body, answer.headers.get("date"), (asked + time.time()) / 2)
