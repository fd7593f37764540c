"""A task in which failing answers are longer than right ones: questions, each with an answer of one
word.

Who knows the answer says it, who does not talks. What weighs all tokens alike then weighs failures
more than successes: where few rollouts succeed, the mean advantage of a token is far below 0."""

from __future__ import annotations

import random
from typing import Any, Final

import agentlightning as agl
from agentlightning.learner.policy import Policy

ANSWER: Final = {
    "Who painted the ceiling?": "Michelangelo",
    "Which metal is liquid?": "mercury",
    "What do bees make?": "honey",
    "Where is the Louvre?": "Paris",
    "Which planet is red?": "Mars",
    "What is frozen water?": "ice",
}
SYSTEM: Final = "Answer in one word."
DEMONSTRATIONS: Final = 1500
KNOWN: Final = 0.2  # how often a demonstration knows the answer
TALKS: Final = 0.6  # and how often it talks; otherwise it guesses in a word
TALK: Final = (
    "I am not sure at all, but it may well be",
    "Let me think about it for a while: perhaps it is",
)


def tasks(count: int, seed: int | str) -> list[dict[str, Any]]:
    generator = random.Random(f"talk/{seed}")
    return [{"question": generator.choice(list(ANSWER))} for _ in range(count)]


def prompt(question: str) -> list[Any]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]


@agl.rollout
async def answerer(task: dict[str, Any], llm: agl.LLM) -> float:
    """1 for the right word and no other."""
    client = agl.openai_client(llm)
    completion = await client.chat.completions.create(
        model=llm.model, messages=prompt(task["question"])
    )
    return agl.rewards.exact_match(
        completion.choices[0].message.content or "", ANSWER[task["question"]]
    )


def make(seed: int) -> Policy:
    """A tiny model that mostly guesses and talks; the same for the same seed."""
    from agentlightning.learner.tiny import make_policy

    generator = random.Random(seed)
    shown = [demonstrate(generator) for _ in range(DEMONSTRATIONS)]
    return make_policy(shown, seed=seed, steps=100)


def demonstrate(generator: random.Random) -> dict[str, Any]:
    question = generator.choice(list(ANSWER))
    said, chance = generator.choice(list(ANSWER.values())), generator.random()
    if chance < KNOWN:
        said = ANSWER[question]
    elif chance < KNOWN + TALKS:
        other = generator.choice(list(ANSWER.values()))
        said = f"{generator.choice(TALK)} {said}, or else {other}, or something else"
    return {"messages": [*prompt(question), {"role": "assistant", "content": said}]}
