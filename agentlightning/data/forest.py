"""Token sequences → a forest that contains each shared prefix once, and how to cut a batch into
such forests.

(P A), (P A O B), (P C) → P A O B, and C as a branch after the last token of P: each distinct prefix
is computed once, whatever its origin (turns of a conversation, samples of a prompt, interleaved
agents). Knows token ids only; no losses, rollouts or models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
Slots = npt.NDArray[np.int64]

# A token costs as much as attending to about this many others: six times the width of a transformer
# of width 700. It decides only between places to cut a batch, all of which give the same gradient.
PAIRS_PER_TOKEN = 4096
# An additional forest costs about this many tokens; a batch is cut only if that gains more.
TOKENS_PER_FOREST = 64


@dataclass(frozen=True)
class Branch:
    """Consecutive tokens: slots `start` to `stop`, after the slots `before` int64[M], their path
    from the root. A branch with an empty path is the trunk of a tree."""

    start: int
    stop: int
    before: Slots


@dataclass(frozen=True)
class Forest:
    """Trees of token ids in L slots. `token_ids` int32[L]; `depths` int64[L], the position of each
    token in its sequences; `previous` int64[L], the slot of the token before it (−1 at a root).
    `branches` cover the slots in order, and paths refer only to slots of earlier branches."""

    token_ids: IntArray
    depths: Slots
    previous: Slots
    branches: tuple[Branch, ...]

    @property
    def pairs(self) -> int:
        """The number of (query, key) pairs in attention, each token with itself included."""
        return int((self.depths + 1).sum())


def prefix_order(sequences: Sequence[IntArray]) -> tuple[list[int], Slots]:
    """An order in which each sequence follows the one with which it shares the longest prefix, and
    the length of that prefix, int64[n] (0 for the first). A sequence comes after those that extend
    it."""
    # big-endian bytes sort like token ids
    keys = [sequence.astype(">u4").tobytes() for sequence in sequences]
    order = sorted(range(len(sequences)), key=keys.__getitem__, reverse=True)
    shared = np.zeros(len(order), np.int64)
    for place in range(1, len(order)):
        shared[place] = shared_length(sequences[order[place - 1]], sequences[order[place]])
    return order, shared


def shared_length(first: IntArray, second: IntArray) -> int:
    """The number of leading tokens that two sequences share."""
    length = min(len(first), len(second))
    different = first[:length] != second[:length]
    return int(different.argmax()) if different.any() else length


def cut(lengths: Slots, shared: Slots, sampled: Slots, limit: int) -> list[tuple[int, int]]:
    """Cut sequences in prefix order into forests, at the least cost; returns ranges of positions. A
    forest has at most `limit` tokens, and at most as many of the `sampled` ones; a longer sequence
    gets its own.

    The cost of a cut is the prefix that the next forest recomputes: its tokens and their
    attention."""
    size = len(lengths)
    added = np.concatenate([[0], np.cumsum(lengths - shared)])
    rows = np.concatenate([[0], np.cumsum(sampled)])
    opening = PAIRS_PER_TOKEN * (TOKENS_PER_FOREST + shared) + shared * (shared + 1) // 2
    least = np.zeros(size + 1, np.int64)
    chosen = np.zeros(size + 1, np.int64)
    first = 0  # the earliest place from which a forest can reach as far as `stop`
    for stop in range(1, size + 1):
        while first < stop - 1 and (
            shared[first] + added[stop] - added[first] > limit or rows[stop] - rows[first] > limit
        ):
            first += 1
        costs = least[first:stop] + opening[first:stop]
        chosen[stop] = first + int(costs.argmin())
        least[stop] = costs[chosen[stop] - first]
    ranges: list[tuple[int, int]] = []
    stop = size
    while stop:
        ranges.append((int(chosen[stop]), stop))
        stop = int(chosen[stop])
    return ranges[::-1]


def build_forest(sequences: Sequence[IntArray], shared: Slots) -> tuple[Forest, list[Slots]]:
    """Lay sequences in prefix order into a forest; `shared` are the lengths from `prefix_order`
    (ignored for the first). Also returns the slot of each token of each sequence, int64[len]."""
    branches: list[Branch] = []
    paths: list[Slots] = []
    size = 0
    for sequence, common in zip(sequences, [0, *shared[1:].tolist()], strict=True):
        before = paths[-1][:common] if common else np.zeros(0, np.int64)
        grown = len(sequence) - common
        if grown:
            branches.append(Branch(size, size + grown, before))
        paths.append(np.concatenate([before, np.arange(size, size + grown)]))
        size += grown
    token_ids = np.zeros(size, np.int32)
    depths = np.zeros(size, np.int64)
    previous = np.full(size, -1, np.int64)
    for sequence, path in zip(sequences, paths, strict=True):
        token_ids[path] = sequence
        depths[path] = np.arange(len(path))
        previous[path[1:]] = path[:-1]
    return Forest(token_ids, depths, previous, tuple(branches)), paths
