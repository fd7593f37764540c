"""Who made a call and what for, from what coding agents really send; and what is left of a request
that is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import aiohttp
import msgspec
import pytest

from agentlightning import semconv
from agentlightning.data.call_filter import HOUSEKEEPING, CallFilter
from agentlightning.data.conversations import read_calls
from agentlightning.data.transitions import trace_rollout
from agentlightning.types import AttemptedRollout, Rollout
from tests.gateway.claude import asked as claude_asks
from tests.gateway.talker import user
from tests.gateway.world import World, world

pytestmark = pytest.mark.anyio

CLAUDE = {
    "user-agent": "claude-cli/2.1.197 (external, sdk-cli)",
    "x-claude-code-session-id": "main",
}
CODEX = {
    "user-agent": "codex_exec/0.169.0 (Debian 12.0.0)",
    "session-id": "main",
    "thread-id": "main",
}
OPENCODE = {"user-agent": "opencode/1.18.33 ai-sdk/provider-utils/4.0.23", "x-session-id": "main"}
BILLING = "x-anthropic-billing-header: cc_version=2.1.197.7d4; cc_entrypoint=sdk-cli;"
SDK = "You are a Claude agent, built on Anthropic's Claude Agent SDK."
FROM_USER = "Your task is to create a detailed summary of the conversation so far"


def turn(**metadata: Any) -> dict[str, str]:
    return {"x-codex-turn-metadata": json.dumps(metadata)}


def claude(system: str, *said: str, role: str = "user") -> tuple[str, dict[str, Any]]:
    parts = [{"type": "text", "text": text} for text in (BILLING, SDK, system)]
    messages = [
        {"role": role, "content": [{"type": "text", "text": text}]} for text in said or ("hello",)
    ]
    reminder = {"role": "system", "content": "The following skills are available"}
    return "messages", claude_asks() | {"system": parts, "messages": [*messages, reminder]}


def codex(said: str = "hello") -> tuple[str, dict[str, Any]]:
    developer = {
        "role": "developer",
        "content": [{"type": "input_text", "text": "You are a coding agent"}],
    }
    return "responses", {
        "model": "policy",
        "input": [{"type": "message", **one} for one in (developer, *user(said))],
    }


def chat(system: str, said: str = "hello") -> tuple[str, dict[str, Any]]:
    return "chat/completions", {
        "model": "policy",
        "messages": [{"role": "system", "content": system}, *user(said)],
    }


SUB = "You are an agent for Claude Code, Anthropic's official CLI."
SHAPES: dict[str, tuple[Mapping[str, str], tuple[str, dict[str, Any]], tuple[str | None, ...]]] = {
    # headers, request → the agent, its parent, what housekeeping
    "claude": (CLAUDE, claude("\nYou are an interactive agent"), ("claude-code", None, None)),
    "claude's title": (
        CLAUDE,
        claude("Generate a concise, sentence-case title"),
        ("claude-code", None, "title"),
    ),
    "claude's sub-agent": (
        CLAUDE | {"x-claude-code-agent-id": "a04d"},
        claude(SUB),
        ("claude-code/agent for Claude Code", "main", None),
    ),
    "its own": (
        CLAUDE | {"x-claude-code-agent-id": "b1", "x-claude-code-parent-agent-id": "a04d"},
        claude("Search."),
        ("claude-code/sub-agent", "a04d", None),
    ),
    "claude's compaction": (
        CLAUDE,
        claude("You are a tool", FROM_USER),
        ("claude-code", None, "compaction"),
    ),
    "the same, long ago": (
        CLAUDE,
        claude("You are an interactive agent", FROM_USER, "hello"),
        ("claude-code", None, None),
    ),
    "codex": (
        CODEX | turn(agent_name="/root", request_kind="turn"),
        codex(),
        ("codex", None, None),
    ),
    "codex's sub-agent": (
        CODEX
        | {
            "thread-id": "b",
            "x-codex-parent-thread-id": "main",
            "x-openai-subagent": "collab_spawn",
        }
        | turn(request_kind="turn", subagent_kind="thread_spawn"),
        codex(),
        ("codex/collab_spawn", "main", None),
    ),
    "one with a name": (
        CODEX
        | {"thread-id": "b", "x-codex-parent-thread-id": "main"}
        | turn(agent_name="/root/searcher"),
        codex(),
        ("codex/searcher", "main", None),
    ),
    "metadata of another shape": (
        CODEX | {"x-codex-turn-metadata": '[{"request_kind": "compaction"}]'},
        codex(),
        ("codex", None, None),
    ),
    "opencode's title": (
        OPENCODE,
        chat("You are a title generator. You output"),
        ("opencode", None, "title"),
    ),
    "opencode's sub-agent": (
        OPENCODE | {"x-session-id": "b", "x-parent-session-id": "main"},
        chat("You are a file search specialist. You"),
        ("opencode/file search specialist", "main", None),
    ),
    "aider's commit": (
        {"user-agent": "litellm/1.106.2"},
        chat(
            "You are an expert software engineer that generates concise, one-line Git commit "
            "messages"
        ),
        (None, None, "commit message"),
    ),
    "a chat about compactions": (
        {"user-agent": "OpenAI/Python 2.9.0"},
        chat("You help", FROM_USER),
        (None,) * 3,
    ),
    "a chat with codex' header": (turn(request_kind="compaction"), chat("You help"), (None,) * 3),
    "no harness": (
        {"x-session-id": "s"},
        chat("You are the writer.", "Write: You are a title generator"),
        (None,) * 3,
    ),
}


async def post(
    there: World, attempted: AttemptedRollout, path: str, body: Any, headers: Mapping[str, str] = {}
) -> int:
    url = f"{there.url}/rollout/{attempted.rollout_id}/attempt/{attempted.attempt.attempt_id}/v1/{path}"
    key = {"authorization": f"Bearer {attempted.api_key}"}
    async with (
        aiohttp.ClientSession(headers=key) as session,
        session.post(url, json=body, headers=headers) as answer,
    ):
        await answer.read()
        return answer.status


@pytest.mark.parametrize("shape", SHAPES)
async def test_the_span_of_a_call_names_the_agent_and_its_housekeeping(
    gateway_world: World, shape: str
) -> None:
    headers, request, expected = SHAPES[shape]
    attempted = await gateway_world.attempt()
    assert await post(gateway_world, attempted, *request, headers) == 200
    (span,) = await gateway_world.spans(attempted)
    named = (semconv.GEN_AI_AGENT_NAME, semconv.CALL_PARENT_AGENT, semconv.CALL_HOUSEKEEPING)
    assert tuple(map(span.attributes.get, named)) == expected


async def test_housekeeping_trains_only_by_name_and_gets_no_intermediate_reward(
    gateway_world: World,
) -> None:
    attempted = await gateway_world.attempt()
    for shape in ("claude", "claude's sub-agent", "claude's title"):
        await post(gateway_world, attempted, *SHAPES[shape][1], SHAPES[shape][0])
    calls = await gateway_world.spans(attempted)
    late = dict.fromkeys(("start_time", "end_time"), calls[-1].end_time + 1)
    half = {"agentlightning.reward.0.value": 0.5, semconv.REWARD_FINAL: False}
    reward = {"name": semconv.REWARD, "span_id": "9" * 16, "attributes": half, "tokens": None}
    spans = [*calls, msgspec.structs.replace(calls[-1], **late, **reward)]
    rollout = Rollout(
        rollout_id=attempted.rollout_id, input="task", start_time=0.0, status="succeeded"
    )

    def trained(agents: str | None) -> list[tuple[str | None, float | None]]:
        found = trace_rollout(rollout, spans, calls=CallFilter(agents=agents)).transitions
        return [(transition.agent, transition.reward) for transition in found]

    main, sub, title = "claude-code", "claude-code/agent for Claude Code", "title"
    assert trained(None) == [(main, None), (sub, 0.5)]
    assert trained("claude-code") == [(main, None)]
    assert trained("title|claude-code.*") == [(main, None), (sub, 0.5), (title, None)]
    assert trained("housekeeping") == [(title, None)]
    assert trace_rollout(rollout, spans).excluded == {HOUSEKEEPING: 1}
    assert [call.unlearnable for call in read_calls(spans)[0]] == [None, None, "housekeeping call"]


FORCED_HOSTED = {
    "tools": [{"type": "web_fetch_20250910", "name": "x"}],
    "tool_choice": {"type": "tool", "name": "x"},
}


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("chat/completions", {"model": "policy", "messages": []}, 400, "invalid_request"),
        ("chat/completions", {"messages": user("hello")}, 400, "invalid_request"),
        ("messages", claude_asks(**FORCED_HOSTED), 400, None),
        ("responses", {"model": "policy", "input": "x" * 5000}, 413, "body_too_large"),
        ("messages/count_tokens", {"model": "policy"}, 400, "invalid_request"),
        ("audio/speech", {"model": "policy"}, 404, "not_found"),
    ],
)
async def test_a_refused_request_leaves_the_reason_in_its_attempt(
    tmp_path: Any, path: str, body: Any, status: int, code: str | None
) -> None:
    async with world(tmp_path, body_limit=4000) as there:
        attempted = await there.attempt()
        assert await post(there, attempted, path, body) == status
        (span,) = await there.spans(attempted)
    assert span.attributes[semconv.CALL_REFUSED] == f"/v1/{path}"
    assert span.attributes[semconv.HTTP_STATUS] == status
    assert span.status.status_code == "ERROR" and span.status.description
    assert code in (None, span.attributes[semconv.ERROR_TYPE])
    rollout = Rollout(rollout_id=span.rollout_id, input="task", start_time=0.0, status="succeeded")
    assert trace_rollout(rollout, [span]).outcome == "no calls"


async def test_refusals_cannot_fill_the_store_and_those_of_nobody_leave_nothing(
    gateway_world: World,
) -> None:
    attempted = await gateway_world.attempt()
    long = "x" * 5000
    assert set(
        await asyncio.gather(*(post(gateway_world, attempted, long, {}) for _ in range(130)))
    ) == {404}
    spans = await gateway_world.spans(attempted)
    assert len(spans) == 100 and len(msgspec.json.encode(spans)) < 400_000
    assert (
        await post(gateway_world, msgspec.structs.replace(attempted, rollout_id="none"), long, {})
        == 404
    )
    assert [one.rollout_id for one in await gateway_world.store.query_rollouts()] == [
        attempted.rollout_id
    ]
