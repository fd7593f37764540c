"""Agents that call their model four times, with tools of an MCP server between; `mcp` is imported
when the agent runs."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

import agentlightning as agl
from agentlightning.types import LLM

SERVER = Path(__file__).with_name("mcp_server.py")


@asynccontextmanager
async def session_of(task: dict[str, Any], **options: Any) -> AsyncIterator[Any]:
    """A session with the server at the task's URL, or with one over stdio."""
    from mcp import ClientSession, StdioServerParameters
    from mcp.client.stdio import stdio_client
    from mcp.client.streamable_http import streamable_http_client

    arguments = [str(SERVER), task["log"]]
    program = StdioServerParameters(command=sys.executable, args=arguments)
    client: Any = streamable_http_client(task["url"]) if "url" in task else stdio_client(program)
    async with client as streams, ClientSession(*streams[:2], **options) as session:
        await session.initialize()
        yield session


def client_of(llm: LLM) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key, max_retries=0)


async def interrupt(task: dict[str, Any]) -> None:
    """End the first attempt: by an error, or by the death of its process."""
    gone_on = Path(task["log"]).with_suffix(".on")
    if task.get("interrupted") and not gone_on.exists():
        gone_on.touch()
        if task["interrupted"] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("interrupted")


def text_of(result: Any) -> str:
    return " ".join(part.text for part in result.content)


@agl.rollout
async def walk(task: dict[str, Any], llm: LLM) -> float:
    messages: list[Any] = []
    asked = task.get("asks", [["roll", {"sides": 6}], ["look", {"city": "Oslo"}]])
    async with client_of(llm) as client:

        async def ask(text: str) -> str:
            messages.append({"role": "user", "content": text})
            answer = await client.chat.completions.create(
                model=llm.model, messages=messages, max_tokens=8
            )
            messages.append(answer.choices[0].message.model_dump(exclude_none=True))
            return str(answer.choices[0].message.content)

        async def sampled(context: Any, params: Any) -> Any:
            from mcp.types import CreateMessageResult, TextContent

            content = TextContent(type="text", text=await ask(params.messages[0].content.text))
            return CreateMessageResult(role="assistant", content=content, model="policy")

        async with session_of(task, sampling_callback=sampled) as session:
            await ask("hello")
            for name, arguments in asked:
                await ask(text_of(await session.call_tool(name, arguments=arguments))[-99:])
            await interrupt(task)
            name, arguments = asked[0]
            await ask(text_of(await session.call_tool(name, arguments))[-99:])
    return 1.0


@agl.operation
async def rolled(session: Any, sides: int) -> str:
    """An operation with an MCP call inside."""
    return text_of(await session.call_tool("roll", {"sides": sides}))


@agl.rollout
async def walk_by_sdk(task: dict[str, Any], llm: LLM) -> float:
    """An agent of the OpenAI Agents SDK, which its model has roll and look."""
    from agents import Agent, OpenAIChatCompletionsModel, RunConfig, Runner
    from agents.mcp import MCPServerStdio, MCPServerStreamableHttp

    arguments: Any = {"command": sys.executable, "args": [str(SERVER), task["log"]]}
    if "url" in task:
        server: Any = MCPServerStreamableHttp({"url": task["url"]})
    else:
        server = MCPServerStdio(arguments)
    async with server, client_of(llm) as client:
        model = OpenAIChatCompletionsModel(llm.model, client)
        agent = Agent("roller", model=model, mcp_servers=[server])
        config = RunConfig(tracing_disabled=True)
        await Runner.run(agent, task["text"], run_config=config)
    await interrupt(task)
    return 1.0
