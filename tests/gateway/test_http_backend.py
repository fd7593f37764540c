"""A remote server as a backend: our own gateway over HTTP, and servers that answer badly."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from agentlightning import semconv
from agentlightning.errors import BackendError
from agentlightning.gateway.app import Gateway
from agentlightning.gateway.backend import BackendEvent, Delta, Finished, ModelCall, Sampling, Started, Usage
from agentlightning.gateway.backends.http import HttpBackend
from agentlightning.gateway.models import ModelEntry, ModelTable
from agentlightning.store.sql import SqlStore
from tests.gateway.talker import SEARCH_TOOL, user
from tests.gateway.world import GREEDY, World, serving, world

pytestmark = pytest.mark.anyio


def chunk(*choices: dict[str, Any], **more: Any) -> str:
    body = {"id": "1", "object": "chat.completion.chunk", "choices": list(choices), **more}
    return f"data: {json.dumps(body)}\n\n"


def piece(text: str, ids: list[int], logprobs: list[float], **more: Any) -> dict[str, Any]:
    """A choice of a chunk as vLLM writes it."""
    content = [{"token": "?", "logprob": value, "bytes": None, "top_logprobs": []} for value in logprobs]
    return {"index": 0, "delta": {"content": text}, "logprobs": {"content": content}, "token_ids": ids, **more}


GOOD = [
    chunk({"index": 0, "delta": {"role": "assistant", "content": ""}}, prompt_token_ids=[1, 2, 3]),
    chunk(piece("Hi", [4], [-0.5])),
    chunk(piece("!", [5, 6], [-0.25, -0.125], finish_reason="stop", stop_reason=None)),
    chunk(usage={"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}),
    "data: [DONE]\n\n",
]


class Upstream:
    """A server that answers with the given events, or refuses; it remembers what it was asked."""

    def __init__(self, events: list[str], status: int = 200, error: Any = None) -> None:
        self.events, self.status, self.error = events, status, error
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []

    async def answer(self, request: Request) -> Response:
        self.asked.append(await request.json())
        self.headers.append(dict(request.headers))
        if self.status != 200:
            return JSONResponse(self.error, self.status)
        return StreamingResponse(self._sent(), media_type="text/event-stream")

    async def _sent(self) -> AsyncIterator[str]:
        for event in self.events:
            yield event

    @asynccontextmanager
    async def backend(self, **options: Any) -> AsyncIterator[HttpBackend]:
        app = Starlette(routes=[Route("/v1/chat/completions", self.answer, methods=["POST"])])
        async with serving(app) as url:
            backend = HttpBackend(f"{url}/v1", **options)
            try:
                yield backend
            finally:
                await backend.close()


def simple_call(**fields: Any) -> ModelCall:
    return ModelCall(**{"request_id": "r", "model": "m", "messages": user("hello"), **fields})


async def events_of(upstream: Upstream, call: ModelCall | None = None, **options: Any) -> list[BackendEvent]:
    async with upstream.backend(**options) as backend:
        return [event async for event in backend.answer(call or simple_call())]


async def test_ids_logprobs_and_usage_are_asked_for_and_read() -> None:
    upstream = Upstream(GOOD)
    events = await events_of(upstream, api_key="secret", model="upstream-name")
    assert events[0] == Started((1, 2, 3))
    deltas = [event for event in events if isinstance(event, Delta)]
    assert [token_id for delta in deltas for token_id in delta.token_ids] == [4, 5, 6]
    assert [logprob for delta in deltas for logprob in delta.logprobs] == [-0.5, -0.25, -0.125]
    assert events[-2:] == [Finished(0, "stop"), Usage(3, 3)]
    (asked,) = upstream.asked
    assert asked["model"] == "upstream-name"
    assert (asked["stream"], asked["return_token_ids"], asked["logprobs"]) == (True, True, True)
    assert upstream.headers[0]["authorization"] == "Bearer secret"


async def test_a_hosted_api_is_not_asked_for_token_ids() -> None:
    upstream = Upstream(GOOD)
    await events_of(upstream, captures_tokens=False)
    assert "return_token_ids" not in upstream.asked[0] and "logprobs" not in upstream.asked[0]


async def test_the_effective_sampling_is_sent() -> None:
    upstream = Upstream(GOOD)
    sampling = Sampling(temperature=0.5, top_p=0.9, top_k=3, max_tokens=7, stop=("x",), seed=9)
    await events_of(upstream, simple_call(sampling=sampling, tools=[SEARCH_TOOL], session="attempt"))
    asked = upstream.asked[0]
    expected = {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "max_tokens": 7, "stop": ["x"], "seed": 9, "n": 1}
    assert {name: asked[name] for name in expected} == expected
    assert asked["tools"] == [SEARCH_TOOL]


async def test_a_stop_string_and_a_grammar_are_flagged() -> None:
    stopped = [GOOD[0], chunk(piece("Hi", [4], [-0.5], finish_reason="stop", stop_reason="x")), GOOD[-1]]
    events = await events_of(Upstream(stopped))
    assert events[-1] == Finished(0, "stop", "ended by a stop string")
    events = await events_of(Upstream(GOOD), simple_call(extra={"response_format": {"type": "json_object"}}))
    assert events[-2] == Finished(0, "stop", "constrained by a grammar")


@pytest.mark.parametrize(
    ("upstream", "status", "says"),
    [
        (Upstream([], 400, {"error": {"message": "too long", "code": "context_length_exceeded"}}), 400, "too long"),
        (Upstream([], 429, {"error": {"message": "slow down"}}), 429, "slow down"),
        (Upstream([], 500, {"detail": "oops"}), 502, "oops"),
        (Upstream([], 401, {"error": {"message": "bad key"}}), 502, "key"),
        (Upstream(GOOD[:2]), 502, "before every choice"),
        (Upstream([GOOD[0], "data: {nonsense\n\n"]), 502, "no chat.completion.chunk"),
        (Upstream([GOOD[0], 'data: {"error": {"message": "gpu on fire"}}\n\n']), 502, "gpu on fire"),
    ],
)
async def test_a_failing_upstream_is_a_typed_error(upstream: Upstream, status: int, says: str) -> None:
    with pytest.raises(BackendError, match=says) as caught:
        await events_of(upstream)
    assert caught.value.status == status


async def test_an_unreachable_upstream_is_a_503_after_retries(caplog: pytest.LogCaptureFixture) -> None:
    backend = HttpBackend("http://127.0.0.1:9/v1")
    with pytest.raises(BackendError, match="cannot be reached") as caught:
        [event async for event in backend.answer(simple_call())]
    await backend.close()
    assert caught.value.status == 503
    assert "trying again" in caplog.text


@asynccontextmanager
async def gateway_before(upstream: Upstream, store: SqlStore) -> AsyncIterator[World]:
    async with upstream.backend() as backend:
        gateway = Gateway(ModelTable([ModelEntry("policy", backend, train=GREEDY)]), store)
        async with serving(Starlette(routes=gateway.routes())) as url:
            built = World(url, store, gateway, None)  # type: ignore[arg-type]
            yield built
            for client in built.clients:
                await client.close()


@pytest.mark.parametrize(
    ("events", "flag"),
    [
        (GOOD, None),
        (
            [*GOOD[:3], chunk(usage={"prompt_tokens": 3, "completion_tokens": 4}), GOOD[-1]],
            "ids and reported usage differ",
        ),
        (
            [GOOD[0], chunk(piece("Hi", [4, 5], [-0.5], finish_reason="stop")), GOOD[-1]],
            "ids and logprobs differ in length",
        ),
        (
            [chunk({"index": 0, "delta": {"content": "Hi"}, "finish_reason": "stop"}), GOOD[-1]],
            "backend returns no token ids",
        ),
    ],
)
async def test_a_call_whose_counts_disagree_is_flagged(tmp_path: Path, events: list[str], flag: str | None) -> None:
    store = await SqlStore.open(tmp_path / "store.sqlite", synchronous="NORMAL")
    async with gateway_before(Upstream(events), store) as front:
        attempted = await front.attempt()
        await front.client(attempted).chat.completions.create(model="policy", messages=user("hello"))
        (span,) = await front.spans(attempted)
        assert span.attributes.get(semconv.CALL_FLAG) == flag
    await store.close()


async def test_a_failure_in_mid_stream_reaches_the_client_and_the_span(tmp_path: Path) -> None:
    store = await SqlStore.open(tmp_path / "store.sqlite", synchronous="NORMAL")
    async with gateway_before(Upstream(GOOD[:2]), store) as front:
        attempted = await front.attempt()
        stream = await front.client(attempted).chat.completions.create(
            model="policy", messages=user("hello"), stream=True
        )
        with pytest.raises(openai.APIError, match="before every choice"):
            [chunk async for chunk in stream]
        (span,) = await front.spans(attempted)
        assert span.attributes[semconv.CALL_FLAG] == "call failed"
        assert span.tokens is not None and span.tokens.choices[0].token_ids == (4,)
    await store.close()


async def test_a_gateway_before_a_gateway_records_the_engines_ids_and_versions(tmp_path: Path) -> None:
    (tmp_path / "back").mkdir()
    async with world(tmp_path / "back", store=False) as back:
        await back.service.update_weights(5)
        store = await SqlStore.open(tmp_path / "store.sqlite", synchronous="NORMAL")
        backend = HttpBackend(f"{back.url}/v1", model="policy")
        gateway = Gateway(ModelTable([ModelEntry("front", backend, train=GREEDY)]), store)
        async with serving(Starlette(routes=gateway.routes())) as url:
            front = World(url, store, gateway, back.service)
            attempted = await front.attempt()
            answer = await front.client(attempted).chat.completions.create(
                model="front", messages=user("weather"), tools=[SEARCH_TOOL]
            )
            turns = [*user("weather"), answer.choices[0].message.model_dump()]
            turns.append({"role": "tool", "tool_call_id": turns[1]["tool_calls"][0]["id"], "content": "sunny"})
            await front.clients[0].chat.completions.create(model="front", messages=turns, tools=[SEARCH_TOOL])
            first, second = await front.spans(attempted)
            await front.clients[0].close()
        await backend.close()
        await store.close()
    assert answer.choices[0].message.tool_calls[0].function.name == "search"
    assert semconv.CALL_FLAG not in first.attributes
    choice = first.tokens.choices[0]
    assert choice.versions == ((5, len(choice.token_ids)),)
    before = (*first.tokens.prompt_token_ids, *choice.token_ids)
    assert second.tokens.prompt_token_ids[: len(before)] == before
