"""A writer with two tools, one of which fails, hands over to a rewriter: agents of the OpenAI Agents SDK.

Nothing here knows of Agent Lightning. The SDK finds the model's URL and key in its environment, and the last line of
output is the reward: run it as `agl runner --command "opentelemetry-instrument python agent.py"`.
"""

import asyncio
import json
import sys

from agents import Agent, Runner, function_tool, set_default_openai_api


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@function_tool
def divide(a: int, b: int) -> float:
    """Divide two numbers."""
    return a / b


async def write(topic: str) -> str:
    rewriter = Agent("rewriter", instructions="You are the rewriter.", model="policy")
    writer = Agent(
        "writer", instructions="You are the writer.", model="policy", tools=[add, divide], handoffs=[rewriter]
    )
    result = Runner.run_streamed(writer, topic)
    async for _ in result.stream_events():
        pass
    return result.final_output


if "chat" in sys.argv:  # Chat Completions instead of Responses
    set_default_openai_api("chat_completions")
text = asyncio.run(write(json.load(sys.stdin)["topic"]))
print(json.dumps({"reward": float("sea" in text)}))
