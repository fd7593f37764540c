"""OpenAI's responses as its own client sees them, over HTTP, from a real engine and from a server
like vLLM."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, get_args

import aiohttp
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel

from agentlightning import semconv
from agentlightning.types import Span
from tests.gateway.talker import PLAIN, SEARCH_TOOL
from tests.gateway.upstream import DONE, GOOD, Upstream, chunk, gateway_before
from tests.gateway.world import World

pytestmark = pytest.mark.anyio

TOOL = {"type": "function", **SEARCH_TOOL["function"], "strict": False}
EVENTS = {
    get_args(model.model_fields["type"].annotation)[0]: model
    for model in get_args(get_args(ResponseStreamEvent)[0])
}


async def raw_events(client: openai.AsyncOpenAI, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream as they were sent, each of the form that the SDK declares."""
    headers = {"authorization": f"Bearer {client.api_key}"}
    asked = {"model": "policy", "stream": True, **body}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{client.base_url}responses", json=asked, headers=headers) as response,
    ):
        text = await response.text()
    assert response.status == 200 and response.content_type == "text/event-stream"
    events: list[dict[str, Any]] = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
        EVENTS[events[-1]["type"]].model_validate(events[-1])
        if "response" in events[-1]:
            Response.model_validate(events[-1]["response"])
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def kinds(events: list[dict[str, Any]]) -> list[str]:
    """The types of the events, repeated ones once."""
    names = [event["type"] for event in events]
    return [name for place, name in enumerate(names) if names[place - 1 : place] != [name]]


async def raw_response(client: openai.AsyncOpenAI, **body: Any) -> dict[str, Any]:
    raw = await client.responses.with_raw_response.create(**{"model": "policy", **body})
    whole = json.loads(raw.text)
    Response.model_validate(whole)
    return whole


def messages_of(span: Span) -> list[dict[str, Any]]:
    return json.loads(str(span.attributes[semconv.GEN_AI_INPUT_MESSAGES]))


async def test_the_response_is_of_the_declared_form_and_repeats_its_request(
    gateway_world: World,
) -> None:
    client = gateway_world.client(await gateway_world.attempt("test"))
    asked = {
        "instructions": "Be brief.",
        "max_output_tokens": 9,
        "tools": [TOOL],
        "tool_choice": "auto",
        "temperature": 0.0,
        "text": {"format": {"type": "text"}},
        "truncation": "disabled",
        "background": False,
        "prompt_cache_key": "key",
        "parallel_tool_calls": True,
    }
    made_up = {"id": "mine", "status": "mine", "output": [], "usage": {}}
    whole = await raw_response(client, input="hello", **asked, extra_body=made_up)
    assert {name: whole[name] for name in asked} == asked
    assert "mine" not in (whole["id"], whole["status"]) and whole["output"] and whole["usage"]
    assert set(whole) <= set(Response.model_fields) | {"store"}


@pytest.mark.parametrize(
    ("text", "output"), [("weather", ["message", "function_call"]), ("both", ["function_call"] * 2)]
)
async def test_tool_calls_stream_as_items_of_their_own(
    gateway_world: World, text: str, output: list[str]
) -> None:
    client = gateway_world.client(await gateway_world.attempt())
    events = await raw_events(client, input=text, tools=[TOOL])
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [item["type"] for item in done] == output
    assert json.loads(done[1]["arguments"])["q"] == {"weather": "sun", "both": "rain"}[text]
    assert len({item["id"] for item in done}) == 2
    places = [event["output_index"] for event in events if "output_index" in event]
    assert places == sorted(places)  # one item after the other
    streamed, whole = events[-1]["response"], await raw_response(client, input=text, tools=[TOOL])
    assert streamed["output"] == done
    for response in (whole, streamed):
        del response["id"], response["created_at"]
        for item in response["output"]:
            item.pop("id"), item.pop("call_id", None)
    assert whole == streamed


async def test_logprobs_are_given_on_request(gateway_world: World) -> None:
    client = gateway_world.client(await gateway_world.attempt())
    include = ["message.output_text.logprobs"]
    whole = await raw_response(client, input="hello", include=include)
    events = await raw_events(client, input="hello", include=include)
    (part,) = whole["output"][0]["content"]
    assert len(part["logprobs"]) == whole["usage"]["output_tokens"]
    assert "".join(entry["token"] for entry in part["logprobs"]).startswith(PLAIN["hello"])
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == part["logprobs"]
    sent = [
        entry
        for event in events
        if event["type"].endswith("text.delta")
        for entry in event["logprobs"]
    ]
    assert sent == part["logprobs"][: len(sent)] and len(sent) >= len(part["logprobs"]) - 1
    plain = await raw_response(client, input="hello")
    assert plain["output"][0]["content"][0]["logprobs"] == []


SHORT = {"model": "policy", "max_output_tokens": 8}


@pytest.mark.parametrize("continued", [False, True])
async def test_tools_round_trip_with_the_history_sent_or_continued(
    gateway_world: World, continued: bool
) -> None:
    attempted = await gateway_world.attempt()
    client = gateway_world.client(attempted)
    first = await client.responses.create(model="policy", input="weather", tools=[TOOL])
    call_id = first.output[1].call_id
    result = {"type": "function_call_output", "output": "sunny", "call_id": call_id}
    if continued:
        more = {"input": [result], "previous_response_id": first.id}
    else:
        more = {"input": [{"role": "user", "content": "weather"}, *first.output, result]}
    second = await client.responses.create(model="policy", tools=[TOOL], **more)
    assert second.previous_response_id == (first.id if continued else None)
    before, after = await gateway_world.spans(attempted)
    _, assistant, tool = messages_of(after)
    assert (assistant["content"], assistant["tool_calls"][0]["id"]) == ("Let me look.", call_id)
    assert tool == {"role": "tool", "tool_call_id": call_id, "content": "sunny"}
    # What was sampled stands in the next prompt as it was sampled.
    sampled = before.tokens.prompt_token_ids + before.tokens.choices[0].token_ids
    assert after.tokens.prompt_token_ids[: len(sampled)] == sampled


async def test_a_conversation_goes_on_without_the_old_instructions(gateway_world: World) -> None:
    attempted = await gateway_world.attempt()
    client = gateway_world.client(attempted)
    one = await client.responses.create(**SHORT, input="hello", instructions="Be kind.")
    two = await client.responses.create(**SHORT, input="count", previous_response_id=one.id)
    await client.responses.create(
        **SHORT, input="hello", previous_response_id=two.id, instructions="Be rude."
    )
    await client.responses.create(**SHORT, input="signs", previous_response_id=one.id)
    *_, longer, branch = await gateway_world.spans(attempted)
    start = [("user", "hello"), ("assistant", one.output_text)]
    more = [("user", "count"), ("assistant", two.output_text), ("user", "hello")]
    texts = [
        [(message["role"], message["content"]) for message in messages_of(span)]
        for span in (branch, longer)
    ]
    assert texts == [[*start, ("user", "signs")], [("system", "Be rude."), *start, *more]]


async def test_only_ones_own_stored_responses_can_be_continued(gateway_world: World) -> None:
    attempted, other = await gateway_world.attempt(), await gateway_world.attempt()
    client, bare = gateway_world.client(attempted), gateway_world.client()
    mine = await client.responses.create(model="policy", input="hello")
    theirs = await gateway_world.client(other).responses.create(model="policy", input="hello")
    nobodys = await bare.responses.create(model="policy", input="hello")
    unstored = await client.responses.create(model="policy", input="hello", store=False)
    chat = await client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": "hello"}]
    )
    for response_id in (theirs.id, nobodys.id, unstored.id, chat.id, "resp_unknown"):
        with pytest.raises(openai.BadRequestError, match="not found") as caught:
            await client.responses.create(
                model="policy", input="count", previous_response_id=response_id
            )
        assert (
            caught.value.code == "previous_response_not_found"
            and caught.value.param == "previous_response_id"
        )
    with pytest.raises(openai.BadRequestError, match="not found"):
        await bare.responses.create(model="policy", input="count", previous_response_id=mine.id)
    again = await bare.responses.create(**SHORT, input="count", previous_response_id=nobodys.id)
    assert again.previous_response_id == nobodys.id
    numbers = [
        span.attributes.get(semconv.CALL_INDEX) for span in await gateway_world.spans(attempted)
    ]
    assert numbers == [0, 1, 2, *[None] * 5]  # those that were refused


@asynccontextmanager
async def front_of(*events: str) -> AsyncIterator[tuple[World, Upstream]]:
    upstream = Upstream(list(events))
    async with gateway_before(upstream) as front:
        yield front, upstream


def delta(finish_reason: str | None = None, **fields: Any) -> str:
    return chunk({"index": 0, "delta": fields, "finish_reason": finish_reason})


def calling(index: int, arguments: str, **first: Any) -> dict[str, Any]:
    name = {"name": first.pop("name")} if first else {}
    return {"index": index, **first, "function": {**name, "arguments": arguments}}


USAGE = chunk(
    usage={
        "prompt_tokens": 5,
        "completion_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": {"reasoning_tokens": 2},
    }
)
REASONED = [
    delta(role="assistant", content=""),
    delta(reasoning_content="Let me"),
    delta(reasoning_content=" see.", content="I "),
    delta(content="look."),
    delta(tool_calls=[calling(0, "", id="call_1", name="search")]),
    delta(tool_calls=[calling(0, '{"q":')]),
    delta(tool_calls=[calling(0, ' "sun"}')]),
    delta(tool_calls=[calling(1, "{}", id="call_2", name="wait")]),
    delta("tool_calls"),
    USAGE,
    DONE,
]


class Weather(BaseModel):
    degrees: int


async def test_structured_output_reaches_the_server_and_is_parsed() -> None:
    async with front_of(delta(content='{"degrees": 20}'), delta("stop"), DONE) as (front, upstream):
        client = front.client(await front.attempt("test"))
        response = await client.responses.parse(
            model="policy",
            input="How warm?",
            text_format=Weather,
            reasoning={"effort": "low", "summary": "auto"},
            include=["reasoning.encrypted_content"],
            tools=[TOOL],
            tool_choice={"type": "function", "name": "search"},
            extra_body={"chat_template_kwargs": {"thinking": True}},
        )
    assert response.output_parsed == Weather(degrees=20)
    (asked,) = upstream.asked
    assert asked["response_format"]["json_schema"]["name"] == "Weather"
    assert asked["response_format"]["json_schema"]["strict"] is True
    assert (
        asked["response_format"]["json_schema"]["schema"]["properties"]["degrees"]["type"]
        == "integer"
    )
    assert asked["messages"] == [{"role": "user", "content": "How warm?"}]
    assert asked["tools"] == [{"type": "function", "function": SEARCH_TOOL["function"]}]
    assert asked["tool_choice"] == {"type": "function", "function": {"name": "search"}}
    assert (asked["reasoning_effort"], asked["chat_template_kwargs"]) == ("low", {"thinking": True})
    assert not {"input", "text", "reasoning", "include", "store", "metadata", "instructions"} & set(
        asked
    )


async def test_reasoning_and_tool_calls_in_pieces_stream_as_items() -> None:
    async with front_of(*REASONED) as (front, upstream):
        client = front.client(await front.attempt())
        events = await raw_events(client, input="weather", tools=[TOOL])
        async with client.responses.stream(model="policy", input="weather", tools=[TOOL]) as stream:
            response = await stream.until_done()
        assert response is stream
        final = events[-1]["response"]
        await client.responses.create(
            model="policy",
            tools=[TOOL],
            previous_response_id=final["id"],
            input="more",
            stream=True,
        )
        await client.responses.create(
            model="policy",
            tools=[TOOL],
            input=[{"role": "user", "content": "weather"}, *final["output"]],
            stream=True,
        )
    reasoning, message, one, two = final["output"]
    assert (
        reasoning["content"] == [{"type": "reasoning_text", "text": "Let me see."}]
        and reasoning["summary"] == []
    )
    assert message["content"][0]["text"] == "I look."
    assert (one["call_id"], one["name"], one["arguments"]) == ("call_1", "search", '{"q": "sun"}')
    assert (two["call_id"], two["name"], two["arguments"]) == ("call_2", "wait", "{}")
    assert kinds(events)[2:8] == [
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
    ]
    assert final["usage"] == {
        "input_tokens": 5,
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens": 4,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 9,
    }
    continued, sent = upstream.asked[2]["messages"], upstream.asked[3]["messages"]
    assert continued[:2] == sent
    assert sent[1]["reasoning_content"] == "Let me see." and len(sent[1]["tool_calls"]) == 2


@pytest.mark.parametrize(
    ("reason", "status", "details", "error"),
    [
        ("length", "incomplete", {"reason": "max_output_tokens"}, None),
        ("content_filter", "incomplete", {"reason": "content_filter"}, None),
        (
            "abort",
            "failed",
            None,
            {"code": "server_error", "message": "the backend aborted the answer"},
        ),
    ],
)
async def test_how_an_answer_ended_is_its_status(
    reason: str, status: str, details: Any, error: Any
) -> None:
    async with front_of(delta(content="I"), delta(reason), DONE) as (front, _):
        client = front.client(await front.attempt())
        whole = await raw_response(client, input="hello")
        last = (await raw_events(client, input="hello"))[-1]
        assert last["type"] == f"response.{status}"
        for response in (whole, last["response"]):
            assert (response["status"], response["incomplete_details"], response["error"]) == (
                status,
                details,
                error,
            )


async def test_an_answer_without_a_word_is_an_empty_message_and_a_refusal_a_part_of_its_own() -> (
    None
):
    async with front_of(delta("stop"), DONE) as (front, _):
        client = front.client(await front.attempt())
        streamed = (await raw_events(client, input="hello"))[-1]["response"]
        for response in (await raw_response(client, input="hello"), streamed):
            assert [part["text"] for item in response["output"] for part in item["content"]] == [""]
    async with front_of(delta(refusal="I "), delta(refusal="won't."), delta("stop"), DONE) as (
        front,
        _,
    ):
        events = await raw_events(front.client(await front.attempt()), input="hello")
    assert {"response.refusal.delta", "response.refusal.done"} <= set(kinds(events))
    assert events[-1]["response"]["output"][0]["content"] == [
        {"type": "refusal", "refusal": "I won't."}
    ]


async def test_a_failure_in_mid_stream_is_told_in_both_ways() -> None:
    async with front_of(*GOOD[:2]) as (front, _):
        attempted = await front.attempt()
        client = front.client(attempted)
        *_, error, failed = await raw_events(client, input="hello")
        assert (error["type"], error["code"], failed["type"]) == (
            "error",
            "backend_error",
            "response.failed",
        )
        assert (
            "before every choice" in error["message"] and error["error"]["type"] == "server_error"
        )
        assert (
            failed["response"]["status"] == "failed"
            and "before every" in failed["response"]["error"]["message"]
        )
        with pytest.raises(openai.APIError, match="before every choice"):
            async with client.responses.stream(model="policy", input="hello") as stream:
                await stream.until_done()
        # what failed cannot be continued
        with pytest.raises(openai.BadRequestError, match="not found"):
            await client.responses.create(
                model="policy", input="x", previous_response_id=failed["response"]["id"]
            )
        spans = await front.spans(attempted)
        assert [span.attributes.get(semconv.CALL_FLAG) for span in spans] == [
            "call failed",
            "call failed",
            None,
        ]


async def test_an_item_that_others_interrupt_is_written_whole() -> None:
    first, second = calling(0, "{", id="a", name="f"), calling(1, "{}", id="b", name="g")
    parts = [
        {"tool_calls": [first]},
        {"tool_calls": [second]},
        {"content": "so"},
        {"tool_calls": [calling(0, "}")]},
    ]
    async with front_of(*(delta(**part) for part in parts), delta("tool_calls"), DONE) as (
        front,
        _,
    ):
        events = await raw_events(front.client(await front.attempt()), input="hello", tools=[TOOL])
        items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert [item.get("name") or item["content"][0]["text"] for item in items] == [
            "f",
            "g",
            "so",
        ]
        assert [item["arguments"] for item in items[:2]] == ["{}", "{}"] and events[-1]["response"][
            "output"
        ] == items


@pytest.mark.parametrize("attributed", [False, True])
async def test_a_websocket_is_declined_so_that_clients_post_at_once(
    gateway_world: World, attributed: bool
) -> None:
    client = gateway_world.client(await gateway_world.attempt() if attributed else None)
    headers = {"connection": "upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{client.base_url}responses", headers=headers) as told,
    ):
        assert told.status == 426 and (await told.json())["error"]["code"] == "no_websocket"
