"""What is recorded of a call: exact ids, effective sampling, flags, and when it becomes durable."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest
import torch
from opentelemetry import propagate

from agentlightning import semconv
from agentlightning.gateway.generation import call_seed
from agentlightning.tracing.context import bind
from agentlightning.tracing.opentelemetry import OpenTelemetryTracer
from agentlightning.types import AttemptedRollout, Span
from tests.gateway.talker import PLAIN, SEARCH_TOOL, make_talker, user
from tests.gateway.upstream import until
from tests.gateway.world import World

pytestmark = pytest.mark.anyio


async def call(world: World, attempted: AttemptedRollout, **parameters: Any) -> tuple[Any, Span]:
    """One call and its span."""
    asked = {"model": "policy", "messages": user("hello"), **parameters}
    answer = await world.client(attempted).chat.completions.create(**asked)
    return answer, (await world.spans(attempted))[-1]


async def test_a_span_holds_the_exact_ids_and_the_models_own_logprobs(gateway_world: World) -> None:
    await gateway_world.service.update_weights(7)
    _, span = await call(gateway_world, await gateway_world.attempt())
    talker = make_talker()
    assert span.tokens is not None
    (choice,) = span.tokens.choices
    assert (
        talker.tokenizer.decode(span.tokens.prompt_token_ids) == "<|user|>hello<|end|><|assistant|>"
    )
    assert talker.tokenizer.decode(choice.token_ids) == PLAIN["hello"] + "<|end|>"
    assert choice.versions == ((7, len(choice.token_ids)),)
    ids = torch.tensor([[*span.tokens.prompt_token_ids, *choice.token_ids]])
    with torch.no_grad():
        logits = talker.model(ids).logits[0, len(span.tokens.prompt_token_ids) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, ids[0, -len(choice.token_ids) :, None])[:, 0]
    assert choice.logprobs == pytest.approx(expected.tolist(), abs=1e-4)


async def test_a_span_describes_the_call_in_gen_ai_attributes(gateway_world: World) -> None:
    attempted = await gateway_world.attempt()
    answer, span = await call(
        gateway_world, attempted, model="gpt-4o", messages=user("weather"), tools=[SEARCH_TOOL]
    )
    attributes = span.attributes
    assert span.name == "chat policy"
    assert attributes[semconv.GEN_AI_OPERATION] == "chat"
    assert (
        attributes[semconv.GEN_AI_REQUEST_MODEL],
        attributes[semconv.GEN_AI_RESPONSE_MODEL],
    ) == ("gpt-4o", "policy")
    assert attributes[semconv.GEN_AI_RESPONSE_ID] == answer.id
    assert attributes[semconv.GEN_AI_FINISH_REASONS] == ["tool_calls"]
    assert attributes[semconv.GEN_AI_INPUT_TOKENS] == len(span.tokens.prompt_token_ids)
    assert attributes[semconv.GEN_AI_OUTPUT_TOKENS] == len(span.tokens.choices[0].token_ids)
    assert json.loads(attributes[semconv.GEN_AI_INPUT_MESSAGES]) == user("weather")
    assert json.loads(attributes[semconv.GEN_AI_TOOL_DEFINITIONS]) == [SEARCH_TOOL]
    (message,) = json.loads(attributes[semconv.GEN_AI_OUTPUT_MESSAGES])
    assert message["tool_calls"][0]["id"] == answer.choices[0].message.tool_calls[0].id
    assert attributes[semconv.CALL_TRAINABLE] is True
    assert semconv.CALL_FLAG not in attributes
    assert span.end_time > span.start_time
    assert attempted.api_key is not None and attempted.api_key not in repr(span)


ASKED = {"temperature": 0.5, "top_p": 0.3, "presence_penalty": 1.0, "max_tokens": 30, "seed": 11}


@pytest.mark.parametrize(
    ("mode", "asked", "effective", "overridden"),
    [
        (
            "train",
            ASKED,
            {"temperature": 0.0, "top_p": 1.0, "max_tokens": 30},
            ASKED.keys() - {"max_tokens"},
        ),
        ("val", {"max_tokens": 30}, {"max_tokens": 4}, {"max_tokens"}),
        ("test", {"temperature": 0.5, "seed": 11}, {"temperature": 0.5, "seed": 11}, set()),
    ],
)
async def test_the_run_decides_sampling_except_in_test_mode_and_both_are_recorded(
    gateway_world: World,
    mode: Any,
    asked: dict[str, Any],
    effective: dict[str, Any],
    overridden: set[str],
) -> None:
    _, span = await call(gateway_world, await gateway_world.attempt(mode), **asked)
    assert json.loads(span.attributes[semconv.CALL_SAMPLING]).items() >= effective.items()
    told = json.loads(span.attributes.get(semconv.CALL_OVERRIDDEN, "{}"))
    assert told == {name: value for name, value in asked.items() if name in overridden}


async def test_sampling_noise_depends_on_names_and_not_on_timing(gateway_world: World) -> None:
    named = [
        await gateway_world.attempt(metadata={"seed": 3, "sample": sample}) for sample in ("a", "b")
    ]
    await asyncio.gather(*(call(gateway_world, attempted) for attempted in named))
    await call(gateway_world, named[0])
    spans = [span for attempted in named for span in await gateway_world.spans(attempted)]
    seeds = [json.loads(span.attributes[semconv.CALL_SAMPLING])["seed"] for span in spans]
    assert seeds == [call_seed(3, "a", 0), call_seed(3, "a", 1), call_seed(3, "b", 0)]
    assert len(set(seeds)) == 3


async def test_a_text_cut_by_a_stop_string_keeps_its_ids_and_trains(gateway_world: World) -> None:
    answer, span = await call(
        gateway_world, await gateway_world.attempt(), messages=user("count"), stop="4"
    )
    assert answer.choices[0].message.content == "1 2 3 "
    assert make_talker().tokenizer.decode(span.tokens.choices[0].token_ids).startswith("1 2 3 4")
    assert semconv.CALL_FLAG not in span.attributes


async def test_the_agents_trace_is_continued(gateway_world: World) -> None:
    trace_id, parent_id = "a" * 32, "b" * 16
    attempted = await gateway_world.attempt()
    headers = {"traceparent": f"00-{trace_id}-{parent_id}-01"}
    _, span = await call(gateway_world, attempted, extra_headers=headers)
    assert (span.trace_id, span.parent_id) == (trace_id, parent_id)
    headers = {}
    with bind(OpenTelemetryTracer(attempted.rollout_id, attempted.attempt.attempt_id)) as tracer:
        # as instrumented clients do, here outside any span of the agent's
        propagate.inject(headers)
    _, span = await call(gateway_world, attempted, extra_headers=headers)
    assert (span.trace_id, span.parent_id) == (tracer.trace_id, None)
    _, span = await call(gateway_world, attempted)
    assert span.trace_id != trace_id and span.parent_id is None


async def test_a_client_that_leaves_cancels_its_call_and_the_part_is_not_trained(
    gateway_world: World,
) -> None:
    attempted = await gateway_world.attempt(mode="test")
    url = f"{gateway_world.client(attempted).base_url}chat/completions"
    body = {"model": "policy", "messages": user("count")}
    # Nothing is sampled while the engine is held, so the call is surely cut off.
    async with aiohttp.ClientSession() as session, gateway_world.service.exclusive():
        with pytest.raises(TimeoutError):
            await session.post(url, json=body, timeout=aiohttp.ClientTimeout(total=0.3))
    await until(lambda: not gateway_world.gateway.running)
    (span,) = await gateway_world.spans(attempted)
    assert span.attributes[semconv.GEN_AI_FINISH_REASONS] == ["abort"]
    assert span.attributes[semconv.CALL_FLAG] == "client disconnected"
    assert span.status.status_code == "ERROR"
