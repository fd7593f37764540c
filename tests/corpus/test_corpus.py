"""What agents that people use send is answered, whoever answers: `tests/corpus/*.jsonl`, which
`add.py` writes. `protocol-kinds.jsonl` has a request of each kind of item, part and tool that
agents send."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from agentlightning import semconv
from agentlightning.engine.engine import Engine
from agentlightning.engine.service import EngineService
from agentlightning.gateway.backend import Backend, Sampling
from agentlightning.gateway.backends.factory import make_backend
from agentlightning.gateway.chat.template import ChatTemplate
from agentlightning.gateway.chat.token_backend import TokenBackend
from agentlightning.gateway.models import ModelEntry
from agentlightning.learner.tiny import make_model, make_tokenizer
from agentlightning.types import Mode
from tests.gateway.backends.test_sglang import Sglang
from tests.gateway.upstream import GOOD, Upstream
from tests.gateway.world import World, fronting, serving

pytestmark = pytest.mark.anyio

HERE = Path(__file__).parent
LONG = 65_536
MODES: tuple[Mode, ...] = ("train", "val")
SHORT = Sampling(temperature=0.0, max_tokens=2)
LAST = {  # what a stream of each protocol ends with
    "chat/completions": ("[DONE]",),
    "messages": ("message_stop",),
    "responses": ("response.completed", "response.incomplete"),
    "": ("finishReason",),
}


def requests_of(agent: str) -> list[dict[str, Any]]:
    """The agent's requests, each with its tools and for the model `policy`."""
    head, *requests = map(
        json.loads, (HERE / f"{agent}.jsonl").read_text(encoding="utf-8").splitlines()
    )
    for request in requests:
        body = request["body"]
        if "tools" in body:
            body["tools"] = [head["tools"][number] for number in body["tools"]]
        if "model" in body:
            body["model"] = "policy"
    return requests


AGENTS = sorted(path.stem for path in HERE.glob("*.jsonl"))


def _protocol(path: str) -> str:
    return next(protocol for protocol in LAST if path.partition("?")[0].endswith(protocol))


# --- who answers ----------------------------------------------------------------------------------


@cache
def policy() -> tuple[Any, Any]:
    """A tiny policy with room for the prompts of these agents, and its tokenizer."""
    text = "".join((HERE / f"{agent}.jsonl").read_text(encoding="utf-8") for agent in AGENTS)
    tokenizer = make_tokenizer(
        [text[start : start + 200] for start in range(0, len(text), 200)], 2048
    )
    return make_model(tokenizer, seed=0, max_positions=LONG), tokenizer


@contextmanager
def engine() -> Iterator[EngineService]:
    model, tokenizer = policy()
    service = EngineService(
        Engine(model, eos_token_ids=[tokenizer.eos_token_id], max_sequence_length=LONG, slots=4)
    )
    service.start()
    yield service
    service.close()


class Hosted(Upstream):
    """An API of a provider, which speaks chat completions, responses and messages."""

    async def own(self, request: Request) -> Response:
        self.asked.append(await request.json())
        kind = LAST[_protocol(request.url.path)][0]
        said = {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Hi!"}],
        }
        response = {"id": "r", "object": "response", "status": "completed", "output": [said]}
        if not self.asked[-1].get("stream"):
            return JSONResponse(response)
        event = json.dumps(
            {"type": kind, **({"response": response} if kind.startswith("response") else {})}
        )
        return StreamingResponse(
            iter([f"event: {kind}\ndata: {event}\n\n"]), media_type="text/event-stream"
        )


@asynccontextmanager
async def answering(kind: str, directory: Path) -> AsyncIterator[Backend]:
    _, tokenizer = policy()
    if kind == "embedded":
        with engine() as service:
            chat = ChatTemplate.from_pretrained(tokenizer)
            yield TokenBackend(chat, service, name="embedded", max_sequence_length=LONG)
    elif kind == "sglang":
        tokenizer.save_pretrained(directory)
        with engine() as service:
            server = Sglang(service)
            routes = [Route("/generate", server.generate, methods=["POST"])]
            routes.append(Route("/abort_request", server.abort, methods=["POST"]))
            async with connected(routes, kind, tokenizer=str(directory)) as backend:
                yield backend
    else:
        upstream = Hosted(GOOD)
        routes = [Route("/v1/chat/completions", upstream.answer, methods=["POST"])]
        if kind != "chat only":
            routes += [
                Route(f"/v1/{path}", upstream.own, methods=["POST"])
                for path in ("responses", "messages")
            ]
        async with connected(routes, "openai" if kind == "chat only" else kind) as backend:
            yield backend


@asynccontextmanager
async def connected(routes: list[Route], kind: Any, **options: Any) -> AsyncIterator[Backend]:
    async with serving(Starlette(routes=routes)) as url:
        backend = make_backend(f"{url}/v1", kind=kind, **options)
        yield backend
        await backend.close()


@asynccontextmanager
async def gateway(kind: str, directory: Path) -> AsyncIterator[World]:
    async with answering(kind, directory / "tokenizer") as backend:
        own = backend.captures_tokens
        decided = SHORT if own else None
        async with fronting(
            ModelEntry("policy", backend, trainable=own, train=decided, val=decided)
        ) as built:
            yield built


# --- what they say --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["embedded", "vllm", "sglang", "openai", "chat only", "anthropic"])
async def test_every_request_is_answered(kind: str, tmp_path: Path) -> None:
    problems: list[str] = []
    async with gateway(kind, tmp_path) as there, aiohttp.ClientSession() as session:
        for agent in AGENTS:
            for number, request in enumerate(requests_of(agent)):
                if kind == "anthropic" and _protocol(request["path"]) != "messages":
                    continue  # nobody points an agent of another protocol there
                for mode in MODES:
                    problem = await _problem(there, session, request, mode)
                    problems += [f"{agent} {number} {mode}: {problem}"] if problem else []
    assert not problems, "\n".join(problems)


async def _problem(
    there: World, session: aiohttp.ClientSession, request: dict[str, Any], mode: Mode
) -> str | None:
    """What is wrong with the answer to a request, or with what is recorded of it."""
    attempted = await there.attempt(mode)
    key = attempted.api_key or "EMPTY"
    place = f"{there.url}/rollout/{attempted.rollout_id}/attempt/{attempted.attempt.attempt_id}{request['path']}"
    headers = request["headers"] | {
        "authorization": f"Bearer {key}",
        "x-api-key": key,
        "x-goog-api-key": key,
    }
    async with session.post(place, json=request["body"], headers=headers) as response:
        text = await response.text()
    if response.status != 200:
        return f"{response.status} {text[:300]}"
    if response.content_type != "text/event-stream":
        answer = json.loads(text)
        if answer.get("error") or not any(
            answer.get(name) for name in ("choices", "output", "content", "candidates")
        ):
            return f"answers {text[:300]}"
    else:
        events = [
            line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")
        ]
        if any("error" in json.loads(event) for event in events if event != "[DONE]"):
            return f"an error in the stream: {text[-300:]}"
        if not any(last in events[-1] for last in LAST[_protocol(request["path"])]):
            return f"ends with {events[-1][:200]}"
    (span,) = await there.spans(attempted)
    trains = there.gateway.entry("policy").trainable and mode == "train"
    exact = (
        span.tokens is not None and span.tokens.choices and semconv.CALL_FLAG not in span.attributes
    )
    if trains and not exact:
        return f"is not trainable: {span.attributes.get(semconv.CALL_FLAG)}"
    return None
