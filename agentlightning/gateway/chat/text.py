"""An answer's text while it streams: made of token ids, cut at stop strings, and split from the reasoning
before it. Text is given out as soon as it is certain, and always whole characters.

Knows tokenizers and text.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection
from typing import Final

from tokenizers.decoders import DecodeStream

from agentlightning.data.token_bytes import TokenBytes

BEGIN: Final = "<think>"
END: Final = "</think>"


class Detokenizer:
    """The visible text of one answer, incrementally: `add` returns what became certain, `flush` the rest.

    A character whose bytes are split over tokens comes with its last byte; bytes that are no UTF-8 become U+FFFD."""

    def __init__(self, token_bytes: TokenBytes, *, keep_markers: bool, shown: Collection[int] = ()) -> None:
        self._token_bytes = token_bytes
        self._hidden = (token_bytes.hidden_ids if keep_markers else token_bytes.special_ids).difference(shown)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        # Where text depends on context:
        self._stream = DecodeStream()
        self._ids: list[int] = []
        self._given = 0  # characters of their text

    def add(self, token_id: int) -> str:
        if token_id in self._hidden:
            return ""
        if self._token_bytes.exact:
            return self._decoder.decode(self._token_bytes[token_id])
        self._ids.append(token_id)
        text = self._stream.step(self._token_bytes.tokenizer, token_id) or ""
        self._given += len(text)
        return text

    def flush(self) -> str:
        if self._token_bytes.exact:
            return self._decoder.decode(b"", final=True)
        return self._token_bytes.text(self._ids)[self._given :]


class StopStrings:
    """Cuts a text at the first of `stops`; holds back what may be the beginning of one."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """The text that is certain; `matched` is set when a stop string was reached and the text is cut before it."""
        if not self._stops:
            return text
        held = self._held + text
        places = [(held.find(stop), stop) for stop in self._stops if stop in held]
        if places:
            place, self.matched = min(places)
            self._held = ""
            return held[:place]
        keep = max(overlap(held, stop) for stop in self._stops)
        certain = len(held) - keep
        self._held = held[certain:]
        return held[:certain]

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` may be the beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0


class Reasoning:
    """Splits `<think>reasoning</think>` off the beginning of a text, with the line breaks behind it; `begun` says that
    the prompt ends with the mark already."""

    def __init__(self, *, begun: bool) -> None:
        self._mark: str | None = END if begun else BEGIN  # what is looked for; None where only the answer is left
        self._held = ""

    def feed(self, text: str, *, last: bool = False) -> tuple[str, str]:
        """What is certain of (reasoning, answer) now."""
        if self._mark is None and not self._held:
            return "", text
        held, self._held = self._held + text, ""
        if self._mark == BEGIN:
            begun = held.lstrip()
            if begun.startswith(BEGIN):
                self._mark, held = END, begun.removeprefix(BEGIN)
            elif BEGIN.startswith(begun) and not last:
                self._held = held
                return "", ""
            else:
                self._mark = None
                return "", held
        reasoning = ""
        if self._mark == END:
            reasoning, found, held = held.partition(END)
            if not found:
                keep = 0 if last else overlap(reasoning, END)
                certain = len(reasoning) - keep
                self._held = reasoning[certain:]
                return reasoning[:certain], ""
            self._mark, held = None, "\n" + held
        answer = held.lstrip("\n")
        self._held = "" if answer or last else "\n"  # more line breaks may come
        return reasoning, answer
