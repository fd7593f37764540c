"""Adds an agent's requests to the corpus, without any text of theirs.

    python tests/corpus/add.py claude-code 2.1.332 http://127.0.0.1:8000    # listens at http://127.0.0.1:8001

Passes everything on to the server behind it, an `agl server` or a provider, until it is stopped.
Keys, types, numbers and words of the protocol stay; every other string becomes a placeholder.
Writes `NAME.jsonl`: first the agent, its version and its tools, then one request a line, whose
`tools` are numbers of those."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from aiohttp import ClientSession, web

# What these keys hold is a word of the protocol or of a schema, if it is one word at all.
_WORDS = {
    "$schema",
    "cache_control",
    "call_id",
    "effort",
    "encoding_format",
    "finish_reason",
    "finishReason",
    "format",
    "id",
    "include",
    "item_id",
    "keep",
    "media_type",
    "mode",
    "model",
    "name",
    "namespace",
    "object",
    "phase",
    "prompt_cache_retention",
    "required",
    "role",
    "search_context_size",
    "service_tier",
    "status",
    "strict",
    "summary",
    "syntax",
    "tool_call_id",
    "tool_choice",
    "tool_use_id",
    "ttl",
    "truncation",
    "type",
    "verbosity",
    "request_kind",
    "subagent_kind",
    "agent_name",
    "threshold",
    "category",
    "anthropic-beta",
    "anthropic-version",
    "openai-beta",
    "x-openai-subagent",
    "originator",
    "version",
    "enum",
}
_HEADERS = re.compile(
    "anthropic-(beta|version)|openai-beta|originator|version|session-id|thread-id|x-(claude|codex|openai|app|goog-api-client).*"
)
_WORD = re.compile(r"[\w$./:,=-]{1,300}")
_IDENTITY = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f-]{22}|(?=\w*\d)[0-9a-f]{12,}")
_HOP = {
    "host",
    "content-length",
    "transfer-encoding",
    "connection",
    "content-encoding",
    "accept-encoding",
}
_SCHEMAS = ("properties", "$defs", "patternProperties")


def scrubbed(value: Any, key: str = "", *, names: bool = False) -> Any:
    """The value with a placeholder for each text. `names`: its keys are names of properties, not of
    the protocol."""
    if isinstance(value, dict):
        return {
            name: scrubbed(one, "" if names else name, names=not names and name in _SCHEMAS)
            for name, one in value.items()
        }
    if isinstance(value, list):
        return [scrubbed(one, key) for one in value]
    if not isinstance(value, str):
        return value
    if value.startswith(("{", "[")):
        try:
            return json.dumps(scrubbed(json.loads(value)), separators=(",", ":"))
        except ValueError:
            pass
    if key in _WORDS and _WORD.fullmatch(value):
        return _IDENTITY.sub("0" * 12, value)
    if key == "pattern":
        return ".*"
    return "…" if key == "description" else ("text " * 5)[: len(value)].rstrip()


def shape(path: str, headers: dict[str, str], body: Any, tools: list[Any]) -> dict[str, Any]:
    """What is kept of a request; its tools are added to `tools`, where they are not among them."""
    body = scrubbed(body)
    if body.get("tools"):
        tools += (tool for tool in body["tools"] if tool not in tools)
        body["tools"] = [tools.index(tool) for tool in body["tools"]]
    kept = {
        name: scrubbed(text, name)
        for name, text in sorted(headers.items())
        if _HEADERS.fullmatch(name)
    }
    return {"path": path, "headers": kept, "body": body}


def main(agent: str, version: str, upstream: str) -> None:
    tools: list[Any] = []
    shapes: list[dict[str, Any]] = []

    async def passed_on(request: web.Request) -> web.Response:
        body = await request.read()
        if request.method == "POST" and body:
            headers = {name.lower(): text for name, text in request.headers.items()}
            shapes.append(shape(request.path_qs, headers, json.loads(body), tools))
        headers = {name: text for name, text in request.headers.items() if name.lower() not in _HOP}
        async with (
            ClientSession() as session,
            session.request(
                request.method, upstream + request.path_qs, data=body, headers=headers
            ) as answer,
        ):
            kept = {name: text for name, text in answer.headers.items() if name.lower() not in _HOP}
            return web.Response(status=answer.status, headers=kept, body=await answer.read())

    app = web.Application(client_max_size=1 << 28)
    app.router.add_route("*", "/{tail:.*}", passed_on)
    web.run_app(app, host="127.0.0.1", port=8001)
    lines = [{"agent": agent, "version": version, "tools": tools}, *shapes]
    written = [json.dumps(line, ensure_ascii=False, separators=(",", ":")) for line in lines]
    Path(__file__).with_name(f"{agent}.jsonl").write_text(
        "\n".join(dict.fromkeys(written)) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
