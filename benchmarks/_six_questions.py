"""A game in which failing rollouts make more calls than those that succeed: find an owner within
six questions.

Each question has a form to keep. Who finds the owner soon keeps it once or twice, who fails six
times: what weighs all tokens alike punishes the form itself, without which nothing succeeds any
more."""

from __future__ import annotations

import random
from typing import Any, Final

import agentlightning as agl
from agentlightning.learner.policy import Policy

OWNER: Final = {
    "apple": "Ada",
    "boat": "Ben",
    "candle": "Cleo",
    "drum": "Dan",
    "engine": "Eva",
    "feather": "Finn",
}
_OTHERS: Final = (
    "Gus Hana Ivo Jill Kurt Lena Max Nora Otto Pia Quin Rosa Sam Tess Uma Vera Will Yara"
)
NAMES: Final = (*OWNER.values(), *_OTHERS.split())
QUESTIONS: Final = 6
SYSTEM: Final = f"Find the owner in {QUESTIONS} questions."
DEMONSTRATIONS: Final = 1500
KNOWN: Final = 0.02  # how often a demonstrated question names the owner; otherwise it guesses


def tasks(count: int, seed: int | str) -> list[dict[str, Any]]:
    generator = random.Random(f"six questions/{seed}")
    return [{"thing": generator.choice(list(OWNER))} for _ in range(count)]


def begin(thing: str) -> list[Any]:
    return [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": f"Who owns the {thing}?"},
    ]


def question(name: str) -> str:
    return f"Please tell me: does it belong to {name}?"


@agl.rollout
async def player(task: dict[str, Any], llm: agl.LLM) -> float:
    """1 for the owner, 0 for none in six questions; what is no question is told to be none, and
    counts."""
    client = agl.openai_client(llm)
    messages, known = begin(task["thing"]), {question(name) for name in NAMES}
    for _ in range(QUESTIONS):
        completion = await client.chat.completions.create(model=llm.model, messages=messages)
        said = completion.choices[0].message.content or ""
        if said == question(OWNER[task["thing"]]):
            return 1.0
        told = "no" if said in known else "that is no question"
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": told}]
    return 0.0


def make(seed: int) -> Policy:
    """A tiny model that keeps the form and guesses nearly at random; the same for the same seed."""
    from agentlightning.learner.tiny import make_policy

    generator = random.Random(seed)
    shown = [demonstrate(generator) for _ in range(DEMONSTRATIONS)]
    return make_policy(shown, seed=seed, steps=100)


def demonstrate(generator: random.Random) -> dict[str, Any]:
    thing = generator.choice(list(OWNER))
    messages = begin(thing)
    for _ in range(QUESTIONS):
        name = OWNER[thing] if generator.random() < KNOWN else generator.choice(NAMES)
        messages.append({"role": "assistant", "content": question(name)})
        if name == OWNER[thing]:
            break
        messages.append({"role": "user", "content": "no"})
    return {"messages": messages}
