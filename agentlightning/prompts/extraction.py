"""The components of a program: its own texts in recorded calls, by agent and place, with what varies
in them, and why a text cannot be changed.

Reads spans of a store. Knows no gateway and runs nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from os.path import commonprefix
from typing import Final

import msgspec

from agentlightning import semconv
from agentlightning.data.agents import agent_of, role_in
from agentlightning.prompts.alignment import aligned, masked
from agentlightning.prompts.components import HOLE, Pattern, fingerprint
from agentlightning.prompts.places import SYSTEM, USER, Change, blocks, change_field, tag_of
from agentlightning.prompts.replacing import as_sent
from agentlightning.tracing.dialects import is_gateway_call, text_of
from agentlightning.tracing.steps import read_steps
from agentlightning.types import UNATTRIBUTED, Prompts, PromptText, Rollout, Span

RECURRING: Final = 2
"""Distinct tasks in which a text must be the same, word for word."""
COMPARED: Final = 3
"""Distinct tasks whose texts are compared, where they differ."""
_SHORTEST_BLOCK: Final = 40  # characters of a block of a user's message
_SHORTEST_PREFIX: Final = 20  # that texts of agents with different names share
_VALUES: Final = 3  # that are shown of a hole
_ONE_TASK: Final = "it was seen in one task only, so what varies in it is not known"


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
    holes: tuple[tuple[str, ...], ...] = ()
    reason: str | None = None


@dataclass
class _Text:
    """One text at a place, and who sent it."""

    text: str
    agents: set[str] = field(default_factory=set[str])
    tasks: set[str] = field(default_factory=set[str])
    calls: int = 0


@dataclass
class _Found:
    """Texts of one form, and the form or the reason why there is none."""

    texts: list[_Text]
    pattern: Pattern
    reason: str | None = None


class Recorded:
    """The texts of recorded calls. `candidates` are those that may have been in place, by
    `resources_id`: what the program itself sent is read back from them."""

    def __init__(self, candidates: Mapping[str, Prompts] | None = None) -> None:
        self.calls = 0
        self._candidates = candidates or {}
        self._texts: dict[str, dict[str, _Text]] = {}

    def add(self, rollout: Rollout, spans: Sequence[Span]) -> None:
        """Add the calls of a rollout's attempt. Those of no attempt are told apart by how their
        conversations begin, as their tasks are not known."""
        task = msgspec.json.encode(rollout.input).decode()
        for step in read_steps(spans):
            if step.call is not step.span or not is_gateway_call(step.span):
                continue
            self.calls += 1
            agent = agent_of(step).name or "agent"
            if rollout.rollout_id == UNATTRIBUTED:
                task = _first_question(step.span)
            for place, text in {*_texts(step.span, self._candidates)}:
                kept = self._texts.setdefault(place, {}).setdefault(text, _Text(text))
                kept.agents.add(agent)
                kept.tasks.add(task)
                kept.calls += 1

    def components(self, keep: Sequence[str] = ()) -> list[Component]:
        """All components, by name. Those whose names match a pattern of `keep` (`writer.*`) are not
        offered."""
        found: list[Component] = []
        for place, texts in self._texts.items():
            forms = _forms(place, list(texts.values()))
            _refuse_ambiguous(forms)
            found += [_component(place, form) for form in forms]
        return [
            replace(component, reason="it is to be kept")
            if component.reason is None
            and any(fnmatchcase(component.name, pattern) for pattern in keep)
            else component
            for component in _named(found)
        ]


def base_candidate(components: Iterable[Component]) -> Prompts:
    """The candidate that changes nothing: every component that is offered, with its own text."""
    return Prompts(
        components={
            each.name: PromptText(place=each.place, sent=each.sent, text=each.sent)
            for each in components
            if each.reason is None
        }
    )


def _texts(span: Span, candidates: Mapping[str, Prompts]) -> Iterable[tuple[str, str]]:
    """(place, text) of a call, as the program sent it; of users only blocks of some length."""
    found: list[tuple[str, str]] = []

    def note(place: str, text: str) -> str:
        if place != USER:
            found.append((place, text))
        else:
            found.extend((place, block) for block in blocks(text) if len(block) >= _SHORTEST_BLOCK)
        return text

    sent = as_sent(span, candidates)
    for name in ("system", "instructions", "systemInstruction", "system_instruction"):
        change_field("system", sent.request.get(name), note)
    change_field("messages", sent.messages, note)
    change_field("tools", sent.tools, note)
    return [(place, text) for place, text in found if text.strip()]


def _first_question(span: Span) -> str:
    questions: list[str] = []

    def note(place: str, text: str) -> str:
        if place == USER:
            questions.append(text)
        return text

    change: Change = note
    change_field("messages", as_sent(span, {}).messages, change)
    return questions[0] if questions else span.span_id


# --- forms of texts -------------------------------------------------------------------------------


def _forms(place: str, texts: list[_Text]) -> list[_Found]:
    """What recurs word for word is a form by itself, before anything is aligned: agents that differ
    in one word stay apart. Of the rest, texts of one agent are aligned, and then those that begin
    alike."""
    exact = _groups(texts, lambda text: str(masked(text.text)))
    recurring = [group for group in exact if _tasks(group) >= RECURRING]
    rest = [text for group in exact if _tasks(group) < RECURRING for text in group]
    forms = [_Found(group, masked(group[0].text)) for group in recurring]
    if place == USER:
        once = [text for text in rest if tag_of(text.text)]
        return forms + [_Found([text], masked(text.text), _ONE_TASK) for text in once]
    left: list[_Text] = []
    for group in _groups(rest, lambda text: place != SYSTEM or min(text.agents)):
        if _tasks(group) < COMPARED:
            left += group
        else:
            forms.append(_aligned(group))
    for group in _alike(left):
        several = any(len(own) > 1 for own in _groups(group, lambda text: min(text.tasks)))
        if _tasks(group) >= COMPARED and not several:
            forms.append(_aligned(group))
        else:
            forms += _too_few(group)
    return _without_contained(forms)


def _aligned(group: list[_Text]) -> _Found:
    found = aligned([text.text for text in group])
    if isinstance(found, str):
        return _Found(group, masked(group[0].text), found)
    return _Found(group, found)


def _too_few(group: list[_Text]) -> list[_Found]:
    tasks = _tasks(group)
    reason = _ONE_TASK
    if tasks > 1:
        reason = f"it differs in each of {tasks} tasks; at least {COMPARED} are compared"
    return [_Found(own, masked(own[0].text), reason) for own in _by_agent(group)]


def _without_contained(forms: list[_Found]) -> list[_Found]:
    """The forms without those whose texts another form of the same agents has too, as a name that
    recurred by chance."""
    kept: list[_Found] = []
    for form in forms:
        wider = next(
            (
                other
                for other in forms
                if other is not form
                and other.reason is None
                and len(other.pattern.segments) > len(form.pattern.segments)
                and _agents(other) & _agents(form)
                and all(other.pattern.match(text.text) is not None for text in form.texts)
            ),
            None,
        )
        if wider is None:
            kept.append(form)
        else:
            wider.texts += form.texts
    return kept


def _refuse_ambiguous(forms: Sequence[_Found]) -> None:
    """A form that a text of another one would be taken for cannot be offered."""
    order = sorted(forms, key=lambda form: -form.pattern.constant)
    for form in forms:
        for text in form.texts:
            taken = next(
                (
                    other
                    for other in order
                    if other.reason is None and other.pattern.match(text.text) is not None
                ),
                form,
            )
            if taken is not form:
                taken.reason = "another text of the program has its form too"
    for form in forms:
        if form.reason is None and not any(map(str.strip, form.pattern.segments)):
            form.reason = "nothing in it is constant"
        if form.reason is None and any(HOLE.search(text.text) for text in form.texts):
            form.reason = "it contains {hole1} or the like itself"


def _groups(texts: Iterable[_Text], key: Callable[[_Text], object]) -> list[list[_Text]]:
    groups: dict[object, list[_Text]] = {}
    for text in texts:
        groups.setdefault(key(text), []).append(text)
    return list(groups.values())


def _by_agent(texts: Iterable[_Text]) -> list[list[_Text]]:
    return _groups(texts, lambda text: min(text.agents))


def _alike(texts: Iterable[_Text]) -> list[list[_Text]]:
    """Texts that begin with the same words."""
    groups: list[list[_Text]] = []
    for text in sorted(texts, key=lambda text: text.text):
        prefix = commonprefix([groups[-1][0].text, text.text]) if groups else ""
        if len(prefix) >= _SHORTEST_PREFIX:
            groups[-1].append(text)
        else:
            groups.append([text])
    return groups


def _tasks(texts: Iterable[_Text]) -> int:
    return len({task for text in texts for task in text.tasks})


def _agents(form: _Found) -> set[str]:
    return {agent for text in form.texts for agent in text.agents}


# --- components -----------------------------------------------------------------------------------


def _component(place: str, form: _Found) -> Component:
    agents = _agents(form)
    role = role_in(form.pattern.segments[0])
    if len(agents) > 1 and place == SYSTEM and role:  # the names differ in what is a hole
        agents = {role}
    sent = str(form.pattern)
    matched = [form.pattern.match(text.text) or () for text in form.texts]
    holes = [tuple(dict.fromkeys(values))[:_VALUES] for values in zip(*matched, strict=False)]
    return Component(
        name=place,
        place=place,
        agents=tuple(sorted(agents)),
        sent=sent,
        fingerprint=fingerprint(place, sent),
        tasks=_tasks(form.texts),
        calls=sum(text.calls for text in form.texts),
        holes=tuple(holes),
        reason=form.reason,
    )


def _named(components: Iterable[Component]) -> list[Component]:
    """The components with names of their own: `writer.system`, `user.system-reminder`,
    `tools.search.description`; with the agent where several have one tool, and a number where even
    that is the same."""
    several = list(components)
    places = [component.place for component in several]
    used: set[str] = set()
    found: list[Component] = []
    for component in several:
        agent = _slug(component.agents[0])
        name = component.place
        if component.place == SYSTEM or (name != USER and places.count(name) > 1):
            name = f"{agent}.{name}"
        if component.place == USER:
            name = f"{USER}.{_slug(tag_of(component.sent) or ' '.join(component.sent.split()[:3]))}"
        number = 1
        unique = name
        while unique in used:
            number += 1
            unique = f"{name}-{number}"
        used.add(unique)
        found.append(replace(component, name=unique))
    return sorted(found, key=lambda component: component.name)


def _slug(name: str) -> str:
    return re.sub(r"[^\w]+", "-", name.lower()).strip("-")[:40] or "agent"


def candidates_in(spans: Iterable[Span]) -> set[str]:
    """The ids of the resources whose texts were put into these calls."""
    recorded = (text_of(span, semconv.CALL_REPLACED) for span in spans)
    return {
        msgspec.json.decode(text)["resources_id"] for text in recorded if text is not None
    }
