"""The SDKs of OpenAI and Anthropic for Node: what they send is understood, and what they get they understand."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from agentlightning import semconv
from agentlightning.data.transitions import trace_rollout
from agentlightning.store.sql import SqlStore
from agentlightning.types import AttemptedRollout, Mode, Span
from tests.gateway.talker import PLAIN
from tests.gateway.test_hostile_servers import BEGIN, RawServer, before
from tests.gateway.upstream import DONE, GOOD, Upstream, chunk, gateway_before
from tests.gateway.world import World
from tests.node import NODE, installed

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

HERE = Path(__file__).parent / "node"


@pytest.fixture(scope="module")
def packages() -> Path:
    """The folder that holds the SDKs."""
    return installed(HERE / "package.json")


async def run(packages: Path, there: World, scenario: str, attempted: AttemptedRollout | None = None) -> Any:
    """What a scenario of `contract.mjs` printed."""
    path = "" if attempted is None else f"/rollout/{attempted.rollout_id}/attempt/{attempted.attempt.attempt_id}"
    key = (attempted and attempted.api_key) or "EMPTY"
    places = {"OPENAI_BASE_URL": f"{there.url}{path}/v1", "ANTHROPIC_BASE_URL": f"{there.url}{path}"}
    keys = {"OPENAI_API_KEY": key, "ANTHROPIC_API_KEY": key}
    process = await asyncio.create_subprocess_exec(
        *(NODE, HERE / "contract.mjs", scenario),
        env={"PACKAGES": str(packages), **places, **keys},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, err.decode()
    return json.loads(out)


async def captured(packages: Path, there: World, scenario: str, mode: Mode = "train") -> tuple[Any, list[Span]]:
    """What a scenario printed, and the spans of its calls."""
    attempted = await there.attempt(mode)
    told = await run(packages, there, scenario, attempted)
    await asyncio.wait_for(there.gateway.idle(), 60)
    return told, await there.spans(attempted)


# --- answers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scenario", ["chat", "chat_stream"])
async def test_a_chat_is_answered(gateway_world: World, packages: Path, scenario: str) -> None:
    told, (span,) = await captured(packages, gateway_world, scenario)
    assert told["choices"][0]["message"]["content"] == PLAIN["hello"]
    assert told["choices"][0]["finish_reason"] == "stop"
    assert span.tokens is not None and told["usage"]["completion_tokens"] == len(span.tokens.choices[0].token_ids)
    assert semconv.CALL_FLAG not in span.attributes


@pytest.mark.parametrize("scenario", ["chat_tools", "chat_tools_stream"])
async def test_a_chat_calls_two_tools(gateway_world: World, packages: Path, scenario: str) -> None:
    told, _ = await captured(packages, gateway_world, scenario)
    calls = told["choices"][0]["message"]["tool_calls"]
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"q": "sun"}, {"q": "rain"}]
    assert len({call["id"] for call in calls}) == 2 and told["choices"][0]["finish_reason"] == "tool_calls"


async def test_a_text_is_continued_and_models_are_listed(gateway_world: World, packages: Path) -> None:
    told, _ = await captured(packages, gateway_world, "completion")
    assert told["object"] == "text_completion" and told["usage"]["completion_tokens"] <= 4
    assert [model["id"] for model in await run(packages, gateway_world, "models")] == ["policy"]


@pytest.mark.parametrize("scenario", ["response", "response_stream"])
async def test_a_response_is_made(gateway_world: World, packages: Path, scenario: str) -> None:
    told, (span,) = await captured(packages, gateway_world, scenario)
    assert told["output_text"] == PLAIN["hello"] and told["status"] == "completed"
    assert told["usage"]["output_tokens"] == span.attributes[semconv.GEN_AI_OUTPUT_TOKENS]


async def test_a_response_calls_a_tool_and_is_continued(gateway_world: World, packages: Path) -> None:
    told, spans = await captured(packages, gateway_world, "response_tools")
    assert (told["call"]["name"], json.loads(told["call"]["arguments"])) == ("search", {"q": "sun"})
    assert told["continued"] and len(spans) == 2
    *_, call, result = json.loads(str(spans[1].attributes[semconv.GEN_AI_INPUT_MESSAGES]))
    assert call["tool_calls"][0]["id"] == result["tool_call_id"] and result["content"] == "sunny"


@pytest.mark.parametrize("scenario", ["message", "message_stream"])
async def test_a_message_is_answered(gateway_world: World, packages: Path, scenario: str) -> None:
    told, (span,) = await captured(packages, gateway_world, scenario)
    assert [block["text"] for block in told["content"]] == [PLAIN["hello"]] and told["stop_reason"] == "end_turn"
    assert told["usage"]["output_tokens"] == span.attributes[semconv.GEN_AI_OUTPUT_TOKENS]


@pytest.mark.parametrize("scenario", ["message_tools", "message_tools_stream"])
async def test_a_message_calls_two_tools(gateway_world: World, packages: Path, scenario: str) -> None:
    told, _ = await captured(packages, gateway_world, scenario)
    assert [block["input"] for block in told["content"] if block["type"] == "tool_use"] == [{"q": "sun"}, {"q": "rain"}]
    assert told["stop_reason"] == "tool_use"


async def test_tokens_of_a_message_are_counted(gateway_world: World, packages: Path) -> None:
    told, spans = await captured(packages, gateway_world, "message_count")
    assert told["input_tokens"] > 0 and spans == []


# --- errors ------------------------------------------------------------------------------------------------------


def same(error: dict[str, Any], **expected: Any) -> bool:
    return {name: error.get(name) for name in expected} == expected


async def test_errors_are_of_openais_classes(gateway_world: World, packages: Path) -> None:
    told, _ = await captured(packages, gateway_world, "chat_errors")
    assert same(told["refused"], name="BadRequestError", status=400, code="unsupported_parameter")
    assert same(told["range"], name="BadRequestError", status=400, param="temperature", type="invalid_request_error")
    assert same(told["missing"], name="NotFoundError", status=404, code="model_not_found")
    told, _ = await captured(packages, gateway_world, "response_error")
    assert same(told, name="BadRequestError", status=400, code="unsupported_parameter", param="background")


async def test_errors_are_of_anthropics_classes(gateway_world: World, packages: Path) -> None:
    told, _ = await captured(packages, gateway_world, "message_errors")
    assert same(told["refused"], name="BadRequestError", status=400, type="invalid_request_error")
    assert "max_tokens" in told["refused"]["message"]
    assert same(told["missing"], name="NotFoundError", status=404, type="not_found_error")


@pytest.mark.parametrize("scenario", ["chat_ended", "message_ended"])
async def test_an_attempt_that_has_ended_is_not_asked_for_again(
    gateway_world: World, packages: Path, scenario: str
) -> None:
    attempted = await gateway_world.attempt()
    ids = attempted.rollout_id, attempted.attempt.attempt_id
    await gateway_world.store.update_attempt(*ids, status="failed")
    told = await run(packages, gateway_world, scenario, attempted)
    assert same(told, name="PermissionDeniedError", status=403)


# --- servers that stand in ---------------------------------------------------------------------------------------


class Unsteady(Upstream):
    """Refuses its first call."""

    async def answer(self, request: Request) -> Response:
        if not self.asked:
            self.asked.append({})
            return JSONResponse({"error": {"message": "not yet"}}, self.status)
        self.status = 200
        return await super().answer(request)


@asynccontextmanager
async def standing_in(upstream: Upstream, directory: Path) -> AsyncIterator[World]:
    store = await SqlStore.open(directory / "store.sqlite", synchronous="NORMAL")
    async with gateway_before(upstream, store) as there:
        yield there
    await store.close()


@pytest.mark.parametrize("scenario", ["chat_retry", "message_retry"])
@pytest.mark.parametrize("status", [500, 503])
async def test_a_failure_is_asked_for_again_and_trained_once(
    tmp_path: Path, packages: Path, scenario: str, status: int
) -> None:
    async with standing_in(Unsteady(GOOD, status), tmp_path) as there:
        told, spans = await captured(packages, there, scenario)
        rollout = await there.store.get_rollout_by_id(spans[0].rollout_id)
        assert rollout is not None
        learned = trace_rollout(rollout, spans)
    assert "Hi!" in json.dumps(told)
    assert [transition.call_index for transition in learned.transitions] == [1]
    assert [span.attributes.get(semconv.CALL_FLAG) for span in spans] == ["call failed", None]
    assert all(semconv.CALL_DISCARDS not in span.attributes for span in spans)


@pytest.mark.parametrize("scenario", ["chat_abort", "message_abort"])
async def test_a_stream_that_is_aborted_is_recorded_as_left(tmp_path: Path, packages: Path, scenario: str) -> None:
    server = RawServer(BEGIN, hangs=True)
    async with before(server, tmp_path, timeout_seconds=60.0) as there:
        told, (span,) = await captured(packages, there, scenario)
        await asyncio.wait_for(server.left.wait(), 60)
    assert told == {"text": "Hi", "ended": "quietly"}
    assert span.attributes[semconv.CALL_FLAG] == "client disconnected"
    assert span.tokens is not None and span.tokens.choices[0].token_ids == (4,)


async def test_structured_output_is_parsed(tmp_path: Path, packages: Path) -> None:
    events = [chunk({"index": 0, "delta": {"content": '{"sun": true}'}, "finish_reason": "stop"}), DONE]
    upstream = Upstream(events)
    async with standing_in(upstream, tmp_path) as there:
        told, (span,) = await captured(packages, there, "chat_parse", "test")
    assert told["choices"][0]["message"]["parsed"] == {"sun": True}
    assert upstream.asked[0]["response_format"]["json_schema"]["name"] == "weather"
    assert span.attributes[semconv.CALL_FLAG] == "constrained by a grammar"
