"""Token ids → text, token by token: text is given out as soon as it is certain, and always whole characters.

Knows tokenizers only.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection

from agentlightning.data.token_bytes import TokenBytes


class Detokenizer:
    """The visible text of one answer, incrementally: `add` returns what became certain, `flush` the rest.

    A character whose bytes are split over tokens comes with its last byte; bytes that are no UTF-8 become U+FFFD."""

    def __init__(self, token_bytes: TokenBytes, *, keep_markers: bool, shown: Collection[int] = ()) -> None:
        self._token_bytes = token_bytes
        self._hidden = (token_bytes.hidden_ids if keep_markers else token_bytes.special_ids).difference(shown)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        # Where text depends on context: the last tokens given out, which are enough of it, and those held back.
        self._ids: list[int] = []
        self._context = 0  # how many of these were given out
        self._given = 0  # characters of their text

    def add(self, token_id: int) -> str:
        if token_id in self._hidden:
            return ""
        if self._token_bytes.exact:
            return self._decoder.decode(self._token_bytes[token_id])
        self._ids.append(token_id)
        text = self._decoded(self._ids)
        if text.endswith("\ufffd"):  # perhaps only the beginning of a character
            return ""
        return self._new(text)

    def flush(self) -> str:
        if self._token_bytes.exact:
            return self._decoder.decode(b"", final=True)
        return self._new(self._decoded(self._ids))

    def _decoded(self, token_ids: list[int]) -> str:
        return self._token_bytes.tokenizer.decode(token_ids, skip_special_tokens=False)

    def _new(self, text: str) -> str:
        new, last = text[self._given :], self._ids[self._context :]
        context = self._decoded(last)
        if context:  # else earlier tokens still decide, such as whether a space is the first
            self._ids, text = last, context
        self._context, self._given = len(self._ids), len(text)
        return new
