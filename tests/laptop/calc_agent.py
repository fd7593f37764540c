"""A program of the reader's: it asks its API one thing, and says how good the answer was."""

import json

from openai import OpenAI

answer = OpenAI().chat.completions.create(
    model="gpt-5-mini", max_tokens=8, messages=[{"role": "user", "content": "What is 1+1?"}]
)
print(json.dumps({"reward": float(answer.choices[0].message.content == "2")}))
