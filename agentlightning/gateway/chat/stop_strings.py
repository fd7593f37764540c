"""Stop strings, found while text streams. Knows text only."""

from __future__ import annotations


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
        """What was held back when the answer ended without a stop string."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` may be the beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0
