"""vLLM by token ids: a server that answers `/inference/v1/generate` as vLLM 0.32 does, whose tokens
are the talker's own, beside chat completions. `tests/learner/test_vllm.py` asks the same of the
real one."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from agentlightning.engine.service import EngineService
from agentlightning.errors import BackendError
from agentlightning.gateway.answer import Answer
from agentlightning.gateway.backend import WEIGHTS_UNKNOWN, Sampling
from agentlightning.gateway.backends.factory import make_backend
from agentlightning.gateway.backends.tokens import VllmBackend
from agentlightning.gateway.capture import untrainable_reason
from agentlightning.gateway.chat.token_backend import TokenBackend
from agentlightning.gateway.gateway import Gateway
from agentlightning.gateway.generation import SampledToken
from agentlightning.gateway.models import ModelEntry, ModelTable
from agentlightning.server.app import create_app
from agentlightning.server.serve import HttpServer
from tests.gateway.backends.engines import answered, chat_call, check_parity, named, sampled
from tests.gateway.talker import make_talker
from tests.gateway.world import talking

pytestmark = pytest.mark.anyio


class Vllm:
    """`versions` are told of each answer, `changes` made to its choice; `asked` are the requests
    for token ids."""

    def __init__(self, service: EngineService) -> None:
        self.service = service
        self.versions: list[dict[str, Any]] | None = None
        self.changes: dict[str, Any] = {}
        self.refusal: Response | None = None
        self.status = 405  # of a GET
        self.asked: list[dict[str, Any]] = []

    async def generate(self, request: Request) -> Response:
        if request.method == "GET":
            return Response(status_code=self.status)
        asked = await request.json()
        self.asked.append(asked)
        if self.refusal is not None:
            return self.refusal
        if asked["stream"]:
            return StreamingResponse(self._stream(asked), media_type="text/event-stream")
        return JSONResponse(
            {"choices": [self._choice(asked, [token async for token in self._sampled(asked)])]}
        )

    async def _stream(self, asked: dict[str, Any]) -> AsyncIterator[str]:
        async for token in self._sampled(asked):
            yield f"data: {json.dumps({'choices': [self._choice(asked, [token])]})}\n\n"
        yield "data: [DONE]\n\n"

    def _sampled(self, asked: dict[str, Any]) -> AsyncIterator[SampledToken]:
        sampling = asked["sampling_params"]
        return sampled(
            self.service,
            asked["token_ids"],
            sampling,
            sampling.get("max_tokens"),
            sampling.get("seed"),
        )

    def _choice(self, asked: dict[str, Any], tokens: list[SampledToken]) -> dict[str, Any]:
        top = asked["sampling_params"]["logprobs"]
        told = [{"token_id": one.token_id, "logprob": one.logprob, "rank": 1} for one in tokens]
        reason = tokens[-1].finish_reason
        return {
            "index": 0,
            "finish_reason": reason,
            "stop_reason": None,
            "token_ids": [token.token_id for token in tokens],
            "logprobs": {"content": [one | {"top_logprobs": [one][:top]} for one in told]},
            "weight_versions": self.versions if reason else None,
        } | (self.changes if reason else {})


Setting = tuple[VllmBackend, Vllm, TokenBackend]


@asynccontextmanager
async def connected(tokenizer: str, *, takes_ids: bool) -> AsyncIterator[Setting]:
    async with talking() as (embedded, service):
        server, gateway = Vllm(service), Gateway(ModelTable([ModelEntry("m", embedded)]))
        app = create_app(None, gateway=gateway)
        if takes_ids:
            app.routes.insert(
                0, Route("/inference/v1/generate", server.generate, methods=["GET", "POST"])
            )
        async with HttpServer(app) as http:
            backend = make_backend(f"{http.url}/v1", kind="vllm", tokenizer=tokenizer)
            assert isinstance(backend, VllmBackend)
            yield backend, server, embedded
            await backend.close()


@pytest.fixture
async def world(tokenizer: str) -> AsyncIterator[Setting]:
    async with connected(tokenizer, takes_ids=True) as setting:
        yield setting


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", ["signs", "weather", "broken"])
async def test_answers_are_those_of_the_same_engine_embedded(
    world: Setting, text: str, stream: bool
) -> None:
    backend, server, embedded = world
    await check_parity(backend, embedded, text, stream)
    assert len(server.asked) == 1 and "tools" not in server.asked[0]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("takes_ids", [False, True])
async def test_an_answer_that_a_stop_string_ends_trains(
    tokenizer: str, takes_ids: bool, stream: bool
) -> None:
    """All that was sampled is known, the tokens of the string too, which the agent does not see."""
    async with connected(tokenizer, takes_ids=takes_ids) as (backend, _, _):
        sampling = Sampling(temperature=0.0, stop=("4",))
        answer = await answered(backend, chat_call("count", sampling=sampling, stream=stream))
    (choice,) = answer.choices
    assert (choice.string("content"), choice.stop_string, choice.finish_reason) == (
        "1 2 3 ",
        "4",
        "stop",
    )
    assert make_talker().tokenizer.decode(choice.token_ids) == "1 2 3 4"
    assert (
        len(choice.logprobs) == len(choice.token_ids) and untrainable_reason(answer, True) is None
    )


async def test_the_sampling_is_said_in_full(world: Setting) -> None:
    backend, server, _ = world
    await answered(backend, chat_call(sampling=Sampling(temperature=0.5, max_tokens=4, seed=7)))
    end = make_talker().tokenizer.eos_token_id
    asked = {
        "temperature": 0.5,
        "top_p": 1.0,
        "top_k": -1,
        "max_tokens": 4,
        "seed": 7,
        "stop_token_ids": [end],
    }
    assert server.asked[0]["sampling_params"] == {**asked, "logprobs": 0, "detokenize": False}


@pytest.mark.parametrize("stream", [False, True])
async def test_the_server_says_which_weights_sampled_each_token(
    world: Setting, stream: bool
) -> None:
    backend, server, _ = world
    backend.connection.version = 4
    call = chat_call(sampling=Sampling(temperature=0.0, max_tokens=4), stream=stream)
    (plain,) = (await answered(backend, call)).choices
    assert plain.versions == [[4, len(plain.token_ids)]]
    server.versions = [named("4", 0, 1), named("5", 1, len(plain.token_ids))]
    (told,) = (await answered(backend, call)).choices
    assert told.versions == [[4, 1], [5, len(plain.token_ids) - 1]]


@pytest.mark.parametrize(("failures", "untrainable"), [(0, None), (1, WEIGHTS_UNKNOWN)])
async def test_a_call_during_which_a_load_failed_is_not_trained_and_one_whose_server_seemed_lost_is(
    world: Setting, failures: int, untrainable: str | None
) -> None:
    backend, _, _ = world
    events, answer = backend.answer(chat_call(stream=True)), Answer(1)
    answer.add(await anext(events))
    backend.connection.unusable, backend.connection.failed_loads = "the server was lost", failures
    async for event in events:
        answer.add(event)
    assert answer.choices[0].untrainable == untrainable


async def test_what_token_ids_cannot_ask_is_asked_as_a_chat(world: Setting) -> None:
    backend, server, _ = world
    answer = await answered(backend, chat_call(extra={"presence_penalty": 1.0}))
    assert answer.choices[0].untrainable == "constrained by a grammar"
    assert server.asked == []


async def test_a_server_without_the_route_renders_the_chats_itself(tokenizer: str) -> None:
    async with connected(tokenizer, takes_ids=False) as (backend, server, embedded):
        ours, expected = await answered(backend, chat_call()), await answered(embedded, chat_call())
        assert ours.choices[0].token_ids == expected.choices[0].token_ids
        assert not await backend.takes_ids() and server.asked == []


async def test_a_server_that_fails_when_it_is_asked_for_the_route_is_asked_again(
    world: Setting,
) -> None:
    backend, server, _ = world
    server.status = 503
    with pytest.raises(BackendError, match="answered 503"):
        await answered(backend, chat_call())
    server.status = 405
    assert (await answered(backend, chat_call())).choices[0].token_ids and await backend.takes_ids()


@pytest.mark.parametrize(
    ("changes", "refusal", "says"),
    [
        ({"finish_reason": "abort"}, None, "ended its answer: abort"),
        ({"token_ids": [1, 2, 3]}, None, "logprobs of other tokens"),
        ({"finish_reason": None}, None, "before the last token"),
        ({}, Response("[1, 2", 200, media_type="application/json"), "no answer of /generate"),
        ({}, JSONResponse({"error": {"message": "too long", "code": 400}}, 400), "too long"),
    ],
)
async def test_what_is_no_answer_is_refused(
    world: Setting, changes: dict, refusal: Any, says: str
) -> None:
    backend, server, _ = world
    server.changes, server.refusal = changes, refusal
    with pytest.raises(BackendError, match=says) as refused:
        await answered(backend, chat_call())
    assert says != "too long" or refused.value.status == 400
