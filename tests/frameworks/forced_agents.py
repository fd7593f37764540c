"""Programs that force a call or a form, as their users write them; `python forced_agents.py NAME`
prints what came."""

from __future__ import annotations

import os
import sys
from typing import Any

from pydantic import BaseModel, Field

QUESTION = "Where is the sea?"


class Found(BaseModel):
    place: str = Field(max_length=8)


def smolagents() -> Any:
    from smolagents import OpenAIServerModel, ToolCallingAgent

    model = OpenAIServerModel("policy", api_base=os.environ["OPENAI_BASE_URL"], max_tokens=200)
    return ToolCallingAgent(tools=[], model=model, max_steps=1, verbosity_level=0).run(QUESTION)


def pydantic_ai() -> Any:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel

    return Agent(OpenAIChatModel("policy"), output_type=Found, retries=0).run_sync(QUESTION).output


def pydantic_ai_native() -> Any:
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel

    return (
        Agent(OpenAIChatModel("policy"), output_type=NativeOutput(Found), retries=0)
        .run_sync(QUESTION)
        .output
    )


def dspy() -> Any:
    import dspy

    with dspy.context(
        lm=dspy.LM("openai/policy", max_tokens=200, cache=False), adapter=dspy.JSONAdapter()
    ):
        return dspy.Predict("question -> place")(question=QUESTION)


def openai_responses() -> Any:
    import openai

    hints = {
        "reasoning": {"effort": "low"},
        "text": {"verbosity": "low"},
        "max_output_tokens": 100_000,
    }
    return (
        openai.OpenAI()
        .responses.parse(model="policy", input=QUESTION, text_format=Found, **hints)
        .output_parsed
    )


if __name__ == "__main__":
    print(repr(globals()[sys.argv[1]]()))
