"""A game in which failing takes longer than succeeding: find the owner of a thing within six questions.

A rollout that knows the owner has few sampled tokens, one that does not has the most. What weighs tokens alike then
weighs failures more than successes.
"""

from __future__ import annotations

import random
from typing import Any, Final

import agentlightning as agl
from agentlightning.learner.policy import Policy

_OWNED: Final = """
apple Ada, boat Ben, candle Cleo, drum Dan, engine Eva, feather Finn, guitar Gus, hammer Hana, island Ivo, jacket Jill,
kettle Kurt, ladder Lena, mirror Max, needle Nora, orange Otto, piano Pia, quilt Quin, ribbon Rosa, saddle Sam,
teapot Tess, umbrella Uma, violin Vera, wagon Will, zebra Yara
"""
OWNER: Final = dict(pair.split() for pair in _OWNED.split(","))
QUESTIONS: Final = 6
SYSTEM: Final = f"Find the owner in {QUESTIONS} questions."
DEMONSTRATIONS: Final = 1500
KNOWN: Final = 0.03  # how often a demonstrated question knows the owner; otherwise it guesses
TALK: Final = ("", "", "Does it belong to ", "I am not sure at all, but it may well belong to ")


def tasks(count: int, seed: int | str) -> list[dict[str, Any]]:
    generator = random.Random(f"six questions/{seed}")
    return [{"thing": generator.choice(list(OWNER))} for _ in range(count)]


def begin(thing: str) -> list[Any]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"Who owns the {thing}?"}]


def answer(thing: str, said: str) -> str:
    """What a question is answered; `yes` ends the game."""
    named = [name for name in OWNER.values() if name in said.replace("?", " ").split()]
    return "yes" if named == [OWNER[thing]] else "no"


@agl.rollout
async def player(task: dict[str, Any], llm: agl.LLM) -> float:
    """1 for the owner, 0 for none in six questions."""
    client = agl.openai_client(llm)
    messages = begin(task["thing"])
    for _ in range(QUESTIONS):
        completion = await client.chat.completions.create(model=llm.model, messages=messages)
        said = completion.choices[0].message.content or ""
        told = answer(task["thing"], said)
        if told == "yes":
            return 1.0
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": told}]
    return 0.0


def make(seed: int) -> Policy:
    """A tiny model that guesses nearly at random and talks about it; the same for the same seed."""
    from agentlightning.learner.warm_start import WarmStart, make_policy

    generator = random.Random(seed)
    shown = [demonstrate(generator) for _ in range(DEMONSTRATIONS)]
    return make_policy(shown, seed=seed, options=WarmStart(max_steps=160))


def demonstrate(generator: random.Random) -> dict[str, Any]:
    thing = generator.choice(list(OWNER))
    messages = begin(thing)
    for _ in range(QUESTIONS):
        owner = OWNER[thing] if generator.random() < KNOWN else generator.choice(list(OWNER.values()))
        said = generator.choice(TALK) + owner
        told = answer(thing, said)
        messages.append({"role": "assistant", "content": said})
        if told == "yes":
            break
        messages.append({"role": "user", "content": told})
    return {"messages": messages}
