"""A writer with two tools, one of which fails, and a rewriter, with nothing but OpenAI's SDK."""

import json
import sys

from openai import OpenAI

client = OpenAI()
MODEL = "gpt-4o-mini"


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
    return {
        "type": "function",
        "function": {"name": tool.__name__, "description": description, "parameters": numbers},
    }


TOOLS = {"add": add, "divide": divide}
DESCRIBED = [described(add, "Add two numbers."), described(divide, "Divide two numbers.")]


def use(call):
    try:
        result = TOOLS[call.function.name](**json.loads(call.function.arguments))
    except ArithmeticError as error:
        result = f"Error: {error}"
    return {"role": "tool", "tool_call_id": call.id, "content": str(result)}


def write(topic):
    messages = [
        {"role": "system", "content": "You are the writer."},
        {"role": "user", "content": topic},
    ]
    while True:
        answer = (
            client.chat.completions.create(model=MODEL, messages=messages, tools=DESCRIBED)
            .choices[0]
            .message
        )
        if not answer.tool_calls:
            return answer.content
        messages += [answer, *map(use, answer.tool_calls)]


def rewrite(draft):
    messages = [
        {"role": "system", "content": "You are the rewriter."},
        {"role": "user", "content": draft},
    ]
    chunks = client.chat.completions.create(model=MODEL, messages=messages, stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


if __name__ == "__main__":
    print(rewrite(write(sys.argv[1])))
