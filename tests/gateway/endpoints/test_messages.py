"""The endpoint as Anthropic's own client sees it, over HTTP, from a real engine."""

from __future__ import annotations

import json

import anthropic
import pytest
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent

from agentlightning import semconv
from tests.gateway.claude import SEARCH, answered, asked, client_of, events_of, post, strictly
from tests.gateway.talker import PLAIN, user
from tests.gateway.world import World

pytestmark = pytest.mark.anyio


async def test_an_answer_streams_as_the_events_of_the_protocol(gateway_world: World) -> None:
    strictly(Message, (await post(gateway_world, "messages", asked()))[1])
    events = await events_of(gateway_world, text="signs")
    names = [name for name, _ in events]
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[3:-3]) == {"content_block_delta"} and len(names) > 9
    read = [strictly(RawMessageStreamEvent, data) for name, data in events if name != "ping"]
    assert [event.type for event in read] == [name for name in names if name != "ping"]
    start, end = read[0].message, read[-2]
    assert (start.content, start.stop_reason, start.usage.output_tokens) == ([], None, 0)
    assert start.usage.input_tokens == end.usage.input_tokens > 0
    assert (end.delta.stop_reason, end.usage.output_tokens > 10) == ("end_turn", True)
    assert (
        "".join(event.delta.text for event in read if event.type == "content_block_delta")
        == PLAIN["signs"]
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_sequence_cuts_the_text_and_is_named(
    gateway_world: World, stream: bool
) -> None:
    message = await answered(
        client_of(gateway_world), stream, **asked("count", stop_sequences=["4 5", "9"])
    )
    assert message.content[0].text == "1 2 3 "
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "4 5")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_with_a_tool_goes_on(gateway_world: World, stream: bool) -> None:
    attempted = await gateway_world.attempt()
    client = client_of(gateway_world, attempted)
    first = await answered(client, stream, **asked("weather", tools=[SEARCH]))
    text, call = first.content
    assert (text.type, text.text, first.stop_reason) == ("text", "Let me look.", "tool_use")
    assert (call.type, call.name, call.input) == ("tool_use", "search", {"q": "sun"})
    result = {
        "type": "tool_result",
        "tool_use_id": call.id,
        "content": [{"type": "text", "text": "sunny"}],
    }
    history = [*user("weather"), first.to_param(), {"role": "user", "content": [result]}]
    await client.messages.create(**asked(tools=[SEARCH], messages=history))
    one, two = await gateway_world.spans(attempted)
    said = json.loads(two.attributes[semconv.GEN_AI_INPUT_MESSAGES])
    assert [message["role"] for message in said] == ["user", "assistant", "tool"]
    assert (
        said[1]["content"] == "Let me look."
        and said[2]["tool_call_id"] == said[1]["tool_calls"][0]["id"]
    )
    # The text the policy sampled is found again: its own token ids are the history.
    assert one.tokens is not None and two.tokens is not None
    spoken = one.tokens.prompt_token_ids + one.tokens.choices[0].token_ids
    assert two.tokens.prompt_token_ids[: len(spoken)] == spoken
    assert two.attributes[semconv.RECORDED_SPLICE] == len(one.tokens.choices[0].token_ids)
    counted = (len(one.tokens.prompt_token_ids), len(one.tokens.choices[0].token_ids))
    assert (first.usage.input_tokens, first.usage.output_tokens) == counted
    assert one.attributes[semconv.GEN_AI_RESPONSE_ID] == first.id
    assert (one.attributes[semconv.CALL_ENDPOINT], one.attributes[semconv.CALL_STREAM]) == (
        "messages",
        stream,
    )
    assert semconv.CALL_FLAG not in one.attributes


async def test_the_sdks_tool_runner_does_without_threads(gateway_world: World) -> None:
    asked_for: list[str] = []

    async def search(q: str) -> str:
        """Look something up.

        Args:
            q: what
        """
        asked_for.append(q)
        return "sunny"

    attempted = await gateway_world.attempt()
    runner = client_of(gateway_world, attempted).beta.messages.tool_runner(
        **asked("weather"), tools=[anthropic.beta_async_tool(search)], max_iterations=2
    )
    await runner.until_done()
    refused, *calls = await gateway_world.spans(attempted)
    assert asked_for == ["sun"] and len(calls) == 2
    assert str(refused.status.description).startswith("thread is not supported")


async def test_tokens_are_counted_and_nothing_is_recorded(gateway_world: World) -> None:
    attempted = await gateway_world.attempt()
    client = client_of(gateway_world, attempted)
    request = {
        "model": "policy",
        "messages": user("weather"),
        "tools": [SEARCH],
        "system": "Be brief.",
    }
    count = await client.messages.count_tokens(**request)
    assert await gateway_world.spans(attempted) == []
    answer = await client.messages.create(**request, max_tokens=8)
    assert count.input_tokens == answer.usage.input_tokens
    (span,) = await gateway_world.spans(attempted)
    assert span.attributes[semconv.CALL_INDEX] == 0
    said = json.loads(span.attributes[semconv.GEN_AI_INPUT_MESSAGES])
    assert said == [{"role": "system", "content": "Be brief."}, *user("weather")]
    assert "Be brief" not in span.attributes[semconv.CALL_REQUEST]
    strictly(MessageTokensCount, (await post(gateway_world, "messages/count_tokens", request))[1])
