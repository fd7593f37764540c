"""A calculating assistant, written with AutoGen's AgentChat. It does not know whether it is being
trained.

It solves one word problem by calling a calculator over several turns, against any OpenAI-compatible
endpoint:

    OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=any python examples/math_tools/agent.py
    "What is 12 * 7?"
"""

from __future__ import annotations

import argparse
import asyncio

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.base import TaskResult
from autogen_agentchat.messages import TextMessage
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import BaseOpenAIChatCompletionClient
from calculator import MOST_CALLS, SYSTEM, calculate
from openai import AsyncOpenAI

MODEL_INFO = {  # AutoGen asks it of models that it does not know
    "function_calling": True,
    "vision": False,
    "json_output": False,
    "structured_output": False,
    "family": "unknown",
}


async def run(question: str, *, client: AsyncOpenAI, model: str = "policy") -> TaskResult:
    """The conversation about one problem, of at most five calls of the model.

    Arguments that a tool does not take, a tool that does not exist and an error in a tool are told
    to the model, which may try again. AutoGen's own `OpenAIChatCompletionClient` would make an HTTP
    client for each problem, 18 ms of CPU; its base class takes one that there is."""
    model_client = BaseOpenAIChatCompletionClient(
        client, create_args={"model": model}, model_info=MODEL_INFO
    )
    agent = AssistantAgent(
        "calculator",
        model_client,
        tools=[FunctionTool(calculate, str(calculate.__doc__))],
        system_message=SYSTEM,
        max_tool_iterations=MOST_CALLS,
    )
    return await agent.run(task=question)


def answer_of(result: TaskResult) -> str:
    """What the assistant said in the end; nothing if it was still calling tools, whose results
    AutoGen then repeats."""
    last = result.messages[-1]
    return last.content if isinstance(last, TextMessage) and last.source == "calculator" else ""


async def answer(question: str, *, client: AsyncOpenAI, model: str = "policy") -> str:
    """The answer to one problem."""
    return answer_of(await run(question, client=client, model=model))


async def main() -> None:
    parser = argparse.ArgumentParser(description="Solve a problem with a calculator.")
    parser.add_argument(
        "question", nargs="?", default="A loaf of bread costs €9. How much do 12 loaves cost?"
    )
    parser.add_argument("--model", default="policy", help="the model name to ask the endpoint for")
    options = parser.parse_args()
    async with AsyncOpenAI() as client:
        result = await run(options.question, client=client, model=options.model)
    for message in result.messages:
        print(f"{message.type:>22}  {message.to_text()}")


if __name__ == "__main__":
    asyncio.run(main())
