"""A forest holds every prefix once and every sampled token with a loss row of its own."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from agentlightning.data.aggregation import aggregation_weights
from agentlightning.data.forest import Forest, build_forest, prefix_order
from agentlightning.data.sequences import Level, MicroBatch, build_sequences, micro_batches
from tests.data.test_sequences import credited

token_ids = st.lists(st.integers(0, 2), min_size=1, max_size=8)


def planted(*sequences: list[int]) -> tuple[Forest, list[list[int]]]:
    """The forest of some sequences, and the slots of each, in the order given."""
    arrays = [np.array(sequence, np.int32) for sequence in sequences]
    order, shared = prefix_order(arrays)
    forest, paths = build_forest([arrays[i] for i in order], shared)
    return forest, [paths[order.index(i)].tolist() for i in range(len(arrays))]


def forests(
    level: Level, calls: list[tuple[list[int], list[int]]], max_tokens: int = 1000
) -> list[MicroBatch]:
    sequences = build_sequences([credited(prompt, answer) for prompt, answer in calls], level)
    return list(micro_batches(sequences, aggregation_weights(sequences, "token-mean"), max_tokens))


@settings(deadline=None)
@given(st.lists(token_ids, min_size=1, max_size=8))
def test_each_distinct_prefix_stands_once_and_each_path_spells_its_sequence(
    sequences: list[list[int]],
) -> None:
    forest, paths = planted(*sequences)
    prefixes = {
        tuple(sequence[:stop]) for sequence in sequences for stop in range(1, len(sequence) + 1)
    }
    assert len(forest.token_ids) == len(prefixes)
    assert forest.pairs == sum(map(len, prefixes))
    for sequence, path in zip(sequences, paths, strict=True):
        assert forest.token_ids[path].tolist() == sequence
        assert forest.depths[path].tolist() == list(range(len(sequence)))
        assert forest.previous[path].tolist() == [-1, *path[:-1]]
    for slot in range(len(forest.token_ids)):
        below = {one for path in paths if slot in path for one in path[path.index(slot) :]}
        assert below == set(range(slot, slot + len(below)))
    for branch in forest.branches:
        own = list(range(branch.start, branch.stop))
        assert [*branch.before.tolist(), *own] in [
            path[: len(branch.before) + len(own)] for path in paths
        ]


@settings(deadline=None)
@given(st.lists(st.tuples(token_ids, token_ids), min_size=1, max_size=8), st.integers(1, 30))
def test_every_sampled_token_keeps_its_own_row_however_the_batch_is_cut(
    calls: list[tuple[list[int], list[int]]], budget: int
) -> None:
    def rows(level: Level) -> list[tuple[int, ...]]:
        return sorted(
            tuple(micro.token_ids[row, [*path_to(micro, position)]])
            for micro in forests(level, calls, budget)
            for row, position in zip(micro.rows, micro.positions, strict=True)
        )

    assert rows("tree") == rows("transition")
    for micro in forests("tree", calls, budget):
        assert micro.tokens <= budget or micro.transitions.max() == 0


def path_to(micro: MicroBatch, position: int) -> list[int]:
    """The places from the first token to this one."""
    if micro.forest is None:
        return list(range(position + 1))
    path = [position]
    while (before := int(micro.forest.previous[path[0]])) >= 0:
        path.insert(0, before)
    return path


def test_the_page_on_traces_shows_what_the_code_computes() -> None:
    root = Path(__file__).parents[2]
    script = runpy.run_path(str(root / "scripts" / "draw_forest.py"))
    group = script["group"]()
    assert script["table"](group) in (root / "docs" / "how-it-works.md").read_text()
    for name, picture in script["pictures"](group).items():
        assert (root / "docs" / "images" / name).read_text() == picture, (
            "draw it anew: python scripts/draw_forest.py"
        )
