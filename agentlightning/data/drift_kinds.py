"""Why ids made anew from text are others than those recorded: six kinds of drift, told by the first difference.

`·` separates tokens, `⏎` is a line break; recorded → anew:

    split           the text is the same, cut into other tokens
                        th·ere  →  there
    special token   a token that is reserved, or that nothing spells, on one side; ordinary text or nothing on the other
                        <·|·end·|·>  →  <|end|>     (the policy spelled out what the tokenizer reads as one token)
                        yes·<|user|>·no  →  yes·no  (the text that agents get leaves special tokens out)
    turn boundary   the answer's words are the same, its edges are not: white space around them, how the turn ends, or a
                    token that reaches across the edge
                        yes·⏎·<|end|>  →  yes·<|end|>
                        yes·.  →  yes·.⏎            (the text goes on with a line break)
    tool call       a tool call is written otherwise than it was sampled
                        {"q":"sun"}  →  {"q": "sun"}
    normalisation   the words are the same but for Unicode's forms, case, white space within, or bytes that are no UTF-8
                        e·◌́  →  é
    template        the text is another: the template rewrites what is past, or is not the one that was used
                        <think>·hm·</think>·yes  →  yes

Knows ids, texts and special tokens. Does not know calls, messages or spans.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

from agentlightning.data.histories import canonical, common_length
from agentlightning.data.token_bytes import MARKERS, TokenBytes

Ids: TypeAlias = tuple[int, ...]
Kind: TypeAlias = Literal["split", "special token", "turn boundary", "tool call", "normalisation", "template"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)

_SHOWN_BEFORE, _SHOWN_AFTER = 3, 8  # tokens of an example
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


@dataclass(frozen=True)
class Drift:
    """Recorded ids that are others when made anew.

    `tokens` counts the recorded ones: from the first difference to the last; in a history from the first difference to
    the answer's end, as none of them is shared with the later prompt. `before`, `recorded` and `anew` are the texts of
    the tokens just before the first difference, and of a few from it on."""

    kind: Kind
    tokens: int
    before: tuple[str, ...]
    recorded: tuple[str, ...]
    anew: tuple[str, ...]


@dataclass(frozen=True)
class Difference:
    """The shortest ranges, recorded[start:recorded_end] and anew[start:anew_end], that begin with the first difference
    and end at the same byte. `overhangs`: there are none, since the last token of anew reaches beyond all recorded."""

    start: int
    recorded_end: int
    anew_end: int
    same_text: bool
    overhangs: bool


class Classifier:
    """Tells the kind of a drift, for ids that are known to differ."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._id_to_token = token_bytes.tokenizer.id_to_token
        added = token_bytes.tokenizer.get_added_tokens_decoder()
        self._reserved = frozenset(added)
        self._specials = tuple(token.content for token in added.values() if token.special)
        self._special = re.compile("|".join(map(re.escape, self._specials)) or "(?!)")

    def of_history(self, prompt: Ids, answer: Ids, later: Ids, calls_tools: bool) -> Drift:
        recorded = (*prompt, *answer)
        difference = self.difference(recorded, later)
        across = difference.start < len(prompt) < difference.recorded_end
        if difference.overhangs or (difference.same_text and across):
            kind = "turn boundary"
        elif difference.same_text:
            kind = self.cut(recorded, later, difference)
        else:
            kind = self._reworded(prompt, answer, later, calls_tools)
        return self.drift(kind, recorded, later, difference.start, len(recorded) - difference.start)

    def difference(self, recorded: Ids, anew: Ids) -> Difference:
        start = recorded_end = anew_end = common_length(recorded, anew)
        left = right = b""  # what the two ranges spell so far
        while True:
            if len(right) <= len(left) and anew_end < len(anew):
                right += self._spelling(anew[anew_end])
                anew_end += 1
            elif recorded_end < len(recorded):
                left += self._spelling(recorded[recorded_end])
                recorded_end += 1
            else:
                break
            if len(left) == len(right) and start not in (recorded_end, anew_end):
                break
        overhangs = len(left) < len(right) and right.startswith(left)
        return Difference(start, recorded_end, anew_end, left == right, overhangs)

    def _spelling(self, token_id: int) -> bytes:
        """The token's own bytes, those of a word with the space it begins with."""
        if self._token_bytes.exact:
            return self._token_bytes[token_id]
        token = self._id_to_token(token_id) or ""
        byte = _BYTE.fullmatch(token)
        return bytes.fromhex(byte[1]) if byte else token.replace("▁", " ").encode()

    def cut(self, recorded: Ids, anew: Ids, difference: Difference) -> Kind:
        """The kind where both sides spell the same text."""
        left = recorded[difference.start : difference.recorded_end]
        right = anew[difference.start : difference.anew_end]
        return "split" if self._unwritten(left) == self._unwritten(right) else "special token"

    def _unwritten(self, ids: Ids) -> list[int]:
        """Those that no tokenizer makes of ordinary text: reserved ones, and ids beyond the vocabulary."""
        return [token_id for token_id in ids if token_id in self._reserved or not self._spelling(token_id)]

    def _reworded(self, prompt: Ids, answer: Ids, later: Ids, calls_tools: bool) -> Kind:
        """The kind where an answer, or what came before it, is another text in a later prompt."""
        text = self._token_bytes.text
        before, rendered = text(list(prompt)), text(list(later))
        said = text([*prompt, *answer])[len(before) :]
        if not rendered.startswith(before):
            return "template"
        rendered = rendered[len(before) :]
        words = self._words(said)
        place = common_length(said, rendered)
        # A special token is one thing: the difference does not lie within it.
        place = next((m.start() for m in self._special.finditer(said) if m.start() < place < m.end()), place)
        if rendered.startswith(said):
            return "normalisation"  # only bytes that are no text differ
        if rendered.lstrip().startswith(words):
            return "turn boundary"
        if calls_tools and place >= _calls_begin(said):
            return "tool call"
        if self._special.match(said, place):
            return "special token"
        if self._special.match(rendered, place):
            return "turn boundary"
        return "normalisation" if canonical(rendered).startswith(canonical(words)) else "template"

    def _words(self, said: str) -> str:
        """The answer without white space around it and the special tokens that end it."""
        words = said.strip()
        while end := next((special for special in self._specials if words.endswith(special)), None):
            words = words.removesuffix(end).rstrip()
        return words

    def drift(self, kind: Kind, recorded: Ids, anew: Ids, start: int, tokens: int) -> Drift:
        return Drift(
            kind,
            tokens,
            before=self.shown(recorded[max(0, start - _SHOWN_BEFORE) : start]),
            recorded=self.shown(recorded[start : start + _SHOWN_AFTER]),
            anew=self.shown(anew[start : start + _SHOWN_AFTER]),
        )

    def shown(self, ids: Ids) -> tuple[str, ...]:
        """The text of each token; of one without any its id, as `#17`."""
        return tuple(self._spelling(token_id).decode(errors="backslashreplace") or f"#{token_id}" for token_id in ids)


def _calls_begin(said: str) -> int:
    """Where tool calls begin, with the space before them; an answer without a known marker is all tool call."""
    marked = min((said.find(marker) for marker in MARKERS if marker in said), default=0)
    return len(said[:marked].rstrip())
