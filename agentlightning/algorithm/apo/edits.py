"""From an agent's rollouts with a prompt to a better prompt: a critique, and an edit that follows
it.

This is the textual gradient of ProTeGi (Pryzant et al., EMNLP 2023).
"""

from __future__ import annotations

import asyncio
import os
import re
import string
from collections.abc import Mapping, Sequence
from typing import Any, Final

import jinja2.meta
import jinja2.sandbox
import msgspec

from agentlightning import semconv
from agentlightning.algorithm.apo.candidates import Budget
from agentlightning.data.conversations import conversations, read_calls, render_message
from agentlightning.errors import AgentLightningError, BackendError, ConfigError
from agentlightning.rewards.chat_completion import Completion, Messages, complete, read_completion
from agentlightning.types import LLM, PromptTemplate, Span

AT_ONCE: Final = 16  # simultaneous calls of the optimiser's models
SHOWN_CHARACTERS: Final = 6_000  # of one rollout; the middle is left out
# Branches of one prompt look at the same rollouts from different sides.
ANGLES: Final = (
    "Look for what went wrong where the reward is low.",
    "Compare high rewards with low ones: what was done differently?",
    "Look for what the prompt leaves open, and what it says that misleads.",
)
_CRITIC: Final = (
    "You are shown a prompt of an AI agent and what the agent did with it, with the reward of "
    "each run. {angle} Name the few causes that matter most and, for each, the change to the "
    "prompt that would raise the reward on tasks of this kind, not only on those shown. Do not "
    "write the new prompt."
)
_EDITOR: Final = (
    "You improve a prompt of an AI agent by following a critique. {placeholders} "
    "Answer with the whole new prompt between <prompt> and </prompt>, and nothing else."
)
_AGAIN: Final = (
    "That cannot be used: {reason}. Answer again with the whole prompt between <prompt> and "
    "</prompt>."
)
_ANSWER: Final = re.compile(r"<prompt>(.*)</prompt>", re.DOTALL)


class Rejected(AgentLightningError):
    """The optimiser's model returned nothing usable, twice."""


class OptimizerModel:
    """Calls models through `client`, an SDK's `AsyncOpenAI` or an `LLM`; or, without one, at the
    OpenAI-compatible `endpoint` with the key in OPENAI_API_KEY. Its usage is added to `budget`."""

    def __init__(
        self,
        client: object,
        endpoint: str | None,
        temperature: float,
        timeout: float,
        budget: Budget,
    ):
        self._client: Any = client
        self._temperature = temperature
        self._timeout = timeout
        self._budget = budget
        self._turns = asyncio.Semaphore(AT_ONCE)
        if client is None:
            endpoint = endpoint or os.environ.get("OPENAI_BASE_URL") or "https://api.openai.com/v1"
            self._client = LLM(
                endpoint=endpoint, model="", api_key=os.environ.get("OPENAI_API_KEY")
            )
        elif not isinstance(client, LLM) and not (
            type(client).__name__.startswith("Async") and hasattr(client, "chat")
        ):
            raise ConfigError(
                f"the optimiser's client is a {type(client).__name__}; give an AsyncOpenAI or an "
                "LLM"
            )

    async def ask(self, model: str, messages: Messages) -> str:
        """The answer of `model`, stripped; may be empty. BackendError after the last try;
        OutOfBudget."""
        self._budget.require()
        async with self._turns:
            answer = await self._complete(model, messages)
        # Without a count, assume four characters per token.
        read = (
            answer.read
            if answer.read is not None
            else sum(len(message["content"]) for message in messages) // 4
        )
        written = answer.written if answer.written is not None else len(answer.text) // 4
        self._budget.spend_calls({model: (read, written)})
        return answer.text.strip()

    async def _complete(self, model: str, messages: Messages) -> Completion:
        settings: dict[str, Any] = {"temperature": self._temperature}
        if isinstance(self._client, LLM):
            llm = msgspec.structs.replace(self._client, model=model, sampling_parameters=settings)
            return await complete(llm, messages, timeout=self._timeout)
        chat = self._client.with_options(timeout=self._timeout).chat.completions
        try:
            return read_completion(
                (await chat.create(model=model, messages=messages, **settings)).model_dump()
            )
        except Exception as error:
            status = getattr(error, "status_code", 503)
            raise BackendError(
                f"the client of the optimiser failed: {error}", status=status
            ) from error


async def critique(
    model: OptimizerModel,
    name: str,
    templates: Mapping[str, PromptTemplate],
    changed: str,
    shown: Sequence[str],
    angle: int,
) -> str:
    """What is wrong with the template `changed`, given rollouts as text. Rejected if the answer is
    empty."""
    parts = [
        _CRITIC.format(angle=ANGLES[angle % len(ANGLES)]),
        f'<prompt name="{changed}">\n{templates[changed].template}\n</prompt>',
        *(
            f'<other_prompt name="{other}">\n{templates[other].template}\n</other_prompt>'
            for other in templates
            if other != changed
        ),
        *(f'<run number="{number}">\n{text}\n</run>' for number, text in enumerate(shown, start=1)),
    ]
    for _ in range(2):
        if text := await model.ask(name, [{"role": "user", "content": "\n\n".join(parts)}]):
            return text
    raise Rejected("the critique was empty")


async def edit(
    model: OptimizerModel, name: str, original: PromptTemplate, critique: str
) -> PromptTemplate:
    """`original` changed according to the critique. An unusable answer is sent back once, with the
    reason."""
    kept = ", ".join(f"{value!r}" for value in sorted(placeholders(original)))
    rule = (
        f"It is a template ({original.engine}): keep its placeholders exactly "
        f"({kept or 'there are none'}), add none."
    )
    question = f"<prompt>\n{original.template}\n</prompt>\n\n<critique>\n{critique}\n</critique>"
    messages = [{"role": "user", "content": f"{_EDITOR.format(placeholders=rule)}\n\n{question}"}]
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
    """The template in the answer. ConfigError, with the reason, if it is missing or cannot replace
    the original."""
    found = _ANSWER.search(answer)
    if found is None or not found[1].strip():
        raise ConfigError("there is no prompt between <prompt> and </prompt>")
    edited = msgspec.structs.replace(original, template=found[1].strip("\n"))
    has = placeholders(edited)
    wanted = placeholders(original)
    complaints = [
        f"it lost the placeholder {_shown(name, original)}" for name in sorted(wanted - has)
    ]
    complaints += [
        f"it has the placeholder {_shown(name, original)}, which nothing fills"
        for name in sorted(has - wanted)
    ]
    if complaints:
        raise ConfigError("; ".join(complaints))
    if edited.template.strip() == original.template.strip():
        raise ConfigError("it is the same as before")
    return edited


def in_words(task: Any, spans: Sequence[Span], reward: float, status: str) -> str:
    """A rollout as text: its task, conversations, errors and reward."""
    lines = [f"task: {task if isinstance(task, str) else msgspec.json.encode(task).decode()}"]
    for chain in conversations(read_calls(spans)[0]):
        lines += map(render_message, (*chain[-1].messages, chain[-1].answer))
    for error in (span.attributes for span in spans if span.name == semconv.EXCEPTION):
        lines.append(
            f"error: {error.get(semconv.EXCEPTION_TYPE)}: {error.get(semconv.EXCEPTION_MESSAGE)}"
        )
    text = "\n".join(lines)
    half = SHOWN_CHARACTERS // 2
    if (left_out := len(text) - SHOWN_CHARACTERS) > 0:
        text = f"{text[:half]}\n[… {left_out:,} characters left out …]\n{text[-half:]}"
    return f"{text}\nended: {status}; reward: {reward:.3g}"


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


def _shown(name: str, template: PromptTemplate) -> str:
    return f"{{{name}}}" if template.engine == "f-string" else f"{{{{ {name} }}}}"
