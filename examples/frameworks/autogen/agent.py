"""A writer with two tools, one of which fails, and a rewriter: a team of AutoGen.

Of Agent Lightning it knows the parameter `llm` alone. Run it as `agl runner agent.py:write --instrument autogen`.
"""

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_ext.models.openai import OpenAIChatCompletionClient

ABILITIES = {"function_calling": True, "vision": False, "json_output": False, "structured_output": False}


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def divide(a: int, b: int) -> float:
    """Divide two numbers."""
    return a / b


async def write(task: dict, llm) -> float:
    model = OpenAIChatCompletionClient(
        model=llm.model,
        base_url=llm.endpoint,
        api_key=llm.api_key,
        model_info={**ABILITIES, "family": "unknown"},  # AutoGen asks this of models that it does not know
    )
    writer = AssistantAgent(
        "writer", model, tools=[add, divide], system_message="You are the writer.", max_tool_iterations=5
    )
    rewriter = AssistantAgent("rewriter", model, system_message="You are the rewriter.", model_client_stream=True)
    result = await RoundRobinGroupChat([writer, rewriter], max_turns=2).run(task=task["topic"])
    await model.close()
    return float("sea" in result.messages[-1].content)
