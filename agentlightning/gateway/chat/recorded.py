"""Prompts that repeat an earlier answer get that answer's own token ids, not a new tokenisation of its text.

A chat's history is rendered and tokenised anew at every call, and the tokenizer may split text otherwise than the
policy sampled it. Where a rendered prompt begins with the exact text of an earlier prompt and answer, and that text
ends with a special token, at which the tokenizer provably splits, the recorded ids are the prompt's beginning.

    recorded  "<|user|>hi<|end|><|assistant|>yes<|end|>"  →  (5, 17, 2, 6, 90, 91, 2)
    prompt    "<|user|>hi<|end|><|assistant|>yes<|end|><|user|>more<|end|>…"
           →  (5, 17, 2, 6, 90, 91, 2) + encode("<|user|>more<|end|>…")
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass

from agentlightning.data.token_bytes import splits_at_special_tokens
from agentlightning.gateway.chat.template import ChatTemplate


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt's text and exact ids, of which `spliced_tokens` are those of recorded answers."""

    text: str
    token_ids: tuple[int, ...]
    spliced_tokens: int = 0


class RecordedAnswers:
    """Remembers, per session, the last answers with their prompts, of so many `tokens` in all; the least recently used
    session is forgotten. `encode` may be called in any thread.

    With a tokenizer that does not provably split at special tokens nothing is remembered, and every prompt is
    tokenised as a whole."""

    def __init__(
        self, chat: ChatTemplate, *, sessions: int = 4096, answers: int = 16, tokens: int = 16_000_000
    ) -> None:
        self._chat = chat
        self._sessions: OrderedDict[str, deque[EncodedPrompt]] = OrderedDict()
        self._session_limit = sessions
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
        return EncodedPrompt(text, (*known.token_ids, *rest), known.spliced_tokens)

    def record(self, session: str | None, prompt: EncodedPrompt, answer_ids: list[int]) -> None:
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
                (*prompt.token_ids, *answer_ids),
                prompt.spliced_tokens + len(answer_ids),
            )
        )
        self._tokens += len(answers[-1].token_ids)
        if len(answers) > self._answer_limit:
            self._tokens -= len(answers.popleft().token_ids)
        self._sessions.move_to_end(session)
        while len(self._sessions) > self._session_limit or self._tokens > self._token_limit:
            _, forgotten = self._sessions.popitem(last=False)
            self._tokens -= sum(len(answer.token_ids) for answer in forgotten)

    def _longest(self, session: str, text: str) -> EncodedPrompt | None:
        answers = tuple(self._sessions.get(session, ()))
        matching = [answer for answer in answers if text.startswith(answer.text)]
        return max(matching, key=lambda answer: len(answer.text), default=None)
