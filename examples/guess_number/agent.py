"""Guess a number from 1 to 64 in ten tries. After a wrong guess the agent hears `higher` or
`lower`, no more."""

from __future__ import annotations

from collections.abc import Iterable

import aiohttp

import agentlightning as agl

HIGHEST, TRIES = 64, 10
QUESTION = f"Guess a number from 1 to {HIGHEST}"


class Game:
    """The conversation of a game, and `low` to `high`, the numbers that are left. The first guesses
    may be given."""

    def __init__(self, secret: int, opening: Iterable[int] = ()) -> None:
        self.secret = secret
        self.low, self.high = 1, HIGHEST
        self.messages: list[dict[str, str]] = [{"role": "user", "content": QUESTION}]
        self.tried = 0
        for said in opening:
            self.hear(said)

    def hear(self, said: int) -> None:
        """Answer a wrong guess."""
        higher = said < self.secret
        if higher:
            self.low = max(self.low, said + 1)
        else:
            self.high = min(self.high, said - 1)
        self.tried += 1
        hint = "higher" if higher else "lower"
        self.messages += [
            {"role": "assistant", "content": str(said)},
            {"role": "user", "content": hint},
        ]


@agl.rollout
async def guess(task: dict, llm: agl.LLM) -> float:
    """1 for a number found at once, 0.1 less for each further try; 0 if it is not found in ten."""
    game = Game(task["secret"], task.get("opening", ()))
    headers = {"authorization": f"Bearer {llm.api_key}"}
    async with aiohttp.ClientSession(
        f"{llm.endpoint}/", headers=headers, raise_for_status=True
    ) as client:
        while game.tried < TRIES:
            agl.emit_annotation({"state": game.high - game.low + 1})
            asked = {"model": llm.model, "messages": game.messages}
            async with client.post("chat/completions", json=asked) as answer:
                said = (await answer.json())["choices"][0]["message"]["content"] or ""
            if not said.isdecimal():
                return 0.0
            if int(said) == game.secret:
                return 1 - game.tried / TRIES
            game.hear(int(said))
    return 0.0
