"""What an answer must be: enforced in evaluation and serving, a hint in training."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion
from pydantic import BaseModel, Field

from agentlightning import semconv
from agentlightning.gateway.backend import ModelCall
from agentlightning.gateway.chat.grammar import Form, Grammars, form_of
from agentlightning.gateway.chat.template import ChatTemplate
from agentlightning.gateway.chat.text import TOOL_FORMATS, ToolCall
from agentlightning.types import Mode, Span
from tests.gateway.talker import PLAIN, SEARCH_TOOL, make_talker, user
from tests.gateway.world import World

pytestmark = pytest.mark.anyio


class City(BaseModel, extra="forbid"):
    name: str = Field(max_length=6)
    size: int = Field(ge=0, le=99)
    tags: list[str] = Field(max_length=0)


SCHEMA = City.model_json_schema()
LOOK = {"type": "function", "function": {"name": "löök", "parameters": SCHEMA}}
ENUM = {
    "type": "object",
    "properties": {"q": {"enum": ["sun", "rain"]}},
    "additionalProperties": False,
}
TIGHT = {
    "type": "function",
    "function": {"name": "search", "parameters": {**ENUM, "propertyNames": {"minLength": 1}}},
}


def json_format(schema: Any) -> dict[str, Any]:
    return {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": schema, "strict": True},
    }


async def asked(
    there: World, mode: Mode | None = "test", **fields: Any
) -> tuple[ChatCompletion, Span | None]:
    attempted = None if mode is None else await there.attempt(mode)
    defaults: dict[str, Any] = {
        "model": "policy",
        "messages": user("hello"),
        "temperature": 1.0,
        "max_tokens": 300,
    }
    answer = await there.client(attempted).chat.completions.create(**{**defaults, **fields})
    return answer, (await there.spans(attempted))[-1] if attempted else None


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_fits_its_schema_whatever_is_drawn(
    gateway_world: World, stream: bool
) -> None:
    attempted = await gateway_world.attempt("test")
    chat = gateway_world.client(attempted).chat.completions
    for seed in range(12):
        if stream:
            asking = {
                "messages": user("hello"),
                "model": "policy",
                "temperature": 1.0,
                "seed": seed,
                "stream": True,
            }
            chunks = [
                chunk
                async for chunk in await chat.create(**asking, response_format=json_format(SCHEMA))
            ]
            City.model_validate_json(
                "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            )
        else:
            answer = await chat.parse(
                model="policy", messages=user("hello"), seed=seed, response_format=City, n=2
            )
            assert all(
                choice.message.parsed and choice.finish_reason == "stop"
                for choice in answer.choices
            )
    spans = await gateway_world.spans(attempted)
    assert {span.attributes[semconv.CALL_FLAG] for span in spans} == {"constrained by a grammar"}
    assert all(max(choice.logprobs) <= 0 for span in spans for choice in span.tokens.choices)


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "search"}}, None]
)
async def test_a_forced_call_is_one_whatever_is_drawn(gateway_world: World, choice: Any) -> None:
    """Without a choice, and with tools at hand, JSON output may wait for a call."""
    called = set[str]()
    wanted = {"tool_choice": choice} if choice else {"response_format": json_format(SCHEMA)}
    for seed in range(12):
        forced = {"tools": [TIGHT, LOOK], **wanted, "parallel_tool_calls": False, "seed": seed}
        answer, _ = await asked(gateway_world, None, messages=user("weather"), **forced)
        message = answer.choices[0].message
        if choice is None and not message.tool_calls:
            City.model_validate_json(message.content or "")
            continue
        (call,) = message.tool_calls or ()
        assert answer.choices[0].finish_reason == "tool_calls" and not message.content
        called.add(call.function.name)
        if call.function.name == "search":
            assert json.loads(call.function.arguments).get("q") in (None, "sun", "rain")
        else:
            City.model_validate_json(call.function.arguments)
    assert called <= {"search", "löök"} and (choice in ("required", None) or called == {"search"})


async def test_the_same_in_training_is_sampled_freely_noted_and_trained(
    gateway_world: World,
) -> None:
    wishes = {
        "response_format": json_format(SCHEMA),
        "tool_choice": "required",
        "max_tokens": 10_000,
    }
    answer, span = await asked(
        gateway_world, "train", tools=[SEARCH_TOOL], presence_penalty=1.0, verbosity="low", **wishes
    )
    assert answer.choices[0].message.content or answer.choices[0].message.tool_calls
    assert span.attributes[semconv.CALL_DROPPED] == [
        "response_format",
        "tool_choice",
        "verbosity",
        "max_tokens",
    ]
    assert json.loads(span.attributes[semconv.CALL_OVERRIDDEN])["presence_penalty"] == 1.0
    assert semconv.CALL_FLAG not in span.attributes and semconv.CALL_TRAINABLE in span.attributes


@pytest.mark.parametrize("thought", ["", "<think>so</think>", "so</think>\n"])
@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
async def test_calls_are_written_as_they_are_read(tool_format: str, thought: str) -> None:
    chat = ChatTemplate.from_pretrained(make_talker().tokenizer)
    form = form_of(
        ModelCall(model="m", messages=[], tools=[TIGHT, LOOK], tool_choice="required"), tool_format
    )
    assert form is not None
    grammars, drawing = Grammars(chat), random.Random(tool_format)
    for _ in range(5):
        masks = await grammars.masks(
            form, "may" if thought.startswith("<") else "must" if thought else "no"
        )
        for token_id in chat.encode(thought):
            masks.advance(token_id)
        said = list[int]()
        while chat.stop_token_ids.isdisjoint(said):
            bits = int.from_bytes(masks.allowed, "little")
            allowed = [number for number in range(bits.bit_length()) if bits >> number & 1]
            said.append(
                drawing.choice([one for one in allowed if one in chat.stop_token_ids] or allowed)
            )
            masks.advance(said[-1])
        parser = TOOL_FORMATS[tool_format].parser()
        calls = [*parser.feed(chat.token_bytes.text(said[:-1])), *parser.finish()]
        assert calls and all(isinstance(call, ToolCall) for call in calls)


async def test_the_grammars_of_one_session_do_not_hold_up_those_of_another() -> None:
    grammars = Grammars(ChatTemplate.from_pretrained(make_talker().tokenizer))
    large = Form(
        "response_format",
        {"properties": {f"p{number}": {"type": "number"} for number in range(1000)}},
    )
    many = [asyncio.ensure_future(grammars.masks(large, "no", "busy")) for _ in range(12)]
    await grammars.masks(Form("response_format", {"type": "object"}), "no", "other")
    assert not all(one.done() for one in many)
    await asyncio.gather(*many)


DEEP: Any = {"type": "integer"}
for _ in range(400):
    DEEP = {"type": "array", "items": DEEP, "minItems": 1}
CHAIN = {
    "$defs": {f"{n}": {"pattern": f".*[a-z]{n}.*", "$ref": f"#/$defs/{n + 1}"} for n in range(20)}
}
HOSTILE = {
    "no type": ({"type": "strin"}, "Invalid type"),
    "not known": ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    "elsewhere": ({"$ref": "http://127.0.0.1:9/x.json"}, "not present in a registry"),
    "endless": ({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "no value fits"),
    "deep": (DEEP, "cannot be enforced"),
    "large": ({"enum": [f"choice {number}" for number in range(10_000)]}, "65,536"),
    "wide": (
        {
            "type": "object",
            "properties": {f"p{number}": {"type": "string"} for number in range(2000)},
        },
        "items",
    ),
    "patterns": (
        {"allOf": [{"type": "string", "pattern": f".*[a-z]{n}.*"} for n in range(20)]},
        "match 20 patterns",
    ),
    "chain": ({**CHAIN, "$ref": "#/$defs/0"}, "match 20 patterns"),
    "backtracking": ({"type": "string", "pattern": "(a*)*(?=b)\\1"}, "regex"),
    "product": (
        {
            "allOf": [
                {"anyOf": [{"properties": {f"{a}{b}": {}}} for b in "uvwxyz"]} for a in range(9)
            ]
        },
        "large",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_bad_schema_is_refused_in_its_own_words_and_holds_nobody_up(
    gateway_world: World, name: str
) -> None:
    schema, says = HOSTILE[name]
    refused = asyncio.ensure_future(asked(gateway_world, None, response_format=json_format(schema)))
    assert (await asked(gateway_world, None, temperature=0.0))[0].choices[
        0
    ].message.content == PLAIN["hello"]
    with pytest.raises(openai.BadRequestError, match=says):
        await refused


@pytest.mark.parametrize(
    "pattern", ["((a{1,1000}){1,1000}){1,1000}", "^(.*a){30}.{30}$", "(a|b)*a(a|b){25}c"]
)
async def test_a_catastrophic_pattern_is_followed_in_steps(
    gateway_world: World, pattern: str
) -> None:
    async with asyncio.timeout(60):
        await asked(
            gateway_world, None, response_format=json_format({"type": "string", "pattern": pattern})
        )
