"""A player of the tower of Hanoi, written with the `openai` SDK. It does not know whether it is
being trained.

It moves one disk a call, in one conversation, until it says that it is done, against any
OpenAI-compatible endpoint:

    OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=any python agent.py AAAA C
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion
from tower import WAYS, Tower

MOST_CALLS = 32
MOVE = {
    "type": "function",
    "function": {
        "name": "move",
        "description": "Move the upper disk from one peg to another: AC from A to C.",
        "parameters": {
            "type": "object",
            "properties": {"way": {"type": "string", "enum": WAYS}},
            "required": ["way"],
        },
    },
}


def asked(tower: Tower) -> dict:
    """The request: the goal, and the peg of each disk, the smallest first."""
    return {"role": "user", "content": f"Bring all disks {tower.state}"}


async def play(
    tower: Tower,
    *,
    client: AsyncOpenAI,
    model: str = "policy",
    before_call: Callable[[], object] = lambda: None,
) -> list[dict]:
    """Move disks for at most 32 calls. Return the conversation."""
    messages = [asked(tower)]
    for _ in range(MOST_CALLS):
        before_call()
        # `client.chat.completions.create` looks for files in every message of the history, by all
        # types that it could have: a third of all CPU time in a training
        completion = await client.post(
            "/chat/completions",
            cast_to=ChatCompletion,
            body={"model": model, "messages": messages, "tools": [MOVE]},
        )
        said = completion.choices[0].message
        if not said.tool_calls:
            messages.append({"role": "assistant", "content": said.content})
            break
        calls = [call.model_dump(include={"id", "type", "function"}) for call in said.tool_calls]
        messages.append({"role": "assistant", "content": said.content, "tool_calls": calls})
        for call in calls:
            result = use(tower, call["function"]["arguments"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    return messages


def use(tower: Tower, arguments: str) -> str:
    """The tool's result: the position, after what was wrong with the move."""
    try:
        tower.move(json.loads(arguments)["way"])
    except (ValueError, LookupError, TypeError) as error:
        known = isinstance(error, ValueError) and not isinstance(error, json.JSONDecodeError)
        return f"Error: {error if known else 'no way'}, {tower.state}"
    return tower.state


async def main() -> None:
    parser = argparse.ArgumentParser(description="Bring a tower to another peg.")
    parser.add_argument("position", nargs="?", default="AAAA", help="the peg of each disk")
    parser.add_argument("goal", nargs="?", default="C")
    parser.add_argument("--model", default="policy", help="the model name to ask the endpoint for")
    options = parser.parse_args()
    async with AsyncOpenAI() as client:
        tower = Tower(options.position, options.goal)
        for message in await play(tower, client=client, model=options.model):
            ways = [call["function"]["arguments"] for call in message.get("tool_calls", [])]
            print(f"{message['role']:>10}  {message['content'] or ''}", *ways)


if __name__ == "__main__":
    asyncio.run(main())
