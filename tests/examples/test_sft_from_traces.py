"""Best of 8 and fine-tuning on it, as the example has them, with an agent and a policy that need no
warm start."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from agentlightning.data.references import load_reference
from tests import agents
from tests.test_trainer import TASKS, policy

SCRIPT = Path(__file__).parents[2] / "examples" / "sft_from_traces" / "train.py"


def test_the_best_of_eight_recorded_rollouts_are_imitated(tmp_path: Path) -> None:
    example = sys.modules[load_reference(f"{SCRIPT}:main").__module__]
    policy().save(tmp_path / "start")
    sampling = example.trainer(tmp_path / "start", example.best_of_8, tmp_path / "sampled", seed=1)
    sampling.fit(agents.vowels, TASKS[:3])
    imitation = example.agl.SFT(traces=str(tmp_path / "sampled"), steps=1)
    tuned = example.trainer(tmp_path / "start", imitation, tmp_path / "tuned", 1, example.RATE).fit(
        agents.vowels
    )
    values = tuned.metrics[0].values
    groups = values["rollouts"] / 8  # a group that is all alike has no best
    assert groups in (1, 2, 3)
    # one rollout each, of two calls that may be one sequence
    assert groups <= values["sequences"] <= 2 * groups
    assert replace(imitation, **example.KEPT, **example.FINE_TUNING).threshold == 0.5
