"""A writer with two tools, one of which fails, and a rewriter: a team of AutoGen."""

import asyncio
import sys

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_ext.models.openai import OpenAIChatCompletionClient

model = OpenAIChatCompletionClient(model="gpt-4o-mini")


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def divide(a: int, b: int) -> float:
    """Divide two numbers."""
    return a / b


async def write(topic: str) -> str:
    writer = AssistantAgent(
        "writer",
        model,
        tools=[add, divide],
        system_message="You are the writer.",
        max_tool_iterations=5,
    )
    rewriter = AssistantAgent(
        "rewriter", model, system_message="You are the rewriter.", model_client_stream=True
    )
    result = await RoundRobinGroupChat([writer, rewriter], max_turns=2).run(task=topic)
    return result.messages[-1].content


if __name__ == "__main__":
    print(asyncio.run(write(sys.argv[1])))
