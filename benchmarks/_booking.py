"""What automatic intermediate rewards (AIR) are worth, on a task in which tools fail and the model
is to blame.

A trip is booked by three tools, each of which asks for what the one before it answered. A wrong or
missing number is an error, and so is a step that was taken before. Only the number of the ticket
earns anything, in at most six calls, and at first hardly ever.

Decided before the runs that are reported: the measure is the mean held-out reward of the
evaluations in the last third of the steps (after steps 30, 35 and 40), and the mean over all of
them (every five steps) says how fast it was learned. AIR is better, or worse, where all three seeds
are, of either. Settings are those of the quickstart with fewer tasks; alpha 0.05 was tried beside
the default 0.2 with seed 91, which is not reported."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, Final

import agentlightning as agl
from agentlightning.config import make_algorithm
from agentlightning.learner.policy import load_policy
from agentlightning.learner.policy_config import AdamW
from agentlightning.learner.tiny import make_policy

_NAMES: Final = (
    "Athens Bergen Berlin Dublin Geneva Lisbon Lyon Madrid Milan Munich Naples Oslo Paris Porto "
    "Rome"
)
CITIES: Final = tuple(_NAMES.split())
ASKED: Final = {"find": "city", "hold": "offer", "pay": "hold"}  # in this order
ANSWERED: Final = {"find": "offer", "hold": "hold", "pay": "ticket"}
MAX_CALLS: Final = 6
SYSTEM: Final = "Booking desk."


def tool(name: str, asked: str) -> Any:
    schema = {"type": "object", "properties": {asked: {"type": "string"}}, "required": [asked]}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS: Final = [tool(name, asked) for name, asked in ASKED.items()]

# --- the runs ---

DR_GRPO: Final = {"baseline": "dr_grpo"}
AIR: Final = DR_GRPO | {"returns": "air", "equal_rewards": True}
BOOKINGS: Final[dict[str, dict[str, Any]]] = {
    "reward alone": DR_GRPO,
    "reward alone (grpo)": {"baseline": "grpo"},
    "AIR 0.05": AIR | {"returns_options": {"alpha": 0.05}},
    "AIR 0.2": AIR | {"returns_options": {"alpha": 0.2}},
}
COMMON: Final[dict[str, Any]] = {
    "name": "grpo",
    "steps": 40,
    "tasks_per_step": 8,
    "group_size": 8,
    "minibatches": 2,
    "clip_high": 0.28,
    "max_tokens": 32,
    "level": "tree",
    "evaluate_every": 5,
    "stop_on_collapse": 0,
}
HELDOUT_TASKS: Final = 48


def train(name: str, seed: int, start: Path, out: Path) -> None:
    """Train as `BOOKINGS` has it from the policy of the seed in `start`, made if it is empty."""
    if not (start / "config.json").is_file():
        make(seed).save(start)
    agl.Trainer(
        model=load_policy(start),
        algorithm=make_algorithm(COMMON | BOOKINGS[name]),
        optimizer=AdamW(learning_rate=1.5e-4, micro_batch_tokens=4096),
        n_runners=128,
        max_sequence_length=512,
        run_dir=out,
        seed=seed,
    ).fit(booker, tasks(2000, seed), tasks(HELDOUT_TASKS, "held-out"))


# --- the task ---


def tasks(count: int, seed: int | str) -> list[dict[str, Any]]:
    """Each has a city and the numbers that the three tools answer."""
    generator = random.Random(f"booking/{seed}")
    return [
        {
            "city": generator.choice(CITIES),
            "numbers": [str(one) for one in generator.sample(range(100, 1000), len(ASKED))],
        }
        for _ in range(count)
    ]


class Desk:
    """The tools of one task. `right` is what each must be given."""

    def __init__(self, task: dict[str, Any]) -> None:
        self.right = dict(zip(ASKED, [task["city"], *task["numbers"]], strict=False))
        self.answers = {
            name: f"{ANSWERED[name]}: {given}"
            for name, given in zip(ASKED, task["numbers"], strict=True)
        }
        self.used = set[str]()

    def use(self, name: str, arguments: str) -> str:
        """What a tool answers; a failure begins with `Error`."""
        if name not in ASKED:
            return "Error: no such tool"
        try:
            given = json.loads(arguments)[ASKED[name]]
        except (ValueError, TypeError, KeyError):
            given = None
        if given != self.right[name]:
            return f"Error: no such {ASKED[name]}"
        if name in self.used:
            return f"Error: {ASKED[name]} used"
        self.used.add(name)
        return self.answers[name]


def begin(task: dict[str, Any]) -> list[Any]:
    return [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": f"Book a trip to {task['city']}."},
    ]


@agl.rollout
async def booker(task: dict[str, Any], llm: agl.LLM) -> float:
    """1 for the ticket that was paid for, 0 for anything else and after six calls."""
    client = agl.openai_client(llm)
    messages, desk = begin(task), Desk(task)
    for _ in range(MAX_CALLS):
        answer = await client.chat.completions.create(
            model=llm.model, messages=messages, tools=TOOLS
        )
        said = answer.choices[0].message
        if not said.tool_calls:
            return float("pay" in desk.used and (said.content or "").strip() == desk.answers["pay"])
        messages.append(said.model_dump(include={"role", "content", "tool_calls"}))
        for call in said.tool_calls:
            result = desk.use(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return 0.0


# --- the policy it starts from ---

DEMONSTRATIONS: Final = 2000
KNOWS: Final = 0.2  # how often the script takes the next tool, beyond chance
SLOPPY: Final = 0.25  # how often it makes a number up that it has read
ANSWERS: Final = 0.5  # how often a ticket ends the conversation
GIVES_UP: Final = 0.08  # how often it stops at anything else


def make(seed: int) -> Any:
    """A tiny model that knows every form, and hardly ever what is next; the same for the same
    seed."""
    generator = random.Random(f"demonstrations/{seed}")
    shown = [
        demonstrate(task, generator) for task in tasks(DEMONSTRATIONS, f"demonstrations/{seed}")
    ]
    return make_policy(shown, tools=TOOLS, seed=seed, steps=160)


def demonstrate(task: dict[str, Any], generator: random.Random) -> dict[str, Any]:
    messages, desk, read = begin(task), Desk(task), {"city": task["city"]}
    for number in range(MAX_CALLS):
        told = messages[-1]["content"]
        if told.startswith("ticket") and generator.random() < ANSWERS:
            messages.append({"role": "assistant", "content": told})
            break
        if number and generator.random() < GIVES_UP:
            messages.append({"role": "assistant", "content": "sorry"})
            break
        following = [*ASKED, "find"][len(desk.used)]
        name = following if generator.random() < KNOWS else generator.choice(list(ASKED))
        value = read.get(ASKED[name])
        if value is None or generator.random() < SLOPPY:
            value = (
                generator.choice(CITIES) if name == "find" else str(generator.randrange(100, 1000))
            )
        arguments = json.dumps({ASKED[name]: value})
        result = desk.use(name, arguments)
        if not result.startswith("Error"):
            read[ANSWERED[name]] = result.split(": ")[1]
        call = {
            "id": f"call_{number}",
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    return {"messages": messages}
