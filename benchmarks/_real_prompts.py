"""What agents really send: long histories full of JSON and addresses, screenshots, and
conversations that repeat all that was said in each of their turns. The same in each run."""

from __future__ import annotations

import base64
import json
import random
from typing import Any, Final, TypeAlias

Messages: TypeAlias = list[dict[str, Any]]

HISTORY: Final = 100_000  # characters
IMAGE: Final = 75_000  # bytes, 100 kB as base64
TURNS: Final = 30
_random: Final = random.Random(0)
_WORDS: Final = [
    "".join(_random.choices("abcdefghijklmnopqrstuvwxyz", k=_random.randint(2, 9)))
    for _ in range(8000)
]


def _words(count: int) -> str:
    return " ".join(_random.choices(_WORDS, k=count))


def _found(number: int) -> str:
    """A tool's result of about 2 kB, as trackers and mailboxes answer."""
    rows = [
        {
            "key": f"PROJ-{number * 8 + row}",
            "token": "may",
            "author": f"{_words(1)}@example.com",
            "text": _words(20),
            "url": f"https://{_words(1)}.example.com:8443/browse/{row}?key=PROJ-{row}",
        }
        for row in range(8)
    ]
    return json.dumps({"issues": rows})


def _turn(number: int) -> Messages:
    function = {
        "name": "search",
        "arguments": json.dumps({"key": f"PROJ-{number}", "query": _words(5)}),
    }
    call = {"id": f"call_{number}", "type": "function", "function": function}
    return [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": f"call_{number}", "content": _found(number)},
    ]


def conversation() -> list[Messages]:
    """The messages of each turn: all before, and a tool's result of 2 kB more."""
    said: Messages = [
        {"role": "system", "content": _words(200)},
        {"role": "user", "content": _words(50)},
    ]
    turns = [said]
    for number in range(TURNS - 1):
        turns.append([*turns[-1], *_turn(number)])
    return turns


def history() -> Messages:
    """100 kB of turns, whose JSON has `"key"` fields and addresses in it."""
    said: Messages = [{"role": "user", "content": _words(50)}]
    while len(json.dumps(said)) < HISTORY:
        said += _turn(len(said))
    return said


def screenshot() -> Messages:
    url = "data:image/png;base64," + base64.b64encode(_random.randbytes(IMAGE)).decode()
    image = {"type": "image_url", "image_url": {"url": url}}
    return [{"role": "user", "content": [{"type": "text", "text": _words(50)}, image]}]
