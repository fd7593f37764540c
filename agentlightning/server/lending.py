"""A trainer's side of `server.models`: lending its policy to the gateway of a server in another process, and having the
calls of it held while weights are updated.

This module knows what to ask such a server. It does not know what the server does with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Final
from urllib.parse import quote

import aiohttp
import msgspec

from agentlightning.errors import AgentLightningError, UnavailableError
from agentlightning.gateway.backend import Sampling
from agentlightning.gateway.models import ModelEntry
from agentlightning.gateway.updates import ServerUpdate, WeightUpdate
from agentlightning.server.models import Hold, ModelRegistration, Release, RunSampling, Updated
from agentlightning.store.wire import Answer, error_of

_log: Final = logging.getLogger(__name__)


async def register_model(
    server: str, entry: ModelEntry, *, base_url: str, api_key: str | None, owner: str | None = None, check: bool = True
) -> None:
    """Let the gateway of `server` route `entry.name` to `base_url` (this process's endpoint), in the name of `owner`.

    ConflictError where the name is another owner's, and what else the server refuses as its own error; UnavailableError
    where it cannot be reached."""
    asked = ModelRegistration(
        base_url=base_url,
        kind="vllm" if entry.trainable else "openai",
        aliases=entry.aliases,
        trainable=entry.trainable,
        train=_registered(entry.train),
        val=_registered(entry.val),
        owner=owner,
        check=check,
    )
    await _ask("PUT", server, quote(entry.name), api_key, asked)


async def unregister_model(server: str, name: str, *, api_key: str | None, owner: str | None = None) -> None:
    """Take the model away again; nothing happens if it is gone already, or is another `owner`'s by now."""
    query = "" if owner is None else f"?owner={quote(owner, safe='')}"
    await _ask("DELETE", server, quote(name) + query, api_key, None)


def _registered(sampling: Sampling | None) -> RunSampling | None:
    return None if sampling is None else msgspec.convert(sampling, RunSampling, from_attributes=True)


async def hold_model(server: str, name: str, *, api_key: str | None, seconds: float = 300.0) -> None:
    """Let calls of the model wait at the gateway of `server`, for `seconds` unless it is released or held again."""
    await _ask("POST", server, f"{quote(name)}/hold", api_key, Hold(seconds=seconds), seconds=30.0)


async def release_model(server: str, name: str, *, api_key: str | None, policy_version: int | None = None) -> None:
    """Let them through again; see `Release`."""
    asked = Release(policy_version=policy_version)
    await _ask("POST", server, f"{quote(name)}/release", api_key, asked, seconds=30.0)


async def update_model(server: str, name: str, update: WeightUpdate, *, api_key: str | None) -> list[ServerUpdate]:
    """Have the model's servers load weights; see `gateway.updates.update_weights`."""
    # As long as weights take to load.
    answer = await _ask("POST", server, f"{quote(name)}/weights", api_key, update, seconds=None)
    return msgspec.json.decode(answer, type=Updated).servers


@asynccontextmanager
async def model_held(server: str, name: str, *, api_key: str | None, lease: float = 60.0) -> AsyncGenerator[None]:
    """Calls of the model wait at the gateway of `server` as long as the block lasts, and for at most `lease` seconds
    more if this process dies in it. Where the server cannot be told so, it is logged, and they do not wait."""

    async def hold() -> None:
        with _logged():
            await hold_model(server, name, api_key=api_key, seconds=lease)

    async def renew() -> None:
        while not ended.is_set():
            try:
                async with asyncio.timeout(lease / 3):
                    await ended.wait()
            except TimeoutError:
                await hold()

    await hold()
    ended = asyncio.Event()
    renewing = asyncio.create_task(renew(), name=f"hold of {name}")
    try:
        yield
    finally:
        ended.set()
        await renewing  # a request to hold must not arrive after the one to release
        with _logged():
            await release_model(server, name, api_key=api_key)


@asynccontextmanager
async def models_held(server: str, names: Sequence[str], *, api_key: str | None) -> AsyncGenerator[None]:
    """`model_held` of several at once."""
    async with AsyncExitStack() as stack:
        for name in names:
            await stack.enter_async_context(model_held(server, name, api_key=api_key))
        yield


@contextmanager
def _logged() -> Generator[None]:
    try:
        yield
    except AgentLightningError as error:  # a hold is not worth the end of a run
        _log.warning("the calls of agents do not wait for new weights with their clocks stopped: %s", error)


async def _ask(
    method: str,
    server: str,
    path: str,
    api_key: str | None,
    body: msgspec.Struct | None,
    *,
    seconds: float | None = 90.0,
) -> bytes:
    """What `server` answers to a request about its models within `seconds`: what it refuses as its own error,
    UnavailableError where it cannot be reached."""
    url = f"{server.rstrip('/')}/api/v1/models/{path}"
    data = None if body is None else msgspec.json.encode(body)
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=10.0)  # a check takes as long as a token does
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.request(method, url, data=data, headers=headers) as answer,
        ):
            said = await answer.read()
            if answer.status >= 400:
                raise error_of(Answer(url=url, status=answer.status, content_type=answer.content_type, body=said))
            return said
    except (aiohttp.ClientError, TimeoutError) as error:
        raise UnavailableError(
            f"the server at {server} cannot be reached ({error}); is `agl server` running?"
        ) from None
