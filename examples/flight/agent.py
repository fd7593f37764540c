"""A travel desk: an agent written with the plain `openai` SDK. It does not know whether it is being
trained.

It answers one question by calling tools over several turns, against any OpenAI-compatible endpoint:

    OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=any python examples/flight/agent.py
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import hashlib
import json
import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass

from openai import AsyncOpenAI

SYSTEM = "Travel desk."
MAX_TURNS = 5
NEEDLESS_CALL_COST = 0.15
SHORTEST_ROUTE = {"cancelled": 2, "origin_given": 1, "sum": 1}
CARRIERS = ("AF", "AZ", "BA", "IB", "KL", "LH", "OS", "SK")
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def tool(name: str, description: str, **parameters: str) -> dict:
    """The JSON description of one tool, as the chat-completions protocol wants it."""
    schema = {
        "type": "object",
        "properties": {parameter: {"type": kind} for parameter, kind in parameters.items()},
        "required": list(parameters),
    }
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": schema},
    }


TOOLS = [
    tool(
        "memory",
        "Look up the user's home city and budget: query `home` or `budget`.",
        query="string",
    ),
    tool(
        "search",
        "Find the best flight within a budget.",
        **{"from": "string", "to": "string", "max": "integer"},
    ),
    tool("calculator", "Evaluate an arithmetic expression.", expression="string"),
]


@dataclass(frozen=True)
class Episode:
    """What happened on one task: the reward in [0, 1], the conversation, and the names of the tools
    called in order."""

    reward: float
    messages: list[dict]
    calls: list[str]


def best_flight(origin: str, destination: str, budget: int) -> str:
    """The flight number on this route and budget, such as `KL23`: the same in every process,
    different for others."""
    digest = hashlib.sha256(f"{origin}/{destination}/{budget}".encode()).digest()
    return f"{CARRIERS[digest[0] % len(CARRIERS)]}{10 + digest[1] % 30}"


def calculate(expression: str) -> int | float:
    """The value of an expression of numbers and + - * /. ValueError for anything else."""

    def value(node: ast.AST) -> int | float:
        match node:
            case ast.Expression(body=body):
                return value(body)
            case ast.Constant(value=int() | float() as number):
                return number
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
                return OPERATORS[type(op)](value(left), value(right))
        raise ValueError(f"only numbers and + - * / can be evaluated, not {expression!r}")

    if len(expression) > 100:
        raise ValueError("the expression is longer than 100 characters")
    return value(ast.parse(expression, mode="eval"))


def use_tool(task: dict, name: str, arguments: str) -> str:
    """The tool's result as a line of text, or `error` when the model asked for something that does
    not exist."""
    try:
        given = json.loads(arguments)
        if name == "memory" and re.search("home|budget", given["query"].lower()):
            return f"from: {task['home']}, max: {task['budget']}"
        if name == "search":
            return f"flight: {best_flight(str(given['from']), str(given['to']), int(given['max']))}"
        if name == "calculator":
            return f"result: {calculate(str(given['expression']))}"
    except (
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        SyntaxError,
        ArithmeticError,
        RecursionError,
        MemoryError,
    ):
        pass  # the model learns from the word `error` that its call was malformed
    return "error"


def grade(task: dict, answer: str, calls: Sequence[str]) -> float:
    """1 for the right answer, less 0.15 for each call beyond the shortest route; 0 for a wrong
    answer.

    The last flight number (or number) in the text counts as the answer, so that a whole sentence is
    fine."""
    found = re.findall(r"-?\d+" if task["kind"] == "sum" else r"\b[A-Z]{2}\d{2}\b", answer)
    if not found or found[-1] != task["answer"]:
        return 0.0
    needless = max(0, len(calls) - SHORTEST_ROUTE[task["kind"]])
    return max(0.0, 1.0 - NEEDLESS_CALL_COST * needless)


async def run(task: dict, *, client: AsyncOpenAI | None = None, model: str = "policy") -> Episode:
    """Work on one task for at most five turns. Without a client, one is made from the
    environment."""
    if client is None:
        async with AsyncOpenAI() as own:
            return await run(task, client=own, model=model)
    messages: list[dict] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": task["question"]},
    ]
    calls: list[str] = []
    for _ in range(MAX_TURNS):
        completion = await client.chat.completions.create(
            model=model, messages=messages, tools=TOOLS
        )
        message = completion.choices[0].message
        if not message.tool_calls:
            answer = message.content or ""
            messages.append({"role": "assistant", "content": answer})
            return Episode(grade(task, answer, calls), messages, calls)
        messages.append(
            {
                "role": "assistant",
                "content": message.content,
                "tool_calls": [
                    call.model_dump(include={"id", "type", "function"})
                    for call in message.tool_calls
                ],
            }
        )
        for call in message.tool_calls:
            calls.append(call.function.name)
            result = use_tool(task, call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return Episode(0.0, messages, calls)


async def solve(task: dict, *, client: AsyncOpenAI | None = None, model: str = "policy") -> float:
    """The reward of one task."""
    return (await run(task, client=client, model=model)).reward


def show(episode: Episode) -> None:
    for message in episode.messages:
        text = message.get("content") or ""
        calls = [call["function"] for call in message.get("tool_calls", [])]
        print(
            f"{message['role']:>10}  {text}"
            + "".join(f"{call['name']}({call['arguments']})" for call in calls)
        )
    print(f"{'reward':>10}  {episode.reward:.2f}\n")


async def main() -> None:
    # the agent itself needs no task file; only this demonstration does
    from tasks import heldout_tasks

    parser = argparse.ArgumentParser(description="Run the travel desk on a few held-out tasks.")
    parser.add_argument("--tasks", type=int, default=6, help="how many tasks to run")
    parser.add_argument("--model", default="policy", help="the model name to ask the endpoint for")
    options = parser.parse_args()
    async with AsyncOpenAI() as client:
        tasks = heldout_tasks(options.tasks)
        for episode in await asyncio.gather(
            *(run(task, client=client, model=options.model) for task in tasks)
        ):
            show(episode)


if __name__ == "__main__":
    asyncio.run(main())
