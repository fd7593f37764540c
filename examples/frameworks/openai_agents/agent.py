"""A writer with two tools, one of which fails, hands over to a rewriter: agents of the OpenAI
Agents SDK."""

import asyncio
import sys

from agents import Agent, Runner, function_tool


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@function_tool
def divide(a: int, b: int) -> float:
    """Divide two numbers."""
    return a / b


rewriter = Agent("rewriter", instructions="You are the rewriter.", model="gpt-4o-mini")
writer = Agent(
    "writer",
    instructions="You are the writer.",
    model="gpt-4o-mini",
    tools=[add, divide],
    handoffs=[rewriter],
)


async def write(topic: str) -> str:
    result = Runner.run_streamed(writer, topic)
    async for _ in result.stream_events():
        pass
    return result.final_output


if __name__ == "__main__":
    print(asyncio.run(write(sys.argv[1])))
