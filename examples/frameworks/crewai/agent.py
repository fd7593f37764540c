"""A crew of two: a writer with two tools, one of which fails, and a rewriter."""

import sys

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool
def divide(a: int, b: int) -> float:
    """Divide two numbers."""
    return a / b


model = LLM(model="gpt-4o-mini")
writer = Agent(
    role="writer", goal="write", backstory="You use your tools.", llm=model, tools=[add, divide]
)
rewriter = Agent(
    role="rewriter",
    goal="shorten",
    backstory="You are brief.",
    llm=LLM(model="gpt-4o-mini", stream=True),
)
draft = Task(description="{topic}", expected_output="a text", agent=writer)
final = Task(description="Shorten it.", expected_output="a text", agent=rewriter)
crew = Crew(agents=[writer, rewriter], tasks=[draft, final])


def write(topic: str) -> str:
    return crew.kickoff({"topic": topic}).raw


if __name__ == "__main__":
    print(write(sys.argv[1]))
