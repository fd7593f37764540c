"""A writer with two tools, one of which fails, and a rewriter: two agents of LangChain, one after
the other."""

import sys

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


model = ChatOpenAI(model="gpt-4o-mini")
writer = create_agent(
    model,
    [add, divide],
    system_prompt="You are the writer.",
    middleware=[tell_errors],
    name="writer",
)
rewriter = create_agent(model, system_prompt="You are the rewriter.", name="rewriter")


def write(topic: str) -> str:
    draft = writer.invoke({"messages": [("user", topic)]})["messages"][-1].text
    parts = rewriter.stream({"messages": [("user", draft)]}, stream_mode="messages")
    return "".join(part.text for part, _ in parts)


if __name__ == "__main__":
    print(write(sys.argv[1]))
