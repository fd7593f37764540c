"""Google's SDK, run by its own environment's Python: a loop with a tool, a stream, a count, and
what is refused."""

import json

from google import genai
from google.genai import errors, types

asked_for: list[str] = []


def search(q: str) -> str:
    """Look something up."""
    asked_for.append(q)
    return "sunny"


client = genai.Client()
declared = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}
function = types.FunctionDeclaration(
    name="search", description="Look something up.", parameters_json_schema=declared
)
config = types.GenerateContentConfig(tools=[types.Tool(function_declarations=[function])])
chat = client.chats.create(model="policy", config=config)
call = chat.send_message("weather").function_calls[0]
part = types.Part.from_function_response(name="search", response={"result": search(**call.args)})
found = chat.send_message(part)
events = list(client.models.generate_content_stream(model="policy", contents="hello"))
image = types.Part.from_bytes(data=b"\x89PNG", mime_type="image/png")
try:
    client.models.generate_content(model="policy", contents=[image, "hello"])
    refused = ""
except errors.ClientError as error:
    refused = f"{error.code} {error.status}"
told = {
    "asked_for": asked_for,
    "found": found.text,
    "streamed": "".join(event.text or "" for event in events),
    "pieces": len(events),
    "tokens": events[-1].usage_metadata.total_token_count,
    "counted": client.models.count_tokens(model="policy", contents="hello").total_tokens,
    "refused": refused,
}
print(json.dumps(told))
