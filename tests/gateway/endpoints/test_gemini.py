"""Google's Gemini API: its requests in the form of chat completions, and its answers, over HTTP,
from a real engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from agentlightning import semconv
from agentlightning.gateway.endpoints.gemini import GenerateContent
from agentlightning.gateway.request import CallRefused, CallRequest
from agentlightning.types import AttemptedRollout
from tests.gateway.endpoints.test_messages_elsewhere import Saying
from tests.gateway.talker import BROKEN_CALL, FOUND, SEARCH_TOOL, user
from tests.gateway.upstream import gateway_before
from tests.gateway.world import World, world

pytestmark = pytest.mark.anyio

SEARCH = {"functionDeclarations": [SEARCH_TOOL["function"]]}
CALL = {"functionCall": {"name": "search", "args": {"q": "sun", "n": 1.5}}}


def turn(*parts: Any, role: str = "user") -> dict[str, Any]:
    return {
        "role": role,
        "parts": [{"text": part} if isinstance(part, str) else part for part in parts],
    }


def result(response: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"functionResponse": {"name": "search", "response": response, **more}}


def asked(text: str = "hello", **more: Any) -> dict[str, Any]:
    return {"contents": [turn(text)], **more}


async def post(
    there: World,
    body: Any,
    method: str = "generateContent",
    attempted: AttemptedRollout | None = None,
    **headers: str,
) -> tuple[int, Any]:
    """(status, the answer, or the list of what a stream says); by default as Google's SDKs ask."""
    path = (
        ""
        if attempted is None
        else f"/rollout/{attempted.rollout_id}/attempt/{attempted.attempt.attempt_id}"
    )
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    url = f"{there.url}{path}/v1beta/models/policy:{method}"
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, data=data, headers=headers) as answer,
    ):
        text = await answer.text()
        if answer.content_type == "text/event-stream":
            return answer.status, [json.loads(event[6:]) for event in text.split("\n\n") if event]
        return answer.status, json.loads(text)


async def answered(
    there: World, stream: bool, body: Any, attempted: AttemptedRollout | None = None
) -> dict[str, Any]:
    """The one candidate, with `usageMetadata` in it; adjacent texts of a stream are joined."""
    status, told = await post(
        there, body, "streamGenerateContent?alt=sse" if stream else "generateContent", attempted
    )
    assert status == 200, told
    events = told if stream else [told]
    parts: list[dict[str, Any]] = []
    for part in (part for event in events for part in event["candidates"][0]["content"]["parts"]):
        if (
            parts
            and "text" in part
            and "text" in parts[-1]
            and part.get("thought") == parts[-1].get("thought")
        ):
            parts[-1]["text"] += part["text"]
        elif part != {"text": ""}:
            parts.append(part)
    return events[-1]["candidates"][0] | {
        "parts": parts,
        "usageMetadata": events[-1]["usageMetadata"],
    }


def read(body: dict[str, Any]) -> CallRequest:
    return GenerateContent("policy").read(json.dumps(body).encode())


def called(call_id: str, arguments: str = '{"q": "sun", "n": 1.5}') -> dict[str, Any]:
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": "search", "arguments": arguments},
    }


def assistant(content: str | None, *calls: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": [*calls], **more}


def tool(call_id: str, content: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


PNG = {"inlineData": {"mimeType": "image/png", "data": "AA=="}}
SHOWN = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}


SAID = {"role": "assistant", "content": "A"}


@pytest.mark.parametrize(
    ("contents", "chat"),
    [
        (
            [turn("A"), turn("B")],
            [{"role": "user", "content": [{"type": "text", "text": one} for one in "AB"]}],
        ),
        ([turn("A", PNG)], [{"role": "user", "content": [{"type": "text", "text": "A"}, SHOWN]}]),
        ([turn({}, "A", {"thoughtSignature": "s"}, {"tomorrowsPart": {}})], user("A")),
        (
            [turn({"executableCode": {"code": "1"}}, "A", role="model"), turn("B")],
            [SAID, *user("B")],
        ),
        ([turn({"inline_data": {"mime_type": "text/csv", "data": "YSxi"}})], user("a,b")),
        ({"parts": {"text": "A"}}, user("A")),
        (
            [
                turn({"text": "T", "thought": True}, "A", role="model"),
                turn(CALL, "B", role="model"),
                turn("C"),
            ],
            [assistant("AB", called("000000001"), reasoning_content="T"), *user("C")],
        ),
        (  # results belong to the calls of their id, else of their name, in order
            [
                turn(CALL, {"functionCall": {"name": "search", "id": "x"}}, CALL, role="model"),
                turn(
                    result({"output": "one"}),
                    result({"error": "two"}, id="x"),
                    "go on",
                    result({"a": 1}),
                ),
            ],
            [
                assistant(None, called("000000001"), called("x", "{}"), called("000000003")),
                tool("000000001", "one"),
                tool("x", "Error: two"),
                tool("000000003", '{"a": 1}'),
                *user("go on"),
            ],
        ),
    ],
)
def test_contents_become_a_chat(contents: Any, chat: list[dict[str, Any]]) -> None:
    system = {"role": "system", "content": "S"}
    assert read(
        {"contents": contents, "systemInstruction": {"parts": [{"text": "S"}]}}
    ).messages == [system, *chat]


def test_both_spellings_of_the_protocol_mean_the_same() -> None:
    schema = {
        "type": "OBJECT",
        "any_of": [{"max_items": "2"}],
        "properties": {"a_b": {"type": "STRING"}},
    }
    call = {"name": "search", "args": {"a_b": 1}}
    snake = {
        "system_instruction": {"parts": {"text": "S"}},
        "contents": [
            turn("A"),
            turn({"function_call": call}, role="model"),
            turn({"function_response": {"name": "search", "response": {"a_b": 2}}}),
        ],
        "tools": {"function_declarations": {"name": "search", "parameters": schema}},
        "tool_config": {
            "function_calling_config": {"mode": "ANY", "allowed_function_names": ["search"]}
        },
        "generation_config": {
            "max_output_tokens": 7,
            "stop_sequences": ["x"],
            "response_mime_type": "text/plain",
        },
    }
    camel = {
        "systemInstruction": {"parts": [{"text": "S"}]},
        "contents": [
            turn("A"),
            turn({"functionCall": call}, role="model"),
            turn({"functionResponse": {"name": "search", "response": {"a_b": 2}}}),
        ],
        "tools": [
            {
                "functionDeclarations": [
                    {"name": "search", "parameters": {**schema, "anyOf": [{"maxItems": "2"}]}}
                ]
            }
        ],
        "toolConfig": {
            "functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["search"]}
        },
        "generationConfig": {
            "maxOutputTokens": 7,
            "stopSequences": ["x"],
            "responseMimeType": "text/plain",
        },
    }
    del camel["tools"][0]["functionDeclarations"][0]["parameters"]["any_of"]
    ours, theirs = read(snake), read(camel)
    assert ours.messages[0] == {"role": "system", "content": "S"}
    assert ours.messages[2]["tool_calls"][0]["function"]["arguments"] == '{"a_b": 1}'
    assert ours.messages[3]["content"] == '{"a_b": 2}'
    properties = ours.tools[0]["function"]["parameters"]["properties"]
    assert (ours.sampling.max_tokens, ours.sampling.stop, [*properties]) == (7, ("x",), ["a_b"])
    for name in ("messages", "tools", "tool_choice", "sampling", "dropped"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert "S" not in ours.request_json


def test_settings_are_those_of_chat_completions() -> None:
    schema = {
        "type": "OBJECT",
        "properties": {"a": {"type": "ARRAY", "items": {"type": "STRING", "nullable": True}}},
    }
    json_schema = {
        "type": "object",
        "properties": {"a": {"type": "array", "items": {"type": ["string", "null"]}}},
    }
    config = {
        "temperature": 0.5,
        "topP": 0.9,
        "topK": 40.0,
        "maxOutputTokens": "7",
        "stopSequences": ["x"],
        "seed": 3,
        "candidateCount": 2,
        "presencePenalty": 0.5,
        "thinkingConfig": {"thinkingBudget": 0},
        "responseMimeType": "application/json",
        "responseSchema": schema,
    }
    request = read(
        asked(
            generationConfig=config,
            safetySettings=[{"category": "HARM_CATEGORY_HARASSMENT", "threshold": "BLOCK_NONE"}],
            labels={"a": "b"},
            tools=[
                {"googleSearch": {}, "functionDeclarations": [{"name": "f", "parameters": schema}]}
            ],
        )
    )
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (
        0.5,
        0.9,
        40,
        7,
    )
    assert (sampling.stop, sampling.seed, sampling.n) == (("x",), 3, 2)
    assert request.shaping == {"presence_penalty": 0.5}
    wanted = {"name": "answer", "schema": json_schema, "strict": True}
    assert request.extra == {"response_format": {"type": "json_schema", "json_schema": wanted}}
    assert request.tools == [
        {"type": "function", "function": {"name": "f", "parameters": json_schema}}
    ]
    assert request.dropped == (
        "generationConfig.thinkingConfig",
        "safetySettings",
        "tools.googleSearch",
    )


@pytest.mark.parametrize(
    ("calling", "choice", "names"),
    [
        ({"mode": "AUTO"}, "auto", "abc"),
        (
            {"mode": "ANY", "allowedFunctionNames": ["a"]},
            {"type": "function", "function": {"name": "a"}},
            "abc",
        ),
        ({"mode": "ANY", "allowedFunctionNames": ["a", "c"]}, "required", "ac"),
    ],
)
def test_function_calling_is_a_tool_choice(
    calling: dict[str, Any], choice: Any, names: str
) -> None:
    tools = [
        {
            "functionDeclarations": [
                {"name": name, "parametersJsonSchema": {"type": "object"}} for name in "abc"
            ]
        }
    ]
    request = read(asked(tools=tools, toolConfig={"functionCallingConfig": calling}))
    assert (request.tool_choice, "".join(one["function"]["name"] for one in request.tools)) == (
        choice,
        names,
    )


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "contents"),
        ({"contents": []}, "contents"),
        ({"contents": [turn("A"), turn("B", role="model")]}, "contents"),
        (
            {"contents": [turn({"fileData": {"fileUri": "gs://a/b", "mimeType": "text/x"}})]},
            "contents[0].parts[0]",
        ),
        ({"contents": [turn({"text": 1})]}, "contents[0].parts[0].text"),
        (asked(tools=[{"computerUse": {}}]), "tools[0]"),
        (asked(cachedContent="cachedContents/1"), "cachedContent"),
        (asked(generationConfig={"topK": "many"}), "generationConfig.topK"),
        (asked(generationConfig={"responseLogprobs": True}), "generationConfig.responseLogprobs"),
        (
            asked(generationConfig={"responseModalities": ["AUDIO"]}),
            "generationConfig.responseModalities",
        ),
        (
            asked(generationConfig={"responseMimeType": "text/x.enum"}),
            "generationConfig.responseMimeType",
        ),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    with pytest.raises(CallRefused) as caught:
        read(body)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_with_a_function_is_captured_exactly(
    gateway_world: World, stream: bool
) -> None:
    attempted = await gateway_world.attempt()
    request = asked(
        "weather", tools=[SEARCH], generationConfig={"thinkingConfig": {"includeThoughts": True}}
    )
    one = await answered(gateway_world, stream, request, attempted)
    text, call = one["parts"]
    assert (text, call["functionCall"]["args"]) == ({"text": "Let me look."}, {"q": "sun"})
    assert (one["finishReason"], one["index"]) == ("STOP", 0)
    del call["functionCall"]["id"]  # as clients may
    contents = [turn("weather"), turn(text, call, role="model"), turn(result({"result": "sunny"}))]
    two = await answered(
        gateway_world, stream, {"contents": contents, "tools": [SEARCH]}, attempted
    )
    assert two["parts"] == [{"text": FOUND}]
    first, second = await gateway_world.spans(attempted)
    assert first.tokens is not None and second.tokens is not None
    usage, choice = one["usageMetadata"], first.tokens.choices[0]
    assert (usage["promptTokenCount"], usage["candidatesTokenCount"]) == (
        len(first.tokens.prompt_token_ids),
        len(choice.token_ids),
    )
    assert usage["totalTokenCount"] == sum(
        (usage["promptTokenCount"], usage["candidatesTokenCount"])
    )
    assert (
        len(choice.logprobs) == len(choice.token_ids) and semconv.CALL_FLAG not in second.attributes
    )
    # The text the policy sampled is found again: its own token ids are the history.
    assert (
        second.tokens.prompt_token_ids[: len(first.tokens.prompt_token_ids)]
        == first.tokens.prompt_token_ids
    )
    assert second.attributes[semconv.RECORDED_SPLICE] == len(choice.token_ids)
    assert first.attributes[semconv.CALL_ENDPOINT] == "generateContent"
    assert first.attributes[semconv.CALL_STREAM] is stream
    assert first.attributes[semconv.CALL_DROPPED] == ["generationConfig.thinkingConfig"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "config", "said", "reason"),
    [
        ("broken", {}, BROKEN_CALL, "STOP"),
        ("count", {"stopSequences": ["4 5"]}, "1 2 3 ", "STOP"),
        ("count", {"maxOutputTokens": 3}, "1 2", "MAX_TOKENS"),
    ],
)
async def test_how_an_answer_ends(
    gateway_world: World, stream: bool, text: str, config: dict[str, Any], said: str, reason: str
) -> None:
    tools = [SEARCH] if text == "broken" else []
    told = await answered(gateway_world, stream, asked(text, generationConfig=config, tools=tools))
    assert told["finishReason"] == reason and told["parts"][0]["text"].startswith(said)


@pytest.mark.parametrize("stream", [False, True])
async def test_another_servers_reasoning_is_a_thought(stream: bool) -> None:
    details = {
        "prompt_tokens_details": {"cached_tokens": 8},
        "completion_tokens_details": {"reasoning_tokens": 2},
    }
    call = {"id": "call_1", "type": "function", "function": {"name": "search", "arguments": ""}}
    said = Saying(
        {"reasoning_content": "Hmm, well.", "content": "Yes.", "tool_calls": [call]},
        "tool_calls",
        **details,
    )
    async with gateway_before(said) as there:
        told = await answered(
            there, stream, asked("A", systemInstruction=turn("S"), tools=[SEARCH])
        )
        assert [message["role"] for message in said.asked[0]["messages"]] == ["system", "user"]
        assert said.asked[0]["tools"] == [SEARCH_TOOL]
    call_part = {"functionCall": {"id": "call_1", "name": "search", "args": {}}}
    assert told["parts"] == [{"text": "Hmm, well.", "thought": True}, {"text": "Yes."}, call_part]
    assert told["usageMetadata"] == {
        "promptTokenCount": 10,
        "candidatesTokenCount": 3,
        "totalTokenCount": 15,
        "cachedContentTokenCount": 8,
        "thoughtsTokenCount": 2,
    }


@pytest.mark.parametrize(
    ("method", "body", "code", "status", "says"),
    [
        ("generateContent", b"{not json", 400, "INVALID_ARGUMENT", "not a JSON object"),
        (
            "streamGenerateContent?alt=sse",
            asked("x y " * 600),
            400,
            "INVALID_ARGUMENT",
            "max_sequence_length",
        ),
        ("countTokens", {}, 400, "INVALID_ARGUMENT", "contents"),
        ("embedContent", asked(), 404, "NOT_FOUND", "no method"),
    ],
)
async def test_an_error_has_googles_shape(
    gateway_world: World, method: str, body: Any, code: int, status: str, says: str
) -> None:
    answered, told = await post(gateway_world, body, method)
    assert (answered, told["error"]["code"], told["error"]["status"]) == (code, code, status)
    assert says in told["error"]["message"]


async def test_a_key_names_its_attempt_and_tokens_are_counted(tmp_path: Path) -> None:
    async with world(tmp_path, admin_key="the admin key") as guarded:
        attempted = await guarded.attempt()
        key, request = {"x-goog-api-key": attempted.api_key or ""}, asked("weather", tools=[SEARCH])
        _, counted = await post(guarded, request, "countTokens", **key)
        assert await guarded.spans(attempted) == []
        status, told = await post(guarded, request, **key)
        assert status == 200 and told["usageMetadata"]["promptTokenCount"] == counted["totalTokens"]
        assert len(await guarded.spans(attempted)) == 1
        status, told = await post(guarded, asked())
        assert (status, told["error"]["status"]) == (401, "UNAUTHENTICATED")
