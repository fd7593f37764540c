"""A writer with two tools, one of which fails, and a rewriter: two agents of LangChain, one after the other.

Of Agent Lightning it knows the parameter `llm` alone. Run it as `agl runner agent.py:write --instrument langchain`.
"""

from langchain.agents import create_agent
from langchain.agents.middleware import wrap_tool_call
from langchain_core.messages import ToolMessage
from langchain_openai import ChatOpenAI


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def divide(a: int, b: int) -> float:
    """Divide two numbers."""
    return a / b


@wrap_tool_call
def tell_errors(request, call):
    """Without this an error of a tool ends the agent."""
    try:
        return call(request)
    except ArithmeticError as error:
        return ToolMessage(f"Error: {error}", tool_call_id=request.tool_call["id"], status="error")


def write(task: dict, llm) -> float:
    model = ChatOpenAI(model=llm.model, base_url=llm.endpoint, api_key=llm.api_key)
    writer = create_agent(
        model, [add, divide], system_prompt="You are the writer.", middleware=[tell_errors], name="writer"
    )
    rewriter = create_agent(model, system_prompt="You are the rewriter.", name="rewriter")
    draft = writer.invoke({"messages": [("user", task["topic"])]})["messages"][-1].text
    text = ""
    for part, _ in rewriter.stream({"messages": [("user", draft)]}, stream_mode="messages"):
        text += part.text
    return float("sea" in text)
