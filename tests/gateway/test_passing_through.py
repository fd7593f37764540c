"""Endpoints that a backend answers in the agent's own protocol: routed, recorded, and otherwise
left alone."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import openai
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from yarl import URL

from agentlightning import semconv
from agentlightning.gateway.backend import Sampling
from agentlightning.gateway.backends.http import HttpBackend, Kind
from agentlightning.gateway.models import ANY, ModelEntry
from agentlightning.types import UNATTRIBUTED
from tests.gateway.talker import user
from tests.gateway.world import GREEDY, World, fronting, serving

pytestmark = pytest.mark.anyio

EMBEDDED = {
    "object": "list",
    "data": [{"object": "embedding", "index": 0, "embedding": [0.1, 0.2]}],
    "model": "upstream-embedder",
    "usage": {"prompt_tokens": 4, "total_tokens": 4},
}
SUNNY = {"type": "output_text", "text": "Sunny.", "annotations": []}
SEARCHED = {
    "id": "resp_1",
    "object": "response",
    "created_at": 1,
    "model": "gpt",
    "status": "completed",
    "output": [
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [SUNNY],
        },
    ],
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
    "usage": {"input_tokens": 7, "output_tokens": 2, "total_tokens": 9},
}
MESSAGE_EVENTS: list[dict[str, Any]] = [
    {
        "type": "message_start",
        "message": {"id": "msg_1", "role": "assistant", "usage": {"input_tokens": 5}},
    },
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Let me "}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "look."}},
    {"type": "content_block_stop", "index": 0},
    {
        "type": "content_block_start",
        "index": 1,
        "content_block": {"type": "tool_use", "id": "t1", "name": "search"},
    },
    {
        "type": "content_block_delta",
        "index": 1,
        "delta": {"type": "input_json_delta", "partial_json": '{"q": '},
    },
    {
        "type": "content_block_delta",
        "index": 1,
        "delta": {"type": "input_json_delta", "partial_json": '"sun"}'},
    },
    {"type": "content_block_stop", "index": 1},
    {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 9}},
    {"type": "message_stop"},
]


def sent(event: dict[str, Any]) -> str:
    return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"


class Hosted:
    """A hosted API of several endpoints; remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any], dict[str, str]]] = []
        self.status = 200
        self.breaks_off_after: int | None = None  # events
        self.answered: dict[str, Any] = SEARCHED

    async def answer(self, request: Request) -> Response:
        body = await request.json() if request.method == "POST" else {}
        self.asked.append((request.url.path, body, dict(request.headers)))
        if self.status != 200:
            why = "no, not with the key backend-key"
            return JSONResponse(
                {"error": {"message": why, "type": "x", "code": "y", "param": None}}, self.status
            )
        if request.url.path == "/v1/embeddings":
            return JSONResponse(
                EMBEDDED, headers={"x-request-id": "up-1", "set-cookie": "secret=1"}
            )
        if not body.get("stream"):
            return JSONResponse(self.answered)
        if request.url.path == "/v1/responses":
            events = [
                {
                    "type": "response.created",
                    "response": {**SEARCHED, "status": "in_progress", "output": []},
                }
            ]
            events.append({"type": "response.completed", "response": SEARCHED})
        else:
            events = MESSAGE_EVENTS
        return StreamingResponse(self._events(events), media_type="text/event-stream")

    async def _events(self, events: list[dict[str, Any]]) -> AsyncIterator[str]:
        for count, event in enumerate(events, 1):
            yield sent(event)
            if count == self.breaks_off_after:
                raise ConnectionResetError


@asynccontextmanager
async def before(
    hosted: Hosted, kind: Kind = "openai", *, name: str = "hosted", train: Sampling | None = None
) -> AsyncIterator[World]:
    app = Starlette(routes=[Route("/{path:path}", hosted.answer, methods=["GET", "POST"])])
    async with serving(app) as url:
        backend = HttpBackend(f"{url}/v1", kind=kind, api_key="backend-key", model="upstream-name")
        async with fronting(
            ModelEntry(name, backend, trainable=False, train=train, val=None)
        ) as front:
            yield front


async def test_embeddings_reach_the_backend_under_its_own_name_and_key() -> None:
    hosted = Hosted()
    async with before(hosted) as front:
        attempted = await front.attempt()
        client = front.client(attempted, default_headers={"cookie": "agent=1"})
        raw = await client.embeddings.with_raw_response.create(
            model="hosted", input="hello", encoding_format="float"
        )
        (span,) = await front.spans(attempted)
    assert raw.parse().data[0].embedding == [0.1, 0.2]
    assert raw.headers["x-request-id"] == "up-1" and "set-cookie" not in raw.headers
    path, body, headers = hosted.asked[0]
    assert (path, body["model"], headers["authorization"]) == (
        "/v1/embeddings",
        "upstream-name",
        "Bearer backend-key",
    )
    assert "cookie" not in headers
    assert span.name == "embeddings hosted"
    assert span.attributes[semconv.GEN_AI_INPUT_TOKENS] == 4
    assert semconv.CALL_RESPONSE not in span.attributes


async def test_models_are_the_backends_and_lead_to_no_other_route_of_it() -> None:
    hosted = Hosted()
    async with before(hosted, name=ANY) as front, aiohttp.ClientSession() as session:
        for path in ("../files", "%2e%2e/files", "a/%2e%2e/../../files", "."):
            async with session.get(URL(f"{front.url}/v1/models/{path}", encoded=True)) as answer:
                assert answer.status == 404
        assert hosted.asked == []
        hosted.status = 401
        for path in ("models", "models/hosted"):
            async with session.get(f"{front.url}/v1/{path}") as answer:
                assert (answer.status, "refused the gateway's key" in await answer.text()) == (
                    502,
                    True,
                )


async def test_what_only_the_hosted_api_knows_passes_through_and_is_sampled_as_it_says_itself() -> (
    None
):
    hosted = Hosted()
    async with before(hosted, train=GREEDY) as front:
        attempted = await front.attempt()
        client = front.client(attempted)
        asked: Any = {
            "model": "hosted",
            "input": "weather?",
            "tools": [{"type": "web_search"}],
            "temperature": 0.7,
        }
        answer = await client.responses.create(**asked)
        kinds = [event.type async for event in await client.responses.create(**asked, stream=True)]
        whole, streamed = await front.spans(attempted)
    assert answer.output_text == "Sunny." and hosted.asked[0][1]["temperature"] == 0.7
    assert kinds == ["response.created", "response.completed"]
    for span in (whole, streamed):
        assert (
            json.loads(str(span.attributes[semconv.GEN_AI_OUTPUT_MESSAGES]))[0]["content"]
            == "Sunny."
        )
        assert json.loads(str(span.attributes[semconv.CALL_RESPONSE])) == SEARCHED
        assert span.attributes[semconv.CALL_FLAG] == "backend returns no token ids"
        assert span.attributes[semconv.GEN_AI_OUTPUT_TOKENS] == 2
        assert (
            semconv.GEN_AI_TEMPERATURE not in span.attributes
            and semconv.CALL_OVERRIDDEN not in span.attributes
        )
        assert json.loads(str(span.attributes[semconv.CALL_REQUEST]))["temperature"] == 0.7


async def test_a_streamed_message_is_recorded_as_a_whole() -> None:
    async with before(Hosted(), "anthropic") as front:
        attempted = await front.attempt()
        url = f"{front.url}/rollout/{attempted.rollout_id}/attempt/{attempted.attempt.attempt_id}/v1/messages"
        body = {"model": "hosted", "max_tokens": 9, "stream": True, "messages": user("hello")}
        async with aiohttp.ClientSession() as http, http.post(url, json=body) as answer:
            text = await answer.text()
        (span,) = await front.spans(attempted)
    assert text == "".join(map(sent, MESSAGE_EVENTS))
    (message,) = json.loads(str(span.attributes[semconv.GEN_AI_OUTPUT_MESSAGES]))
    assert message["content"] == "Let me look."
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"q": "sun"}
    assert span.attributes[semconv.GEN_AI_FINISH_REASONS] == ["tool_calls"]


async def test_anthropic_gets_its_key_as_each_of_its_protocols_brings_it() -> None:
    hosted = Hosted()
    hosted.answered = {
        "choices": [{"index": 0, "message": {"content": "Hi"}, "finish_reason": "stop"}]
    }
    async with before(hosted, "anthropic") as front, aiohttp.ClientSession() as http:
        asked = {
            "model": "hosted",
            "max_tokens": 9,
            "messages": [{"role": "user", "content": "hi"}],
        }
        for path in ("messages", "chat/completions"):
            async with http.post(f"{front.url}/v1/{path}", json=asked) as answer:
                assert answer.status == 200, await answer.text()
    keys = [
        {name: headers.get(name) for name in ("x-api-key", "authorization")}
        for _, _, headers in hosted.asked
    ]
    assert keys == [
        {"x-api-key": "backend-key", "authorization": None},
        {"x-api-key": None, "authorization": "Bearer backend-key"},
    ]


async def test_refusals_are_the_backends_own_but_its_key_is_not_the_agents_matter() -> None:
    hosted = Hosted()
    async with before(hosted) as front:
        client = front.client()
        hosted.status = 422
        with pytest.raises(openai.UnprocessableEntityError):
            await client.embeddings.create(model="hosted", input="hello")
        hosted.status = 401
        with pytest.raises(openai.InternalServerError, match="refused the gateway's key"):
            await client.embeddings.create(model="hosted", input="hello")
        await front.gateway.close()
        spans = await front.store.query_spans(UNATTRIBUTED)
    assert {span.attributes[semconv.CALL_FLAG] for span in spans} == {"call failed"}
    assert "the backend answered 422: {" in str([span.status.description for span in spans])


async def test_a_stream_that_breaks_off_ends_with_an_error_and_what_it_said_is_recorded() -> None:
    hosted = Hosted()
    hosted.breaks_off_after = 4
    async with before(hosted, "anthropic") as front, aiohttp.ClientSession() as session:
        asked = {"model": "hosted", "max_tokens": 9, "messages": user("hello"), "stream": True}
        async with session.post(f"{front.url}/v1/messages", json=asked) as answer:
            text = await answer.text()
        await front.gateway.close()
        (span,) = await front.store.query_spans(UNATTRIBUTED)
    assert "Let me" in text and "broke off" in text
    assert json.loads(str(span.attributes[semconv.GEN_AI_OUTPUT_MESSAGES])) == [
        {"role": "assistant", "content": "Let me look."}
    ]
    assert span.attributes[semconv.GEN_AI_FINISH_REASONS] == ["abort"]
    duration = span.end_time - span.start_time if span.end_time else 0.0
    assert 0 < float(str(span.attributes[semconv.GEN_AI_TIME_TO_FIRST_CHUNK])) < duration


@pytest.mark.parametrize("path", ["messages", "responses"])
async def test_the_record_of_a_stream_is_keyed_and_an_odd_part_of_it_costs_no_other(
    path: str,
) -> None:
    """Blocks that interleave; usage that is none; a last event without the output."""
    tool = {"type": "tool_use", "id": "t1", "name": "search"}
    message = {"type": "message", "role": "assistant", "content": [SUNNY]}
    call = {"type": "function_call", "call_id": "t1", "name": "search", "arguments": '{"q": "sun"}'}
    streams: dict[str, list[dict[str, Any]]] = {
        "messages": [
            {"type": "message_start", "message": {"id": 7, "usage": "?"}},
            {"type": "content_block_start", "index": 1, "content_block": tool},
            {
                "type": "content_block_start",
                "index": 0,
                "content_block": {"type": "text", "text": ""},
            },
            {"type": "content_block_delta", "index": 1, "delta": {"partial_json": '{"q": '}},
            {
                "type": "content_block_delta",
                "index": 0,
                "delta": {"type": "text_delta", "text": "Sunny."},
            },
            {"type": "content_block_delta", "index": 1, "delta": {"partial_json": '"sun"}'}},
            {
                "type": "message_delta",
                "delta": {"stop_reason": "tool_use"},
                "usage": {"output_tokens": "9"},
            },
        ],
        "responses": [
            {"type": "response.created", "response": {"id": "r", "output": []}},
            {
                "type": "response.output_item.added",
                "output_index": 0,
                "item": message | {"content": []},
            },
            {"type": "response.output_text.delta", "output_index": 0, "delta": "Sun"},
            {"type": "response.output_item.done", "output_index": 1, "item": call},
            {"type": "response.output_text.delta", "output_index": 0, "delta": "ny."},
            {
                "type": "response.completed",
                "response": {"id": "r", "output": [], "usage": {"output_tokens": 9.0}},
            },
        ],
    }
    sent = "".join(f"data: {json.dumps(event)}\n\n" for event in streams[path])

    async def answer(request: Request) -> Response:
        return Response(sent, media_type="text/event-stream")

    kind: Kind = "anthropic" if path == "messages" else "openai"
    app = Starlette(routes=[Route(f"/v1/{path}", answer, methods=["POST"])])
    async with serving(app) as url:
        backend = HttpBackend(f"{url}/v1", kind=kind)
        async with (
            fronting(ModelEntry("hosted", backend, trainable=False)) as front,
            aiohttp.ClientSession() as session,
        ):
            asked = {"model": "hosted", "stream": True, "messages": user("x"), "input": "x"}
            async with session.post(f"{front.url}/v1/{path}", json=asked) as received:
                assert await received.text() == sent
            await front.gateway.close()
            (span,) = await front.store.query_spans(UNATTRIBUTED)
    (recorded,) = json.loads(str(span.attributes[semconv.GEN_AI_OUTPUT_MESSAGES]))
    assert recorded["content"] == "Sunny." and span.attributes[semconv.GEN_AI_OUTPUT_TOKENS] == 9
    (called,) = recorded["tool_calls"]
    assert json.loads(called["function"]["arguments"]) == {"q": "sun"}


@pytest.mark.parametrize(
    "odd",
    [
        {"usage": {"input_tokens": "?"}},
        {"output": 3},
        {"output": [{"type": "message", "content": ["?"]}]},
        {"status": []},
    ],
)
async def test_an_answer_in_an_unknown_form_is_passed_on_all_the_same(odd: dict[str, Any]) -> None:
    hosted = Hosted()
    hosted.answered = odd
    async with before(hosted) as front, aiohttp.ClientSession() as session:
        async with session.post(
            f"{front.url}/v1/responses", json={"model": "hosted", "input": "hello"}
        ) as answer:
            assert (answer.status, await answer.json()) == (200, odd)
        await front.gateway.close()
        assert len(await front.store.query_spans(UNATTRIBUTED)) == 1


async def test_what_a_backend_says_of_its_own_key_reaches_no_agent() -> None:
    hosted = Hosted()
    hosted.status = 400
    async with before(hosted) as front, aiohttp.ClientSession() as session:
        for path in ("responses", "embeddings"):
            asked = {"model": "hosted", "input": "hello", "stream": path == "responses"}
            async with session.post(f"{front.url}/v1/{path}", json=asked) as answer:
                said = await answer.text()
                assert (
                    answer.status == 400 and "the key [key]" in said and "backend-key" not in said
                )
        await front.gateway.close()
        assert "backend-key" not in str(await front.store.query_spans(UNATTRIBUTED))
