"""Adds an agent's recorded requests to the corpus, without any text of theirs.

    python tests/corpus/add.py claude-code 2.1.197 RECORDED.json…

Each recording is a JSON object with `method`, `path`, `headers` and `body`. Keys, types, numbers and words of the
protocol stay; every other string becomes a placeholder. Writes `NAME.jsonl`: first the agent, its version and its
tools, then one request a line, whose `tools` are numbers of those.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

# What these keys hold is a word of the protocol or of a schema, if it is one word at all.
_WORDS = {
    "$schema", "cache_control", "call_id", "effort", "encoding_format", "finish_reason", "finishReason", "format",
    "id", "include", "item_id", "keep", "media_type", "mode", "model", "name", "namespace", "object", "phase",
    "prompt_cache_retention", "required", "role", "search_context_size", "service_tier", "status", "strict",
    "summary", "syntax", "tool_call_id", "tool_choice", "tool_use_id", "ttl", "truncation", "type", "verbosity",
    "request_kind", "subagent_kind", "agent_name", "threshold", "category", "anthropic-beta", "anthropic-version",
    "openai-beta", "x-openai-subagent", "originator", "version", "enum"
}  # fmt: skip
_HEADERS = re.compile(
    "anthropic-(beta|version)|openai-beta|originator|version|session-id|thread-id|x-(claude|codex|openai|app|goog-api-client).*"
)
_WORD = re.compile(r"[\w$./:,=-]{1,300}")
_IDENTITY = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f-]{22}|(?=\w*\d)[0-9a-f]{12,}")
_SCHEMAS = ("properties", "$defs", "patternProperties")


def scrubbed(value: Any, key: str = "", *, names: bool = False) -> Any:
    """The value with a placeholder for each text. `names`: its keys are names of properties, not of the protocol."""
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


def shape(recorded: dict[str, Any], tools: list[Any]) -> dict[str, Any]:
    """What is kept of one recording; its tools are added to `tools`, where they are not among them."""
    headers = {name.lower(): text for name, text in recorded["headers"].items()}
    body = scrubbed(recorded["body"])
    if body.get("tools"):
        tools += (tool for tool in body["tools"] if tool not in tools)
        body["tools"] = [tools.index(tool) for tool in body["tools"]]
    kept = {name: scrubbed(text, name) for name, text in sorted(headers.items()) if _HEADERS.fullmatch(name)}
    return {"path": recorded["path"], "headers": kept, "body": body}


def main(agent: str, version: str, *files: str) -> None:
    tools: list[Any] = []
    recorded = [json.loads(Path(file).read_text(encoding="utf-8")) for file in files]
    shapes = [shape(one, tools) for one in recorded if one["method"] == "POST" and isinstance(one["body"], dict)]
    lines = [{"agent": agent, "version": version, "tools": tools}, *shapes]
    written = [json.dumps(line, ensure_ascii=False, separators=(",", ":")) for line in lines]
    target = Path(__file__).with_name(f"{agent}.jsonl")
    target.write_text("\n".join(dict.fromkeys(written)) + "\n", encoding="utf-8")
    print(f"{target}: {len(shapes)} requests, {target.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])
