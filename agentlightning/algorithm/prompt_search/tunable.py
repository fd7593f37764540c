"""The texts that a search may change: the prompt templates among the resources, or those that an
unchanged program sends."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import jinja2.meta
import jinja2.sandbox
import msgspec

from agentlightning.errors import ConfigError, nearest
from agentlightning.prompts.components import (
    FILE,
    HOLE,
    PROMPTS,
    candidate_of,
    changed_components,
    problem,
    write_candidate,
)
from agentlightning.prompts.extraction import Component, base_candidate
from agentlightning.types import NamedResources, PromptCandidate, PromptTemplate, Resource


class Tunable(Protocol):
    """Texts by name, as the editing model reads and writes them."""

    texts: Mapping[str, str]
    """The texts that a search begins with."""
    place: str
    """The file or folder of a run's directory in which texts are saved."""

    def rule(self, name: str) -> str:
        """The parts that an edit of the text must keep, in words for the editing model."""
        ...

    def check(self, name: str, text: str) -> None:
        """ConfigError, with the reason, if `text` cannot take the place of the first one."""
        ...

    def template(self, name: str, text: str) -> PromptTemplate:
        """The text as a template."""
        ...

    def resources(self, texts: Mapping[str, str]) -> Mapping[str, Resource]:
        """The resources by which rollouts get these texts."""
        ...

    def replaced(self, texts: Mapping[str, str]) -> frozenset[str]:
        """The texts that the gateway puts in place of a program's: where one met no call, the
        rollout says nothing about it."""
        ...

    def save(self, texts: Mapping[str, str], directory: Path) -> None:
        """Write the texts to the directory of a run, for people."""
        ...


class Templates(Tunable):
    """Prompt templates among the agent's resources, all or those that are named. ConfigError if
    there are none, or one is malformed."""

    place = "prompts"

    def __init__(self, resources: NamedResources, wanted: Sequence[str] = ()) -> None:
        there = {
            name: resource
            for name, resource in resources.items()
            if isinstance(resource, PromptTemplate)
        }
        for name in wanted:
            if name not in there:
                raise ConfigError(
                    f"templates: there is no prompt template {name!r}; {nearest(name, there)}"
                )
        if not there:
            raise ConfigError(
                "there is no prompt to optimise; give the Trainer initial_resources={'prompt': "
                "agl.PromptTemplate(…)}"
            )
        self._templates = {name: there[name] for name in wanted or there}
        self.texts = {name: template.template for name, template in self._templates.items()}
        for name, template in self._templates.items():
            try:
                placeholders(template)  # refuse a malformed template before anything is spent
            except ConfigError as error:
                raise ConfigError(f"the prompt template {name!r} cannot be used: {error}") from None

    def rule(self, name: str) -> str:
        template = self._templates[name]
        kept = ", ".join(f"{value!r}" for value in sorted(placeholders(template)))
        return (
            f"It is a template ({template.engine}): keep its placeholders exactly "
            f"({kept or 'there are none'}), add none."
        )

    def check(self, name: str, text: str) -> None:
        template = self._templates[name]
        wanted = placeholders(template)
        has = placeholders(self.template(name, text))
        shown = "{{{}}}" if template.engine == "f-string" else "{{{{ {} }}}}"
        complaints = [
            f"it lost the placeholder {shown.format(lost)}" for lost in sorted(wanted - has)
        ]
        complaints += [
            f"it has the placeholder {shown.format(new)}, which nothing fills"
            for new in sorted(has - wanted)
        ]
        if complaints:
            raise ConfigError("; ".join(complaints))

    def template(self, name: str, text: str) -> PromptTemplate:
        return msgspec.structs.replace(self._templates[name], template=text)

    def resources(self, texts: Mapping[str, str]) -> Mapping[str, Resource]:
        return {name: self.template(name, text) for name, text in texts.items()}

    def replaced(self, texts: Mapping[str, str]) -> frozenset[str]:
        return frozenset()

    def save(self, texts: Mapping[str, str], directory: Path) -> None:
        folder = directory / self.place
        folder.mkdir(exist_ok=True)
        for name, text in texts.items():
            (folder / f"{name}.txt").write_text(text, encoding="utf-8")


class Components(Tunable):
    """Texts that an unchanged program sends; a search begins with those of the candidate `first`.
    ConfigError if none can be replaced, `wanted` names one that cannot, or the program does not
    send one that `first` changes."""

    place = FILE

    def __init__(
        self,
        found: Sequence[Component],
        wanted: Sequence[str] = (),
        first: PromptCandidate | None = None,
    ) -> None:
        self._base = base_candidate(found)
        offered = self._base.components
        for name in wanted:
            if name not in offered:
                raise ConfigError(
                    f"templates: there is no text {name!r} that can be replaced; "
                    f"{nearest(name, offered)}. `agl prompts` shows all"
                )
        if not offered:
            reasons = [f"{each.name}: {each.reason}" for each in found] or ["no call was recorded"]
            raise ConfigError(
                "there is no prompt to optimise: no text that the program sends can be replaced "
                f"({'; '.join(reasons[:3])}). Give more tasks, or initial_resources={{'prompt': "
                "agl.PromptTemplate(…)}"
            )
        self._continued = first is not None
        self._own = {name: offered[name].sent for name in wanted or offered}
        self.texts = {**self._own, **self._texts_of(first)}

    def _texts_of(self, first: PromptCandidate | None) -> dict[str, str]:
        """The texts of a candidate, by the names that they have in this program."""
        if first is None:
            return {}
        offered = self._base.components
        names = {(text.place, text.sent): name for name, text in offered.items()}
        texts: dict[str, str] = {}
        for given in sorted(changed_components(first)):
            text = first.components[given]
            name = names.get((text.place, text.sent))
            if name not in self._own:
                raise ConfigError(
                    f"initial_resources: the program does not send {given!r} as the candidate has "
                    "it, or it may not change: leave it out of the candidate"
                )
            texts[name] = text.text
        return texts

    def rule(self, name: str) -> str:
        holes = ", ".join(each[0] for each in HOLE.finditer(self._own[name]))
        kept = f"{holes}, each once and in this order" if holes else "there are none"
        return (
            f"What varies in it is written as {{hole1}}, {{hole2}} and so on: keep these ({kept})."
        )

    def check(self, name: str, text: str) -> None:
        wrong = problem(self._own[name], text)
        if wrong is not None:
            raise ConfigError(wrong)

    def template(self, name: str, text: str) -> PromptTemplate:
        return PromptTemplate(template=text)

    def resources(self, texts: Mapping[str, str]) -> Mapping[str, Resource]:
        if self._continued or self.replaced(texts):
            return {PROMPTS: candidate_of(self._base, texts)}
        return {}

    def replaced(self, texts: Mapping[str, str]) -> frozenset[str]:
        return frozenset(name for name, text in texts.items() if text != self._own[name])

    def save(self, texts: Mapping[str, str], directory: Path) -> None:
        write_candidate(candidate_of(self._base, texts), directory / self.place)


def placeholders(template: PromptTemplate) -> frozenset[str]:
    """Names of the template's placeholders. ConfigError if it is malformed."""
    text = template.template
    try:
        if template.engine == "jinja":
            tree = jinja2.sandbox.SandboxedEnvironment().parse(text)
            return frozenset(jinja2.meta.find_undeclared_variables(tree))
        if template.engine == "poml":  # expressions that start with a name
            return frozenset(re.findall(r"\{\{\s*([A-Za-z_]\w*)", text))
        fields = [field for _, field, _, _ in string.Formatter().parse(text) if field is not None]
    except (ValueError, jinja2.TemplateError) as error:
        raise ConfigError(f"it is not a valid {template.engine} template: {error}") from None
    return frozenset(re.split(r"[.\[]", field, maxsplit=1)[0] for field in fields)
