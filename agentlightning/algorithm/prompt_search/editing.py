"""A model that writes better texts: from rollouts straight to an edit, or by way of a critique.

The critique is the textual gradient of ProTeGi (Pryzant et al., EMNLP 2023)."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from agentlightning import semconv
from agentlightning.algorithm.budget import Spending
from agentlightning.algorithm.prompt_search.tunable import Tunable
from agentlightning.data.conversations import render_conversations
from agentlightning.errors import AgentLightningError, BackendError, ConfigError
from agentlightning.rewards.chat_completion import Completion, Messages, complete, read_completion
from agentlightning.types import LLM, Span

AT_ONCE: Final = 16  # simultaneous calls of the editing models
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
_FOLLOW: Final = "Follow the critique."
_REFLECT: Final = (
    "You see what the agent did with it, and the reward of each run: find out why rewards are low, "
    "and change the prompt so that they rise on tasks of this kind."
)
_EDITOR: Final = (
    "You improve a prompt of an AI agent. {source} {rule} Write general instructions: put no task "
    "that is shown, and no answer to one, into the prompt. Answer with the whole new prompt "
    "between <prompt> and </prompt>, and nothing else."
)
_AGAIN: Final = (
    "That cannot be used: {reason}. Answer again with the whole prompt between <prompt> and "
    "</prompt>."
)
# Tags around what a model is shown, which a rollout itself may not write.
_TAG: Final = re.compile(r"<(?=/?(?:run|prompt|other_prompt|critique)\b)", re.I)
_ANSWER: Final = re.compile(r"<prompt>(.*)</prompt>", re.DOTALL)


class Rejected(AgentLightningError):
    """The editing model returned nothing usable, twice."""


class Recorded(msgspec.Struct, frozen=True):
    """An answered call: a hash of what was asked, and the answer."""

    asked: str
    text: str
    model: str
    read: int
    written: int


class EditingModel:
    """Calls models through `client`, an SDK's `AsyncOpenAI` or an `LLM`; or, without one, at the
    OpenAI-compatible `endpoint` with the key in OPENAI_API_KEY.

    Answers are kept in the file `record`, a JSON object a line, and what was asked before is
    answered from there."""

    def __init__(
        self,
        client: object,
        endpoint: str | None,
        temperature: float,
        timeout: float,
        spending: Spending,
        record: Path,
    ) -> None:
        self._client: Any = client
        self._temperature = temperature
        self._timeout = timeout
        self._spending = spending
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._record = record
        self._answers: dict[str, str] = {}
        if client is None:
            endpoint = endpoint or os.environ.get("OPENAI_BASE_URL") or "https://api.openai.com/v1"
            self._client = LLM(
                endpoint=endpoint, model="", api_key=os.environ.get("OPENAI_API_KEY")
            )
        elif not isinstance(client, LLM) and not (
            type(client).__name__.startswith("Async") and hasattr(client, "chat")
        ):
            raise ConfigError(
                f"the client of the editing model is a {type(client).__name__}; give an "
                "AsyncOpenAI or an LLM"
            )
        if record.exists():
            self._read_record()

    async def ask(self, model: str, messages: Messages, sample: str) -> str:
        """The answer of `model`, stripped; may be empty. `sample` names the edit, and tells it from
        others that ask the same. BackendError after the last try; OutOfBudget."""
        asked = hashlib.sha256(msgspec.json.encode([model, messages, sample])).hexdigest()
        if asked in self._answers:
            return self._answers[asked]
        self._spending.require()
        async with self._turns:
            answer = await self._complete(model, messages)
        text = answer.text.strip()
        # Without a count, assume four characters per token.
        sent = sum(len(message["content"]) for message in messages)
        read = sent // 4 if answer.read is None else answer.read
        written = len(text) // 4 if answer.written is None else answer.written
        self._spending.add_call({model: (read, written)})
        self._write_record(Recorded(asked, text, model, read, written))
        return text

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
                f"the client of the editing model failed: {error}", status=status
            ) from error

    def _read_record(self) -> None:
        *lines, torn = self._record.read_bytes().split(b"\n")
        if torn:  # by a kill in the middle of a write
            self._record.write_bytes(b"".join(line + b"\n" for line in lines))
        for number, line in enumerate(lines, start=1):
            try:
                call = msgspec.json.decode(line, type=Recorded)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise ConfigError(
                    f"line {number} of {self._record} is no recorded call: {error}; delete the "
                    "line, and its call is made again"
                ) from None
            self._answers[call.asked] = call.text
            self._spending.add_call({call.model: (call.read, call.written)})

    def _write_record(self, call: Recorded) -> None:
        with self._record.open("ab") as file:
            file.write(msgspec.json.encode(call) + b"\n")


async def critique(
    model: EditingModel,
    name: str,
    sample: str,
    texts: Mapping[str, str],
    changed: str,
    shown: Sequence[str],
    angle: int,
) -> str:
    """A critique of the text `changed`, given rollouts in words. Rejected if the answer is
    empty."""
    instruction = _CRITIC.format(angle=ANGLES[angle % len(ANGLES)])
    question = "\n\n".join([instruction, _prompts(texts, changed), *_runs(shown)])
    for time in range(2):
        if text := await model.ask(
            name, [{"role": "user", "content": question}], f"{sample}-{time}"
        ):
            return text
    raise Rejected("the critique was empty")


async def edit(
    model: EditingModel,
    name: str,
    sample: str,
    tunable: Tunable,
    texts: Mapping[str, str],
    changed: str,
    *,
    shown: Sequence[str] = (),
    critique: str | None = None,
) -> dict[str, str]:
    """`texts` with another `changed`, made from rollouts in words (`shown`) or by following a
    critique. An unusable answer is sent back once, with the reason; then Rejected."""
    source = _FOLLOW if critique else _REFLECT
    given = [f"<critique>\n{critique}\n</critique>"] if critique else _runs(shown)
    instruction = _EDITOR.format(source=source, rule=tunable.rule(changed))
    question = "\n\n".join([instruction, _prompts(texts, changed), *given])
    messages = [{"role": "user", "content": question}]
    reason = ""
    for _ in range(2):
        answer = await model.ask(name, messages, sample)
        try:
            return {**texts, changed: read_edit(answer, tunable, changed, texts[changed])}
        except ConfigError as error:
            reason = str(error)
        messages.append({"role": "assistant", "content": answer or "(nothing)"})
        messages.append({"role": "user", "content": _AGAIN.format(reason=reason)})
    raise Rejected(f"the edit was unusable twice: {reason}")


def read_edit(answer: str, tunable: Tunable, name: str, before: str) -> str:
    """The text in the answer. ConfigError, with the reason, if it is missing or cannot be used."""
    found = _ANSWER.search(answer)
    if found is None or not found[1].strip():
        raise ConfigError("there is no prompt between <prompt> and </prompt>")
    text = found[1].strip("\n")
    tunable.check(name, text)
    if text.strip() == before.strip():
        raise ConfigError("it is the same as before")
    return text


def _prompts(texts: Mapping[str, str], changed: str) -> str:
    """The text to change, then the others, which are read along with it."""
    others = [
        f'<other_prompt name="{other}">\n{text}\n</other_prompt>'
        for other, text in texts.items()
        if other != changed
    ]
    return "\n\n".join([f'<prompt name="{changed}">\n{texts[changed]}\n</prompt>', *others])


def _runs(shown: Sequence[str]) -> list[str]:
    return [
        f'<run number="{number}">\n{_TAG.sub("&lt;", text)}\n</run>'
        for number, text in enumerate(shown, 1)
    ]


def in_words(task: Any, spans: Sequence[Span], reward: float, status: str) -> str:
    """A rollout as text: its task, conversations, errors and reward."""
    lines = [f"task: {task if isinstance(task, str) else msgspec.json.encode(task).decode()}"]
    lines.append(render_conversations(spans, SHOWN_CHARACTERS))
    for error in (span.attributes for span in spans if span.name == semconv.EXCEPTION):
        lines.append(
            f"error: {error.get(semconv.EXCEPTION_TYPE)}: {error.get(semconv.EXCEPTION_MESSAGE)}"
        )
    text = "\n".join(lines)
    return f"{text}\nended: {status}; reward: {reward:.3g}"
