"""The bytes of token ids, and how a tokenizer splits texts.

Knows tokenizers only.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

# Special tokens that start tool calls in some formats; the text keeps them until tool calls are
# parsed.
MARKERS = frozenset({"<|python_tag|>", "<tool_call>", "</tool_call>"})

_AT_THE_BEGINNING = ("Metaspace", "Prepend", "Strip", "Precompiled", "BertNormalizer")


class TokenBytes:
    """The bytes of every token id, and which ids are special (not part of the visible text).

    With `exact`, a text is the concatenation of its tokens' bytes, as in byte-level vocabularies.
    Otherwise (SentencePiece) tokens must be decoded in context."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.exact = '"type":"ByteLevel"' in _state(tokenizer.decoder)
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.hidden_ids = frozenset(i for i in self.special_ids if added[i].content not in MARKERS)
        self._bytes = {token_id: token.content.encode() for token_id, token in added.items()}

    def __getitem__(self, token_id: int) -> bytes:
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._look_up(token_id)
        return known

    def _look_up(self, token_id: int) -> bytes:
        token = self.tokenizer.id_to_token(token_id)
        if token is None:  # models pad their vocabulary beyond the tokenizer's
            return b""
        if not self.exact:
            return self.tokenizer.decode([token_id], skip_special_tokens=False).encode()
        return bytes(_BYTE_OF[character] for character in token)

    def text(self, token_ids: Sequence[int]) -> str:
        """The full text of an answer, special tokens included."""
        if self.exact:
            return b"".join(self[token_id] for token_id in token_ids).decode(errors="replace")
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)


def splits_at_special_tokens(tokenizer: Tokenizer) -> bool:
    """Whether encode(A + B) = encode(A) + encode(B) for every A that ends with a special token.

    True if nothing is added to or removed from the start of a text: no Metaspace, no Prepend or
    Strip normaliser, no `add_prefix_space`, and no special token that absorbs the space beside
    it."""
    parts = _state(tokenizer.normalizer) + _state(tokenizer.pre_tokenizer)
    if '"add_prefix_space":true' in parts or any(
        f'"type":"{kind}"' in parts for kind in _AT_THE_BEGINNING
    ):
        return False
    added = tokenizer.get_added_tokens_decoder().values()
    return not any(token.rstrip or token.lstrip for token in added)


def _state(component: Any) -> str:
    """The JSON form of a tokenizer's component, without white space."""
    return (
        ""
        if component is None
        else json.dumps(json.loads(component.__getstate__()), separators=(",", ":"))
    )


def _byte_characters() -> dict[str, int]:
    """Byte-level vocabularies write each byte as one printable character: printable Latin-1 bytes
    as themselves, the others, in order, as the characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + n): byte for n, byte in enumerate(others)
    }


_BYTE_OF = _byte_characters()
