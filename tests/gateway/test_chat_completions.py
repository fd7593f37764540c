"""The endpoint as OpenAI's own client sees it, over HTTP, from a real engine."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import openai
import pytest

from agentlightning import semconv
from tests.gateway.talker import PLAIN, SEARCH_TOOL, make_talker, user
from tests.gateway.world import World

pytestmark = pytest.mark.anyio


async def test_an_answer_streams_with_characters_whole_and_ends_once(gateway_world: World) -> None:
    client = gateway_world.client(await gateway_world.attempt())
    stream = await client.chat.completions.create(
        model="policy", messages=user("signs"), stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    texts = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(texts) == PLAIN["signs"] and len([text for text in texts if text]) > 3
    reasons = [
        choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason
    ]
    assert reasons == ["stop"]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens > 10


async def test_tool_choice_none_shows_the_model_no_tools(gateway_world: World) -> None:
    client = gateway_world.client(await gateway_world.attempt())
    prompts = [
        (
            await client.chat.completions.create(
                model="policy",
                messages=user("hello"),
                extra_body={"return_token_ids": True},
                **tools,
            )
        ).prompt_token_ids
        for tools in ({}, {"tools": [SEARCH_TOOL], "tool_choice": "none"})
    ]
    assert prompts[0] == prompts[1]


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_and_token_ids_are_given_on_request(
    gateway_world: World, stream: bool
) -> None:
    attempted = await gateway_world.attempt()
    answer = await gateway_world.client(attempted).chat.completions.create(
        model="policy",
        messages=user("hello"),
        logprobs=True,
        stream=stream,
        extra_body={"return_token_ids": True},
    )
    chunks = [chunk async for chunk in answer] if stream else [answer]
    choices = [choice for chunk in chunks for choice in chunk.choices]
    tokens = [
        token for choice in choices if choice.logprobs for token in choice.logprobs.content or []
    ]
    ids = [
        token_id
        for choice in choices
        for token_id in (choice.model_extra or {}).get("token_ids") or []
    ]
    assert (
        bytes(byte for token in tokens for byte in token.bytes or []).decode()
        == PLAIN["hello"] + "<|end|>"
    )
    (span,) = await gateway_world.spans(attempted)
    assert span.tokens is not None
    assert ids == list(span.tokens.choices[0].token_ids)
    assert chunks[0].prompt_token_ids == list(span.tokens.prompt_token_ids)
    assert [token.logprob for token in tokens] == pytest.approx(
        span.tokens.choices[0].logprobs, abs=1e-6
    )


async def test_models_are_listed(gateway_world: World) -> None:
    client = gateway_world.client()
    assert [model.id async for model in client.models.list()] == ["policy"]
    assert (await client.models.retrieve("policy")).id == "policy"
    with pytest.raises(openai.NotFoundError, match="no model is called"):
        await client.models.retrieve("other")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"{not json", "not a JSON object"),
        ({"model": None}, "'model'"),
        ({"messages": None}, "'messages'"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "king"}]}, "messages[0].role"),
        ({"messages": [{"role": {"a": 1}}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [3]}]}, "messages[0].content"),
        ({"n": "2"}, "n cannot be used"),
        ({"temperature": -1}, "temperature"),
        ({"tools": [{}]}, "tools[0]"),
        ({"stop": 1}, "stop cannot be used"),
        # What the engine cannot honour:
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "other"}}},
            "tool_choice",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format",
        ),
        ({"top_logprobs": 2, "logprobs": True}, "top_logprobs"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"guided_regex": "a+"}, "guided_regex"),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "image_url", "image_url": {"url": "https://x"}}],
                    }
                ]
            },
            "image_url",
        ),
    ],
)
async def test_a_request_that_cannot_be_answered_is_refused_by_name(
    gateway_world: World, body: Any, says: str
) -> None:
    if isinstance(body, dict):
        body = json.dumps(
            {"model": "policy", "messages": user("x"), "tools": [SEARCH_TOOL], **body}
        ).encode()
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{gateway_world.url}/v1/chat/completions", data=body) as response,
    ):
        error = (await response.json())["error"]
    assert response.status == 400 and says in error["message"]
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("stream", [False, True])
async def test_an_agent_that_wants_one_tool_call_gets_the_first(
    gateway_world: World, stream: bool
) -> None:
    attempted = await gateway_world.attempt()
    answer = await gateway_world.client(attempted).chat.completions.create(
        model="policy",
        messages=user("both"),
        tools=[SEARCH_TOOL],
        parallel_tool_calls=False,
        stream=stream,
    )
    if stream:
        parts = [
            part
            for chunk in [one async for one in answer]
            for part in chunk.choices[0].delta.tool_calls or ()
        ]
    else:
        parts = answer.choices[0].message.tool_calls
    (span,) = await gateway_world.spans(attempted)
    assert [part.function.arguments for part in parts] == ['{"q": "sun"}']
    assert semconv.CALL_FLAG not in span.attributes  # both were sampled, and freely
    assert (
        make_talker().tokenizer.decode(span.tokens.choices[0].token_ids).count("<tool_call>") == 2
    )
