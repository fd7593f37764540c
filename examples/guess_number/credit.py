"""The baseline of this example."""

from __future__ import annotations

import json

import numpy as np

from agentlightning.data.credit import Returns, baseline


@baseline(compares="nothing", whitens=True)
def numbers_left(returns: Returns) -> np.ndarray:
    """A = (x − mean) / std over all guesses of the step that were made with as many numbers left, whatever the secret:
    a position is as good as its width."""
    width = np.array([high - low for low, high in (json.loads(call.state or "[0, 0]") for call in returns.calls)])
    advantages = np.zeros(len(width))
    for one in np.unique(width):
        own = width == one
        values = returns.values[own]
        advantages[own] = (values - values.mean()) / (values.std() + 0.1)
    return advantages
