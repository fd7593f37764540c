"""Three small agents. Where their model runs, and what trains it, is the run file's business."""

import agentlightning as agl

NAMES = ["Ada", "Alan", "Edsger", "Grace", "John", "Ken", "Linus", "Margaret"]
HIGHEST, GUESSES = 7, 3  # whoever halves what is left always finds it
THINGS = {
    "cat": {"alive?", "small?"},
    "horse": {"alive?"},
    "spoon": {"small?"},
    "tower": set[str](),
}


def greeting(name: str) -> str:
    return f"Greet {name}"


def begin_guessing() -> str:
    return f"Guess a number from 1 to {HIGHEST}"


def questions() -> list[str]:
    return ["alive?", "small?"]


def ask_about(thing: str, question: str) -> str:
    return f"The {thing}: {question}"


async def reply(llm: agl.LLM, messages: list[dict]) -> str:
    """The model's next turn, which is added to the messages."""
    completion = await agl.openai_client(llm).chat.completions.create(
        model=llm.model, messages=messages, max_tokens=8
    )
    content = completion.choices[0].message.content or ""
    messages.append({"role": "assistant", "content": content})
    return content.strip()


@agl.rollout
async def hello(task: dict, llm: agl.LLM) -> float:
    """Say hello to a name: 1.0, or 0.0."""
    return float(
        await reply(llm, [{"role": "user", "content": greeting(task["name"])}])
        == f"hello {task['name']}"
    )


@agl.rollout
async def guess_the_number(task: dict, llm: agl.LLM) -> float:
    """Find a number from hints: 1.0 if it was found, else at most 0.5, the more the nearer the last
    guess was."""
    messages: list[dict] = [{"role": "user", "content": begin_guessing()}]
    distance = HIGHEST
    for _ in range(GUESSES):
        said = await reply(llm, messages)
        if not said.isdecimal():
            return 0.0
        distance = abs(task["secret"] - int(said))
        if distance == 0:
            return 1.0
        messages.append(
            {"role": "user", "content": "higher" if task["secret"] > int(said) else "lower"}
        )
    return max(0.0, 0.5 - 0.5 * distance / HIGHEST)


@agl.rollout
async def twenty_questions(task: dict, llm: agl.LLM, resources: dict) -> float:
    """Two questions to another model, which is not trained, and then the thing: 1.0 if it is right,
    else 0.0."""
    messages: list[dict] = [{"role": "user", "content": "What is it?"}]
    for _ in range(2):
        question = await reply(llm, messages)
        told = await reply(
            resources["answerer"], [{"role": "user", "content": ask_about(task["thing"], question)}]
        )
        messages.append({"role": "user", "content": told})
    return float(await reply(llm, messages) == task["thing"])
