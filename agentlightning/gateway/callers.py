"""The agent and the purpose of a call, by headers and messages as coding agents send them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from agentlightning.data.agents import opening, role_in
from agentlightning.prompts.places import SYSTEM, USER
from agentlightning.prompts.replacing import Replaced
from agentlightning.semconv import (
    CALL_HOUSEKEEPING,
    CALL_OPENING,
    CALL_PARENT_AGENT,
    CALL_REPLACED,
    GEN_AI_AGENT_ID,
    GEN_AI_AGENT_NAME,
)
from agentlightning.tracing.dialects import json_of, mapping, texts
from agentlightning.types import Attributes

_CLAUDE: Final = "x-claude-code-"
# How `User-Agent` begins, the agent's name, and the headers with the ids of the agent, of its
# parent, and of the session, which is the main agent's.
_HARNESSES: Final = (
    (
        "claude-cli/",
        "claude-code",
        _CLAUDE + "agent-id",
        _CLAUDE + "parent-agent-id",
        _CLAUDE + "session-id",
    ),
    ("codex", "codex", "thread-id", "x-codex-parent-thread-id", "session-id"),
    ("opencode/", "opencode", "x-session-id", "x-parent-session-id", "x-session-id"),
)
# JSON with `agent_name` and `request_kind`; a word
_CODEX: Final = ("x-codex-turn-metadata", "x-openai-subagent")
# of requests that are housekeeping
_CODEX_KINDS: Final = frozenset({"prewarm", "compaction", "memory"})
# What housekeeping a call is, by how `User-Agent` begins, and how part of the system prompt or the
# latest text does.
_PROMPTS: Final = {
    "claude-cli/": {
        "Generate a concise, sentence-case title": "title",
        "Generate a short kebab-case name": "title",
        "You are a helpful AI assistant tasked with summarizing conversations": "compaction",
        "Your task is to create a detailed summary of": "compaction",
    },
    "opencode/": {
        "You are a title generator": "title",
        "Create a new anchored summary from the conversation": "compaction",
    },
    "GeminiCLI": {
        "You are a specialized system component responsible for distilling": "compaction",
        "You are a Task Routing AI": "routing",
        "You are a specialized Task Routing AI": "routing",
        "Analyze *only* the content and structure of your immediately": "next speaker",
    },
    "QwenCode/": {
        "Generate a concise, sentence-case title": "title",
        "You are the component that summarizes internal chat history": "compaction",
        "Analyze *only* the content and structure of your immediately": "next speaker",
    },
    "": {  # aider, whose SDK says its own name
        "*Briefly* summarize this partial conversation": "compaction",
        "You are an expert software engineer that generates concise, one-line": "commit message",
    },
}
_SYSTEM: Final = ("system", "developer")
_PARTS: Final = 4  # of a system prompt, one of which begins so
_LONGEST: Final = 200  # characters of a name or an id


def caller_attributes(
    headers: Mapping[str, str], messages: Sequence[Any], replaced: Replaced | None = None
) -> Attributes:
    """Attributes of a call's span: the agent's name and id, its parent's id, how its prompt begins,
    and what housekeeping the call is, as far as `headers` (with lower-case names) and prompts tell:
    those that the agent sent, whatever was `replaced` in them."""
    client = headers.get("user-agent", "")
    turn = mapping(json_of(headers.get(_CODEX[0])))
    subagent = headers.get(_CODEX[1])
    system = next(filter(None, (_texts(message, *_SYSTEM) for message in messages)), [])
    latest = next(
        (message for message in reversed(messages) if mapping(message).get("role") not in _SYSTEM),
        None,
    )
    asked = _texts(latest, USER)[-1:]
    if replaced is not None:
        system = [replaced.as_sent(SYSTEM, text) for text in system]
        asked = [replaced.as_sent(USER, text) for text in asked]
    found = _agent(headers, str(turn.get("agent_name") or ""), subagent, system[:_PARTS])
    if begins := opening("".join(system)):
        found[CALL_OPENING] = begins
    if replaced is not None:
        found[CALL_REPLACED] = replaced.record
    begun = [text.lstrip() for text in (*system[:_PARTS], *asked)]
    prompts = next(
        (prompts for begins, prompts in _PROMPTS.items() if client.startswith(begins)), {}
    )
    kind = next(
        (
            kind
            for begins, kind in prompts.items()
            if any(text.startswith(begins) for text in begun)
        ),
        None,
    )
    if client.startswith("codex") and str(turn.get("request_kind")) in _CODEX_KINDS:
        kind = turn["request_kind"]
    if kind:
        found[CALL_HOUSEKEEPING] = kind
    return found


def _agent(
    headers: Mapping[str, str], path: str, subagent: str | None, system: Sequence[str]
) -> Attributes:
    """`path` is how Codex names an agent (`/root`, `/root/NAME`), `subagent` how it says what kind
    of one it is."""
    for client, name, own, parent_header, session_header in _HARNESSES:
        session = headers.get(session_header)
        agent = headers.get(own) or session
        if agent and headers.get("user-agent", "").startswith(client):
            parent = headers.get(parent_header) or (session if session != agent else None)
            role = path.removeprefix("/root").strip("/")
            if parent and not role:
                role = subagent or role_in("".join(system[-1:])) or "sub-agent"
            name = f"{name}/{role}" if role else name
            attributes = {
                GEN_AI_AGENT_NAME: name,
                GEN_AI_AGENT_ID: agent,
                CALL_PARENT_AGENT: parent,
            }
            return {attribute: value[:_LONGEST] for attribute, value in attributes.items() if value}
    return {}


def _texts(message: object, *roles: str) -> list[str]:
    fields = mapping(message)
    return texts(fields.get("content")) if fields.get("role") in roles else []
