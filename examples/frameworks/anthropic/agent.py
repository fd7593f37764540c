"""A writer with two tools, one of which fails, and a rewriter, with the tool runner of Anthropic's SDK.

Of Agent Lightning it knows the parameter `llm` alone. Run it as `agl runner agent.py:write`: the SDK reports its
tools by itself, and the system prompts tell who is who.
"""

from anthropic import Anthropic, beta_tool


@beta_tool
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


@beta_tool
def divide(a: int, b: int) -> str:
    """Divide two numbers."""
    return str(a / b)


def write(task: dict, llm) -> float:
    client = Anthropic(base_url=llm.endpoint.removesuffix("/v1"), api_key=llm.api_key)  # which adds /v1 itself
    asked = {"model": llm.model, "max_tokens": 100}
    draft = client.beta.messages.tool_runner(
        **asked,
        system="You are the writer.",
        messages=[{"role": "user", "content": task["topic"]}],
        tools=[add, divide],
    ).until_done()
    with client.messages.stream(
        **asked,
        system="You are the rewriter.",
        messages=[{"role": "user", "content": draft.content[0].text}],
    ) as stream:
        text = stream.get_final_text()
    return float("sea" in text)
