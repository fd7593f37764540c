"""An endpoint that stands in for a model: as the agent it does what the prompt tells it and no
more, as the critic it finds what the prompt does not say, and as the editor it says so. Now and
then it errs as models do."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

RULES = {
    "booked": "Never pick a room that is booked at that hour.",
    "seats": "The room needs at least as many seats as there are people.",
    "equipment": "The room must have all the equipment that is asked for.",
    "smallest": "Of the rooms that fit, pick the smallest.",
}
IDLE = ("Be polite.", "Think step by step.")


class Scripted:
    """Answers chat completions; `mistakes` is the share of edits that come back as prose or without
    a placeholder."""

    def __init__(self, mistakes: float = 0.15) -> None:
        self.mistakes = mistakes
        self._chance = random.Random(0)
        self._ids = itertools.count()

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        messages = body["messages"]
        text = str(messages[0]["content"])
        if "between <prompt>" in text:
            message = {"role": "assistant", "content": self._edit(text, again=len(messages) > 1)}
        elif "<prompt" in text:
            message = {"role": "assistant", "content": self._criticise(text)}
        else:
            message = self._act(messages)
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        usage = {
            "prompt_tokens": len(json.dumps(messages)) // 4,
            "completion_tokens": 20,
            "total_tokens": 0,
        }
        choice = {"index": 0, "message": message, "finish_reason": reason}
        answer = {
            "id": f"c{next(self._ids)}",
            "object": "chat.completion",
            "created": 1,
            "model": body["model"],
        }
        return web.json_response(answer | {"choices": [choice], "usage": usage})

    def _act(self, messages: list[dict]) -> dict:
        """The first room that meets what the prompt asks for, and only that."""
        if len(messages) == 1:
            call = {"id": f"call{next(self._ids)}", "type": "function"}
            return {
                "role": "assistant",
                "content": None,
                "tool_calls": [call | {"function": {"name": "list_rooms", "arguments": "{}"}}],
            }
        prompt, rooms = messages[0]["content"], json.loads(messages[-1]["content"])
        people, hour = (int(number) for number in re.findall(r"(\d+) people at (\d+)", prompt)[0])
        request = prompt.partition(":00")[2].partition(".")[0]
        needs = {one for one in ("projector", "whiteboard", "video") if one in request}
        if RULES["booked"] in prompt:
            rooms = [room for room in rooms if hour not in room["booked"]]
        if RULES["seats"] in prompt:
            rooms = [room for room in rooms if room["seats"] >= people]
        if RULES["equipment"] in prompt:
            rooms = [room for room in rooms if needs <= set(room["equipment"])]
        if RULES["smallest"] not in prompt:
            self._chance.shuffle(rooms)
        return {"role": "assistant", "content": rooms[0]["name"] if rooms else "none"}

    def _criticise(self, text: str) -> str:
        prompt = text.partition("</prompt>")[0]
        missing = [rule for rule in RULES.values() if rule not in prompt]
        return f"The prompt does not say: {self._chance.choice([*missing, *IDLE])}"

    def _edit(self, text: str, *, again: bool) -> str:
        prompt = re.split(r'<prompt name="[\w.-]+">\n|\n</prompt>', text)[1]
        edited = f"{prompt}\n{text.rpartition('does not say: ')[2].partition(chr(10))[0]}"
        if not again and self._chance.random() < self.mistakes:
            return self._chance.choice(
                ["I would add a sentence.", f"<prompt>{edited.replace('{request}', 'it')}</prompt>"]
            )
        return f"<prompt>\n{edited}\n</prompt>"


@asynccontextmanager
async def serving(model: Scripted) -> AsyncIterator[str]:
    """The URL at which `model` answers, for the length of the block."""
    application = web.Application(client_max_size=2**26)
    application.router.add_post("/v1/chat/completions", model.answer)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()
