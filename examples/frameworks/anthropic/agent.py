"""A writer with two tools, one of which fails, and a rewriter, with the tool runner of Anthropic's
SDK."""

import sys

from anthropic import Anthropic, beta_tool

client = Anthropic()
MODEL = "claude-haiku-4-5"


@beta_tool
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


@beta_tool
def divide(a: int, b: int) -> str:
    """Divide two numbers."""
    return str(a / b)


def write(topic: str) -> str:
    draft = client.beta.messages.tool_runner(
        model=MODEL,
        max_tokens=100,
        system="You are the writer.",
        messages=[{"role": "user", "content": topic}],
        tools=[add, divide],
    ).until_done()
    with client.messages.stream(
        model=MODEL,
        max_tokens=100,
        system="You are the rewriter.",
        messages=[{"role": "user", "content": draft.content[0].text}],
    ) as stream:
        return stream.get_final_text()


if __name__ == "__main__":
    print(write(sys.argv[1]))
