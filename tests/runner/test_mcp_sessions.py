"""Tool calls of MCP sessions in an attempt that walks a recorded one again: real servers over stdio
and HTTP, a real runner, a tiny model.

Run where mcp and the OpenAI Agents SDK are: `make .venv-experiments/.setup`."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

for package in ("mcp", "agents"):
    pytest.importorskip(package)

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from mcp.types import CallToolResult  # noqa: E402
from opentelemetry import trace  # noqa: E402

import agentlightning as agl  # noqa: E402
from agentlightning import semconv  # noqa: E402
from agentlightning.data.transitions import trace_rollout  # noqa: E402
from agentlightning.store.redaction import redaction  # noqa: E402
from agentlightning.tracing.context import AttemptTracer, bind  # noqa: E402
from agentlightning.tracing.mcp_calls import record_mcp_calls  # noqa: E402
from agentlightning.tracing.opentelemetry import OpenTelemetryTracer  # noqa: E402
from agentlightning.tracing.recorded import (  # noqa: E402
    RecordedOperations,
    key_of,
    read_operations,
    whole,
)
from agentlightning.tracing.steps import read_steps  # noqa: E402
from agentlightning.tracing.tree import refusal_of  # noqa: E402
from agentlightning.types import Rollout, RolloutConfig, Span  # noqa: E402
from tests.frameworks.policy import make_policy, tool_call  # noqa: E402
from tests.runner.agents import mcp_walking  # noqa: E402
from tests.runner.agents.mcp_walking import SERVER  # noqa: E402
from tests.runner.test_recorded import World, fork, serving  # noqa: E402
from tests.runner.world import reason_of, statuses  # noqa: E402
from tests.store.server_process import free_port  # noqa: E402

pytestmark = pytest.mark.anyio

TOOLS = RolloutConfig(
    max_attempts=3, retry_condition=("failed", "unresponsive"), retry="replay", tools="recorded"
)
SDK_TEXT = "Roll the dice, then look at Oslo."
LESSONS = [
    (SDK_TEXT, tool_call("roll", '{"sides": 6}')),
    ("is what the dice show.", tool_call("refuse", '{"reason": "no"}')),
    ("Error executing tool refuse", "I give up."),
]


@pytest.fixture
async def server(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[dict[str, Any]]:
    """What a task says of its server."""
    if request.param == "stdio":
        yield {}
        return
    port = free_port()
    command = [sys.executable, str(SERVER), str(tmp_path / "ran.txt"), str(port)]
    async with await anyio.open_process(command, stdout=None, stderr=None) as process:
        while True:
            try:
                await (await anyio.connect_tcp("127.0.0.1", port)).aclose()
                break
            except OSError:
                await anyio.sleep(0.05)
        yield {"url": f"http://127.0.0.1:{port}/mcp"}
        process.kill()


@pytest.fixture
async def there(tmp_path: Path) -> AsyncIterator[World]:
    async with serving(tmp_path) as world:
        yield world


@pytest.mark.parametrize(
    ("server", "isolation"), [("stdio", "none"), ("http", "process")], indirect=["server"]
)
async def test_recorded_calls_do_not_reach_the_server_before_the_fork_and_do_behind_it(
    there: World, server: dict[str, Any], isolation: Any
) -> None:
    source = await there.first(mcp_walking.walk, isolation, **server)
    assert source.status == "succeeded"
    assert there.ran() == ["roll 6", "look Oslo", "roll 6"]
    recorded = await there.results(source)
    ended = await there.run(fork(source, 2, tools="recorded"), mcp_walking.walk, isolation)
    assert ended.status == "succeeded"
    assert there.ran() == ["roll 6"]
    rolled, looked, last = await there.results(ended)
    assert (rolled, looked) == ((*recorded[0][:2], True), (*recorded[1][:2], True))
    assert not last[2] and last[1] != recorded[2][1]
    assert json.loads(looked[1])["structuredContent"]["places"] == [None, True, "ä\u2028"]


async def test_without_the_setting_the_server_is_asked_again(there: World) -> None:
    source = await there.first(mcp_walking.walk)
    there.ran()
    again = msgspec.structs.replace(fork(source, 2), config=RolloutConfig())
    ended = await there.run(again, mcp_walking.walk)
    assert "is what the dice show" in str(refusal_of(await there.spans(ended)))
    assert there.ran() == ["roll 6"]


@pytest.mark.parametrize(("isolation", "how"), [("none", "raise"), ("process", "kill")])
async def test_a_retry_gets_the_recorded_results(there: World, isolation: Any, how: str) -> None:
    request = there.request(TOOLS, interrupted=how)
    ended = await there.run(request, mcp_walking.walk, isolation)
    assert (await statuses(there.store, ended.rollout_id))[0][-1] == "succeeded"
    assert there.ran() == ["roll 6", "look Oslo", "roll 6"]
    assert [given for _, _, given in await there.results(ended)] == [True, True, False]


async def test_equal_calls_get_their_results_in_order_and_failures_are_results(
    there: World,
) -> None:
    asks = [["roll", {"sides": 6}], ["refuse", {"reason": "no"}], ["roll", {"sides": 6}]]
    source = await there.first(mcp_walking.walk, asks=asks)
    there.ran()
    ended = await there.run(fork(source, 4, tools="recorded"), mcp_walking.walk)
    assert there.ran() == []
    given = await there.results(ended)
    assert given == [(name, result, True) for name, result, _ in await there.results(source)]
    assert [json.loads(result)["isError"] for _, result, _ in given] == [False, True, False, False]
    assert len({result for name, result, _ in given if name == "roll"}) == 3


async def test_what_is_not_recorded_whole_and_what_asked_the_model_runs_again(
    there: World,
) -> None:
    asks = [["look", {"city": "Oslo"}], ["tell", {"what": "secret"}], ["tell", {"what": "much"}]]
    asks.append(["sample", {"question": "x"}])
    source = await there.first(mcp_walking.walk, asks=asks)
    assert source.status == "succeeded", await reason_of(there.store, source.rollout_id)
    there.ran()
    calls = [span for span in await there.spans(source) if semconv.CALL_INDEX in span.attributes]
    ended = await there.run(fork(source, len(calls) - 1, tools="recorded"), mcp_walking.walk)
    assert ended.status == "succeeded", await reason_of(there.store, ended.rollout_id)
    assert there.ran() == ["tell secret", "tell much", "sample x"]
    again = [span for span in await there.spans(ended) if semconv.CALL_INDEX in span.attributes]
    assert len(again) == len(calls)


async def test_without_content_the_server_is_asked_again(tmp_path: Path) -> None:
    async with serving(tmp_path, redaction("tokens")) as there:
        source = await there.first(mcp_walking.walk, asks=[["count", {}]])
        there.ran()
        ended = await there.run(fork(source, 2, tools="recorded"), mcp_walking.walk)
        assert ended.status == "succeeded"
        assert there.ran() == ["count", "count"]


@pytest.mark.parametrize(
    ("server", "isolation"), [("stdio", "process"), ("http", "none")], indirect=["server"]
)
async def test_an_agent_of_the_sdk_goes_on_from_a_call(
    tmp_path: Path, server: dict[str, Any], isolation: Any
) -> None:
    agent = mcp_walking.walk_by_sdk
    async with serving(tmp_path, policy=make_policy(LESSONS)) as there:
        source = await there.first(agent, isolation, text=SDK_TEXT, **server)
        assert source.status == "succeeded", await reason_of(there.store, source.rollout_id)
        assert there.ran() == ["roll 6", "refuse no"]
        ended = await there.run(fork(source, 2, tools="recorded"), agent, isolation)
        assert ended.status == "succeeded", await reason_of(there.store, ended.rollout_id)
        assert there.ran() == []
        assert [given for _, _, given in await there.results(ended)] == [True, True]
        assert counted(source, await there.spans(source)) == [("roll", 1), ("refuse", -1)]


def counted(rollout: Rollout, spans: list[Span]) -> list[tuple[str, int]]:
    """The tool calls that automatic rewards are made of."""
    transitions = trace_rollout(rollout, spans).transitions
    return [(tool.tool, tool.status) for one in transitions for tool in one.tools]


async def test_reports_of_a_tool_around_a_call_and_inside_it_are_one() -> None:
    from mcp import Client
    from mcp.server.mcpserver import MCPServer

    server = MCPServer("numbers", log_level="CRITICAL")

    @server.tool()
    def add(a: int, b: int) -> int:
        agl.emit_reward(float(a), final=False)
        return a + b

    @server.tool()
    def divide(a: int, b: int) -> float:
        return a / b

    record_mcp_calls()
    tracer = OpenTelemetryTracer("rollout", "attempt")
    told = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "add"}
    with bind(tracer):
        async with Client(server) as client:  # in this process: the server reports its tools too
            with trace.get_tracer("framework").start_as_current_span("tool", attributes=told):
                await client.call_tool("add", {"a": 1, "b": 2})
            await client.call_tool("divide", {"a": 1, "b": 0})
    spans = tracer.get_last_trace()
    tools = [step for step in read_steps(spans) if step.kind == "tool"]
    assert [(tool.name, tool.failed) for tool in tools] == [("add", False), ("divide", True)]
    (first, _) = read_operations(spans, every=True)
    assert [given[semconv.reward_value(0)] for given in first.rewards] == [1.0]


texts = st.text(max_size=20)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(texts, values, max_size=3)
resources = st.fixed_dictionaries({"uri": st.just("file:///a%20b"), "text": texts})
blocks = st.one_of(
    st.fixed_dictionaries({"type": st.just("text"), "text": texts}, optional={"_meta": objects}),
    st.fixed_dictionaries(
        {"type": st.just("image"), "data": st.just("aGk="), "mimeType": st.just("image/png")}
    ),
    st.fixed_dictionaries({"type": st.just("resource"), "resource": resources}),
    st.fixed_dictionaries(
        {"type": st.just("resource_link"), "uri": st.just("http://a.b/c?d"), "name": texts}
    ),
)
results = st.fixed_dictionaries(
    {"content": st.lists(blocks, max_size=3)},
    optional={"structuredContent": values, "isError": st.booleans(), "_meta": objects},
)


@given(results)
def test_a_recorded_result_is_the_same_again(sent: dict[str, Any]) -> None:
    result = CallToolResult.model_validate(sent)
    text = whole(result.model_dump(mode="json", by_alias=True, exclude_unset=True))
    assert text is not None
    again = CallToolResult.model_validate(json.loads(text))
    assert again == result
    assert again.model_fields_set == result.model_fields_set


async def test_rounds_in_which_a_server_asks_for_input_are_made_again() -> None:
    """What the client answers is not in the call that the record names."""
    types = pytest.importorskip("mcp_types", reason="of version 2")
    from mcp import Client
    from mcp.server.mcpserver import Context, MCPServer

    record_mcp_calls()
    answers = iter(["first", "second"])
    server = MCPServer("asking", log_level="CRITICAL")
    schema = {"type": "object", "properties": {"x": {"type": "string"}}}
    form = types.ElicitRequestFormParams(message="which?", requested_schema=schema)

    async def ask(question: str, ctx: Any) -> Any:
        if not ctx.input_responses:
            asked = {"a": types.ElicitRequest(params=form)}
            return types.InputRequiredResult(input_requests=asked, request_state="s")
        return str(ctx.input_responses["a"].content["x"])

    result = str | types.InputRequiredResult
    ask.__annotations__ = {"question": str, "ctx": Context, "return": result}
    server.tool()(ask)

    async def answer(*_: Any) -> Any:
        return types.ElicitResult(action="accept", content={"x": next(answers)})

    async def attempt(tracer: AttemptTracer) -> str:
        with bind(tracer):
            async with Client(server, elicitation_callback=answer) as client:
                return (await client.call_tool("ask", {"question": "?"})).content[0].text

    recorded = AttemptTracer("R", "A")
    assert await attempt(recorded) == "first"
    again = AttemptTracer("R", "B")
    again.recorded = RecordedOperations(read_operations(recorded.get_last_trace(), every=True))
    assert await attempt(again) == "second"


async def test_names_that_no_store_takes_are_written_as_text(tmp_path: Path) -> None:
    """A model may write any key."""
    record_mcp_calls()
    tracer = AttemptTracer("R", "A")
    with bind(tracer):
        async with mcp_walking.session_of({"log": str(tmp_path / "ran.txt")}) as session:
            with suppress(Exception):  # of what sends it
                await session.call_tool("look", {"city": "Oslo", "\ud800": 1})
            for own in ("mine", "yours"):
                await session.call_tool("look", {"city": "Oslo", "self": own})
    spans = [one for one in tracer.drain() if one.name == semconv.OPERATION]
    assert len(msgspec.json.encode([span.attributes for span in spans])) > 0
    assert len({key_of(span.attributes) for span in spans}) == 3
