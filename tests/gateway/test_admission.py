"""What an agent may send an engine, and what becomes of the rest."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from agentlightning import semconv
from agentlightning.gateway.models import ModelEntry
from agentlightning.gateway.request import NEUTRAL_PENALTIES
from tests.gateway.backends.engines import named
from tests.gateway.talker import SEARCH_TOOL, user
from tests.gateway.upstream import DONE, GOOD, Upstream, chunk, gateway_before, piece
from tests.gateway.world import World

pytestmark = pytest.mark.anyio

SENT = {
    "model",
    "messages",
    "stream",
    "max_tokens",
    "return_token_ids",
    "return_weight_versions",
    "logprobs",
}
SAMPLING = {
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
}
# Fields that vLLM 0.33 acts on.
HOSTILE: dict[str, Any] = {
    "allowed_token_ids": [5],
    "chat_template": "{{ messages }}",
    "ignore_eos": True,
    "kv_transfer_params": {"remote_host": "10.0.0.1"},
    "logits_processors": ["os.system"],
    "media_io_kwargs": {"video": {"num_frames": -1}},
    "min_tokens": 500,
    "priority": -9,
    "prompt_logprobs": 20,
    "request_id": "another's",
    "stop_token_ids": [4],
    "thinking_token_budget": 1,
    "use_beam_search": True,
    "user": "me",
    "vllm_xargs": {"x": 1},
    "watermarking": True,
}


@asynccontextmanager
async def served(events: list[str] = GOOD, **entry: Any) -> AsyncIterator[tuple[World, Upstream]]:
    upstream = Upstream(events)
    async with gateway_before(upstream) as front:
        if entry:
            front.gateway.models.put(
                ModelEntry("policy", front.gateway.entry("policy").backend, **entry)
            )
        yield front, upstream


async def ask(front: World, mode: Any = "train", **fields: Any) -> Any:
    """The span of a call of a new attempt."""
    attempted = await front.attempt(mode=mode)
    extra = {
        name: value
        for name, value in fields.items()
        if name not in ("tools", "tool_choice", "seed")
    }
    known = {name: value for name, value in fields.items() if name not in extra}
    await front.client(attempted).chat.completions.create(
        model="policy", messages=user("hello"), max_tokens=9, extra_body=extra, **known
    )
    return (await front.spans(attempted))[0]


STRICT = {"type": "function", "function": {**SEARCH_TOOL["function"], "strict": True}}
VARIABLES = {"enable_thinking": False, "tokenize": True, "chat_template": "x"}
FROZEN: dict[str, Any] = {"trainable": False, "train": None}
CONSTRAINTS = {
    "allowed_token_ids",
    "ignore_eos",
    "min_tokens",
    "stop_token_ids",
    "thinking_token_budget",
}


@pytest.mark.parametrize(
    ("entry", "mode", "names"),
    [({}, "train", SENT | SAMPLING), ({}, "test", SENT), (FROZEN, "train", SENT | CONSTRAINTS)],
)
async def test_an_engine_is_sent_the_fields_of_a_list_and_nothing_that_reaches_its_insides(
    entry: dict[str, Any], mode: str, names: set[str]
) -> None:
    async with served(**entry) as (front, upstream):
        span = await ask(front, mode, **HOSTILE)
    assert upstream.asked[0].keys() == names
    if not entry:
        assert span.attributes[semconv.CALL_DROPPED] == sorted(HOSTILE)
        assert semconv.CALL_FLAG not in span.attributes


@pytest.mark.parametrize(
    ("fields", "sent", "dropped"),
    [
        (
            {"tools": [STRICT], "tool_choice": "auto", "parallel_tool_calls": False},
            {"tools": [SEARCH_TOOL]},
            ["tools.strict"],
        ),
        (
            {"chat_template_kwargs": VARIABLES, "reasoning_effort": "low"},
            {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low"},
            ["chat_template_kwargs.chat_template", "chat_template_kwargs.tokenize"],
        ),
    ],
)
async def test_of_tools_and_template_variables_is_sent_what_changes_the_prompt_alone(
    fields: dict[str, Any], sent: dict[str, Any], dropped: list[str]
) -> None:
    async with served() as (front, upstream):
        span = await ask(front, **fields)
    assert (
        upstream.asked[0].items() >= sent.items() and "parallel_tool_calls" not in upstream.asked[0]
    )
    assert (
        span.attributes[semconv.CALL_DROPPED] == dropped
        and semconv.CALL_FLAG not in span.attributes
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [SEARCH_TOOL], "tool_choice": "required"},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "a+"}},
    ],
)
async def test_what_an_answer_must_be_is_sent_except_in_training(fields: dict[str, Any]) -> None:
    wish = [*fields][-1]
    async with served() as (front, upstream):
        free, forced = await ask(front, "train", **fields), await ask(front, "val", **fields)
    assert wish not in upstream.asked[0] and upstream.asked[1].items() >= fields.items()
    assert (
        free.attributes[semconv.CALL_DROPPED] == [wish] and semconv.CALL_FLAG not in free.attributes
    )
    assert semconv.CALL_DROPPED not in forced.attributes
    assert forced.attributes[semconv.CALL_FLAG] == "constrained by a grammar"


LARGE = {"choice": [f"choice {number}" for number in range(10_000)]}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            (name, {"type": "object"})
            for name in ("guided_json", "functions", "audio", "web_search_options")
        ),
        ("structured_outputs", LARGE),  # it would hold up the engine
    ],
)
async def test_what_cannot_be_had_and_would_be_missed_is_refused_by_name(
    name: str, value: Any
) -> None:
    async with served() as (front, upstream):
        with pytest.raises(openai.BadRequestError, match=name):
            await ask(front, "val", **{name: value})
    assert upstream.asked == []


async def test_where_the_agent_decides_penalties_are_sent_except_in_training() -> None:
    penalties: dict[str, Any] = dict.fromkeys(NEUTRAL_PENALTIES, 0.5) | {"logit_bias": {"5": 1.0}}
    async with served(train=None, val=None) as (front, upstream):
        for name, value in penalties.items():
            free, forced = (
                await ask(front, **{name: value}),
                await ask(front, "val", **{name: value}),
            )
            assert (
                upstream.asked[-2].items() >= NEUTRAL_PENALTIES.items()
                and upstream.asked[-1][name] == value
            )
            assert json.loads(free.attributes[semconv.CALL_OVERRIDDEN]) == {name: value}
            assert semconv.CALL_FLAG not in free.attributes
            assert forced.attributes[semconv.CALL_FLAG] == "constrained by a grammar", name


async def test_a_server_is_sent_seeds_in_deterministic_runs_alone() -> None:
    async with served() as (front, upstream):
        await ask(front, seed=3)
        attempted = await front.attempt(metadata={"seed": 1, "deterministic": True})
        await front.client(attempted).chat.completions.create(
            model="policy", messages=user("hello"), seed=3
        )
    plain, deterministic = upstream.asked
    assert "seed" not in plain and deterministic["seed"] > 3


async def test_a_logprob_that_the_server_does_not_know_is_not_trained() -> None:
    unknown = [
        GOOD[0],
        chunk(piece("Hi", [4, 5, 6], [-0.5, -9999.0, -0.1], finish_reason="stop")),
        *GOOD[3:],
    ]
    async with served(unknown) as (front, _):
        assert (await ask(front)).attributes[semconv.CALL_FLAG] == "logprob is clamped or unknown"


@pytest.mark.parametrize(
    ("told", "versions"),
    [
        ([("6", 0, 2), ("7", 2, 3)], ((6, 2), (7, 1))),
        ([("default", 0, 3)], ((5, 3),)),
        # the name of weights that were replaced since by somebody who gave no name
        ([("4", 0, 3)], ((5, 3),)),
        ([("6", 0, 2)], ((5, 3),)),
    ],
)
async def test_the_versions_of_the_weights_are_the_servers_where_it_names_them(
    told: list[tuple[str, int, int]], versions: Any
) -> None:
    spans = [named(*one) for one in told]
    events = [
        *GOOD[:2],
        chunk(piece("!", [5, 6], [-0.25, -0.125], finish_reason="stop", weight_versions=spans)),
        DONE,
    ]
    async with served(events) as (front, _):
        front.gateway.entry("policy").backend.connection.version = 5
        attempted = await front.attempt()
        stream = await front.client(attempted).chat.completions.create(
            model="policy", messages=user("hello"), stream=True
        )
        [part async for part in stream]
        (span,) = await front.spans(attempted)
    assert span.tokens.choices[0].versions == versions


SESSION = {"x-agentlightning-session": "another's"}


async def test_whose_session_a_call_is_nobody_says_but_a_worker() -> None:
    upstream = Upstream(GOOD)
    async with gateway_before(upstream) as front:
        keys = [
            await front.store.issue_key(name=scope, scopes=[scope]) for scope in ("read", "worker")
        ]
        for key in ("EMPTY", *(one.api_key for one in keys)):
            create = front.client(api_key=key).chat.completions.create
            await create(model="policy", messages=user("hello"), extra_headers=SESSION)
    assert [headers.get("x-agentlightning-session") for headers in upstream.headers] == [
        None,
        None,
        "another's",
    ]
