"""Google's SDK with a system instruction and a described tool, run by its own environment's
Python."""

import json
import sys

from google import genai
from google.genai import types

function = types.FunctionDeclaration(
    name="search",
    description="Look something up.",
    parameters_json_schema={"type": "object", "properties": {"q": {"type": "string"}}},
)
config = types.GenerateContentConfig(
    system_instruction=sys.argv[1], tools=[types.Tool(function_declarations=[function])]
)
client = genai.Client()
asked = {"model": "policy", "contents": "hello", "config": config}
answer = client.models.generate_content(**asked)
events = list(client.models.generate_content_stream(**asked))
streamed = "".join(event.text or "" for event in events)
print(json.dumps({"text": answer.text, "streamed": streamed}))
