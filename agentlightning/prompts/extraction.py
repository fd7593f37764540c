"""The components of a program: its own texts in recorded calls, by agent and place, with what
varies in them, and why a text cannot be changed.

Reads spans of a store. Knows no gateway and runs nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import chain
from typing import Final

import msgspec

from agentlightning.data.agents import agent_of, role_in
from agentlightning.prompts.alignment import aligned, masked
from agentlightning.prompts.components import HOLE, Pattern, fingerprint
from agentlightning.prompts.places import FIELDS, SYSTEM, USER, blocks, change_field, tag_of
from agentlightning.prompts.replacing import as_sent, record_of
from agentlightning.tracing.dialects import is_gateway_call
from agentlightning.tracing.steps import read_steps
from agentlightning.types import UNATTRIBUTED, PromptCandidate, PromptText, Rollout, Span

RECURRING: Final = 2
"""Distinct tasks in which a text must be the same, word for word."""
COMPARED: Final = 3
"""Distinct tasks whose texts are compared, where they differ."""
_SHORTEST_BLOCK: Final = 40  # characters of a block of a user's message
_PREFIX: Final = 20  # characters that texts of agents with different names share
_VALUES: Final = 3  # that are shown of a hole


@dataclass(frozen=True)
class Component:
    """A text that a program sends: `sent`, with its holes as `{hole1}` and examples of what was in
    each. `agents` send it, in `calls` calls of `tasks` distinct tasks. A `reason` says why it is
    not offered."""

    name: str
    place: str
    agents: tuple[str, ...]
    sent: str
    fingerprint: str
    tasks: int
    calls: int
    holes: tuple[tuple[str, ...], ...]
    reason: str | None


@dataclass
class _Text:
    """One text at a place, and who sent it."""

    text: str
    agents: set[str] = field(default_factory=set[str])
    tasks: set[str] = field(default_factory=set[str])
    calls: int = 0


@dataclass
class _Form:
    """Texts of one form, and the reason why it cannot be changed."""

    texts: list[_Text]
    pattern: Pattern
    reason: str | None = None


def components_of(
    recorded: Iterable[tuple[Rollout, Sequence[Span]]],
    *,
    candidates: Mapping[str, PromptCandidate] = {},
    keep: Sequence[str] = (),
) -> list[Component]:
    """The components in these rollouts' calls, by name. Those whose names match a pattern of `keep`
    (`writer.*`) are not offered. `candidates` are those that may have been in place, by
    `resources_id`: what the program itself sent is read back from them.

    Calls of no attempt are told apart by the first words of a user: their tasks are not known."""
    places: dict[str, dict[str, _Text]] = {}
    for rollout, spans in recorded:
        task = msgspec.json.encode(rollout.input).decode()
        for step in read_steps(spans):
            if step.call is not step.span or not is_gateway_call(step.span):
                continue
            record = record_of(step.span)
            if record is not None and record.resources_id not in candidates:
                continue  # what the program sent is not known any more
            texts = _texts(step.span, candidates)
            if rollout.rollout_id == UNATTRIBUTED:
                task = next((text for place, text in texts if place == USER), step.span.span_id)
            for place, text in {pair for each in texts for pair in _parts(*each)}:
                kept = places.setdefault(place, {}).setdefault(text, _Text(text))
                kept.agents.add(agent_of(step).name or "agent")
                kept.tasks.add(task)
                kept.calls += 1
    found = [
        _component(place, form)
        for place, texts in places.items()
        for form in _forms(place, list(texts.values()))
    ]
    return [
        replace(each, reason="it is to be kept")
        if each.reason is None and any(fnmatchcase(each.name, pattern) for pattern in keep)
        else each
        for each in _named(found)
    ]


def base_candidate(components: Iterable[Component]) -> PromptCandidate:
    """The candidate that changes nothing: every component that is offered, with its own text."""
    offered = [each for each in components if each.reason is None]
    texts = {
        each.name: PromptText(place=each.place, sent=each.sent, text=each.sent) for each in offered
    }
    return PromptCandidate(components=texts)


def _texts(span: Span, candidates: Mapping[str, PromptCandidate]) -> list[tuple[str, str]]:
    """(place, text) of a call, as the program sent it."""
    found: list[tuple[str, str]] = []

    def note(place: str, text: str) -> str:
        found.append((place, text))
        return text

    sent = as_sent(span, candidates)
    whole = {**sent.request, "messages": sent.messages, "tools": sent.tools}
    for name in FIELDS.keys() & whole.keys():
        change_field(FIELDS[name], whole[name], note)
    return found


def _parts(place: str, text: str) -> list[tuple[str, str]]:
    """What of a text may be a component: of a user's, blocks of some length."""
    parts = blocks(text) if place == USER else [text] * bool(text.strip())
    shortest = _SHORTEST_BLOCK if place == USER else 1
    return [(place, part) for part in parts if len(part) >= shortest]


# --- forms of texts -------------------------------------------------------------------------------


def _forms(place: str, texts: list[_Text]) -> list[_Form]:
    """What recurs word for word is a form by itself, before anything is aligned: agents that differ
    in one word stay apart. Of the rest, texts of one agent are aligned, and then those that begin
    alike."""
    exact = [_Form(group, masked(group[0].text)) for group in _groups(texts, _masked)]
    forms = [form for form in exact if _tasks(form.texts) >= RECURRING]
    rest = [text for form in exact if form not in forms for text in form.texts]
    if place == USER:
        rest = [text for text in rest if tag_of(text.text)]
        forms += [_too_few([text]) for text in rest]
    else:
        own = _groups(rest, lambda text: place != SYSTEM or min(text.agents))
        left = [group for group in own if _tasks(group) < COMPARED]
        alike = _groups(chain(*left), lambda text: text.text[:_PREFIX])
        wide = [_aligned(group) for group in own if group not in left]
        wide += [_aligned(group) if _of_one(group) else _too_few(group) for group in alike]
        forms = [form for form in forms if not any(_contained(form, other) for other in wide)]
        forms += wide
    for form in forms:
        if any(form is not other and _mistaken(other, form) for other in forms):
            form.reason = form.reason or "another text of the program has its form too"
        if any(HOLE.search(text.text) for text in form.texts):
            form.reason = "it has {hole1} or the like in it already"
        if not any(map(str.strip, form.pattern.segments)):
            form.reason = form.reason or "nothing in it is constant"
    return forms


def _masked(text: _Text) -> Hashable:
    return masked(text.text)


def _aligned(group: list[_Text]) -> _Form:
    found = aligned([text.text for text in group])
    if isinstance(found, str):
        return _Form(group, masked(group[0].text), found)
    return _Form(group, found)


def _too_few(group: list[_Text]) -> _Form:
    tasks = _tasks(group)
    reason = "it was seen in one task only, so what varies in it is not known"
    if tasks > 1:
        reason = f"it is another in each of {tasks} tasks; at least {COMPARED} are compared"
        if tasks >= COMPARED:
            reason = "several texts that begin like it were sent in one task"
    return _Form(group, masked(group[0].text), reason)


def _of_one(group: list[_Text]) -> bool:
    """Whether texts that begin alike may be one agent's, whose names differ in what varies: no task
    has two."""
    return len(group) >= COMPARED and _tasks(group) == sum(len(text.tasks) for text in group)


def _contained(form: _Form, wide: _Form) -> bool:
    """Whether the texts of a form have the wider form of the same agent, as of two tasks with one
    user's name."""
    return (
        wide.reason is None
        and not _agents(wide).isdisjoint(_agents(form))
        and all(wide.pattern.match(text.text) is not None for text in form.texts)
    )


def _mistaken(other: _Form, form: _Form) -> bool:
    """Whether a text of the other form would be taken for one of this form."""
    return form.pattern.constant >= other.pattern.constant and any(
        form.pattern.match(text.text) is not None for text in other.texts
    )


def _groups(texts: Iterable[_Text], key: Callable[[_Text], Hashable]) -> list[list[_Text]]:
    groups: dict[Hashable, list[_Text]] = {}
    for text in texts:
        groups.setdefault(key(text), []).append(text)
    return list(groups.values())


def _tasks(texts: Iterable[_Text]) -> int:
    return len({task for text in texts for task in text.tasks})


def _agents(form: _Form) -> set[str]:
    return {agent for text in form.texts for agent in text.agents}


# --- components -----------------------------------------------------------------------------------


def _component(place: str, form: _Form) -> Component:
    agents = _agents(form)
    role = role_in(form.pattern.segments[0])
    if len(agents) > 1 and place == SYSTEM and role:  # the names differ in what is a hole
        agents = {role}
    sent = str(form.pattern)
    values = zip(*(form.pattern.match(text.text) or () for text in form.texts), strict=False)
    return Component(
        name=place,
        place=place,
        agents=tuple(sorted(agents)),
        sent=sent,
        fingerprint=fingerprint(place, sent),
        tasks=_tasks(form.texts),
        calls=sum(text.calls for text in form.texts),
        holes=tuple(tuple(dict.fromkeys(each))[:_VALUES] for each in values),
        reason=form.reason,
    )


def _named(components: Sequence[Component]) -> list[Component]:
    """The components with names of their own: `writer.system`, `user.system-reminder`,
    `tools.search.description`, and a number where several have one."""
    found: dict[str, Component] = {}
    for component in components:
        name = component.place
        if name == SYSTEM:
            name = f"{_slug(component.agents[0])}.{SYSTEM}"
        if name == USER:
            words = tag_of(component.sent) or " ".join(component.sent.split()[:3])
            name = f"{USER}.{_slug(words)}"
        number = 1
        unique = name
        while unique in found:
            number += 1
            unique = f"{name}-{number}"
        found[unique] = replace(component, name=unique)
    return [found[name] for name in sorted(found)]


def _slug(name: str) -> str:
    return re.sub(r"[^\w]+", "-", name.lower()).strip("-")[:40] or "agent"


def candidates_in(spans: Iterable[Span]) -> set[str]:
    """The ids of the resources whose texts were put into these calls."""
    return {record.resources_id for record in map(record_of, spans) if record is not None}
