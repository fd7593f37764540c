"""Models are so small that more than one thread only slows them down."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from agentlightning.learner.tiny import make_tokenizer

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return make_tokenizer(["a plain corpus of a few words"], 300)
