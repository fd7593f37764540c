"""A crew of two: a writer with two tools, one of which fails, and a rewriter.

Of Agent Lightning it knows the parameter `llm` alone. Run it as `agl runner agent.py:write --instrument crewai`.
"""

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


def write(task: dict, llm) -> float:
    def model(stream: bool) -> LLM:
        return LLM(model=llm.model, provider="openai", base_url=llm.endpoint, api_key=llm.api_key, stream=stream)

    writer = Agent(role="writer", goal="write", backstory="You use your tools.", llm=model(False), tools=[add, divide])
    rewriter = Agent(role="rewriter", goal="shorten", backstory="You are brief.", llm=model(True))
    draft = Task(description=task["topic"], expected_output="a text", agent=writer)
    final = Task(description="Shorten it.", expected_output="a text", agent=rewriter)
    text = Crew(agents=[writer, rewriter], tasks=[draft, final]).kickoff().raw
    return float("sea" in text)
