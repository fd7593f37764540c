"""What a template expects to be filled with, and whether an edited one can take its place.

Knows the three template languages. Does not know who edits.
"""

from __future__ import annotations

import re
import string
from typing import Final

import jinja2.meta
import jinja2.sandbox

from agentlightning.errors import ConfigError
from agentlightning.types import PromptTemplate

_POML_EXPRESSION: Final = re.compile(r"\{\{(.*?)\}\}|\bfor\s*=\s*\"([^\"]*)\"|\bif\s*=\s*\"([^\"]*)\"", re.DOTALL)
_NAME: Final = re.compile(r"(?<![\w.'\"])[A-Za-z_]\w*(?!\w*['\"])")
_POML_OWN: Final = frozenset(("in", "loop", "true", "false", "null", "undefined", "typeof"))


def placeholders(template: PromptTemplate) -> frozenset[str]:
    """Names of the values that filling the template takes. ConfigError where it is not well formed."""
    text = template.template
    try:
        if template.engine == "jinja":
            tree = jinja2.sandbox.SandboxedEnvironment().parse(text)
            return frozenset(jinja2.meta.find_undeclared_variables(tree))
        if template.engine == "poml":
            return _of_poml(text)
        fields = [field for _, field, _, _ in string.Formatter().parse(text) if field is not None]
    except (ValueError, jinja2.TemplateError) as error:
        raise ConfigError(f"it is no {template.engine} template: {error}") from None
    return frozenset(re.split(r"[.\[]", field, maxsplit=1)[0] for field in fields)


def check_edit(edited: PromptTemplate, original: PromptTemplate) -> None:
    """ConfigError that says why `edited` cannot take the place of `original`."""
    has, wanted = placeholders(edited), placeholders(original)
    lost, invented = sorted(wanted - has), sorted(has - wanted)
    complaints = [f"it lost the placeholder {_shown(name, original)}" for name in lost]
    complaints += [f"it has the placeholder {_shown(name, original)}, which nothing fills" for name in invented]
    if complaints:
        raise ConfigError("; ".join(complaints))
    if edited.template.strip() == original.template.strip():
        raise ConfigError("it is the same as before")


def _shown(name: str, template: PromptTemplate) -> str:
    return f"{{{name}}}" if template.engine == "f-string" else f"{{{{ {name} }}}}"


def _of_poml(text: str) -> frozenset[str]:
    """Names in `{{ … }}`, `for="item in items"` and `if="…"`, without those that a loop gives."""
    names: set[str] = set()
    given: set[str] = set()
    for shown, loop, condition in _POML_EXPRESSION.findall(text):
        if loop:
            item, _, loop = loop.partition(" in ")
            given.add(item.strip())
        names.update(_NAME.findall(shown or loop or condition))
    return frozenset(names - given - _POML_OWN)
