"""An agent that finds a room for a meeting: it asks for the rooms by a function call, then answers
with a name."""

from __future__ import annotations

import json

from tasks import ROOMS

import agentlightning as agl

PROMPT = "Pick a room for this meeting: {request}. Answer with its name only."
TOOL = {
    "type": "function",
    "function": {
        "name": "list_rooms",
        "description": "All rooms with seats, equipment, and the hours at which each is booked.",
        "parameters": {"type": "object", "properties": {}},
    },
}


@agl.rollout
async def book_room(task: dict, prompt_template: agl.PromptTemplate, llm: agl.LLM) -> float:
    """1 for the right room, 0.3 for one that is too good, 0 for one that does not fit."""
    client = agl.openai_client(llm)
    messages: list = [{"role": "user", "content": prompt_template.format(request=task["request"])}]
    answer = ""
    for _ in range(3):
        completion = await client.chat.completions.create(
            model=llm.model, messages=messages, tools=[TOOL]
        )
        message = completion.choices[0].message
        if not message.tool_calls:
            answer = (message.content or "").strip()
            break
        messages.append(message.model_dump(exclude_none=True))
        rooms = json.dumps(
            [{"name": name, **has, "booked": task["booked"][name]} for name, has in ROOMS.items()]
        )
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": rooms}
            for call in message.tool_calls
        ]
    if answer == task["room"]:
        return 1.0
    return 0.3 if answer in task["fitting"] else 0.0
