"""A writer with two tools, one of which fails, and a rewriter: a workflow of Microsoft Agent
Framework."""

import asyncio
import sys

from agent_framework import WorkflowBuilder
from agent_framework.openai import OpenAIChatCompletionClient

client = OpenAIChatCompletionClient(model="gpt-4o-mini")


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def divide(a: int, b: int) -> float:
    """Divide two numbers."""
    return a / b


async def write(topic: str) -> str:
    writer = client.as_agent(name="writer", instructions="You are the writer.", tools=[add, divide])
    rewriter = client.as_agent(name="rewriter", instructions="You are the rewriter.")
    workflow = (
        WorkflowBuilder(start_executor=writer, output_from=[rewriter])
        .add_edge(writer, rewriter)
        .build()
    )
    text = ""
    async for event in workflow.run(topic, stream=True):
        if event.type == "output":
            text += event.data.text
    return text


if __name__ == "__main__":
    print(asyncio.run(write(sys.argv[1])))
