"""Finds the agent of a program that made a call, and the calls that a choice of agents means.

Knows steps and the messages of a call; it knows nothing about training.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from agentlightning import semconv
from agentlightning.errors import ConfigError
from agentlightning.tracing.dialects import first_item, items, joined, json_of, mapping, text_of
from agentlightning.tracing.steps import Step
from agentlightning.types import Span

_ROLE: Final = re.compile(r"you are (?:the |an? )?([^.,;:!\n]+)", re.IGNORECASE)
_CLAUSE: Final = re.compile(r"[.,;:!?](?:\s|$)")
_PROMPT_KEYS: Final = ('"system"', '"instructions"')  # in Anthropic's protocol and in Responses
_INSTRUCTING: Final = ("system", "developer")
_DSPY_BEGINS: Final = "Your input fields are:"  # the prompts of all its modules
_LONGEST_NAME: Final = 60
_LONGEST_LINE: Final = 1000  # characters in which a name is looked for
_LONGEST_OPENING: Final = 100


@dataclass(frozen=True)
class AgentName:
    """The agent of a call: all its `names`, best first (empty if unknown), and the `words` by which
    it can be chosen. A `housekeeping` call (a title, a compaction) is named after its purpose."""

    names: tuple[str, ...]
    words: tuple[str, ...]
    housekeeping: bool = False

    @property
    def name(self) -> str | None:
        return self.names[0] if self.names else None

    def __str__(self) -> str:
        return " = ".join(self.names) or "an unnamed agent"


def agent_of(step: Step) -> AgentName:
    """The agent of a call: the name its framework gives it, else the role in the prompt that the
    agent sent, the model alias it asked for, or the first clause of the prompt.

    A role follows `You are the` (`a`, `an`) in the first line of the system prompt (with DSPy, of
    the objective) and ends at the first punctuation mark. An agent without a framework name can be
    chosen by any word of its role."""
    attributes = step.span.attributes
    if kind := text_of(step.span, semconv.CALL_HOUSEKEEPING):
        return AgentName((kind,), (kind, "housekeeping"), housekeeping=True)
    asked = attributes.get(semconv.GEN_AI_REQUEST_MODEL)
    answered = attributes.get(semconv.GEN_AI_RESPONSE_MODEL)
    alias = asked if isinstance(asked, str) and asked != answered else None
    if step.agent:
        names = (step.agent,) if alias is None else (step.agent, alias)
        return AgentName(names, names)
    begins = text_of(step.span, semconv.CALL_OPENING)
    return _unnamed(alias, begins or opening(_system_prompt(step.span)))


def opening(prompt: str) -> str:
    """How a system prompt begins, as far as it names its agent: `You are the writer`, or else its
    first line."""
    prompt = prompt.lstrip()
    if prompt.startswith(_DSPY_BEGINS):
        prompt = prompt.partition("your objective is:")[2].lstrip() or prompt
    found = _ROLE.match(prompt[:_LONGEST_LINE])
    if found is not None:
        return found[0][:_LONGEST_OPENING]
    return prompt[:_LONGEST_LINE].partition("\n")[0].strip()[:_LONGEST_NAME]


@lru_cache(maxsize=256)  # an agent makes many calls
def _unnamed(alias: str | None, line: str) -> AgentName:
    found = role_in(line)
    role = found or next(filter(None, _CLAUSE.split(line)), "")
    # Many programs use one model for all agents, but nearly every prompt says `helpful assistant`.
    tells = found is not None and not role.endswith("assistant")
    names = tuple(name for name in ((role, alias) if tells else (alias, role)) if name)
    return AgentName(names, (*names, *re.findall(r"[\w-]+", found or line)))


def role_in(prompt: str) -> str | None:
    """`writer` for `You are the writer. …`."""
    found = _ROLE.match(prompt[:_LONGEST_LINE].lstrip())
    return found[1].strip()[:_LONGEST_NAME] if found else None


def agent_pattern(pattern: str) -> re.Pattern[str]:
    """Compile `"writer|rewriter"` for `chosen`. ConfigError if it is not a regular expression."""
    try:
        return re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise ConfigError(
            f"agents is {pattern!r}, which is not a pattern ({error}); give names with | between "
            "them, such as 'writer|rewriter'"
        ) from None


def chosen(pattern: re.Pattern[str] | None, agent: AgentName) -> bool:
    """Whether the pattern matches a whole word of the agent, ignoring case. None chooses all agents
    except housekeeping."""
    return (
        not agent.housekeeping
        if pattern is None
        else any(pattern.fullmatch(word) for word in agent.words)
    )


def _system_prompt(call: Span) -> str:
    """The system prompt of a request in any of the three protocols; empty if there is none."""
    recorded = text_of(call, semconv.CALL_REQUEST) or ""
    request = mapping(json_of(recorded)) if any(map(recorded.__contains__, _PROMPT_KEYS)) else {}
    if system := request.get("system") or request.get("instructions"):
        return joined(system)
    messages = text_of(call, semconv.GEN_AI_INPUT_MESSAGES) or ""
    first = mapping(first_item(messages))
    several = (
        [first] if first.get("role") in _INSTRUCTING else map(mapping, items(json_of(messages)))
    )
    return next(
        (
            joined(message.get("content"))
            for message in several
            if message.get("role") in _INSTRUCTING
        ),
        "",
    )
