"""The table of kinds: what a page says of it, and that every protocol follows it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentlightning.gateway.chat.repairs import canonical
from agentlightning.gateway.endpoints.completions import ChatCompletions
from agentlightning.gateway.endpoints.gemini import GenerateContent
from agentlightning.gateway.endpoints.kinds import KINDS
from agentlightning.gateway.endpoints.messages import Messages
from agentlightning.gateway.endpoints.responses import Responses
from agentlightning.gateway.request import CallRefused, CallRequest

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "http.md"
UNKNOWN = "tomorrows"


def test_the_page_has_the_table() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for protocol, places in KINDS.items():
        for place, kinds in places.items():
            columns = (kinds.read, kinds.dropped, kinds.refused)
            cells = [" ".join(f"`{kind}`" for kind in sorted(column)) or "–" for column in columns]
            assert f"| `{protocol}` | {place} | {' | '.join(cells)} |" in page


def read(protocol: str, place: str, kind: str, text: str | None) -> CallRequest:
    """A request whose user says "hi", with a thing of this kind in this place."""
    thing: dict[str, Any] = {"type": kind} | ({} if text is None else {"text": text})
    said, tools = {"type": "text", "text": "hi"}, [thing] if place == "tools" else []
    content = [said, thing] if place == "parts" else [said]
    body: dict[str, Any] = {"model": "m"}
    match protocol:
        case "chat/completions":
            body |= {"messages": [{"role": "user", "content": content}], "tools": tools}
            request, dropped = canonical(ChatCompletions().read(json.dumps(body).encode()))
            return CallRequest(model="m", messages=request.messages, dropped=tuple(dropped))
        case "responses":
            items = [{"role": "user", "content": content}, *([thing] if place == "items" else [])]
            return Responses().read(json.dumps(body | {"input": items, "tools": tools}).encode())
        case "messages":
            body |= {
                "max_tokens": 9,
                "messages": [{"role": "user", "content": content}],
                "tools": tools,
            }
            return Messages().read(json.dumps(body).encode())
        case _:
            part = {kind: {}} if text is None else {"text": text}
            parts = [{"text": "hi"}, *([part] if place == "parts" else [])]
            body = {
                "contents": [{"parts": parts}],
                "tools": [{kind: {}}] if place == "tools" else [],
            }
            return GenerateContent("m").read(json.dumps(body).encode())


PLACES = [(protocol, place) for protocol, places in KINDS.items() for place in places]
NAMES = {
    "chat/completions": "messages",
    "responses": "input",
    "messages": "messages",
    "generateContent": "contents",
}


@pytest.mark.parametrize(("protocol", "place"), PLACES)
def test_what_is_left_out_is_noted_and_what_is_refused_says_what_to_do(
    protocol: str, place: str
) -> None:
    kinds, field = KINDS[protocol][place], "tools" if place == "tools" else NAMES[protocol]
    for kind in (*kinds.dropped, UNKNOWN):
        request = read(protocol, place, kind, None)
        assert request.dropped == (f"{field}.{kind}",)
        assert len(request.messages) == 1 and request.tools == []
        content = request.messages[0]["content"]
        assert content in ("hi", [{"type": "text", "text": "hi"}])
    for kind, what_to_do in kinds.refused.items():
        with pytest.raises(CallRefused) as caught:
            read(protocol, place, kind, None)
        assert what_to_do in str(caught.value) and str(caught.value.param).startswith(field)
    if place == "parts":
        assert "more" in json.dumps(read(protocol, place, UNKNOWN, "more").messages)
