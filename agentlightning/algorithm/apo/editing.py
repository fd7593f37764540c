"""From what an agent did with a prompt to a better prompt: a critique, and an edit that follows it.

This is the textual gradient of ProTeGi (Pryzant et al., EMNLP 2023). Knows what the optimiser's model is told and what
of its answers can be used, in each of the three template languages. Does not know candidates, rounds or scores.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from typing import Any, Final

import jinja2.meta
import jinja2.sandbox
import msgspec

from agentlightning import semconv
from agentlightning.algorithm.apo.model import OptimizerModel
from agentlightning.data.conversations import conversations, read_calls, render_message
from agentlightning.errors import AgentLightningError, ConfigError
from agentlightning.types import PromptTemplate, Span

SHOWN_CHARACTERS: Final = 6_000  # of one rollout; what lies in the middle is left out
# Branches of one prompt look at the same rollouts from different sides.
ANGLES: Final = (
    "Look for what went wrong where the reward is low.",
    "Compare high rewards with low ones: what was done differently?",
    "Look for what the prompt leaves open, and what it says that misleads.",
)
_CRITIC: Final = (
    "You are shown a prompt of an AI agent and what the agent did with it, with the reward of each run. {angle} "
    "Name the few causes that matter most and, for each, the change to the prompt that would raise the reward on tasks "
    "of this kind, not only on those shown. Do not write the new prompt."
)
_EDITOR: Final = (
    "You improve a prompt of an AI agent by following a critique. {placeholders} "
    "Answer with the whole new prompt between <prompt> and </prompt>, and nothing else."
)
_AGAIN: Final = "That cannot be used: {reason}. Answer again with the whole prompt between <prompt> and </prompt>."
_ANSWER: Final = re.compile(r"<prompt>(.*)</prompt>", re.DOTALL)


class Rejected(AgentLightningError):
    """The optimiser's model gave nothing that can be used, and was asked twice."""


async def critique(
    model: OptimizerModel,
    name: str,
    templates: Mapping[str, PromptTemplate],
    changed: str,
    shown: Sequence[str],
    angle: int,
) -> str:
    """What is wrong with the template `changed`, given rollouts in words. Rejected where the model says nothing."""
    others = [
        f'<other_prompt name="{one}">\n{templates[one].template}\n</other_prompt>'
        for one in templates
        if one != changed
    ]
    told = [
        f'<prompt name="{changed}">\n{templates[changed].template}\n</prompt>',
        *others,
        *(f'<run number="{number}">\n{text}\n</run>' for number, text in enumerate(shown, start=1)),
    ]
    messages = [
        {"role": "user", "content": "\n\n".join([_CRITIC.format(angle=ANGLES[angle % len(ANGLES)]), *told])},
    ]
    for _ in range(2):
        if text := await model.ask(name, messages):
            return text
    raise Rejected("the critique was empty")


async def edit(model: OptimizerModel, name: str, original: PromptTemplate, critique: str) -> PromptTemplate:
    """`original` changed as the critique says. What cannot be used is sent back once with the reason; then Rejected."""
    kept = ", ".join(f"{value!r}" for value in sorted(placeholders(original)))
    rule = (
        f"It is a template ({original.engine}): keep its placeholders exactly ({kept or 'there are none'}), add none."
    )
    told = f"<prompt>\n{original.template}\n</prompt>\n\n<critique>\n{critique}\n</critique>"
    messages = [{"role": "user", "content": f"{_EDITOR.format(placeholders=rule)}\n\n{told}"}]
    reason = ""
    for _ in range(2):
        answer = await model.ask(name, messages)
        try:
            return read_edit(answer, original)
        except ConfigError as error:
            reason = str(error)
        messages.append({"role": "assistant", "content": answer or "(nothing)"})
        messages.append({"role": "user", "content": _AGAIN.format(reason=reason)})
    raise Rejected(f"the edit was unusable twice: {reason}")


def read_edit(answer: str, original: PromptTemplate) -> PromptTemplate:
    """The template in the answer. ConfigError that says why there is none, or why it cannot replace the original."""
    if not answer:
        raise ConfigError("the answer is empty")
    found = _ANSWER.search(answer)
    if found is None:
        raise ConfigError("there is no prompt between <prompt> and </prompt>")
    edited = msgspec.structs.replace(original, template=found[1].strip("\n"))
    if not edited.template.strip():
        raise ConfigError("the prompt is empty")
    check_edit(edited, original)
    return edited


def in_words(task: Any, spans: Sequence[Span], reward: float, status: str) -> str:
    """A rollout for a reader: its task, its conversations, its errors and its reward."""
    lines = [f"task: {task if isinstance(task, str) else msgspec.json.encode(task).decode()}"]
    for chain in conversations(read_calls(spans)[0]):
        lines += map(render_message, (*chain[-1].messages, chain[-1].answer))
    for error in (span.attributes for span in spans if span.name == semconv.EXCEPTION):
        lines.append(f"error: {error.get(semconv.EXCEPTION_TYPE)}: {error.get(semconv.EXCEPTION_MESSAGE)}")
    return f"{cut_middle(chr(10).join(lines))}\nended: {status}; reward: {reward:.3g}"


def cut_middle(text: str, limit: int = SHOWN_CHARACTERS) -> str:
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2]}\n[… {len(text) - limit:,} characters left out …]\n{text[-limit // 2 :]}"


# --- placeholders ------------------------------------------------------------------------------------------------

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
