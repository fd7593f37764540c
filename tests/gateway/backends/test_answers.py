"""The shapes in which servers are known to answer, and what each is read as, by the agent and in
the record."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any, NamedTuple

import aiohttp
import pytest
from starlette.requests import Request
from starlette.responses import Response

from agentlightning import semconv
from agentlightning.types import AttemptedRollout
from tests.gateway.talker import user
from tests.gateway.upstream import Upstream, gateway_before
from tests.gateway.world import World

pytestmark = pytest.mark.anyio


class Shaped(Upstream):
    """Answers with `said`: a whole answer, or the chunks of a stream."""

    said: Any = None
    kind = ""

    async def answer(self, request: Request) -> Response:
        if isinstance(self.said, list):
            parts = [
                part if isinstance(part, str) else f"data: {json.dumps(part)}\n\n"
                for part in self.said
            ]
            return Response("".join([*parts, "data: [DONE]\n\n"]), media_type="text/event-stream")
        return Response(json.dumps(self.said), media_type="application/json")


class Shape(NamedTuple):
    """What a server sends, and the message that is meant. `usage` is (prompt, completion) where it
    is to be read."""

    server: str
    said: Any
    content: str = "Hi"
    thoughts: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    ends: str = "stop"
    usage: tuple[int, int] | None = None


def whole(message: Any, finish: Any = "stop", **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "message": message, "finish_reason": finish}], **more}


def part(finish: Any = None, /, **delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def call(arguments: Any = None, name: str | None = None, **more: Any) -> dict[str, Any]:
    given = {"name": name, "arguments": arguments}
    return {**more, "function": {key: value for key, value in given.items() if value is not None}}


HI: dict[str, Any] = {"role": "assistant", "content": "Hi"}
TWO = (("f", '{"a":1}'), ("g", '{"b":2}'))
MISTRAL = [
    {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]},
    {"type": "text", "text": "Hi"},
]
SHAPES = [
    # --- what only informs ---
    Shape("Ollama", whole(HI, id=7, created=1.5, usage=None)),
    Shape("TGI", whole(HI, "eos_token", id="", created="2026-01-01T00:00:00Z", timings={"ms": 1})),
    Shape(
        "text-generation-webui",
        whole(HI, usage={"prompt_tokens": "3", "completion_tokens": 4.0}),
        usage=(3, 4),
    ),
    Shape("a proxy", whole(HI, usage={"input_tokens": 3, "output_tokens": 4}), usage=(3, 4)),
    Shape(
        "llama.cpp", whole(HI, usage={"prompt_tokens": -1, "completion_tokens": 4}), usage=(0, 4)
    ),
    Shape(
        "a gateway",
        whole(
            HI,
            usage={
                "prompt_tokens": 3,
                "completion_tokens": 4,
                "prompt_tokens_details": {"cached_tokens": "?"},
            },
        ),
        usage=(3, 4),
    ),
    Shape("LM Studio", whole(HI, usage=[], system_fingerprint={}, service_tier=1)),
    Shape("Cloudflare", whole(HI, None)),
    Shape("Cohere", whole(HI, "COMPLETE")),
    Shape("a server of its own words", whole(HI, "because")),
    Shape("Mistral, at its limit", whole(HI, "model_length"), ends="length"),
    Shape("GLM", whole(HI, "sensitive"), ends="content_filter"),
    Shape(
        "logprobs without numbers",
        {
            "choices": [
                {
                    "index": 0,
                    "message": HI,
                    "finish_reason": "stop",
                    "logprobs": {"content": [{"token": "x"}]},
                }
            ]
        },
    ),
    Shape(
        "logprobs of another kind",
        {"choices": [{"message": HI, "finish_reason": "stop", "logprobs": [1]}]},
    ),
    Shape(
        "a choice from one on", {"choices": [{"index": 1, "message": HI, "finish_reason": "stop"}]}
    ),
    Shape(
        "a choice without a number",
        {"choices": [{"index": None, "message": HI, "finish_reason": 3}]},
    ),
    Shape(
        "a choice too many",
        {"choices": [{"index": i, "message": HI, "finish_reason": "stop"} for i in (0, 1)]},
    ),
    # --- the message ---
    Shape("Mistral", whole({"role": "assistant", "content": MISTRAL}), thoughts="hm"),
    Shape(
        "Mistral, streamed",
        [part(content=MISTRAL[:1]), part(content=MISTRAL[1:]), part("stop", content="")],
        thoughts="hm",
    ),
    Shape("parts that are texts", whole({"content": ["H", {"type": "text", "text": "i"}]})),
    Shape("one part", whole({"content": {"type": "text", "text": "Hi"}})),
    Shape("a message that is a text", whole("Hi")),
    Shape("JSON that was decoded", whole({"content": {"a": 1}}), content='{"a": 1}'),
    Shape("newer vLLM", whole(HI | {"reasoning": "hm"}), thoughts="hm"),
    Shape("DeepSeek", whole(HI | {"reasoning_content": "hm", "tool_calls": None}), thoughts="hm"),
    Shape("Ollama, thinking", whole(HI | {"thinking": "hm"}), thoughts="hm"),
    Shape(
        "OpenRouter",
        whole(HI | {"reasoning": "hm", "reasoning_details": [{"text": "hm"}]}),
        thoughts="hm",
    ),
    Shape(
        "Together",
        [
            {
                "choices": [
                    {"index": 0, "text": "Hi", "delta": {"content": "Hi"}, "finish_reason": None}
                ]
            },
            part("stop"),
        ],
    ),
    Shape(
        "nulls",
        [
            part(role="assistant", content=None, tool_calls=None, function_call=None),
            part(content="Hi"),
            part("stop", content=None),
        ],
    ),
    Shape(
        "half of a character",
        ['data: {"choices": [{"index": 0, "delta": {"content": "Hi\\ud83d"}}]}\n\n', part("stop")],
        content="Hi?",
    ),
    # --- how it is sent ---
    Shape("no reason to end", [part(content="Hi")]),
    Shape(
        "OpenRouter, waiting",
        [": OPENROUTER PROCESSING\n\n", "data:\n\n", part(content="Hi"), part("stop")],
    ),
    Shape(
        "Azure", [{"choices": [], "prompt_filter_results": []}, part(content="Hi"), part("stop")]
    ),
    # --- tool calls ---
    Shape(
        "vLLM",
        whole(
            {
                "content": None,
                "tool_calls": [call('{"a":1}', "f", id="c0"), call('{"b":2}', "g", id="c1")],
            },
            "tool_calls",
        ),
        "",
        "",
        TWO,
        "tool_calls",
    ),
    Shape(
        "arguments as objects, ids as numbers",
        whole({"tool_calls": [call({"a": 1}, "f", id=0), call({"b": 2}, "g", id=1)]}, "tool_use"),
        "",
        "",
        TWO,
        "tool_calls",
    ),
    Shape(
        "no ids",
        whole(
            {"content": "", "tool_calls": [call({"a": 1}, "f"), call('{"b":2}', "g")]}, "tool_calls"
        ),
        "",
        "",
        TWO,
        "tool_calls",
    ),
    Shape(
        "one id for all",
        whole(
            {"tool_calls": [call({"a": 1}, "f", id="x"), call({"b": 2}, "g", id="x")]}, "tool_calls"
        ),
        "",
        "",
        TWO,
        "tool_calls",
    ),
    Shape(
        "no arguments",
        whole({"tool_calls": [call(None, "f", id="c0"), call("", "g", id="c1")]}, "tool_calls"),
        "",
        "",
        (("f", ""), ("g", "")),
        "tool_calls",
    ),
    Shape(
        "a call that is no list",
        whole({"content": None, "tool_calls": call('{"a":1}', "f", id="c0")}, "tool_calls"),
        "",
        "",
        TWO[:1],
        "tool_calls",
    ),
    Shape(
        "OpenAI, interleaved",
        [
            part(tool_calls=[call("", "f", index=0, id="c0"), call("", "g", index=1, id="c1")]),
            part(tool_calls=[call('{"a"', index=0)]),
            part(tool_calls=[call('{"b"', index=1)]),
            part(tool_calls=[call(":1}", index=0), call(":2}", index=1)]),
            part("tool_calls"),
        ],
        "",
        "",
        TWO,
        "tool_calls",
    ),
    Shape(
        "Ollama, two calls",
        [
            part(tool_calls=[call('{"a":1}', "f", index=0, id="c0")]),
            part(tool_calls=[call('{"b":2}', "g", index=0, id="c1")]),
            part("tool_calls"),
        ],
        "",
        "",
        TWO,
        "tool_calls",
    ),
    Shape(
        "Gemini's imitation",
        [
            part(
                tool_calls=[
                    call('{"a":1}', "f", index=0, id=""),
                    call('{"b":2}', "g", index=0, id=""),
                ]
            ),
            part("tool_calls"),
        ],
        "",
        "",
        TWO,
        "tool_calls",
    ),
    Shape(
        "neither index nor id",
        [
            part(tool_calls=[call('{"a"', "f")]),
            part(tool_calls=[call(":1}")]),
            part(tool_calls=[call({"b": 2}, "g")]),
            part("tool_calls"),
        ],
        "",
        "",
        TWO,
        "tool_calls",
    ),
    Shape(
        "the id in every part",
        [
            part(tool_calls=[call('{"a"', "f", id="c0")]),
            part(tool_calls=[call('{"b"', "g", id="c1")]),
            part(tool_calls=[call(":1}", id="c0")]),
            part(tool_calls=[call(":2}", id="c1")]),
            part("tool_calls"),
        ],
        "",
        "",
        TWO,
        "tool_calls",
    ),
    Shape(
        "the name in every part",
        [
            part(tool_calls=[call('{"a"', "f", index=0, id="c0")]),
            part(tool_calls=[call(":1}", "f", index=0, id="c0")]),
            part("tool_calls"),
        ],
        "",
        "",
        TWO[:1],
        "tool_calls",
    ),
    Shape(
        "a name in parts",
        [
            part(tool_calls=[call(None, "get", index=0, id="c0")]),
            part(tool_calls=[call('{"a":1}', "_it", index=0)]),
            part("tool_calls"),
        ],
        "",
        "",
        (("get_it", '{"a":1}'),),
        "tool_calls",
    ),
    Shape(
        "an id that comes late",
        [
            part(tool_calls=[call(None, "f", index=0)]),
            part(tool_calls=[call('{"a":1}', index=0, id="c0")]),
            part("tool_calls"),
        ],
        "",
        "",
        TWO[:1],
        "tool_calls",
    ),
    Shape(
        "text in between",
        [
            part(tool_calls=[call('{"a"', "f", index=0, id="c0")]),
            part(content="Hi"),
            part(tool_calls=[call(":1}", index=0)]),
            part("tool_calls"),
        ],
        "Hi",
        "",
        TWO[:1],
        "tool_calls",
    ),
    Shape(
        "indices from afar",
        [
            part(tool_calls=[call('{"a":1}', "f", index=-1, id="c0")]),
            part(tool_calls=[call('{"b":2}', "g", index=9**12, id="c1")]),
            part("tool_calls"),
        ],
        "",
        "",
        TWO,
        "tool_calls",
    ),
    Shape("tool calls that are none", [part(content="Hi", tool_calls="search"), part("stop")]),
]


@pytest.fixture(params=["vllm", "openai"])
async def before(request: pytest.FixtureRequest) -> AsyncGenerator[tuple[World, Shaped]]:
    server = Shaped([])
    server.kind = request.param
    async with gateway_before(server, kind=request.param) as built:
        yield built, server


async def asked(
    world: World, attempted: AttemptedRollout, path: str, body: dict[str, Any]
) -> tuple[int, str]:
    url = (
        f"{world.url}/rollout/{attempted.rollout_id}/attempt/{attempted.attempt.attempt_id}/{path}"
    )
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as answer:
        return answer.status, await answer.text()


def events(text: str) -> list[dict[str, Any]]:
    data = [line[5:] for line in text.splitlines() if line.startswith("data:")]
    return [json.loads(one) for one in data if one.strip() != "[DONE]"]


def message_of(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client of chat completions makes of a stream: calls by index, texts
    joined."""
    made: dict[str, Any] = {"content": ""}
    calls: dict[int, dict[str, Any]] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        for name, value in choice["delta"].items():
            if isinstance(value, str):
                made[name] = made.get(name, "") + value
        for one in choice["delta"].get("tool_calls", ()):
            empty = {"id": "", "function": {"name": "", "arguments": ""}}
            begun = calls.setdefault(one["index"], empty)
            begun["id"] += one.get("id", "")
            for field, text in one["function"].items():
                begun["function"][field] += text
    return made | {"tool_calls": [*calls.values()]}


def meant(message: dict[str, Any]) -> tuple[str, str, tuple[tuple[str, str], ...]]:
    """(content, thoughts, calls) of a message."""
    functions = [one["function"] for one in message.get("tool_calls") or ()]
    calls = tuple((one["name"], one["arguments"]) for one in functions)
    return (
        message["content"] or "",
        message.get("reasoning_content") or message.get("reasoning") or "",
        calls,
    )


async def wrong_of(world: World, shape: Shape) -> list[str]:
    """What is wrong with the answers to this shape, asked for whole and streamed, and with their
    records."""
    attempted, wrong = await world.attempt(), list[str]()
    expected = (shape.content, shape.thoughts, shape.calls)
    body = {"model": "policy", "messages": user("x"), "stream_options": {"include_usage": True}}
    for stream in (False, True):
        status, text = await asked(
            world, attempted, "v1/chat/completions", body | {"stream": stream}
        )
        if status != 200 or '"error"' in text:
            return [*wrong, text]
        if stream:
            *chunks, last = events(text)
            message, usage = message_of(chunks), last["usage"]
            ends = chunks[-1]["choices"][0]["finish_reason"]
        else:
            (choice,) = json.loads(text)["choices"]
            message, usage, ends = (
                choice["message"],
                json.loads(text)["usage"],
                choice["finish_reason"],
            )
        ids = {one["id"] for one in message.get("tool_calls") or ()} - {""}
        counted = (usage["prompt_tokens"], usage["completion_tokens"])
        got = (meant(message), ends, len(ids), counted)
        if got != (expected, shape.ends, len(shape.calls), shape.usage or (0, 0)):
            wrong.append(f"streamed {stream}: {got}")
    for span in await world.spans(attempted):
        (recorded,) = json.loads(str(span.attributes[semconv.GEN_AI_OUTPUT_MESSAGES]))
        if meant(recorded) != expected:
            wrong.append(f"recorded: {recorded}")
    return wrong


async def test_each_shape_is_read_as_what_it_means(before: tuple[World, Shaped]) -> None:
    world, server = before
    wrong: list[str] = []
    for shape in SHAPES:
        server.said = shape.said
        wrong += [f"{shape.server}: {what}" for what in await wrong_of(world, shape)]
    assert not wrong, "\n".join(wrong)


async def test_a_server_may_give_fewer_choices_than_it_was_asked_for(
    before: tuple[World, Shaped],
) -> None:
    world, server = before
    body = {"model": "policy", "messages": user("x"), "n": 3}
    for said in (whole(HI), [part(content="Hi"), part("stop")]):
        server.said = said
        attempted = await world.attempt()
        _, text = await asked(world, attempted, "v1/chat/completions", body)
        assert [choice["message"]["content"] for choice in json.loads(text)["choices"]] == ["Hi"]
        _, text = await asked(world, attempted, "v1/chat/completions", body | {"stream": True})
        assert message_of(events(text))["content"] == "Hi" and '"error"' not in text
        for span in await world.spans(attempted):
            assert len(json.loads(str(span.attributes[semconv.GEN_AI_OUTPUT_MESSAGES]))) == 1


@pytest.mark.parametrize(
    ("error", "says"),
    [
        ({"error": "no room"}, "no room"),
        ({"error": {"message": "no room", "code": 7}}, "no room"),
        ({"error": {"error": {"message": "no room"}}}, "no room"),
        ({"detail": "no room"}, "no room"),
        ({"detail": [{"loc": ["body", "n"], "msg": "no room"}]}, "body.n: no room"),
        ({"object": "error", "message": "no room"}, "no room"),
        ({"statusCode": 400, "error": "Bad Request", "message": ["no room"]}, "no room"),
        ([{"error": {"message": "no room"}}], "no room"),
        ({"errors": [{"message": "no"}, {"message": "room"}]}, "no; room"),
        ("no room", "no room"),
        (b"no\nroom", "no room"),
        (
            b"<html><head><title>400</title></head><body><h1>no room</h1></body></html>",
            "400 no room",
        ),
        (b"", "answered 400 and said nothing"),
    ],
    ids=str,
)
async def test_the_words_of_a_refusal_reach_the_agent(error: Any, says: str) -> None:
    class Refusing(Upstream):
        async def answer(self, request: Request) -> Response:
            return Response(error if isinstance(error, bytes) else json.dumps(error), 400)

    async with gateway_before(Refusing([]), kind="openai") as world:
        attempted = await world.attempt()
        body = {"model": "policy", "messages": user("x"), "max_tokens": 5}
        for path in ("v1/chat/completions", "v1/messages"):
            status, text = await asked(world, attempted, path, body)
            assert status == 400 and json.loads(text)["error"]["message"].endswith(says)
        for span in await world.spans(attempted):
            assert str(span.status.description).endswith(says)


async def test_calls_are_whole_in_every_protocol(before: tuple[World, Shaped]) -> None:
    world, server = before
    tool = {"name": "f", "description": "", "input_schema": {"type": "object"}}
    function = {"type": "function", "name": "f", "parameters": {}}
    wrong: list[str] = []
    for shape in SHAPES:
        if not shape.calls:
            continue
        server.said = shape.said
        attempted = await world.attempt()
        expected = [(name, json.loads(arguments or "{}")) for name, arguments in shape.calls]
        body = {
            "model": "policy",
            "messages": user("x"),
            "max_tokens": 9,
            "tools": [tool],
            "stream": True,
        }
        _, text = await asked(world, attempted, "v1/messages", body)
        blocks: list[tuple[str, str]] = []
        for event in events(text):
            if event["type"] == "content_block_start":
                assert len(blocks) == event["index"]
                blocks.append((event["content_block"].get("name", ""), ""))
            elif event["type"] == "content_block_delta":
                name, said = blocks[event["index"]]
                blocks[event["index"]] = (name, said + event["delta"].get("partial_json", ""))
        got = [(name, json.loads(said or "{}")) for name, said in blocks if name]
        contents = {
            "contents": [{"parts": [{"text": "x"}]}],
            "tools": [{"functionDeclarations": [{"name": "f"}]}],
        }
        path = "v1beta/models/policy:streamGenerateContent"
        _, text = await asked(world, attempted, path, contents)
        parts = [
            part for event in events(text) for part in event["candidates"][0]["content"]["parts"]
        ]
        called = [part["functionCall"] for part in parts if "functionCall" in part]
        in_gemini = [(one["name"], one["args"]) for one in called]
        answers = {"messages": got, "gemini": in_gemini}
        if server.kind == "vllm":  # hosted APIs answer responses themselves
            body = {"model": "policy", "input": "x", "tools": [function], "stream": True}
            _, text = await asked(world, attempted, "v1/responses", body)
            output = events(text)[-1]["response"]["output"]
            items = [item for item in output if item["type"] == "function_call"]
            answers["responses"] = [
                (one["name"], json.loads(one["arguments"] or "{}")) for one in items
            ]
        wrong += [
            f"{shape.server}, {protocol}: {got}"
            for protocol, got in answers.items()
            if got != expected
        ]
    assert not wrong, "\n".join(wrong)
