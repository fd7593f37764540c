"""A writer with two tools, one of which fails, and a rewriter: a workflow of Microsoft Agent Framework.

Of Agent Lightning it knows the parameter `llm` alone. Run it as
`agl runner agent.py:write --instrument agent-framework`.
"""

from agent_framework import WorkflowBuilder
from agent_framework.openai import OpenAIChatCompletionClient


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def divide(a: int, b: int) -> float:
    """Divide two numbers."""
    return a / b


async def write(task: dict, llm) -> float:
    client = OpenAIChatCompletionClient(model=llm.model, base_url=llm.endpoint, api_key=llm.api_key)
    writer = client.as_agent(name="writer", instructions="You are the writer.", tools=[add, divide])
    rewriter = client.as_agent(name="rewriter", instructions="You are the rewriter.")
    workflow = WorkflowBuilder(start_executor=writer, output_from=[rewriter]).add_edge(writer, rewriter).build()
    text = ""
    async for event in workflow.run(task["topic"], stream=True):
        if event.type == "output":
            text += event.data.text
    return float("sea" in text)
