"""What the gateway remembers of earlier responses, and how much of it."""

from __future__ import annotations

import json

import pytest

from agentlightning import semconv
from agentlightning.gateway.answer import Answer
from agentlightning.gateway.attribution import NOBODY, Caller
from agentlightning.gateway.backend import Delta, Finished
from agentlightning.gateway.conversations import Conversations
from agentlightning.gateway.endpoints.responses import Responses
from agentlightning.gateway.request import CallRefused, CallRequest
from agentlightning.store.redaction import redaction
from tests.store.conftest import opened, span_of

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


async def test_a_response_whose_texts_are_not_captured_is_not_found() -> None:
    async with opened(redact=redaction("tokens")) as store:
        rollout = await store.start_rollout("task")
        attributes = {
            semconv.CALL_ENDPOINT: "responses",
            semconv.CALL_REQUEST: '{"model":"m"}',
            semconv.GEN_AI_RESPONSE_ID: "resp_kept",
            semconv.GEN_AI_FINISH_REASONS: ["stop"],
        }
        await store.add_span(span_of(rollout, attributes=attributes))
        caller = Caller(rollout.rollout_id, rollout.attempt.attempt_id, "0" * 32, "train")
        with pytest.raises(CallRefused, match="not found"):
            await Conversations(store).join(caller, asked("more", previous_response_id="resp_kept"))
