"""A writer with two tools, one of which fails, and a rewriter, with nothing but OpenAI's SDK.

Nothing here knows of Agent Lightning. The SDK finds the model's URL and key in its environment, and the last line of
output is the reward: run it as `agl runner --command "python agent.py"`. The agents are told apart by the roles in
their prompts, and what the model is told of a tool tells how it went.
"""

import json
import sys

from openai import OpenAI

client = OpenAI()
MODEL = "policy"


def add(a, b):
    return a + b


def divide(a, b):
    return a / b


def described(tool, description):
    numbers = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    }
    return {"type": "function", "function": {"name": tool.__name__, "description": description, "parameters": numbers}}


TOOLS = {"add": add, "divide": divide}
DESCRIBED = [described(add, "Add two numbers."), described(divide, "Divide two numbers.")]


def use(call):
    try:
        result = TOOLS[call.function.name](**json.loads(call.function.arguments))
    except ArithmeticError as error:
        result = f"Error: {error}"
    return {"role": "tool", "tool_call_id": call.id, "content": str(result)}


def write(topic):
    messages = [{"role": "system", "content": "You are the writer."}, {"role": "user", "content": topic}]
    while True:
        answer = client.chat.completions.create(model=MODEL, messages=messages, tools=DESCRIBED).choices[0].message
        if not answer.tool_calls:
            return answer.content
        messages += [answer, *map(use, answer.tool_calls)]


def rewrite(draft):
    messages = [{"role": "system", "content": "You are the rewriter."}, {"role": "user", "content": draft}]
    chunks = client.chat.completions.create(model=MODEL, messages=messages, stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


text = rewrite(write(json.load(sys.stdin)["topic"]))
print(json.dumps({"reward": float("sea" in text)}))
