"""The share of calls that a candidate in production was met by. A program that is changed sends
other texts than those that the candidate replaces, and goes on with its own prompts."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Mapping
from typing import Final

_CALLS: Final = 100  # the latest, whose share is watched
_FALL: Final = 0.5  # of the best share so far, from which on a fall is a warning
_log: Final = logging.getLogger(__name__)


class MetShare:
    """Counts calls by whether a text was replaced in them (`yes`, `no`), and warns once in the log
    when the share of the latest 100 falls below half of the best, or is 0."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self._latest: deque[bool] = deque(maxlen=_CALLS)
        self._best = 0.0
        self._warned = False

    @property
    def share(self) -> float:
        """Of the latest 100 calls; 0 before the first."""
        return sum(self._latest) / max(1, len(self._latest))

    def shown(self) -> float | Mapping[tuple[str, ...], float]:
        """The share for `/metrics`, where there is one."""
        return self.share if self._latest else {}

    def add(self, met: bool) -> None:
        self.calls["yes" if met else "no"] += 1
        self._latest.append(met)
        if len(self._latest) < _CALLS:
            return
        share = self.share
        self._best = max(self._best, share)
        fell = share < self._best * _FALL or share == 0
        if fell and not self._warned:
            _log.warning(
                "only %.0f %% of the latest %d calls had a text that the prompts in production "
                "replace, %.0f %% before: the program sends other texts now; `agl prompts` shows "
                "them",
                100 * share,
                _CALLS,
                100 * self._best,
            )
        self._warned = fell
