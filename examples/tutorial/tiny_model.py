"""Makes a tiny model, so that nothing is downloaded; it knows no words but those of tasks.jsonl.

It learns from poor demonstrations, most of which guess instead of calling the tool. A real model
needs no such file. `python tiny_model.py` saves it in the folder `start`."""

import json
import random
from pathlib import Path

from agentlightning.learner.tiny import Policy, make_policy

TOOLS = [
    {"type": "function", "function": {"name": "stock", "parameters": {"properties": {"item": {}}}}}
]
LOOKS_UP = 0.3  # how often a demonstration calls the tool


def make(seed: int) -> Policy:
    """The same model for the same seed."""
    lines = Path(__file__).with_name("tasks.jsonl").read_text(encoding="utf-8").splitlines()
    tasks = [json.loads(line) for line in lines]
    generator = random.Random(seed)
    shown = [demonstrate(generator.choice(tasks), generator) for _ in range(2000)]
    return make_policy(shown, tools=TOOLS, seed=seed)


def demonstrate(task: dict, generator: random.Random) -> dict:
    messages: list[dict] = [{"role": "user", "content": task["question"]}]
    answer = str(generator.randrange(10, 100))
    if generator.random() < LOOKS_UP:
        answer = str(task["answer"])
        function = {"name": "stock", "arguments": json.dumps({"item": task["item"]})}
        call = {"id": "call_1", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": "call_1", "content": answer})
    return {"messages": [*messages, {"role": "assistant", "content": answer}]}


if __name__ == "__main__":
    make(seed=1).save(Path("start"))
