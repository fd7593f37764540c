"""Function agents, in the style of Agent Lightning 0.3: decorators, emitters, operations, a reward
function."""

import os
from typing import Any, TypedDict, cast

from openai import AsyncOpenAI, OpenAI

import agentlightning as agl
from agentlightning import LLM, PromptTemplate, configure_logger, emit_message, reward

logger = configure_logger(name="capitals")


class CapitalTask(TypedDict):
    input: str
    output: str


@agl.rollout
def capitals(task: CapitalTask, llm: agl.LLM) -> float:
    client = OpenAI(
        base_url=llm.endpoint, api_key=llm.api_key or os.environ.get("OPENAI_API_KEY", "dummy")
    )
    response = client.chat.completions.create(
        model=llm.model,
        messages=[{"role": "user", "content": task["input"]}],
        **llm.sampling_parameters,
    )
    answer = response.choices[0].message.content or ""
    agl.emit_message(f"answered {answer}")
    agl.emit_object({"task": task, "answer": answer})
    return 1.0 if task["output"] in answer else 0.0


@agl.rollout
async def with_rollout(task: CapitalTask, llm: LLM, rollout: agl.Rollout) -> bool:
    attempted = cast(agl.AttemptedRollout, rollout)
    url = llm.get_base_url(attempted.rollout_id, attempted.attempt.attempt_id)
    async with AsyncOpenAI(base_url=url, api_key=llm.api_key or "dummy") as client:
        messages: Any = [{"role": "user", "content": task["input"]}]
        response = await client.chat.completions.create(model=llm.model, messages=messages)
    emit_message("done", attributes={"mode": rollout.mode})
    return task["output"] == response.choices[0].message.content


@agl.llm_rollout(strip_proxy=False)
def with_a_proxy(task: CapitalTask, llm: agl.ProxyLLM) -> None:
    with agl.operation(step="answer") as op:
        op.set_input(question=task["input"])
        op.set_output(task["output"])
    agl.emit_annotation({"kind": "capital", "nested": {"depth": 1}})
    agl.emit_reward(0.25, attributes=agl.make_tag_attributes(["guessed"]))
    agl.emit_reward({"right": True, "length": 0.5}, primary_key="right")


@agl.prompt_rollout
def with_a_prompt(task: CapitalTask, prompt_template: PromptTemplate) -> float:
    prompt = prompt_template.format(question=task["input"])
    return grade(prompt, task["output"])


@reward
def grade(prompt: str, right: str) -> float:
    return float(right in prompt)


@agl.operation
def lookup(city: str) -> str:
    return city.upper()


@agl.rollout
async def survives(task: CapitalTask) -> list[agl.Span]:
    try:
        raise KeyError(lookup(task["input"]))
    except KeyError as error:
        agl.emit_exception(error)
    return [cast(agl.Span, agl.emit_reward(0.75, propagate=False))]


def train_tasks() -> agl.Dataset[CapitalTask]:
    return [{"input": "What is the capital of France?", "output": "Paris"}]
