"""A policy that is sampled by servers of its own: what they are given, and what is noticed if they
do not take it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import agentlightning as agl
from agentlightning.errors import BackendError, ConfigError, TrainingError
from agentlightning.gateway.backend import BackendEvent, Delta, ModelCall, Sampling
from agentlightning.learner.base import Weights
from agentlightning.learner.pair_specs import SamplerSpec
from agentlightning.learner.policy import Policy, load_policy, open_policy
from agentlightning.learner.policy_config import AdamW, LoRA
from agentlightning.learner.remote import RemoteSampler
from agentlightning.learner.torch import TorchLearner
from tests import agents
from tests.gateway.backends.test_sglang import Sglang
from tests.gateway.talker import make_talker, user
from tests.gateway.world import serving, talking
from tests.learner.vllm_standin import standin
from tests.test_trainer import TASKS, algorithm, policy, trainer

pytestmark = pytest.mark.anyio


@pytest.fixture
def model(tmp_path: Path) -> Path:
    place = tmp_path / "model"
    place.mkdir()
    policy().save(place)
    return place


async def test_each_publication_is_loaded_before_its_first_token(
    tmp_path: Path, model: Path
) -> None:
    async with standin(model) as (url, server):
        settings: dict[str, Any] = {
            "model": model,
            "sampler": {"vllm": url},
            "algorithm": algorithm(temperature=1.0),
        }
        result = await trainer(tmp_path, **settings).fit_async(agents.vowels, TASKS, TASKS[:2])
        update = [
            "/pause",
            "/collective_rpc",
            "/reset_prefix_cache",
            "/update_weight_version",
            "/resume",
        ]
        assert server.told == update * 3  # the weights it begins with, and two steps
        assert [measured.step for measured in result.metrics] == [0, 1, 2]
        for step in (1, 2):
            assert result.metrics[step].values["inference_mismatch"] < 1e-3
            assert result.metrics[step].values["engine_tokens_per_second"] > 0
        trained = load_policy(result.checkpoint).model.state_dict()
        for name, tensor in server.sampler.model.state_dict().items():
            assert torch.equal(tensor, trained[name]), name


async def test_a_server_that_keeps_old_weights_is_found_out(tmp_path: Path, model: Path) -> None:
    """Before a rollout is paid for; and where it happens later, behind the first step, also of a
    resumed run."""
    async with standin(model) as (url, server):
        settings: dict[str, Any] = {
            "sampler": {"vllm": url},
            "algorithm": algorithm(steps=6, temperature=1.0),
        }
        server.loads = False
        with pytest.raises(TrainingError, match=r"does not sample with them.*restart it"):
            await trainer(
                tmp_path, model=policy(seed=1), run_dir=tmp_path / "a", **settings
            ).fit_async(agents.vowels, TASKS)
        settings |= {
            "optimizer": AdamW(learning_rate=0.02),
            "model": model,
            "run_dir": tmp_path / "b",
        }
        with pytest.raises(
            TrainingError, match=r"after step 1 .*still has the weights of version 0"
        ):
            await trainer(tmp_path, **settings).fit_async(varied, TASKS)
        server.loads = True
        settings["algorithm"] = algorithm(steps=2, temperature=1.0)
        await trainer(tmp_path, **settings).fit_async(varied, TASKS, resume=True)
        server.loads = False
        settings["algorithm"] = algorithm(steps=6, temperature=1.0)
        # where the new weights are too near to be told apart behind the step, a later step says so
        with pytest.raises(TrainingError, match=r"after step 3 .*still has the weights|differ by"):
            await trainer(tmp_path, **settings).fit_async(varied, TASKS, resume=True)


async def test_a_server_that_keeps_its_old_head_is_found_out_behind_the_first_step(
    tmp_path: Path,
) -> None:
    tied = policy()
    tied.model.config.tie_word_embeddings = True
    tied.model.tie_weights()
    place = tmp_path / "tied"
    place.mkdir()
    tied.save(place)
    async with standin(place) as (url, server):
        server.keeps_head = True
        settings: dict[str, Any] = {
            "sampler": {"vllm": url},
            "optimizer": AdamW(learning_rate=0.005),
        }
        training = trainer(
            tmp_path, model=place, algorithm=algorithm(steps=6, temperature=1.0), **settings
        )
        with pytest.raises(
            TrainingError, match=r"after step 1 .*expected at most 0.001.*tie_word_embeddings.*lora"
        ):
            await training.fit_async(varied, TASKS)


async def varied(task: Any, llm: agl.LLM, rollout: agl.Rollout) -> float:
    """Every group has something to learn from."""
    await agents.vowels(task, llm)
    return float((rollout.group_index or 0) % 2)


def test_what_is_exported_is_what_a_server_loads(tmp_path: Path, model: Path) -> None:
    learner = TorchLearner(open_policy(model, seed=0, lora=LoRA(rank=4)))
    learner.export(tmp_path / "adapter", "adapter")
    learner.export(tmp_path / "whole", "whole")
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {
        one.name for one in (tmp_path / "adapter").iterdir()
    }
    whole = load_policy(tmp_path / "whole").model.state_dict()
    assert set(whole) == set(load_policy(model).model.state_dict())
    with pytest.raises(ConfigError, match="no adapter"):
        TorchLearner(open_policy(model, seed=0)).export(tmp_path / "none", "adapter")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_at_sglang_begins_anew_with_the_new_weights(
    tmp_path: Path, stream: bool
) -> None:
    """However often they are replaced meanwhile. And one that is too long for the server is not
    sent there."""
    aborts = [asyncio.Event(), asyncio.Event()]

    async def load(request: Request) -> Response:
        if (await request.json())["abort_all_requests"]:
            aborts[len(server.asked) - 1].set()
        return JSONResponse({"success": True})

    async def generate(request: Request) -> Response:
        number = len(server.asked)
        if not calling or number >= len(aborts):
            return await server.generate(request)
        server.asked.append(asked := await request.json())
        server.begun.set()
        await aborts[number].wait()
        ended = {"type": "abort", "message": "Aborted"}
        counts = {"prompt_tokens": len(asked["input_ids"]), "completion_tokens": 0}
        return JSONResponse(
            {
                "text": "",
                "output_ids": [],
                "meta_info": {"id": asked["rid"], "finish_reason": ended, **counts},
            }
        )

    async def models(request: Request) -> Response:
        return JSONResponse({"data": [{"id": "m", "max_model_len": 40}]})

    calling = False
    async with talking() as (_, service):
        server = Sglang(service)
        posted = {"/generate": generate, "/update_weights_from_disk": load}
        routes = [Route(path, answer, methods=["POST"]) for path, answer in posted.items()]
        async with serving(Starlette(routes=[*routes, Route("/v1/models", models)])) as url:
            talker = make_talker()
            sampler = RemoteSampler(SamplerSpec(sglang=url), Policy(talker.model, talker.tokenizer))
            await sampler.check(Sampling())
            server.asked.clear()
            calling = True
            call = ModelCall(
                request_id="r",
                model="m",
                messages=user("hello"),
                sampling=Sampling(),
                stream=stream,
            )

            async def answered() -> list[BackendEvent]:
                return [event async for event in sampler.answer(call)]

            answering = asyncio.create_task(answered())
            async with asyncio.timeout(20):
                for version in (3, 4):
                    server.begun.clear()
                    await server.begun.wait()
                    await sampler.publish(Weights(version, tmp_path))
                events = await answering
            *_, repeated = server.asked
            assert [event.version for event in events if isinstance(event, Delta)] == [4]
            assert len(repeated["input_ids"]) + repeated["sampling_params"]["max_new_tokens"] == 40
            long = msgspec.structs.replace(
                call, messages=user("hello " * 40), sampling=Sampling(n=8)
            )
            with pytest.raises(BackendError, match=r"have at most 40 \(max_sequence_length\)"):
                await anext(sampler.answer(long))
            assert len(server.asked) == 3
            await sampler.close()
