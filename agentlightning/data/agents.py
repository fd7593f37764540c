"""Which agent of a program made a call, and which calls a choice of agents means.

Knows steps and the messages of a call; it does not know what is trained or why.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from agentlightning import semconv
from agentlightning.errors import ConfigError
from agentlightning.tracing.dialects import items, json_of, mapping, text_of
from agentlightning.tracing.steps import Step
from agentlightning.types import Span

_ROLE: Final = re.compile(r"you are (?:the |an? )?([^.,;:!\n]+)", re.IGNORECASE)
_DECODER: Final = json.JSONDecoder()
_BETWEEN: Final = re.compile(r"[\s,]*")
_LONGEST_NAME: Final = 60
_LONGEST_LINE: Final = 1000  # of which a name is read


@dataclass(frozen=True)
class AgentName:
    """The agent of a call: all `names` it has, the best first (none where nothing tells), and all `words` it can be
    chosen by."""

    names: tuple[str, ...]
    words: tuple[str, ...]

    @property
    def name(self) -> str | None:
        return self.names[0] if self.names else None

    def __str__(self) -> str:
        return " = ".join(self.names) or "one without a name"


def agent_of(step: Step) -> AgentName:
    """The agent of a call: as its framework calls it, else the alias of the model that was asked for, else its role.

    The role is read from the first line of the system prompt: what follows `You are the` (`a`, `an`), up to the first
    punctuation, else the line. An agent that no framework names can be chosen by any word of its role too."""
    attributes = step.span.attributes
    asked, answered = attributes.get(semconv.GEN_AI_REQUEST_MODEL), attributes.get(semconv.GEN_AI_RESPONSE_MODEL)
    alias = asked if isinstance(asked, str) and asked != answered else None
    if step.agent:
        names = (step.agent,) if alias is None else (step.agent, alias)
        return AgentName(names, names)
    line = _system_prompt(step.span).lstrip()[:_LONGEST_LINE].partition("\n")[0].rstrip()
    found = _ROLE.match(line)
    role = (found[1] if found else line).strip()[:_LONGEST_NAME]
    names = tuple(name for name in (alias, role) if name)
    return AgentName(names, (*names, *re.findall(r"[\w-]+", role)))


def agent_pattern(pattern: str) -> re.Pattern[str]:
    """`"writer|rewriter"` as what `chosen` takes. ConfigError if it is no regular expression."""
    try:
        return re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise ConfigError(
            f"agents is {pattern!r}, which is no pattern ({error}); give names with | between them, such as "
            "'writer|rewriter'"
        ) from None


def chosen(pattern: re.Pattern[str], agent: AgentName) -> bool:
    """Whether the pattern is the whole of one of the agent's words, in upper or lower case."""
    return any(pattern.fullmatch(word) for word in agent.words)


def _system_prompt(call: Span) -> str:
    """What the request tells the model to be, in the words of any of the three protocols; empty if nothing."""
    request = mapping(json_of(text_of(call, semconv.CALL_REQUEST)))
    said = request.get("system") or request.get("instructions")
    if not said:
        messages = map(mapping, _one_by_one(text_of(call, semconv.GEN_AI_INPUT_MESSAGES) or ""))
        said = next((one.get("content") for one in messages if one.get("role") in ("system", "developer")), None)
    return said if isinstance(said, str) else "".join(_texts(said))


def _one_by_one(messages: str) -> Iterator[Any]:
    """The items of a JSON array, each decoded when it is asked for: the system prompt is mostly the first message."""
    at = 1 if messages.startswith("[") else len(messages)
    while at < len(messages):
        try:
            item, end = _DECODER.raw_decode(messages, at)
        except (ValueError, RecursionError):  # also at the closing bracket
            return
        yield item
        at = _BETWEEN.match(messages, end).end()  # type: ignore[union-attr]  # it matches nothing, too


def _texts(content: Any) -> list[str]:
    texts = [mapping(block).get("text") for block in items(content)]
    return [text for text in texts if isinstance(text, str)]
