"""Trivial agents: three calls, one after the other, and what they add to them.

They know the endpoint they are given and nothing of what is measured.
"""

from __future__ import annotations

import json
import time
from typing import Any

import aiohttp

import agentlightning as agl

CALLS = 3
_HEADERS = {"content-type": "application/json"}
_session: aiohttp.ClientSession | None = None


async def ask(llm: agl.LLM, task: dict[str, Any]) -> None:
    """One call over connections that all rollouts of the process share, with the least that a
    client can be."""
    global _session
    if _session is None:
        _session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), cookie_jar=aiohttp.DummyCookieJar()
        )
    body = json.dumps(
        {"model": llm.model, "messages": [{"role": "user", "content": task["question"]}]}
    )
    headers = _HEADERS | {"authorization": f"Bearer {llm.api_key}"}
    async with _session.post(
        f"{llm.endpoint}/chat/completions", data=body, headers=headers
    ) as answer:
        assert answer.status == 200, await answer.text()
        await answer.read()


async def close() -> None:
    """End the connections; a runner's end with its process."""
    if _session is not None:
        await _session.close()


@agl.rollout
async def bare(task: dict[str, Any], llm: agl.LLM) -> float:
    for _ in range(CALLS):
        await ask(llm, task)
    return 1.0


@agl.rollout
async def traced(task: dict[str, Any], llm: agl.LLM) -> float:
    """The same, with a span of its own around each call."""
    for _ in range(CALLS):
        with agl.operation(name="ask"):
            await ask(llm, task)
    return 1.0


@agl.rollout
async def traced_if_asked(task: dict[str, Any], llm: agl.LLM) -> float:
    return await (traced if task["spans"] else bare).function(task, llm)


@agl.rollout
async def traced_by_sdk(task: dict[str, Any], llm: agl.LLM) -> float:
    """The same, with spans of OpenTelemetry's SDK."""
    from opentelemetry import trace

    tracer = trace.get_tracer("benchmark")
    for _ in range(CALLS):
        with tracer.start_as_current_span("ask"):
            await ask(llm, task)
    return 1.0


@agl.rollout
async def openai_sdk(task: dict[str, Any], llm: agl.LLM) -> float:
    client = agl.openai_client(llm)
    for _ in range(CALLS):
        await client.chat.completions.create(
            model=llm.model, messages=[{"role": "user", "content": task["question"]}]
        )
    return 1.0


@agl.rollout
async def when_started(task: dict[str, Any]) -> float:
    return time.time()
