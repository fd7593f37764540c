"""What a model thinks before it answers, told apart from the answer while it streams. Knows text only."""

from __future__ import annotations

from typing import Final

from agentlightning.gateway.chat.stop_strings import overlap

BEGIN: Final = "<think>"
END: Final = "</think>"


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
            said = held.lstrip()
            if said.startswith(BEGIN):
                self._mark, held = END, said.removeprefix(BEGIN)
            elif BEGIN.startswith(said) and not last:
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
