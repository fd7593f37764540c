"""An agent that calls its model four times, with tools between; each run of a tool leaves a line in
the file that the task names."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI, OpenAI

import agentlightning as agl
from agentlightning.types import LLM


def note(task: dict[str, Any], line: str) -> None:
    with Path(task["log"]).open("a") as log:
        log.write(f"{line}\n")


@agl.operation
def roll(task: dict[str, Any], sides: int) -> float:
    note(task, f"roll {sides}")
    agl.emit_reward(0.25, final=False)
    return random.randrange(10**9) if task.get("random") else sides


@agl.operation(once=True)
async def book(task: dict[str, Any], flight: str) -> Any:
    return _booked(task, flight)


@agl.operation(once=True, name="book")
def book_in_thread(task: dict[str, Any], flight: str) -> Any:
    return _booked(task, flight)


def _booked(task: dict[str, Any], flight: str) -> Any:
    note(task, f"book {flight}")
    seat = {"flight": flight, "seats": [random.randrange(10**9)], "paid": None}
    return {
        "plain": seat,
        "tuple": (flight, 1),
        "secret": {"flight": flight, "token": "sk-" + "a1b2c3d4" * 4},
    }[task.get("result", "plain")]


@agl.operation
def research(task: dict[str, Any], llm: LLM) -> str:
    """A tool that calls the model itself."""
    note(task, "research")
    with OpenAI(base_url=llm.endpoint, api_key=llm.api_key, max_retries=0) as client:
        answer = client.chat.completions.create(
            model=llm.model, messages=[{"role": "user", "content": "count"}], max_tokens=8
        )
    return str(answer.choices[0].message.content)


def _said(messages: list[Any], text: str) -> Any:
    messages.append({"role": "user", "content": text})
    return messages


def _interrupt(task: dict[str, Any]) -> None:
    """End the first attempt, or let it wait to be killed."""
    gone_on = Path(task["log"]).with_suffix(".on")
    if task.get("interrupted") and not gone_on.exists():
        gone_on.touch()
        if task["interrupted"] == "kill":
            time.sleep(600)
        raise RuntimeError("interrupted")


@agl.rollout
def walk(task: dict[str, Any], llm: LLM) -> float:
    messages: list[Any] = []
    with OpenAI(base_url=llm.endpoint, api_key=llm.api_key, max_retries=0) as client:

        def ask(text: str) -> None:
            answer = client.chat.completions.create(
                model=llm.model, messages=_said(messages, text), max_tokens=8
            )
            messages.append(answer.choices[0].message.model_dump(exclude_none=True))

        ask("hello")
        agl.emit_reward(0.5, final=False)
        if task.get("research"):
            _said(messages, research(task, llm))
        ask(f"rolled {roll(task, 6)}")
        ask(f"booked {book_in_thread(task, 'A1')}")
        _interrupt(task)
        ask(f"rolled {roll(task, 6)}")
    return 1.0


@agl.rollout
async def walk_async(task: dict[str, Any], llm: LLM) -> float:
    messages: list[Any] = []
    async with AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key, max_retries=0) as client:

        async def ask(text: str) -> None:
            answer = await client.chat.completions.create(
                model=llm.model, messages=_said(messages, text), max_tokens=8
            )
            messages.append(answer.choices[0].message.model_dump(exclude_none=True))

        await ask("hello")
        agl.emit_reward(0.5, final=False)
        await ask(f"rolled {roll(task, 6)}")
        await ask(f"booked {await book(task, 'A1')}")
        _interrupt(task)
        await ask(f"rolled {roll(task, 6)}")
    return 1.0
