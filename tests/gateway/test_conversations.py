"""What the gateway remembers of earlier responses, and how much of it."""

from __future__ import annotations

import json

import pytest

from agentlightning.gateway.answer import Answer
from agentlightning.gateway.attribution import NOBODY
from agentlightning.gateway.backend import Delta, Finished
from agentlightning.gateway.conversations import Conversations
from agentlightning.gateway.endpoints.responses import Responses
from agentlightning.gateway.request import CallRefused, CallRequest

pytestmark = pytest.mark.anyio


def asked(text: str, **fields: object) -> CallRequest:
    return Responses().read(json.dumps({"model": "m", "input": text, **fields}).encode())


def remember(conversations: Conversations, request: CallRequest, response_id: str) -> None:
    answer = Answer(1, response_id)
    answer.add(Delta(0, {"content": "yes"}))
    answer.add(Finished(0, "stop"))
    conversations.remember(NOBODY, request, answer)


async def continued(conversations: Conversations, response_id: str) -> list[str]:
    request = await conversations.join(NOBODY, asked("more", previous_response_id=response_id))
    return [message["content"] for message in request.messages]


async def test_the_least_recently_used_is_forgotten() -> None:
    conversations = Conversations(None, limit_count=2)
    remember(conversations, asked("a"), "resp_a")
    remember(conversations, asked("b"), "resp_b")
    assert await continued(conversations, "resp_a") == ["a", "yes", "more"]
    remember(conversations, asked("c"), "resp_c")
    assert await continued(conversations, "resp_a") == ["a", "yes", "more"]
    with pytest.raises(CallRefused, match="not found"):
        await continued(conversations, "resp_b")


async def test_no_more_bytes_are_kept_than_allowed() -> None:
    conversations = Conversations(None, limit_bytes=10_000)
    for number in range(20):
        remember(conversations, asked("x" * 3000), f"resp_{number}")
    assert await continued(conversations, "resp_19")
    with pytest.raises(CallRefused, match="not found"):
        await continued(conversations, "resp_15")
    remember(conversations, asked("x" * 20_000), "resp_large")
    with pytest.raises(CallRefused, match="not found"):
        await continued(conversations, "resp_large")
