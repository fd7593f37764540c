"""On-policy distillation: its advantages are transformers' own log-ratios, wherever the teacher is;
and it trains."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import agentlightning as agl
from agentlightning.config import make_algorithm
from agentlightning.data.credit import RewardedGroup
from agentlightning.data.transitions import Transition
from agentlightning.errors import ConfigError, TrainingError
from agentlightning.learner.policy import Policy
from agentlightning.learner.teacher import open_teacher
from agentlightning.learner.tiny import make_model, make_tokenizer
from tests import agents
from tests.gateway.world import serving
from tests.test_trainer import TASKS, policy, trainer
from tests.transitions import transition

pytestmark = pytest.mark.anyio


def call(rollout: str, index: int, prompt: list[int], answer: list[int]) -> Transition:
    logprobs = -np.arange(1, len(answer) + 1, dtype=np.float32)
    return transition(prompt, answer, rollout_id=rollout, call_index=index, logprobs=logprobs)


def group() -> RewardedGroup:
    """Two rollouts: of two turns, of which the second extends the first, and of one."""
    turns = [call("a", 0, [5, 6, 7], [8, 9]), call("a", 1, [5, 6, 7, 8, 9, 10], [11, 12, 13])]
    return RewardedGroup([turns, [call("b", 0, [20, 21], [22])]], [1.0, 0.0])


def expected(model: Any, one: Transition) -> np.ndarray:
    """log p_teacher − log p_student of each sampled token, by transformers alone."""
    ids = np.concatenate([one.prompt_ids, one.response_ids]).astype(np.int64)
    with torch.no_grad():
        found = torch.log_softmax(
            model(input_ids=torch.from_numpy(ids)[None]).logits[0].float(), -1
        )
    places = range(len(one.prompt_ids) - 1, len(ids) - 1)
    return np.array([found[place, ids[place + 1]] for place in places], np.float32) - one.logprobs


def opened(teacher: Policy, **settings: Any) -> agl.OPD:
    distilled = agl.OPD(teacher=teacher, **settings)
    distilled._teacher = open_teacher(teacher, None)
    return distilled


@pytest.mark.parametrize("level", ["trajectory", "transition", "tree"])
def test_an_advantage_is_the_log_ratio_of_teacher_and_student(level: Any) -> None:
    teacher = policy(seed=7)
    distilled = opened(teacher, level=level, teacher_coefficient=0.5)
    credited = distilled.credited([group()])[0]
    ratios = []
    for calls in credited:
        for item in calls:
            ratio = expected(teacher.model, item.transition)
            np.testing.assert_allclose(item.advantages, 0.5 * ratio, atol=1e-4)
            ratios.append(ratio)
    assert distilled.measured["teacher_kl"] == pytest.approx(
        -np.concatenate(ratios).mean(), abs=1e-4
    )


def test_it_is_added_to_what_rewards_are_worth() -> None:
    teacher = policy(seed=7)
    both = opened(teacher, reward_coefficient=2.0, baseline="grpo", group_size=2).credited(
        [group()]
    )[0]
    rewards = agl.GRPO(group_size=2).credited([group()])[0]
    for calls, rewarded in zip(both, rewards, strict=True):
        for item, reward in zip(calls, rewarded, strict=True):
            told = expected(teacher.model, item.transition) + 2 * reward.advantages
            np.testing.assert_allclose(item.advantages, told, atol=1e-4)


# --- servers --------------------------------------------------------------------------------------


class Scoring:
    """Scores prompts by transformers, in the words of vLLM."""

    def __init__(self, teacher: Policy) -> None:
        self.teacher = teacher
        self.url = ""
        self.keys: list[str | None] = []

    async def models(self, request: Request) -> JSONResponse:
        return JSONResponse({"data": [{"id": "big"}]})

    async def tokenize(self, request: Request) -> JSONResponse:
        tokenizer: Any = self.teacher.tokenizer
        tokens = tokenizer.backend_tokenizer.encode(
            (await request.json())["prompt"], add_special_tokens=False
        )
        return JSONResponse({"tokens": tokens.ids})

    async def score(self, request: Request) -> JSONResponse:
        self.keys.append(request.headers.get("authorization"))
        ids = (await request.json())["prompt"]
        if len(ids) > 100:
            return JSONResponse({"message": "at most 100 tokens"}, 400)
        with torch.no_grad():
            logprobs = torch.log_softmax(
                self.teacher.model(input_ids=torch.tensor([ids])).logits[0].float(), -1
            )
        entries = [
            {str(token): {"logprob": float(logprobs[place, token])}}
            for place, token in enumerate(ids[1:])
        ]
        return JSONResponse({"choices": [{"prompt_logprobs": [None, *entries]}]})


@asynccontextmanager
async def scoring(teacher: Policy) -> AsyncGenerator[Scoring]:
    server = Scoring(teacher)
    routes = [
        Route("/v1/models", server.models),
        Route("/tokenize", server.tokenize, methods=["POST"]),
    ]
    routes.append(Route("/v1/completions", server.score, methods=["POST"]))
    async with serving(Starlette(routes=routes)) as server.url:
        yield server


async def test_a_server_gives_the_same() -> None:
    teacher = policy(seed=7)
    distilled = agl.OPD(teacher=teacher)
    async with scoring(teacher) as server:
        asked = {"vllm": f"{server.url}/v1", "api_key": "secret"}
        distilled._teacher = await asyncio.to_thread(open_teacher, asked, policy().token_bytes)
        credited = await asyncio.to_thread(distilled.credited, [group()])
    for calls in credited[0]:
        for item in calls:
            np.testing.assert_allclose(
                item.advantages, expected(teacher.model, item.transition), atol=1e-4
            )
    assert set(server.keys) == {"Bearer secret"}


async def test_a_run_uses_its_server_and_does_not_keep_the_key(tmp_path: Path) -> None:
    async with scoring(policy(seed=7)) as server:
        chosen = agl.OPD(
            teacher={"vllm": server.url, "api_key": "sk-key-of-the-teacher"},
            steps=1,
            tasks_per_step=2,
        )
        result = await asyncio.to_thread(
            trainer(tmp_path, algorithm=chosen).fit, agents.vowels, TASKS
        )
    assert result.metrics[-1].values["teacher_kl"] > 0
    written = [file for file in result.directory.rglob("*") if file.is_file()]
    assert written and not [file for file in written if b"key-of-the-teacher" in file.read_bytes()]


async def test_what_a_server_cannot_do_is_reported_before_the_run_or_ends_it() -> None:
    async with scoring(policy(seed=7)) as server:
        other = make_tokenizer(["other words altogether"] * 3, 300)
        strange = Policy(make_model(other, seed=0), other).token_bytes
        with pytest.raises(ConfigError, match="same family"):
            await asyncio.to_thread(open_teacher, server.url, strange)
        distilled = agl.OPD(teacher=server.url)
        distilled._teacher = await asyncio.to_thread(open_teacher, server.url, None)
        long = RewardedGroup([[call("a", 0, [5] * 100, [8])]], [0.0])
        with pytest.raises(TrainingError, match="at most 100 tokens"):
            await asyncio.to_thread(distilled.credited, [long])
    with pytest.raises(TrainingError, match="--resume continues"):
        await asyncio.to_thread(distilled.credited, [group()])
    with pytest.raises(ConfigError, match="cannot score sampled tokens"):
        await asyncio.to_thread(open_teacher, server.url, None)


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "teacher is missing"),
        ({"teacher": {"vlm": "http://a"}}, "vllm: http"),
        ({"teacher": {"vllm": "localhost:8000"}}, "names no server"),
        ({"teacher": "big", "temperature": 0.7}, "temperature 1"),
        ({"teacher": "big", "dynamic_sampling": True}, "learns from any group"),
        ({"teacher": "big", "baseline": "grpo", "reward_coefficient": 1.0}, "needs at least 2"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_algorithm({"name": "opd", **settings})
