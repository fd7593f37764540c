"""What a step leaves out: nothing for a stop string, and what leaves out much is said once, with
the remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.algorithm.rl.alarms import Alarms
from tests.test_trainer import TASKS, algorithm, trainer

pytestmark = pytest.mark.anyio

STOP = ["Observation", *"aeiou"]  # the latter so that a policy of random weights comes to one

stopped: list[str | None] = []  # what ended each call of this process


@agl.rollout
async def react(task: dict[str, Any], llm: agl.LLM, rollout: agl.Rollout) -> float:
    """Thinks up to a stop string, observes, and goes on."""
    client = agl.openai_client(llm)
    messages: list[Any] = [{"role": "user", "content": task["word"]}]
    for _ in range(3):
        answer = await client.chat.completions.create(model=llm.model, messages=messages, stop=STOP)
        said = answer.choices[0].message.content or ""
        stopped.append((answer.choices[0].model_extra or {}).get("stop_reason"))
        assert not any(stop in said for stop in STOP)
        messages += [
            {"role": "assistant", "content": said},
            {"role": "user", "content": "Observation: rain"},
        ]
    return float((rollout.group_index or 0) % 2)


async def test_every_call_of_an_agent_with_stop_strings_trains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training = trainer(tmp_path, algorithm=algorithm(steps=2, max_tokens=12))
    result = await training.fit_async(react, TASKS)
    for measured in result.metrics:
        if measured.step:
            assert (measured.values["calls"], measured.values["calls_excluded"]) == (36, 0)
            # what the next prompt makes of it
            assert 0 <= measured.values["unmerged/rollouts"] <= 1
            assert measured.values["inference_mismatch"] < 1e-3
    assert sum(stop is not None for stop in stopped) > len(stopped) / 2
    assert "not trained" not in capsys.readouterr().err


async def test_a_reason_that_leaves_out_many_calls_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = algorithm(steps=2, max_tokens=4, train_truncated=False, temperature=2.0)
    await trainer(tmp_path, algorithm=settings).fit_async(react, TASKS)
    said = capsys.readouterr().err
    assert said.count("of the calls are not trained (cut off at max_tokens)") == 1
    assert "`train_truncated: true` trains them" in said


def test_a_reason_is_said_where_it_leaves_out_more_than_a_tenth_of_the_policys_calls() -> None:
    notes: list[str] = []
    alarms = Alarms(algorithm(), notes.append, [])
    few = {"calls": 90.0, "excluded/has images": 10.0, "excluded/other agent": 500.0}
    alarms.check_excluded(1, few)
    assert notes == []
    alarms.check_excluded(2, few | {"calls": 89.0})
    alarms.check_excluded(3, few | {"calls": 1.0})
    assert notes == [
        'step 2: 10% of the calls are not trained (has images): `keep: ["has images"]` trains them'
    ]
    resumed = Alarms(algorithm(), notes.append, [])
    resumed.remember([few | {"calls": 89.0}])
    resumed.check_excluded(4, few | {"calls": 1.0, "excluded/no token ids": 9.0})
    assert notes[1:] == [
        "step 4: 45% of the calls are not trained (no token ids): no setting does, for they are "
        "not what was sampled"
    ]


def test_a_mismatch_is_put_down_to_rounding_only_where_there_is_any() -> None:
    notes: list[str] = []
    alarms = Alarms(algorithm(), notes.append, [])
    alarms.check_mismatch(1, {"inference_mismatch": 0.03}, 1e-3)
    alarms.check_mismatch(1, {"inference_mismatch": 0.6}, 0.5)
    assert "kept some old weights" in notes[0] and "float32" not in notes[0]
    assert notes[1].endswith("Try float32")
