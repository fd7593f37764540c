"""How the travel desk is trained: the settings of run.yaml, and the policy that training starts
from."""

from __future__ import annotations

from pathlib import Path

import yaml
from demonstrations import TOOLS, demonstrations

from agentlightning.algorithm import GRPO
from agentlightning.learner.policy_config import AdamW
from agentlightning.learner.tiny import Policy, make_policy

SETTINGS = yaml.safe_load((Path(__file__).parent / "run.yaml").read_text(encoding="utf-8"))
SIZES = {name: SETTINGS[name] for name in ("n_runners", "max_sequence_length")}
DEMONSTRATIONS = 2000
VOCABULARY_SIZE = 1024
# not as many as it could learn from: training is to have something left to do
WARM_START_STEPS = 100


def algorithm(steps: int | None = None) -> GRPO:
    settings = {key: value for key, value in SETTINGS["algorithm"].items() if key != "name"}
    return GRPO(**settings | ({"steps": steps} if steps else {}))


def optimizer() -> AdamW:
    return AdamW(**SETTINGS["optimizer"])


def starting_policy(seed: int) -> Policy:
    """The tiny policy, warm-started on deliberately mediocre demonstrations. The same seed gives
    the same policy."""
    shown = demonstrations(DEMONSTRATIONS, seed)
    return make_policy(
        shown, tools=TOOLS, seed=seed, vocabulary_size=VOCABULARY_SIZE, steps=WARM_START_STEPS
    )
