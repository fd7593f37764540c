"""Anthropic's client, at a world's gateway, and requests to it."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
from anthropic import AsyncAnthropic
from anthropic.types import Message
from pydantic import BaseModel, TypeAdapter

from agentlightning.types import AttemptedRollout
from tests.gateway.talker import SEARCH_TOOL, user
from tests.gateway.world import World

SEARCH = {
    "name": "search",
    "description": SEARCH_TOOL["function"]["description"],
    "input_schema": SEARCH_TOOL["function"]["parameters"],
}


def client_of(
    there: World, attempted: AttemptedRollout | None = None, **options: Any
) -> AsyncAnthropic:
    """Anthropic's client, at the attempt's own URL, or at the bare one."""
    path = (
        ""
        if attempted is None
        else f"/rollout/{attempted.rollout_id}/attempt/{attempted.attempt.attempt_id}"
    )
    key = (attempted and attempted.api_key) or "EMPTY"
    client = AsyncAnthropic(
        **{"base_url": there.url + path, "api_key": key, "max_retries": 0, **options}
    )
    there.clients.append(client)  # type: ignore[arg-type] - it is closed like the others
    return client


def asked(text: str = "hello", **more: Any) -> dict[str, Any]:
    return {"model": "policy", "max_tokens": 64, "messages": user(text)} | more


def call_of(arguments: str, name: str = "search") -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}


def block(kind: str, role: str = "user", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": [{"type": kind, **more}]}, *user("end")]}


async def answered(client: AsyncAnthropic, stream: bool, **request: Any) -> Message:
    if not stream:
        return await client.messages.create(**request)
    async with client.messages.stream(**request) as streamed:
        return await streamed.get_final_message()


def strictly(kind: Any, body: str | bytes) -> Any:
    """What the JSON `body` holds, which must be of the SDK's own type, without coercion and without
    a field more."""
    value = TypeAdapter(kind).validate_json(body, strict=True)
    _nothing_more(value)
    return value


def _nothing_more(value: Any) -> None:
    if isinstance(value, BaseModel):
        assert not value.model_extra, f"{type(value).__name__} has no {list(value.model_extra)}"
        for name in type(value).model_fields:
            _nothing_more(getattr(value, name))
    elif isinstance(value, list):
        for item in value:
            _nothing_more(item)


async def post(there: World, path: str, body: Any, **headers: str) -> tuple[int, bytes]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{there.url}/v1/{path}", data=data, headers=headers) as response,
    ):
        return response.status, await response.read()


async def events_of(there: World, **request: Any) -> list[tuple[str, str]]:
    """(name, data) of each server-sent event, as they came over the wire."""
    _, body = await post(there, "messages", asked(**{"stream": True, **request}))
    lines = [event.split("\n") for event in body.decode().split("\n\n") if event]
    return [(name.removeprefix("event: "), data.removeprefix("data: ")) for name, data in lines]
