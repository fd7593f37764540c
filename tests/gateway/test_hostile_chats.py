"""Chats and servers that mean ill: what they cost stays in proportion, and they change nothing for
anybody else."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from agentlightning import semconv
from agentlightning.errors import BackendError, UnavailableError
from agentlightning.gateway.backends.http import HttpBackend
from agentlightning.gateway.chat.repairs import canonical, merged, tries, with_results_behind_calls
from agentlightning.gateway.endpoints.base import Endpoint
from agentlightning.gateway.endpoints.completions import ChatCompletions
from agentlightning.gateway.endpoints.gemini import GenerateContent
from agentlightning.gateway.endpoints.response_items import with_references
from agentlightning.gateway.endpoints.responses import Responses
from agentlightning.gateway.models import ModelAwayError, ModelEntry, ModelTable
from agentlightning.gateway.request import MOST_PARTS, CallRefused
from agentlightning.store.availability import Availability
from tests.gateway.endpoints.test_messages_elsewhere import Saying
from tests.gateway.talker import user
from tests.gateway.test_repairs import ASSISTANT, SYSTEM, Strict, a_call, post, roles
from tests.gateway.upstream import DONE, GOOD, Upstream, chunk, gateway_before, piece
from tests.gateway.world import fronting, serving

pytestmark = pytest.mark.anyio
MANY = 40_000
FUNCTION: dict[str, Any] = {"type": "function", "function": {"name": "f", "arguments": "{}"}}


# --- what a request costs -------------------------------------------------------------------------
# With work that grows as the square of these, each of them would hold up every other call for
# minutes.


def calling(*ids: str) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{**FUNCTION, "id": name} for name in ids],
    }


def result(name: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": name, "content": content}


def function_parts(kind: str, *more: tuple[str, Any]) -> list[dict[str, Any]]:
    return [{kind: {"name": f"f{number}", **dict(more)}} for number in range(MANY)]


LARGE: dict[str, tuple[Endpoint, dict[str, Any]]] = {
    "users in a row": (ChatCompletions(), {"messages": user("x" * 200) * MANY}),
    "results without ids": (
        ChatCompletions(),
        {"messages": [calling(*map(str, range(MANY))), *[{"role": "tool", "content": ""}] * MANY]},
    ),
    "allowed tools": (
        Responses(),
        {
            "input": "x",
            "tools": [{"type": "function", "name": f"f{number}"} for number in range(10_000)],
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": f"g{number}"} for number in range(MANY)],
            },
        },
    ),
    "responses of functions": (
        GenerateContent("m"),
        {
            "contents": [
                {"role": "model", "parts": function_parts("functionCall")},
                {
                    "role": "user",
                    "parts": function_parts("functionResponse", ("response", {}))[::-1],
                },
            ]
        },
    ),
}


@pytest.mark.parametrize("name", LARGE)
def test_a_large_chat_is_read_and_repaired_in_proportion(name: str) -> None:
    endpoint, body = LARGE[name]
    request, _ = canonical(endpoint.read(json.dumps({"model": "m", **body}).encode()))
    assert sum(1 for _ in tries(request.messages)) >= 1


def test_a_body_that_refers_to_earlier_items_is_bounded_as_others_are() -> None:
    asked: list[str] = []

    def answer(response: str) -> dict[str, Any]:
        asked.append(response)
        return {
            "role": "assistant",
            "content": "x" * 10_000,
            "tool_calls": [{**FUNCTION, "id": "c"}],
        }

    items = [{"type": "item_reference", "id": f"msg_a_{number}"} for number in range(MANY)]
    with pytest.raises(CallRefused, match="refers to have more than") as caught:
        with_references(json.dumps({"input": items}).encode(), answer)
    assert caught.value.status == 413 and asked == ["resp_a"]
    with pytest.raises(CallRefused, match="parts"):
        with_references(b'{"input": ["item_reference"%b]}' % (b",[]" * MOST_PARTS), answer)
    long = json.dumps({"input": [{"type": "item_reference", "id": f"fc_a_{'9' * 5000}"}]}).encode()
    assert b"item_reference" in with_references(long, answer)


@pytest.mark.parametrize(
    "fields",
    [
        {
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": []}, 1]},
            }
        },
        {"tools": [{"type": "custom", "custom": {"name": "p", "format": {"grammar": 1}}}]},
        {"messages": [*user("U"), {"role": "tool", "tool_call_id": [], "content": "R"}]},
    ],
)
def test_odd_forms_are_read_as_nothing(fields: dict[str, Any]) -> None:
    canonical(
        ChatCompletions().read(json.dumps({"model": "m", "messages": user("U"), **fields}).encode())
    )


def test_repairs_neither_repeat_nor_lose_what_was_said() -> None:
    twice = [calling("a"), *user("U"), result("a", "1"), calling("a"), *user("V"), result("a", "2")]
    twice.append(result("a", "3"))
    said = [message["content"] for message in with_results_behind_calls(twice)]
    assert said == [None, "1", "U", None, "2", "3", "V"]
    same = [calling(*["a"] * 3), *user("U"), result("a", "1")]
    assert roles(with_results_behind_calls(same)) == "assistant tool user"
    part = {"type": "text", "text": "P"}
    (one,) = merged(
        [
            *user("U"),
            *user("V"),
            {"role": "user", "content": [part]},
            {"role": "user", "content": None},
        ]
    )
    assert one["content"] == [{"type": "text", "text": "U\n\nV"}, part]


# --- what one agent does to the others ------------------------------------------------------------


def user_first(messages: list[dict[str, Any]]) -> str | None:
    said = [message["role"] for message in messages if message["role"] != "system"]
    return (
        None
        if said[:1] == ["user"]
        else "After the system message, conversation roles must alternate user/…"
    )


async def test_a_repair_that_one_chat_needs_is_made_to_no_other() -> None:
    upstream = Strict(user_first)
    async with upstream.backend() as backend, fronting(ModelEntry("policy", backend)) as front:
        for messages in ([SYSTEM, ASSISTANT, *user("V")], [SYSTEM, *user("U")]):
            await post(front, "chat/completions", {"model": "policy", "messages": messages})
    assert [roles(asked["messages"]) for asked in upstream.asked[-2:]] == [
        "user assistant user",
        "system user",
    ]


@pytest.mark.parametrize(
    ("status", "why"),
    [(429, "Too many tokens for the role user"), (400, "The system is overloaded")],
)
async def test_a_refusal_that_is_not_about_the_chat_is_not_tried_again(
    status: int, why: str
) -> None:
    upstream = Strict(lambda messages: why, status)
    async with upstream.backend(kind="openai") as backend:
        with pytest.raises(BackendError, match=why):
            [event async for event in backend.answer(a_call([SYSTEM, *user("U"), SYSTEM]))]
    assert len(upstream.asked) == 1


async def test_a_404_about_what_an_agent_named_takes_no_endpoint_from_the_others() -> None:
    missing = {
        "error": {
            "message": "Conversation with id 'conv_1' not found.",
            "param": None,
            "code": None,
        }
    }

    async def responses(request: Request) -> Response:
        asked = await request.json()
        if "model" not in asked:
            return JSONResponse({"error": {"message": "you must provide a model parameter"}}, 400)
        return (
            JSONResponse(missing, 404) if "conversation" in asked else JSONResponse({"output": []})
        )

    async with serving(
        Starlette(routes=[Route("/v1/responses", responses, methods=["POST"])])
    ) as url:
        backend = HttpBackend(f"{url}/v1", kind="openai")
        async with fronting(ModelEntry("judge", backend, trainable=False)) as front:
            body = {"model": "judge", "input": "U"}
            assert (
                await post(front, "responses", body | {"conversation": "conv_1"}, status=404)
                == missing
            )
            assert await post(front, "responses", body) == {"output": []}
        await backend.close()


async def test_calls_of_an_alias_go_on_when_its_model_is_back() -> None:
    entry = ModelEntry(
        "model", HttpBackend("http://127.0.0.1:9/v1"), aliases=("policy",), lent=True
    )
    table = ModelTable([entry])
    table.remove("model")
    with pytest.raises(ModelAwayError) as caught:
        table.resolve("policy", {"policy"})
    assert caught.value.gate.held
    table.put(entry)
    assert not caught.value.gate.held and table.resolve("policy", {"policy"}) is entry


# --- servers --------------------------------------------------------------------------------------

KEY = "sk-a-key-that-no-agent-may-see"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [200, 400, 500])
async def test_a_key_that_a_server_repeats_does_not_reach_the_agent(
    status: int, stream: bool
) -> None:
    error = {
        "error": {
            "message": f"Incorrect API key provided: {KEY}",
            "code": 401 if status == 200 else "invalid",
        }
    }
    upstream = Upstream([chunk(**error)], status, error) if status != 200 else Saying(error)
    if status == 200:
        upstream.answer = _always(f"data: {json.dumps(error)}\n\n")  # type: ignore[method-assign]
    async with gateway_before(upstream, kind="openai", api_key=KEY) as front:
        attempted = await front.attempt()
        body = {"model": "policy", "messages": user("U"), "stream": stream}
        told = await post(
            front, "chat/completions", body, attempted, status=400 if status == 400 else 502
        )
        (span,) = await front.spans(attempted)
    assert KEY not in str(told) and "[key]" in str(told) and KEY not in str(span)


def _always(text: str) -> Any:
    async def answer(request: Request) -> Response:
        return Response(text, media_type="text/event-stream")

    return answer


ODD: dict[str, list[str]] = {
    "an id below zero": [
        chunk(prompt_token_ids=[1]),
        chunk(piece("x", [-4], [-1.0], finish_reason="stop")),
    ],
    "an id of 41 bits": [
        chunk(prompt_token_ids=[1]),
        chunk(piece("x", [2**40], [-1.0], finish_reason="stop")),
    ],
    "a prompt of 71 bits": [
        chunk(prompt_token_ids=[2**70]),
        chunk(piece("x", [4], [-1.0], finish_reason="stop")),
    ],
}


@pytest.mark.parametrize("name", ODD)
async def test_ids_that_cannot_be_are_recorded_as_none_and_not_trained(name: str) -> None:
    async with gateway_before(Upstream([*ODD[name], DONE])) as front:
        attempted = await front.attempt()
        await post(front, "chat/completions", {"model": "policy", "messages": user("U")}, attempted)
        (span,) = await front.spans(attempted)
    assert span.attributes[semconv.CALL_FLAG] == "backend returns no token ids"


async def test_runs_of_versions_that_do_not_add_up_give_no_token_twice() -> None:
    runs = [[5, 3], [6, -1], [7, 1]]
    part = piece("x", [4, 5, 6], [-1.0] * 3, policy_versions=runs, finish_reason="stop")
    async with gateway_before(Upstream([chunk(prompt_token_ids=[1]), chunk(part), DONE])) as front:
        attempted = await front.attempt()
        await post(
            front,
            "chat/completions",
            {"model": "policy", "messages": user("U"), "stream": True},
            attempted,
        )
        (span,) = await front.spans(attempted)
    assert span.tokens is not None and list(span.tokens.choices[0].token_ids) == [4, 5, 6]


async def test_an_error_that_is_nested_too_deeply_has_no_words() -> None:
    upstream = Upstream(GOOD)
    upstream.answer = _always('data: {"error":' + "[" * 900 + "]" * 900 + "}\n\n")  # type: ignore[method-assign]
    async with gateway_before(upstream) as front:
        told = await post(
            front, "chat/completions", {"model": "policy", "messages": user("U")}, status=502
        )
    assert told["error"]["message"] == "the backend failed in mid-answer: no message"


# --- a store that is asked whether it can be written ----------------------------------------------


async def test_all_who_ask_at_once_share_one_trial_write() -> None:
    written, go_on = 0, asyncio.Event()

    async def write() -> None:
        nonlocal written
        written += 1
        await go_on.wait()

    state = Availability("x", write)
    state._written -= 10.0  # pyright: ignore[reportPrivateUsage]
    asking = [asyncio.create_task(state.check()) for _ in range(50)]
    for _ in range(3):
        await asyncio.sleep(0)
    asking.pop().cancel()
    go_on.set()
    await asyncio.gather(*asking)
    assert written == 1
    state.report(UnavailableError("away"), 0.0)
    raised = [await _error(state) for _ in range(2)]
    # one alone would keep the frames of all
    assert str(raised[0]) == "away" and raised[0] is not raised[1]
    state.close()


async def _error(state: Availability) -> Exception:
    with pytest.raises(UnavailableError) as caught:
        await state.check()
    return caught.value
