"""A writer with two tools, one of which fails, and a rewriter: two nodes of a LangGraph graph."""

import sys

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

model = ChatOpenAI(model="gpt-4o-mini")


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def divide(a: int, b: int) -> float:
    """Divide two numbers."""
    return a / b


tools = [add, divide]


def writer(state):
    return {
        "messages": [
            model.bind_tools(tools).invoke([("system", "You are the writer."), *state["messages"]])
        ]
    }


def rewriter(state):
    return {
        "messages": [
            model.invoke(
                [("system", "You are the rewriter."), ("user", state["messages"][-1].text)]
            )
        ]
    }


graph = StateGraph(MessagesState)
graph.add_node(writer)
graph.add_node(rewriter)
graph.add_node(ToolNode(tools, handle_tool_errors=True))
graph.add_edge(START, "writer")
graph.add_conditional_edges("writer", tools_condition, {"tools": "tools", END: "rewriter"})
graph.add_edge("tools", "writer")
graph.add_edge("rewriter", END)
team = graph.compile()


def write(topic: str) -> str:
    text = ""
    for part, about in team.stream({"messages": [("user", topic)]}, stream_mode="messages"):
        if about["langgraph_node"] == "rewriter":
            text += part.text
    return text


if __name__ == "__main__":
    print(write(sys.argv[1]))
