"""An example's `train.py`, run in the environment of its framework on a small random Llama."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from agentlightning.learner.tiny import END, make_tokenizer, token_id
from tests.examples.loading import EXAMPLES
from tests.frameworks.world import bin_of
from tests.models import tiny_model

SMALL = (
    "lora.rank=4",
    "algorithm.tasks_per_step=2",
    "algorithm.group_size=2",
    "algorithm.max_tokens=8",
)


def save_llama(folder: Path, texts: list[str]) -> Path:
    """A random model with a tokenizer made from `texts`, as a checkpoint in `folder`."""
    tokenizer = make_tokenizer(texts * 4, 320)
    end = token_id(tokenizer, END)
    tiny_model(
        "llama", vocab_size=len(tokenizer), eos_token_id=end, max_position_embeddings=4096
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def train(example: str, *options: str | Path) -> subprocess.CompletedProcess[str]:
    """One small step of `train.py` with these options; `options` may change any of `SMALL`."""
    settings = [word for one in SMALL for word in ("--set", one)]
    command = [bin_of("experiments") / "python", "train.py", "--steps", "1", *settings, *options]
    return subprocess.run(
        command, cwd=EXAMPLES / example, capture_output=True, text=True, timeout=240, check=False
    )


def steps_of(run: Path) -> list[dict[str, Any]]:
    """What was measured of each training step of the run in this directory."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [one for one in lines if "reward" in one]
