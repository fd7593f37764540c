"""Chats that a server or a template refuses as they are, and servers that know chat completions
alone."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import aiohttp
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from agentlightning import semconv
from agentlightning.errors import BackendError
from agentlightning.gateway.backend import ModelCall
from agentlightning.gateway.backends.http import HttpBackend, Kind
from agentlightning.gateway.chat.template import ChatTemplate
from agentlightning.gateway.models import ModelEntry
from tests.gateway.endpoints.test_messages_elsewhere import Saying
from tests.gateway.talker import make_talker, user
from tests.gateway.upstream import GOOD, Upstream, gateway_before
from tests.gateway.world import World, fronting, serving

pytestmark = pytest.mark.anyio

SYSTEM, DEVELOPER = ({"role": role, "content": role[0].upper()} for role in ("system", "developer"))
ASSISTANT = {"role": "assistant", "content": "A"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "R"}


def roles(messages: list[dict[str, Any]]) -> str:
    return " ".join(message["role"] for message in messages)


def system_first(messages: list[dict[str, Any]]) -> str | None:
    late = any(message["role"] in ("system", "developer") for message in messages[1:])
    return "System message must be at the beginning." if late else None


def alternating(messages: list[dict[str, Any]]) -> str | None:
    said = [message["role"] for message in messages if message["role"] != "system"]
    wrong = any(one == other for one, other in pairwise(said))
    return "Conversation roles must alternate user/assistant/user/assistant/..." if wrong else None


def no_system(messages: list[dict[str, Any]]) -> str | None:
    return "System role not supported" if messages[0]["role"] == "system" else alternating(messages)


def no_developer(messages: list[dict[str, Any]]) -> str | None:
    known = all(message["role"] != "developer" for message in messages)
    return (
        None
        if known
        else "unknown variant `developer`, expected one of `system`, `user`, `assistant`, `tool`"
    )


def nine_letters(messages: list[dict[str, Any]]) -> str | None:
    ids = [message["tool_call_id"] for message in messages if message["role"] == "tool"]
    ids += [call["id"] for message in messages for call in message.get("tool_calls") or ()]
    short = all(len(one) == 9 and one.isalnum() for one in ids)
    return None if short else "Tool call IDs should be alphanumeric strings with length 9!"


def results_next(messages: list[dict[str, Any]]) -> str | None:
    pairs = zip(messages, [*messages[1:], {"role": ""}], strict=True)
    wrong = any(one.get("tool_calls") and other["role"] != "tool" for one, other in pairs)
    return (
        "An assistant message with 'tool_calls' must be followed by tool messages"
        if wrong
        else None
    )


REFUSED: dict[
    str, tuple[Callable[[list[dict[str, Any]]], str | None], list[dict[str, Any]], str]
] = {
    "later system": (
        system_first,
        [SYSTEM, *user("U"), SYSTEM, ASSISTANT, *user("V")],
        "system user assistant user",
    ),
    "users in a row": (alternating, [SYSTEM, *user("U"), *user("V")], "system user"),
    "no system": (no_system, [SYSTEM, *user("U"), ASSISTANT, *user("V")], "user assistant user"),
    "ids": (nine_letters, [*user("U"), CALLING, RESULT], "user assistant tool"),
    "results later": (
        results_next,
        [*user("U"), CALLING, *user("V"), RESULT],
        "user assistant tool user",
    ),
    "developers": (no_developer, [DEVELOPER, *user("U")], "system user"),
}


class Strict(Upstream):
    """Refuses chats as templates do, with a reason."""

    def __init__(
        self, refuses: Callable[[list[dict[str, Any]]], str | None], status: int = 400
    ) -> None:
        super().__init__(GOOD)
        self.refuses, self.code = refuses, status

    async def answer(self, request: Request) -> Response:
        body = await request.json()
        if (why := self.refuses(body["messages"])) is None:
            return await super().answer(request)
        self.asked.append(body)
        return JSONResponse(
            {"error": {"message": why, "type": "BadRequestError", "code": self.code}}, self.code
        )


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("kind", ["vllm", "openai"])
async def test_a_chat_that_a_server_refuses_is_repaired_and_the_repair_remembered(
    name: str, kind: Kind
) -> None:
    refuses, messages, expected = REFUSED[name]
    # llama.cpp says so of its templates
    upstream = Strict(refuses, 500 if kind == "openai" else 400)
    async with upstream.backend(kind=kind) as backend:
        entry = ModelEntry("policy", backend, trainable=kind == "vllm")
        async with fronting(entry) as front:
            for _ in range(2):
                answer = await front.client().chat.completions.create(
                    model="policy", messages=messages
                )
                assert answer.choices[0].message.content == "Hi!"
    first, again = upstream.asked[0], upstream.asked[-1]
    assert roles(again["messages"]) == expected
    assert [refuses(asked["messages"]) for asked in upstream.asked[-2:]].count(None) == 1 + (
        kind == "vllm" and name == "developers"
    )  # what helped is tried first
    said = json.dumps(again["messages"])
    assert all(text in said for message in messages if (text := message.get("content")))
    if kind == "openai":
        assert roles(first["messages"]) == roles(messages)  # as it was written, where that is taken


@pytest.mark.parametrize(
    "name", [name for name in REFUSED if name not in ("developers", "results later", "ids")]
)
def test_a_template_is_given_the_same_repairs(name: str) -> None:
    refuses, messages, expected = REFUSED[name]
    tokenizer = make_talker().tokenizer
    rule = {
        system_first: "not loop.first and m.role == 'system'",
        alternating: "not loop.first and m.role == loop.previtem.role",
        no_system: "m.role == 'system'",
    }[refuses]
    refused = "{% if " + rule + " %}{{ raise_exception('no') }}{% endif %}"
    template = "{% for m in messages %}" + refused + "{{ m.role }} {% endfor %}"
    ours = ChatTemplate(tokenizer.backend_tokenizer, template, special_tokens={})
    assert ours.render(messages).strip() == expected


async def test_another_refusal_is_passed_on_at_once_and_one_that_no_repair_helps_as_it_was() -> (
    None
):
    for why, times in (("The model is overloaded", 1), ("System messages are forbidden", 3)):
        upstream = Strict(lambda messages, why=why: why)
        async with upstream.backend(kind="openai") as backend:
            with pytest.raises(BackendError, match=why):
                messages = [SYSTEM, *user("U"), SYSTEM]
                [event async for event in backend.answer(a_call(messages))]
        assert len(upstream.asked) == times


def a_call(messages: list[dict[str, Any]]) -> ModelCall:
    return ModelCall(model="m", messages=messages)


# --- the form of chats before engines -------------------------------------------------------------

PATCH = {"type": "custom", "custom": {"name": "patch", "description": "edits"}}
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


async def test_an_engine_is_sent_one_form_of_whatever_a_client_wrote() -> None:
    upstream = Upstream(GOOD)
    custom = {"id": "c1", "type": "custom", "custom": {"name": "patch", "input": "X"}}
    messages = [
        *user("U"),
        {
            "role": "assistant",
            "content": None,
            "function_call": {"name": "f", "arguments": '{"a'},
            "audio": None,
        },
        {"role": "function", "name": "f", "content": "R"},
        {"role": "assistant", "content": "A", "tool_calls": [custom], "reasoning": "T"},
        {
            "role": "tool",
            "tool_call_id": "c1",
            "content": [{"type": "tomorrows", "data": 1}, {"type": "x", "text": "R"}],
        },
        {"role": "assistant", "content": "A", "tool_calls": [], "refusal": None},
        {"role": "developer", "content": "D"},
        {
            "role": "user",
            "content": [
                {
                    "type": "file",
                    "file": {"filename": "a", "file_data": "data:text/plain;base64,WA=="},
                }
            ],
        },
    ]
    async with gateway_before(upstream) as front:
        attempted = await front.attempt()
        tools = [FUNCTION, PATCH, {"type": "web_search"}, {"type": "tomorrows"}]
        body = {"model": "policy", "messages": messages, "tools": tools}
        await post(front, "chat/completions", body, attempted)
        (span,) = await front.spans(attempted)
    (asked,) = upstream.asked
    older, result, made, known, empty, developer, file = asked["messages"][1:]
    assert (
        older["tool_calls"][0]["function"] == {"name": "f", "arguments": '"{\\"a"'}
        and "audio" not in older
    )
    assert result["tool_call_id"] == older["tool_calls"][0]["id"] and result["role"] == "tool"
    assert made["tool_calls"][0]["function"] == {"name": "patch", "arguments": '{"input":"X"}'}
    assert made["reasoning"] == made["reasoning_content"] == "T"
    assert known["content"] == [{"type": "text", "text": "R"}] and "tool_calls" not in empty
    assert developer["role"] == "system" and file["content"] == [{"type": "text", "text": "X"}]
    assert [tool["function"]["name"] for tool in asked["tools"]] == ["f", "patch"]
    assert span.attributes[semconv.CALL_DROPPED] == [
        "messages.tomorrows",
        "tools.tomorrows",
        "tools.web_search",
    ]


async def post(
    front: World, path: str, body: dict[str, Any], attempted: Any = None, status: int = 200
) -> Any:
    place = (
        ""
        if attempted is None
        else f"/rollout/{attempted.rollout_id}/attempt/{attempted.attempt.attempt_id}"
    )
    async with (
        aiohttp.ClientSession() as session,
        session.post(
            f"{front.url}{place}/v1/{path}", json=body, headers={"authorization": "Bearer EMPTY"}
        ) as answer,
    ):
        text = await answer.text()
        assert answer.status == status, text
        return text if body.get("stream") else json.loads(text)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_of_a_custom_tool_comes_back_as_one(stream: bool) -> None:
    made = {
        "id": "c",
        "type": "function",
        "function": {"name": "patch", "arguments": '{"input": "*** \\"Begin\\""}'},
    }
    both = [made, {**CALL, "id": "d"}]
    async with gateway_before(
        Saying({"content": "So.", "tool_calls": both}, "tool_calls")
    ) as front:
        answer = await front.client().chat.completions.create(
            model="policy", messages=user("U"), tools=[FUNCTION, PATCH], stream=stream
        )
        if stream:
            parts = [
                part
                for one in [one async for one in answer]
                for part in one.choices[0].delta.tool_calls or ()
            ]
            calls = [part for part in parts if part.type == "custom"]
            assert "".join(part.function.arguments for part in parts if part.index == 1) == "{}"
            (call,) = (part.model_dump() for part in calls)
        else:
            call, other = (one.model_dump() for one in answer.choices[0].message.tool_calls)
            assert other["function"]["arguments"] == "{}"
    assert call["custom"] == {"name": "patch", "input": '*** "Begin"'} and call["id"] == "c"


# --- servers without an endpoint ------------------------------------------------------------------

NO_ROUTES = {  # as llama.cpp, LM Studio, FastAPI, Ollama and Azure say it
    "LM Studio": (
        200,
        {"error": "Unexpected endpoint or method. (POST /v1/responses). Returning 200 anyway"},
    ),
    "llama.cpp": (
        404,
        {"error": {"code": 404, "message": "File Not Found", "type": "not_found_error"}},
    ),
    "fastapi": (404, {"detail": "Not Found"}),
    "no json": (404, "404 page not found"),
    "method": (405, {"error": "method not allowed"}),
    "azure": (404, {"error": {"code": "404", "message": "Resource not found"}}),
}
SOMETHING = {
    "OpenAI": {
        "error": {
            "message": "The model `x` does not exist",
            "code": "model_not_found",
            "param": None,
        }
    },
    "vLLM": {"error": {"message": "The model `x` does not exist.", "param": "model", "code": 404}},
    "an item": {
        "error": {"message": "Item with id 'rs_1' not found.", "param": "input", "code": None}
    },
}


@asynccontextmanager
async def chat_only(
    status: int, said: Any, kind: Kind = "openai"
) -> AsyncIterator[tuple[World, Upstream, list[str]]]:
    """A gateway before a server that knows chat completions, and says this of everything else."""
    upstream, others = Saying({"content": "Hi!"}), list[str]()

    async def other(request: Request) -> Response:
        others.append(request.url.path)
        return JSONResponse(said, status) if isinstance(said, dict) else Response(said, status)

    routes = [Route("/v1/chat/completions", upstream.answer, methods=["POST"])]
    routes.append(Route("/{path:path}", other, methods=["GET", "POST"]))
    async with serving(Starlette(routes=routes)) as url:
        backend = HttpBackend(f"{url}/v1", kind=kind, api_key="k")
        async with fronting(ModelEntry("policy", backend, trainable=False)) as front:
            yield front, upstream, others
        await backend.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("server", NO_ROUTES)
async def test_a_server_that_knows_no_responses_is_asked_once_and_then_by_chat_completions(
    server: str, stream: bool
) -> None:
    async with chat_only(*NO_ROUTES[server]) as (front, upstream, others):
        attempted = await front.attempt()
        items = [{"role": "developer", "content": "D"}, {"role": "user", "content": "U"}]
        body = {"model": "policy", "input": items, "stream": stream, "max_output_tokens": 9}
        for _ in range(2):
            answer = await post(front, "responses", body, attempted)
            assert (
                "response.completed" in answer
                if stream
                else answer["output"][0]["content"][0]["text"] == "Hi!"
            )
        spans = await front.spans(attempted)
    assert others == ["/v1/responses"] * 2  # the agent's, and an empty one
    assert [roles(asked["messages"]) for asked in upstream.asked] == ["system user"] * 2
    assert [asked["max_tokens"] for asked in upstream.asked] == [9, 9]
    assert [span.attributes[semconv.CALL_INDEX] for span in spans] == [0, 1]
    assert all(span.status.status_code != "ERROR" for span in spans)


async def test_messages_and_their_count_are_translated_too() -> None:
    async with chat_only(*NO_ROUTES["fastapi"], kind="anthropic") as (front, _, others):
        body = {"model": "policy", "max_tokens": 9, "messages": user("U")}
        for _ in range(2):
            assert (await post(front, "messages", body))["content"][0]["text"] == "Hi!"
            assert (await post(front, "messages/count_tokens", body))["input_tokens"] > 0
    assert others == ["/v1/messages"] * 2 + ["/v1/messages/count_tokens"] * 2


@pytest.mark.parametrize("server", SOMETHING)
async def test_a_404_about_a_model_or_an_item_is_no_missing_endpoint(server: str) -> None:
    async with chat_only(404, SOMETHING[server]) as (front, upstream, others):
        for _ in range(2):
            answer = await post(front, "responses", {"model": "policy", "input": "U"}, status=404)
            assert answer == SOMETHING[server]
    assert others == ["/v1/responses"] * 2 and upstream.asked == []


async def test_references_to_items_of_earlier_responses_are_those_items() -> None:
    upstream = Saying(
        {"reasoning_content": "Hmm.", "content": "Look.", "tool_calls": [CALL]}, "tool_calls"
    )
    async with gateway_before(upstream) as front:
        attempted = await front.attempt()
        items: list[dict[str, Any]] = [{"role": "user", "content": "U"}]
        first = await post(
            front, "responses", {"model": "policy", "input": items, "stream": False}, attempted
        )
        items += [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
        items.append({"type": "item_reference", "id": "msg_of_another_server"})
        items.append({"type": "function_call_output", "call_id": "call_1", "output": "R"})
        await post(
            front, "responses", {"model": "policy", "input": items, "stream": False}, attempted
        )
        spans = await front.spans(attempted)
    assistant, result = upstream.asked[1]["messages"][1:]
    assert (assistant["content"], assistant["tool_calls"], result) == ("Look.", [CALL], RESULT)
    assert assistant["reasoning_content"] == "Hmm."
    assert spans[1].attributes[semconv.CALL_DROPPED] == ["input.item_reference"]


async def test_a_hosted_models_call_of_a_custom_tool_is_passed_on() -> None:
    made = {"id": "c", "type": "custom", "custom": {"name": "patch", "input": "X"}}
    upstream = Saying({"content": "So."}, "tool_calls")
    upstream.message["tool_calls"] = [made]
    async with (
        upstream.backend(kind="openai") as backend,
        fronting(ModelEntry("policy", backend, trainable=False)) as front,
    ):
        body = {"model": "policy", "messages": user("U"), "tools": [PATCH]}
        answer = await post(front, "chat/completions", body)
    assert answer["choices"][0]["message"]["tool_calls"] == [made] and upstream.asked[0][
        "tools"
    ] == [PATCH]
