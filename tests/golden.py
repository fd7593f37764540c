"""What other frameworks compute (tests/oracles/rl_golden.json): verl 0.9.1, OpenRLHF, AReaL, rLLM;
inputs, outputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

_GOLDEN: dict[str, Any] = json.loads(
    (Path(__file__).parent / "oracles" / "rl_golden.json").read_text()
)
INPUTS: dict[str, Any] = _GOLDEN["inputs"]
OUTPUTS: dict[str, Any] = _GOLDEN["outputs"]
MASK = np.array(INPUTS["mask"], bool)
"""bool[B, L]: which tokens were sampled. Two rows have observations between them."""


def sampled(values: Any) -> torch.Tensor:
    """The sampled tokens of a [B, L] list, flattened row by row: float[N]."""
    return torch.tensor(values, dtype=torch.float32)[torch.from_numpy(MASK)]
