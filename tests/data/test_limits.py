"""Trajectories within limits: whole calls where possible, else tokens, and every cut is counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.cli.config import load_config
from agentlightning.cli.training import make_algorithm
from agentlightning.data.sequences import TrainingSequence, TrajectoryLimits, build_sequences, cut_sequences
from agentlightning.errors import ConfigError
from tests.data.test_sequences import credited


def conversation() -> list[TrainingSequence]:
    """1 2 | A1: 3 4 | 5 | A2: 6 7 | 8 | A3: 9 10"""
    calls = [
        credited([1, 2], [3, 4]),
        credited([1, 2, 3, 4, 5], [6, 7]),
        credited([1, 2, 3, 4, 5, 6, 7, 8], [9, 10]),
    ]
    return build_sequences(calls, "trajectory")


def trained(sequences: list[TrainingSequence]) -> list[tuple[int, list[int]]]:
    """(length of the prompt, tokens that are trained) of each sequence."""
    return [(int(one.positions[0]), one.token_ids[one.positions].tolist()) for one in sequences]


@pytest.mark.parametrize(
    ("prompt", "response", "left", "cuts"),
    [
        (None, None, [(2, [3, 4, 6, 7, 9, 10])], {}),
        (2, 8, [(2, [3, 4, 6, 7, 9, 10])], {}),
        # The last call does not fit and begins a sequence of its own, for its prompt is short enough.
        (8, 5, [(2, [3, 4, 6, 7]), (8, [9, 10])], {"sequences": 1}),
        # It is not: as much of its answer stays as fits.
        (7, 7, [(2, [3, 4, 6, 7, 9])], {"tokens": 1}),
        # Nothing of it fits.
        (7, 6, [(2, [3, 4, 6, 7])], {"tokens": 2, "calls": 1}),
        # The first prompt is too long, and all that continue it are longer.
        (1, 99, [], {"tokens": 6, "calls": 3}),
        # Even a sequence of its own has no room for a whole answer.
        (None, 1, [(2, [3]), (5, [6]), (8, [9])], {"sequences": 2, "tokens": 3}),
    ],
)
def test_whole_calls_are_cut_where_possible_and_all_is_counted(
    prompt: int | None, response: int | None, left: list[Any], cuts: dict[str, int]
) -> None:
    sequences, counted = cut_sequences(conversation(), TrajectoryLimits(prompt, response))
    assert trained(sequences) == left
    assert {name: count for name, count in counted.items() if count} == cuts
    for one in sequences:
        assert one.positions[-1] == len(one) - 1
        assert one.transitions[0] == 0
        assert len(one.logprobs) == len(one.advantages) == len(one.versions) == len(one.positions)


def test_agent_lightning_0_3_keys_are_taken_in_python_and_in_run_files(tmp_path: Path) -> None:
    said = {"level": "trajectory", "trajectory_max_prompt_length": 2048, "trajectory_max_response_length": 8192}
    in_python = agl.GRPO(trace_aggregator=said, max_prompt_length=4096, max_response_length=1024)
    assert (in_python.level, in_python.limits) == ("trajectory", TrajectoryLimits(2048, 8192))
    run_file = tmp_path / "run.yaml"
    run_file.write_text(
        "agent: a:b\nmodel: m\ntrain_dataset: d.jsonl\nalgorithm:\n  name: grpo\n  keep: [client disconnected]\n"
        "  trace_aggregator: {level: transition}\n  max_prompt_length: 4096\n"
    )
    algorithm = make_algorithm(load_config(run_file).algorithm)
    assert (algorithm.level, algorithm.call_filter().max_prompt_length) == ("transition", 4096)
    assert algorithm.call_filter().keeps("client disconnected")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"trajectory_max_promt_length": 9}, "did you mean 'trajectory_max_prompt_length'"),
        ({"level": "trajectories"}, "did you mean 'trajectory'"),
        ({"level": "trajectory", "trajectory_max_response_length": 0}, "at least 1"),
        ({"level": "transition", "trajectory_max_prompt_length": 9}, "single calls by max_prompt_length"),
    ],
)
def test_what_is_not_meant_by_them_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        agl.GRPO(trace_aggregator=settings)


def test_two_levels_are_refused() -> None:
    with pytest.raises(ConfigError, match="give one of them"):
        agl.GRPO(level="tree", trace_aggregator={"level": "trajectory"})
