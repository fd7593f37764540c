"""A judge is a model that scores; it is never trained, and what it costs is recorded."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from agentlightning import rewards, semconv
from agentlightning.data.transitions import trace_rollout
from agentlightning.errors import BackendError, ConfigError
from agentlightning.gateway.backends.http import HttpBackend
from agentlightning.gateway.models import ModelEntry
from agentlightning.rewards import chat_completion
from agentlightning.tracing.context import AttemptTracer, bind, recording
from agentlightning.types import LLM, PromptTemplate
from tests.gateway.world import World, serving, world

pytestmark = pytest.mark.anyio
VALUES = {"question": "1+1?", "reference": "2", "answer": "{two}"}


class JudgingServer:
    """Gives these answers, call by call: texts, or statuses."""

    url = ""

    def __init__(self) -> None:
        self.answers: list[str | int] = ["Score: 7"]
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []

    async def answer(self, request: Request) -> JSONResponse:
        self.asked.append(await request.json())
        self.keys.append(request.headers.get("Authorization"))
        text = self.answers[min(len(self.asked), len(self.answers)) - 1]
        if isinstance(text, int):
            return JSONResponse({"error": {"message": "not now"}}, text)
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text},
            "finish_reason": "stop",
        }
        usage = {"prompt_tokens": 30, "completion_tokens": 4, "total_tokens": 34}
        about = {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1,
            "model": "judge-2026",
        }
        return JSONResponse(about | {"choices": [choice], "usage": usage})

    def judge(self, **options: Any) -> rewards.LLMJudge:
        return rewards.LLMJudge(LLM(endpoint=self.url, model="judge"), **options)


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[JudgingServer]:
    monkeypatch.setattr(chat_completion, "WAITS", (0.01, 0.01))
    judging = JudgingServer()
    async with serving(
        Starlette(routes=[Route("/v1/chat/completions", judging.answer, methods=["POST"])])
    ) as url:
        judging.url = f"{url}/v1"
        yield judging


@pytest.fixture
async def behind_gateway(tmp_path: Path, server: JudgingServer) -> AsyncIterator[World]:
    """A gateway with a policy, and with the judging server as a frozen model called `judge`."""
    async with world(tmp_path) as built:
        backend = HttpBackend(server.url, kind="openai")
        built.gateway.models.put(
            ModelEntry("judge", backend, trainable=False, train=None, val=None)
        )
        yield built
        await backend.close()


async def test_the_score_is_read_and_scaled(server: JudgingServer) -> None:
    llm = LLM(
        endpoint=server.url, model="judge", api_key="secret", sampling_parameters={"temperature": 0}
    )
    assert await rewards.LLMJudge(llm).score(**VALUES) == 0.7
    asked = server.asked[0]
    assert (asked["model"], asked["temperature"], server.keys[0]) == ("judge", 0, "Bearer secret")
    assert "N from 0 to 10" in asked["messages"][0]["content"]
    assert asked["messages"][1]["content"].endswith("Answer to be judged:\n{two}")


async def test_the_template_and_the_scale_are_the_users(server: JudgingServer) -> None:
    server.answers = ["I would say score 1, no: **Score:** 4"]
    template = PromptTemplate(template="Is {{ x }} kind?", engine="jinja")
    judge = server.judge(template=template, worst=1, best=5)
    assert await judge.score(x="this") == 0.75
    assert server.asked[0]["messages"][1]["content"] == "Is this kind?"
    assert server.keys == [None]
    with pytest.raises(ConfigError, match="cannot fill"):
        await judge.score(y="this")


@pytest.mark.parametrize("said", ["Good!", "Score: 11", "Score: -1", ""])
async def test_an_answer_without_a_score_is_the_judges_failure(
    server: JudgingServer, said: str
) -> None:
    server.answers = [said]
    with pytest.raises(BackendError, match="gave no score from 0 to 10"):
        await server.judge().score(**VALUES)


async def test_a_judge_that_is_busy_is_asked_again_and_one_that_refuses_is_not(
    server: JudgingServer,
) -> None:
    judge = server.judge()
    server.answers = [429, 503, "Score: 10"]
    assert await judge.score(**VALUES) == 1.0
    server.answers, server.asked = [401], []
    with pytest.raises(BackendError, match=r"answered 401.*not now"):
        await judge.score(**VALUES)
    assert len(server.asked) == 1


async def test_a_judge_nobody_serves_is_named(server: JudgingServer) -> None:
    with pytest.raises(BackendError, match=r"127.0.0.1:1/v1/chat/completions cannot be reached"):
        await rewards.LLMJudge(LLM(endpoint="http://127.0.0.1:1/v1", model="judge")).score(**VALUES)


async def test_outside_the_gateway_the_judge_records_its_cost_itself(server: JudgingServer) -> None:
    with recording() as tracer:
        await server.judge().score(**VALUES)
    (span,) = tracer.get_last_trace()
    assert span.name == "agentlightning.operation"
    assert span.attributes["agentlightning.operation.name"] == "judge"
    assert (
        span.attributes[semconv.GEN_AI_INPUT_TOKENS],
        span.attributes[semconv.GEN_AI_OUTPUT_TOKENS],
    ) == (30, 4)
    assert span.attributes[semconv.GEN_AI_RESPONSE_MODEL] == "judge-2026"
    assert span.attributes[f"{semconv.OPERATION_OUTPUT}.answer"] == "Score: 7"
    assert span.attributes[f"{semconv.OPERATION_OUTPUT}.score"] == 0.7


async def test_a_judge_behind_the_gateway_is_counted_once_never_trained_and_not_replaced_by_the_policy(
    behind_gateway: World,
) -> None:
    attempted = await behind_gateway.attempt()
    ids = attempted.rollout_id, attempted.attempt.attempt_id
    url = f"{behind_gateway.url}/rollout/{ids[0]}/attempt/{ids[1]}/v1"
    tracer = AttemptTracer(*ids)
    with bind(tracer):
        assert (
            await rewards.LLMJudge(
                LLM(endpoint=url, model="judge", api_key=attempted.api_key)
            ).score(**VALUES)
            == 0.7
        )
    (own,) = tracer.get_last_trace()
    assert semconv.GEN_AI_INPUT_TOKENS not in own.attributes
    (call,) = await behind_gateway.spans(attempted)
    assert (
        call.attributes[semconv.GEN_AI_INPUT_TOKENS],
        call.attributes[semconv.CALL_TRAINABLE],
    ) == (30, False)
    unknown = rewards.LLMJudge(LLM(endpoint=url, model="jugde", api_key=attempted.api_key))
    with bind(tracer), pytest.raises(BackendError, match=r"calls of 'policy' out of training"):
        await unknown.score(**VALUES)


async def test_a_call_of_the_policy_that_a_grader_says_is_frozen_is_sampled_as_asked_and_not_trained(
    behind_gateway: World,
) -> None:
    attempted = await behind_gateway.attempt()
    ids = attempted.rollout_id, attempted.attempt.attempt_id
    key = await behind_gateway.store.issue_attempt_key(*ids, rewards=True)
    client = behind_gateway.client(attempted, api_key=key)
    ask: dict[str, Any] = {
        "model": "policy",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 3,
    }
    await client.chat.completions.create(
        **ask, temperature=0.5, extra_headers={semconv.FROZEN_HEADER: "true"}
    )
    await client.chat.completions.create(**ask, temperature=0.5)
    frozen, trained = await behind_gateway.spans(attempted)
    assert frozen.attributes[semconv.GEN_AI_TEMPERATURE] == 0.5
    assert trained.attributes[semconv.GEN_AI_TEMPERATURE] == 0.0
    rollout = await behind_gateway.store.get_rollout_by_id(attempted.rollout_id)
    assert rollout is not None
    traced = trace_rollout(rollout, [frozen, trained])
    assert [transition.span_id for transition in traced.transitions] == [trained.span_id]
    assert traced.excluded == {"frozen model": 1}
