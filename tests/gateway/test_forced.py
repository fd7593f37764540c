"""What an answer must be: a hint in attempts of the embedded engine, refused without one, and written
as servers read it."""

from __future__ import annotations

import json
from typing import Any, cast

import openai
import pytest

from agentlightning import semconv
from agentlightning.gateway.backend import ModelCall
from agentlightning.gateway.chat.forms import form_of
from agentlightning.gateway.chat.text import TOOL_FORMATS
from agentlightning.types import Mode
from tests.gateway.talker import SEARCH_TOOL, user
from tests.gateway.world import World

pytestmark = pytest.mark.anyio

SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}}
JSON_FORMAT: Any = {
    "type": "json_schema",
    "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True},
}


@pytest.mark.parametrize("mode", ["train", "val", "test"])
async def test_a_form_is_a_hint_in_attempts_of_every_mode(gateway_world: World, mode: Mode) -> None:
    attempted = await gateway_world.attempt(mode)
    answer = await gateway_world.client(attempted).chat.completions.create(
        model="policy",
        messages=user("hello"),
        max_tokens=50,
        tools=cast("Any", [SEARCH_TOOL]),
        tool_choice="required",
        response_format=JSON_FORMAT,
        verbosity="low",
    )
    span = (await gateway_world.spans(attempted))[-1]
    assert answer.choices[0].message.content or answer.choices[0].message.tool_calls
    dropped = cast("list[str]", span.attributes[semconv.CALL_DROPPED])
    assert {"response_format", "tool_choice", "verbosity"} <= {*dropped}
    assert semconv.CALL_FLAG not in span.attributes


@pytest.mark.parametrize(
    "wish", [{"tool_choice": "required"}, {"response_format": JSON_FORMAT}], ids=str
)
async def test_without_an_attempt_it_is_refused_with_the_reason(
    gateway_world: World, wish: dict[str, Any]
) -> None:
    with pytest.raises(openai.BadRequestError, match=f"{next(iter(wish))} .*sampled freely"):
        await gateway_world.client(None).chat.completions.create(
            model="policy",
            messages=user("hello"),
            max_tokens=5,
            tools=cast("Any", [SEARCH_TOOL]),
            **wish,
        )


@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
def test_servers_get_a_structural_tag_of_the_models_own_format(tool_format: str) -> None:
    call = ModelCall(model="m", messages=[], tools=[SEARCH_TOOL], tool_choice="required")
    form = form_of(call, tool_format)
    assert form is not None
    tag = form.structural_tag()["format"]
    assert tag["type"] == "tags_with_separator" and tag["at_least_one"]
    written = tag["tags"][0]["begin"] + json.dumps({"q": "x"}) + tag["tags"][0]["end"]
    parser = TOOL_FORMATS[tool_format].parser()
    found = [*parser.feed(written), *parser.finish()]
    assert [getattr(part, "name", None) for part in found] == ["search"]
