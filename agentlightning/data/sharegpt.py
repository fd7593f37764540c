"""A conversation in OpenAI's words → in ShareGPT's: `{"conversations": [{"from": "human", "value": …}, …]}`.

Only `system`, `human` and `gpt` speak, by turns, in text: it is all that readers of this format agree on. Tools, calls
and results are text as the templates of Hermes and Qwen 2.5 have it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from agentlightning.data.conversations import Message

UNSAYABLE: Final = "what ShareGPT cannot say: an image, or an answer that is not to be learned"

_SPEAKERS: Final = {"system": "system", "developer": "system", "user": "human", "tool": "human", "assistant": "gpt"}
_OFFER: Final = (
    "You may call these tools; each line is one of them:\n<tools>\n{tools}\n</tools>\nTo call one, answer "
    '<tool_call>\n{{"name": <its name>, "arguments": <a JSON object>}}\n</tool_call>'
)


def sharegpt(messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> dict[str, Any] | None:
    """The line, None where ShareGPT cannot say it: it has no weights and no images.

    [system S, user U, assistant calls f, tool T, assistant A] → [system S + tools, human U, gpt <tool_call> f, human
    <tool_response> T, gpt A]. Messages of one speaker in a row are one turn."""
    turns: list[dict[str, str]] = []
    for message in messages:
        text = _text(message)
        if text is None or message.get("weight") == 0:
            return None
        speaker = _SPEAKERS[message["role"]]
        if turns and turns[-1]["from"] == speaker:
            turns[-1]["value"] += f"\n\n{text}"
        else:
            turns.append({"from": speaker, "value": text})
    if tools:
        if turns[0]["from"] != "system":
            turns.insert(0, {"from": "system", "value": ""})
        offer = _OFFER.format(tools="\n".join(map(_json, tools)))
        turns[0]["value"] = "\n\n".join(filter(None, (turns[0]["value"], offer)))
    return {"conversations": turns}


def _text(message: Message) -> str | None:
    """All that a message says; None for an image."""
    content: Any = message.get("content") or ""
    if not isinstance(content, str):
        if any(part["type"] != "text" for part in content):
            return None
        content = "".join(part["text"] for part in content)
    if message["role"] == "tool":
        return f"<tool_response>\n{content}\n</tool_response>"
    return "\n".join(filter(None, (content, *map(_call, message.get("tool_calls") or ()))))


def _call(call: dict[str, Any]) -> str:
    arguments = msgspec.json.decode(call["function"]["arguments"])
    return f"<tool_call>\n{_json({'name': call['function']['name'], 'arguments': arguments})}\n</tool_call>"


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
