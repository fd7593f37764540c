"""The engine's async face: streams, cancellation, exclusive use, weight updates, faults and the
end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

from agentlightning.engine.engine import Engine, GenerationRequest, SampledToken
from agentlightning.engine.service import EngineService
from agentlightning.errors import BackendError, UnavailableError
from tests.models import tiny_model

pytestmark = pytest.mark.anyio


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_model()


@pytest.fixture
async def service(model: PreTrainedModel) -> AsyncGenerator[EngineService]:
    torch.set_num_threads(1)
    service = EngineService(Engine(model, eos_token_ids=[], max_sequence_length=256, slots=8))
    service.start()
    yield service
    service.close()


async def collect(service: EngineService, request: GenerationRequest) -> list[SampledToken]:
    return [token async for tokens in service.generate(request) for token in tokens]


async def complete(service: EngineService, request: GenerationRequest) -> list[SampledToken]:
    (tokens,) = [tokens async for tokens in service.generate(replace(request, whole=True))]
    return tokens


def request(seed: int = 0, max_tokens: int = 20) -> GenerationRequest:
    return GenerationRequest([5, 6, 7 + seed], max_tokens=max_tokens, seed=seed)


async def test_many_requests_stream_at_once_and_each_gets_its_own_tokens(
    service: EngineService,
) -> None:
    outputs = await asyncio.gather(*[collect(service, request(seed)) for seed in range(30)])
    for seed, output in enumerate(outputs):
        assert len(output) == 20
        assert [token.finish_reason for token in output] == [None] * 19 + ["length"]
        assert [token.token_id for token in await complete(service, request(seed))] == [
            token.token_id for token in output
        ]


async def test_closing_the_iterator_or_cancelling_the_task_cancels_the_generation(
    service: EngineService,
) -> None:
    async with aclosing(service.generate(request(max_tokens=250))) as tokens:
        await anext(tokens)
    async with service.exclusive():
        task = asyncio.create_task(complete(service, request(max_tokens=250)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    # commands run in order: both cancellations are done
    await complete(service, request(1, max_tokens=1))
    async with service.exclusive() as engine:
        assert (engine.running, engine.waiting) == (0, 0)


async def test_while_held_no_step_is_made_and_new_requests_wait(service: EngineService) -> None:
    running = asyncio.create_task(collect(service, request(max_tokens=250)))
    await asyncio.sleep(0)
    async with service.exclusive() as engine:
        steps = engine.statistics.steps
        waiting = asyncio.create_task(complete(service, request(1)))
        _, pending = await asyncio.wait([running, waiting], timeout=0.05)
        assert waiting in pending
        assert engine.statistics.steps == steps
    assert len(await waiting) == 20
    assert len(await running) == 250


async def test_a_weight_update_lands_in_the_middle_of_a_stream(
    service: EngineService, model: PreTrainedModel
) -> None:
    versions: list[int] = []
    async with aclosing(service.generate(request(max_tokens=100))) as pieces:
        async for tokens in pieces:
            versions += [token.version for token in tokens]
            if len(versions) >= 5 and service.version == 0:
                async with service.exclusive():
                    with torch.no_grad():
                        model.get_input_embeddings().weight.mul_(1.1)
                    await service.update_weights(3)
    assert versions == sorted(versions)
    assert set(versions) == {0, 3}
    assert service.version == 3
    await service.update_weights(4)
    assert service.version == 4


async def test_the_loop_goes_on_while_weights_are_written(model: PreTrainedModel) -> None:
    loop_ran, seen = threading.Event(), list[bool]()
    engine = Engine(model, eos_token_ids=[], max_sequence_length=256, slots=2)
    service = EngineService(engine, lambda: seen.append(loop_ran.wait(3)))
    service.start()
    asyncio.get_running_loop().call_later(0.01, loop_ran.set)
    await service.update_weights(4)
    assert (seen, service.version) == ([True], 4)
    service.close()


async def test_a_failing_step_reaches_every_request_in_it(
    service: EngineService, model: PreTrainedModel
) -> None:
    weight = model.get_submodule("model.norm").weight
    kept = weight.detach().clone()
    async with service.exclusive():
        with torch.no_grad():
            weight.fill_(float("nan"))
        tasks = [
            asyncio.create_task(collect(service, request())),
            asyncio.create_task(complete(service, request(1))),
        ]
        await asyncio.sleep(0)
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(result, BackendError)
        assert result.status == 500
    async with service.exclusive():
        with torch.no_grad():
            weight.copy_(kept)
    assert len(await complete(service, request())) == 20


async def test_closing_ends_what_is_in_flight_and_refuses_what_comes_later(
    service: EngineService,
) -> None:
    tasks = [
        asyncio.create_task(collect(service, request(max_tokens=250))),
        asyncio.create_task(complete(service, request(1, max_tokens=250))),
    ]
    await asyncio.sleep(0)
    service.close()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(result, UnavailableError)
    with pytest.raises(UnavailableError, match="start"):
        await complete(service, request())
    with pytest.raises(UnavailableError):
        await service.update_weights(1)


async def test_closing_reaches_those_who_wait_for_their_turn(service: EngineService) -> None:
    async def second() -> None:
        async with service.exclusive():
            pass

    async with service.exclusive():
        waiting = asyncio.create_task(second())
        await asyncio.sleep(0)
        service.close()
    with pytest.raises(UnavailableError):
        await asyncio.wait_for(waiting, 60)
