"""Whether a run is about to come apart, told by the norms of its gradients. A pure function of what was measured."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from typing import Final

EXPLOSION: Final = 20.0  # a gradient so many times as large as usual; from batch to batch it varies a few times
USUAL: Final = 20  # the norms whose median is what is usual
FEWEST: Final = 5  # before so many nothing is usual yet


def exploding_steps(norms: Iterable[float]) -> int:
    """How many of the last gradient norms, in a row, are more than `EXPLOSION` times the median of those before.

    `[1.0] * 5 + [30.0, 40.0]` → 2. The loss says nothing here: that of a policy gradient is about 0 at any scale."""
    usual: deque[float] = deque(maxlen=USUAL)
    row = 0
    for norm in norms:
        if norm == 0:  # nothing was trained: a critic alone, or nothing that taught
            continue
        if len(usual) >= FEWEST and norm > EXPLOSION * statistics.median(usual):
            row += 1
        else:
            row = 0
            usual.append(norm)
    return row
