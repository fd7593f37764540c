"""Messages and tools → the model's prompt text, by the chat template that came with its tokenizer,
and → token ids.

A chat's history is rendered and tokenised anew at every call, and the tokenizer may split text
otherwise than the policy sampled it. Where a rendered prompt begins with the exact text of an
earlier prompt and answer, and that text ends with a special token, at which the tokenizer provably
splits, the recorded ids are the prompt's beginning.

    recorded  "<|user|>hi<|end|><|assistant|>yes<|end|>"  →  (5, 17, 2, 6, 90, 91, 2)
    prompt    "<|user|>hi<|end|><|assistant|>yes<|end|><|user|>more<|end|>…"
           →  (5, 17, 2, 6, 90, 91, 2) + encode("<|user|>more<|end|>…")

Knows jinja templates and tokenizers. Does not know models, sampling or HTTP.
"""

from __future__ import annotations

import json
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, cast

from jinja2 import TemplateError
from tokenizers import Tokenizer
from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template  # pyright: ignore[reportPrivateUsage]

from agentlightning.arrays import TokenIds, int32
from agentlightning.data.token_bytes import TokenBytes, splits_at_special_tokens
from agentlightning.errors import BackendError, ConfigError
from agentlightning.gateway.chat.repairs import tries
from agentlightning.gateway.chat.text import (
    BEGIN,
    END,
    TOOL_FORMATS,
    Detokenizer,
    ToolCallParser,
    detect_tool_format,
)

# The rollouts of a group begin with the same prompt, and turns repeat: short texts are tokenised
# once.
_REMEMBERED_TEXTS = 2048
_REMEMBERED_LENGTH = 8192  # characters


class ChatTemplate:
    """A tokenizer with its chat template.

    `special_tokens` are the names a template may use (`bos_token` …); the format of tool calls is
    recognised from it. `stop_token_ids` end an answer.

    >>> ChatTemplate.from_pretrained(AutoTokenizer.from_pretrained(path)).render(messages, tools)
    '<|im_start|>system\\n…'
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str,
        *,
        special_tokens: Mapping[str, Any],
        stop_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.tokenizer = tokenizer
        self.stop_token_ids = stop_token_ids
        self.tool_format = detect_tool_format(template)
        self.reasons = tokenizer.token_to_id(END) is not None  # the model was taught to
        self.token_bytes = TokenBytes(tokenizer)
        self._encode_once = lru_cache(maxsize=_REMEMBERED_TEXTS)(self._encode)
        self._special_tokens = dict(special_tokens)
        self._knows_developer = "developer" in template
        self._template = template
        try:
            _compile_jinja_template(template)
        except TemplateError as error:
            raise ConfigError(
                f"the tokenizer's chat template cannot be compiled: {error}"
            ) from None

    @classmethod
    def from_pretrained(cls, tokenizer: Any) -> ChatTemplate:
        """From a `PreTrainedTokenizerFast`. ConfigError without a chat template or with a slow
        tokenizer."""
        template = getattr(tokenizer, "chat_template", None)
        if isinstance(template, dict):
            template = cast(dict[str, str], template).get("default")
        if not isinstance(template, str):
            raise ConfigError(
                "the tokenizer has no chat template, so chats cannot become prompts; use an "
                "instruct model, or set tokenizer.chat_template"
            )
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise ConfigError(
                f"{type(tokenizer).__name__} is not a fast tokenizer; one with tokenizer.json is "
                "needed"
            )
        end = tokenizer.eos_token_id
        return cls(
            backend,
            template,
            special_tokens=tokenizer.special_tokens_map,
            stop_token_ids=frozenset() if end is None else frozenset({end}),
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        /,
        **variables: Any,
    ) -> str:
        """The prompt up to where the assistant begins to speak, of the first form of the chat
        (`repairs.tries`) that the template takes. BackendError (400) says why it takes none."""
        options: dict[str, Any] = {
            "tools": list(tools) or None,
            "add_generation_prompt": True,
            **self._special_tokens,
        }
        options["chat_template"] = self._template
        try:
            # no variable replaces an option
            rendered = partial(render_jinja_template, **options, **variables)
            return _first_taken(rendered, [self._plain(message) for message in messages])
        except BackendError:
            raise
        except Exception as error:  # noqa: BLE001 - a template is a program from elsewhere and may fail in any way
            raise BackendError(
                f"the model's chat template cannot render these messages: {error}",
                status=400,
                code="template_error",
            ) from None

    def encode(self, text: str) -> TokenIds:
        """Token ids of rendered text; special tokens are those spelled out in it, none are
        added."""
        if len(text) <= _REMEMBERED_LENGTH:
            return self._encode_once(text)
        # A batch of one, which unlike `encode` lets other threads run.
        return int32(self.tokenizer.encode_batch([text], add_special_tokens=False)[0].ids)

    def _encode(self, text: str) -> TokenIds:
        return int32(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def detokenizer(self, *, keep_markers: bool, keep_reasoning: bool = False) -> Detokenizer:
        """Text of an answer as it is sampled; `keep_markers` keeps special tokens that mark tool
        calls."""
        marks = map(self.tokenizer.token_to_id, (BEGIN, END)) if keep_reasoning else ()
        shown = [mark for mark in marks if mark is not None]
        return Detokenizer(self.token_bytes, keep_markers=keep_markers, shown=shown)

    def tool_call_parser(self) -> ToolCallParser:
        """A parser for one answer. ConfigError if the format of the model's tool calls is not
        known."""
        if self.tool_format is None:
            raise ConfigError(
                "the chat template's tool-call format is neither hermes nor llama3, so tools "
                "cannot be used with this model"
            )
        return TOOL_FORMATS[self.tool_format].parser()

    def _plain(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message as templates expect it: no nulls, text as one string, tool-call arguments as
        objects."""
        plain = {
            name: value for name, value in message.items() if value is not None and value != []
        }
        plain["content"] = _text(message.get("content"))
        if plain["role"] == "developer" and not self._knows_developer:
            plain["role"] = "system"
        if "tool_calls" in plain:
            plain["tool_calls"] = [_with_arguments(call) for call in plain["tool_calls"]]
        return plain


def _first_taken(rendered: Callable[..., Any], messages: list[dict[str, Any]]) -> str:
    refused: TemplateError | None = None
    for tried, _ in tries(messages):
        try:
            return rendered([tried])[0][0]
        except TemplateError as error:
            refused = refused or error
    assert refused is not None, "there is a first try"
    raise refused


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts: list[str] = []
    for part in content:
        if part.get("type") not in ("text", "input_text", "refusal"):
            raise BackendError(
                f"a message holds a part of type {part.get('type')!r}; this model reads text only",
                status=400,
                code="unsupported_content",
            )
        parts.append(part.get("text") or part.get("refusal") or "")
    return "".join(parts)


def _with_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            parsed = None
        # Arguments that are no JSON object stay the text they are; whether that can be shown is the
        # template's choice.
        function["arguments"] = parsed if isinstance(parsed, dict) else arguments
    return {**call, "function": function}


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt's text and exact ids, of which `spliced_tokens` are those of recorded answers."""

    text: str
    token_ids: TokenIds
    spliced_tokens: int = 0


class RecordedAnswers:
    """Remembers, per session, the last answers with their prompts, of so many `tokens` in all; the
    least recently used sessions are forgotten. `encode` may be called in any thread.

    With a tokenizer that does not provably split at special tokens nothing is remembered, and every
    prompt is tokenised as a whole."""

    def __init__(
        self,
        chat: ChatTemplate,
        *,
        answers: int = 16,
        tokens: int = 16_000_000,
    ) -> None:
        self._chat = chat
        self._sessions: OrderedDict[str, deque[EncodedPrompt]] = OrderedDict()
        self._answer_limit = answers
        self._token_limit = tokens
        self._tokens = 0
        self._usable = splits_at_special_tokens(chat.tokenizer)

    def encode(self, session: str | None, text: str) -> EncodedPrompt:
        """The prompt's ids, with the longest recorded beginning spliced in."""
        known = self._longest(session, text) if session is not None else None
        if known is None:
            return EncodedPrompt(text, self._chat.encode(text))
        rest = self._chat.encode(text[len(known.text) :])
        return EncodedPrompt(text, known.token_ids + rest, known.spliced_tokens)

    def record(self, session: str | None, prompt: EncodedPrompt, answer_ids: TokenIds) -> None:
        """Remember a finished answer, if it ends with a special token; others cannot be spliced."""
        if not self._usable or session is None or not answer_ids:
            return
        token_bytes = self._chat.token_bytes
        if answer_ids[-1] not in token_bytes.special_ids:
            return
        answers = self._sessions.setdefault(session, deque())
        answers.append(
            EncodedPrompt(
                prompt.text + token_bytes.text(answer_ids),
                prompt.token_ids + answer_ids,
                prompt.spliced_tokens + len(answer_ids),
            )
        )
        self._tokens += len(answers[-1].token_ids)
        if len(answers) > self._answer_limit:
            self._tokens -= len(answers.popleft().token_ids)
        self._sessions.move_to_end(session)
        while self._tokens > self._token_limit:
            _, forgotten = self._sessions.popitem(last=False)
            self._tokens -= sum(len(answer.token_ids) for answer in forgotten)

    def _longest(self, session: str, text: str) -> EncodedPrompt | None:
        answers = tuple(self._sessions.get(session, ()))
        matching = [answer for answer in answers if text.startswith(answer.text)]
        return max(matching, key=lambda answer: len(answer.text), default=None)
