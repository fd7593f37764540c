"""SGLang as a backend: a server that answers as SGLang 0.5 does, whose tokens are the talker's
own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from agentlightning.arrays import float32
from agentlightning.engine.service import EngineService
from agentlightning.errors import BackendError, ConfigError
from agentlightning.gateway.backend import Delta, Sampling
from agentlightning.gateway.backends.factory import make_backend
from agentlightning.gateway.backends.tokens import TRUNCATED, SglangBackend
from agentlightning.gateway.chat.token_backend import TokenBackend
from agentlightning.gateway.generation import SampledToken
from agentlightning.gateway.probe import probe
from agentlightning.gateway.request import NEUTRAL_PENALTIES
from tests.gateway.backends.engines import answered, chat_call, check_parity, named, sampled
from tests.gateway.talker import SEARCH_TOOL, make_talker
from tests.gateway.world import serving, talking

pytestmark = pytest.mark.anyio


class Sglang:
    """`/generate` and `/abort_request` as SGLang answers them; `changes` are made to each
    `meta_info`. While it is not `going` it says no more than a first chunk, until it is told to
    abort."""

    def __init__(self, service: EngineService) -> None:
        self.service = service
        self.incremental = False
        self.changes: dict[str, Any] = {}
        self.refusal: Response | None = None
        self.asked: list[dict[str, Any]] = []
        self.aborted: list[str] = []
        self.begun = asyncio.Event()
        self.going = asyncio.Event()
        self.going.set()

    async def generate(self, request: Request) -> Response:
        asked = await request.json()
        self.asked.append(asked)
        self.begun.set()
        if self.refusal is not None:
            return self.refusal
        if asked["stream"]:
            return StreamingResponse(self._stream(asked), media_type="text/event-stream")
        sampled = [token async for token in self._sampled(asked)]
        await self.going.wait()
        answer = self._output(asked, sampled, 0)
        if asked["rid"] in self.aborted:
            answer["meta_info"] |= {"finish_reason": {"type": "abort", "message": "Aborted"}}
        return JSONResponse(answer)

    async def abort(self, request: Request) -> Response:
        rid = (await request.json())["rid"]
        self.aborted += [asked["rid"] for asked in self.asked if asked["rid"].startswith(rid)]
        self.going.set()
        return Response(status_code=200)

    async def _stream(self, asked: dict[str, Any]) -> AsyncIterator[str]:
        sampled: list[SampledToken] = []
        sent = 0
        async for token in self._sampled(asked):
            sampled.append(token)
            # several tokens in a chunk
            if token.finish_reason is not None or len(sampled) - sent == 3:
                yield (
                    "data: "
                    f"{json.dumps(self._output(asked, sampled, sent if self.incremental else 0))}\n"
                    "\n"
                )
                sent = len(sampled)
                await self.going.wait()
        yield "data: [DONE]\n\n"

    async def _sampled(self, asked: dict[str, Any]) -> AsyncIterator[SampledToken]:
        sampling = asked["sampling_params"]
        most, seed = sampling["max_new_tokens"], sampling.get("sampling_seed")
        async with aclosing(
            sampled(self.service, asked["input_ids"], sampling, most, seed)
        ) as tokens:
            async for token in tokens:
                if asked["rid"] in self.aborted:
                    return
                yield token

    def _output(
        self, asked: dict[str, Any], sampled: list[SampledToken], start: int
    ) -> dict[str, Any]:
        """What has been sampled; lists hold what comes after `start`, counts hold everything."""
        last = sampled[-1]
        reasons = {
            "stop": {"type": "stop", "matched": last.token_id},
            "length": {"type": "length", "length": len(sampled)},
        }
        logprobs = [[token.logprob, token.token_id, None] for token in sampled]
        meta = {
            "id": asked["rid"],
            "finish_reason": None if last.finish_reason is None else reasons[last.finish_reason],
            "prompt_tokens": len(asked["input_ids"]),
            "weight_version": "default",
            "num_retractions": 0,
            "input_token_logprobs": [],
            "output_token_logprobs": logprobs[start:],
            "output_token_logprobs_length": len(sampled),
            "completion_tokens": len(sampled),
            "cached_tokens": 0,
        }
        if asked["top_logprobs_num"]:
            tops = [[[entry[0], entry[1], None], [-9.0, 5, None]] for entry in logprobs]
            meta["output_top_logprobs"] = tops[start:]
        ids = [token.token_id for token in sampled][start:]
        return {
            "text": make_talker().tokenizer.decode(ids),
            "output_ids": ids,
            "meta_info": meta | self.changes,
        }


@asynccontextmanager
async def connected(server: Sglang, tokenizer: str) -> AsyncIterator[SglangBackend]:
    routes = [Route(f"/{one.__name__}", one, methods=["POST"]) for one in (server.generate,)]
    routes.append(Route("/abort_request", server.abort, methods=["POST"]))
    async with serving(Starlette(routes=routes)) as url:
        backend = make_backend(f"{url}/v1", kind="sglang", tokenizer=tokenizer)
        assert isinstance(backend, SglangBackend)
        yield backend
        await backend.close()


@pytest.fixture
async def world(tokenizer: str) -> AsyncIterator[tuple[SglangBackend, Sglang, TokenBackend]]:
    """The backend, the server behind it, and the server's own engine as a backend."""
    async with talking() as (embedded, service):
        server = Sglang(service)
        async with connected(server, tokenizer) as backend:
            yield backend, server, embedded


Setting = tuple[SglangBackend, Sglang, TokenBackend]


@pytest.mark.parametrize(("stream", "incremental"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("text", ["signs", "weather", "broken"])
async def test_answers_are_those_of_the_same_engine_embedded(
    world: Setting, text: str, stream: bool, incremental: bool
) -> None:
    backend, server, embedded = world
    server.incremental = incremental
    await check_parity(backend, embedded, text, stream)
    assert server.aborted == []


async def test_every_choice_is_a_request_with_a_seed_of_its_own(world: Setting) -> None:
    backend, server, embedded = world
    call = chat_call(sampling=Sampling(temperature=2.0, max_tokens=8, seed=1, n=3))
    ours, expected = await answered(backend, call), await answered(embedded, call)
    assert [choice.token_ids for choice in ours.choices] == [
        choice.token_ids for choice in expected.choices
    ]
    assert len({asked["sampling_params"]["sampling_seed"] for asked in server.asked}) == 3
    assert len({asked["rid"] for asked in server.asked}) == 3


async def test_what_an_answer_must_be_is_told_as_a_structural_tag(world: Setting) -> None:
    backend, server, _ = world
    forced = chat_call(
        "weather", tools=[SEARCH_TOOL], tool_choice="required", extra={"parallel_tool_calls": False}
    )
    assert (await answered(backend, forced)).choices[0].untrainable == "constrained by a grammar"
    told = json.loads(server.asked[0]["sampling_params"]["structural_tag"])["format"]
    (tag,) = told["tags"]
    assert (told["type"], told["at_least_one"], told["stop_after_first"]) == (
        "tags_with_separator",
        True,
        True,
    )
    assert (tag["begin"], tag["end"]) == (
        '<tool_call>\n{"name": "search", "arguments": ',
        "}\n</tool_call>",
    )
    assert tag["content"]["json_schema"] == SEARCH_TOOL["function"]["parameters"]


async def test_nothing_of_the_sampling_is_left_to_the_server(world: Setting) -> None:
    backend, server, _ = world
    await answered(backend, chat_call(sampling=Sampling(temperature=0.5, max_tokens=4)))
    (asked,) = server.asked
    end = make_talker().tokenizer.eos_token_id
    asked_for = {
        "max_new_tokens": 4,
        "temperature": 0.5,
        "top_p": 1.0,
        "top_k": -1,
        "stop_token_ids": [end],
    }
    assert asked["sampling_params"] == asked_for | dict(NEUTRAL_PENALTIES)
    assert (asked["return_logprob"], asked["logprob_start_len"], asked["stream"]) == (
        True,
        -1,
        False,
    )


async def test_answers_sampled_with_top_p_or_top_k_are_flagged_and_not_trained(
    world: Setting,
) -> None:
    for sampling in (Sampling(top_p=0.9, max_tokens=2), Sampling(top_k=3, max_tokens=2)):
        assert (await answered(world[0], chat_call(sampling=sampling))).choices[
            0
        ].untrainable == TRUNCATED
        with pytest.raises(ConfigError, match="from before top_p and top_k"):
            await probe(world[0], "policy", sampling)
    greedy = Sampling(temperature=0.0, top_p=0.9, max_tokens=2)
    assert (await answered(world[0], chat_call(sampling=greedy))).choices[0].untrainable is None
    await probe(world[0], "policy", Sampling(temperature=0.7))


@pytest.mark.parametrize("stream", [False, True])
async def test_the_likeliest_tokens_are_told(world: Setting, stream: bool) -> None:
    answer = await answered(world[0], chat_call(logprobs=True, top_logprobs=2, stream=stream))
    entries = answer.choices[0].logprob_entries
    assert float32(entry["logprob"] for entry in entries) == answer.choices[0].logprobs
    assert {len(entry["top_logprobs"]) for entry in entries} == {2}
    assert all(entry["top_logprobs"][0]["token"] == entry["token"] for entry in entries)


@pytest.mark.parametrize(
    ("told", "versions"),
    [
        ({"weight_version": "default"}, [[4, 18]]),
        ({"weight_version": "7"}, [[7, 18]]),
        (
            {"weight_version": "7", "weight_versions": [named("6", 0, 5), named("7", 5, 18)]},
            [[6, 5], [7, 13]],
        ),
    ],
)
async def test_weight_versions_are_policy_versions(
    world: Setting, told: dict[str, Any], versions: list[list[int]]
) -> None:
    backend, server, _ = world
    backend.connection.version = 4
    server.changes = told
    choice = (await answered(backend, chat_call("count", stream=True))).choices[0]
    assert len(choice.token_ids) == 18
    assert choice.versions == versions


async def test_a_stop_string_ends_the_answer_and_aborts_the_request(world: Setting) -> None:
    backend, server, _ = world
    call = chat_call("count", sampling=Sampling(temperature=0.0, stop=("4",)))
    answer = await answered(backend, call)
    assert answer.choices[0].string("content") == "1 2 3 "
    assert (answer.choices[0].stop_string, answer.choices[0].untrainable) == ("4", None)
    assert make_talker().tokenizer.decode(answer.choices[0].token_ids) == "1 2 3 4"
    assert server.aborted == [server.asked[0]["rid"]]


@pytest.mark.parametrize(("n", "stream"), [(1, True), (3, True), (1, False)])
async def test_leaving_a_call_aborts_its_requests(world: Setting, n: int, stream: bool) -> None:
    backend, server, _ = world
    server.going.clear()
    call = chat_call("count", sampling=Sampling(temperature=0.0, n=n), stream=stream)
    if stream:
        async with aclosing(backend.answer(call)) as events:
            async for event in events:
                if isinstance(event, Delta):
                    break
    else:
        waiting = asyncio.create_task(answered(backend, call))
        await server.begun.wait()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert sorted(server.aborted) == sorted(asked["rid"] for asked in server.asked)


TOO_LONG = "The input (600 tokens) is longer than the model's context length (512 tokens)."
IN_STREAM = {
    "error": {"message": TOO_LONG, "type": "invalid_request_error", "code": 400, "retryable": False}
}


@pytest.mark.parametrize(
    ("stream", "refusal"),
    [
        (False, JSONResponse({"error": {"message": TOO_LONG}}, 400)),
        (
            True,
            Response(
                f"data: {json.dumps(IN_STREAM)}\n\ndata: [DONE]\n\n", media_type="text/event-stream"
            ),
        ),
    ],
)
async def test_a_refusal_comes_before_anything_is_said(
    world: Setting, stream: bool, refusal: Response
) -> None:
    world[1].refusal = refusal
    async with aclosing(world[0].answer(chat_call(stream=stream))) as events:
        with pytest.raises(BackendError, match="longer than the model's context") as caught:
            await anext(events)
    assert caught.value.status == 400


ABORT = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("told", "status", "says"),
    [
        ({"finish_reason": ABORT, "completion_tokens": 0}, 503, "Aborted"),
        (
            {"finish_reason": {**ABORT, "message": "wrong input", "status_code": 400}},
            400,
            "wrong input",
        ),
        ({"finish_reason": {"type": "stop", "matched": "NaN happened"}}, 503, "NaN happened"),
        ({"prompt_tokens": 3}, 400, "read 3 tokens"),
        ({"output_token_logprobs": []}, 502, "returned the logprobs of 0"),
        ({"finish_reason": None}, 502, "before the last token"),
        ({"completion_tokens": "many"}, 502, "no answer of /generate"),
    ],
)
async def test_an_answer_that_is_not_what_was_asked_for_is_an_error(
    world: Setting, told: dict[str, Any], status: int, says: str, stream: bool
) -> None:
    world[1].changes = told
    with pytest.raises(BackendError, match=says) as caught:
        await answered(world[0], chat_call(stream=stream))
    assert caught.value.status == status


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"kind": "sglang"}, "name the tokenizer"),
        (
            {"kind": "sglang", "tokenizer": "/nowhere/at/all"},
            r"no tokenizer /nowhere/at/all on this machine",
        ),
        ({"kind": "sglang", "tokenizer": "."}, "cannot be read"),
        ({"kind": "sglang", "tokenizer": "/nowhere", "model": "m"}, "leave model out"),
        ({"kind": "azure", "tokenizer": "/nowhere"}, "leave tokenizer out"),
        ({"kind": "ollama"}, "no kind of backend"),
    ],
)
def test_settings_that_do_not_fit_the_kind_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make_backend("http://127.0.0.1:9", **settings)
