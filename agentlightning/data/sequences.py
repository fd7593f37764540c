"""Transitions with advantages → training sequences → micro-batches.

A training sequence is a row of token ids with a loss row per sampled token. At level `transition` each call is a
sequence of its own; at level `tree` too, and whatever prefix the sequences of a batch share is computed once. At level
`trajectory` a call whose prompt extends an earlier sequence token for token is appended to it. Which token belongs to
which transition is kept: "sequence" in a loss means a transition, however it was packed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from agentlightning.data.forest import Forest, cut, plant, prefix_order
from agentlightning.data.transitions import FloatArray, IntArray, Transition

Level: TypeAlias = Literal["transition", "trajectory", "tree"]
Aggregation: TypeAlias = Literal["token-mean", "sequence-mean", "rollout-mean", "constant"]


@dataclass(frozen=True)
class CreditedTransition:
    """A transition with the advantage of each of its sampled tokens, float32[T]; where a critic had a say, also what it
    said each was worth, and what it is to say, float32[T] each."""

    transition: Transition
    advantages: FloatArray
    values: FloatArray | None = None
    value_targets: FloatArray | None = None

    @property
    def trains(self) -> bool:
        """Whether anything is learned from it, by the policy or by a critic."""
        return bool(self.advantages.any()) or not np.array_equal(_or_empty(self.values), _or_empty(self.value_targets))


@dataclass(frozen=True)
class TrainingSequence:
    """One row to compute. `token_ids` int32[L]; the rest are per sampled token, float32[N] or int32[N].

    `positions` are the indices of the sampled tokens in `token_ids`; `transitions` numbers the transition each token
    belongs to (from 0 within this sequence), `versions` the policy that sampled it (−1: unknown). `values` and
    `value_targets` are those of `CreditedTransition`. `tree` asks that prefixes which sequences of the batch share be
    computed once."""

    rollout_id: str
    token_ids: IntArray
    positions: IntArray
    transitions: IntArray
    logprobs: FloatArray
    advantages: FloatArray
    versions: IntArray
    values: FloatArray | None = None
    value_targets: FloatArray | None = None
    tree: bool = False

    def __len__(self) -> int:
        return len(self.token_ids)

    def only(self, kept: npt.NDArray[np.bool_]) -> TrainingSequence:
        """The same row with the loss of some of its sampled tokens alone, bool[N]."""
        names = ("positions", "logprobs", "advantages", "versions", "values", "value_targets")
        parts: dict[str, Any] = {name: one[kept] for name in names if (one := getattr(self, name)) is not None}
        _, numbers = np.unique(self.transitions[kept], return_inverse=True)
        return replace(self, transitions=numbers.astype(np.int32), **parts)

    @property
    def oldest_version(self) -> int | None:
        """The oldest policy that sampled a token of it; None where none is known."""
        known = self.versions[self.versions >= 0]
        return int(known.min()) if len(known) else None

    @property
    def tokens_alone(self) -> int:
        """How many tokens training each of its transitions by itself would compute."""
        ends = self.positions[np.flatnonzero(np.diff(self.transitions, append=-1))]
        return int(ends.sum()) + len(ends)


@dataclass(frozen=True)
class MicroBatch:
    """Right-padded rows, or one row that holds a forest. `token_ids` int32[B, L] (0 where padded); per sampled token of
    all rows, in row order: `rows` and `positions` int64[N] say where it stands, `logprobs`, `advantages`, `weights`
    and, for a critic, `values` and `value_targets` float32[N], `versions` int32[N], `transitions` int64[N] which
    transition of the micro-batch it belongs to (from 0; none is spread over two micro-batches). In a forest one place
    may stand for the same token of several transitions.

    The loss is Σ weights · loss(token): weights already hold the aggregation's denominators over the whole batch, so
    that the sum over micro-batches is the loss of the batch. `tokens` counts those that are not padding."""

    token_ids: IntArray
    rows: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    logprobs: FloatArray
    advantages: FloatArray
    weights: FloatArray
    transitions: npt.NDArray[np.int64]
    versions: IntArray
    tokens: int
    values: FloatArray | None = None
    value_targets: FloatArray | None = None
    forest: Forest | None = None

    @property
    def predictors(self) -> npt.NDArray[np.int64]:
        """Where, in `token_ids` as one line, the token stands that predicts each sampled one, int64[N]."""
        if self.forest is not None:
            return self.forest.previous[self.positions]
        return self.rows * self.token_ids.shape[1] + self.positions - 1


def build_sequences(credited: Sequence[CreditedTransition], level: Level) -> list[TrainingSequence]:
    """Lay the transitions of one rollout (in call order) into training sequences.

    At level `trajectory`: (O1, A1), (O1+A1+O2, A2) → one sequence O1 A1 O2 A2 with loss on A1 and A2; a prompt that
    extends no earlier sequence starts a new one, and interleaved conversations each keep their own."""
    if level in ("transition", "tree"):
        return [_sequence([item], tree=level == "tree") for item in credited]
    chains: list[list[CreditedTransition]] = []
    tails: list[IntArray] = []  # all tokens of each chain so far
    for item in credited:
        prompt = item.transition.prompt_ids
        candidates = [i for i, earlier in enumerate(tails) if _extends(prompt, earlier)]
        extended = max(candidates, key=lambda i: len(tails[i]), default=None)
        tail = np.concatenate([prompt, item.transition.response_ids])
        if extended is None:
            chains.append([item])
            tails.append(tail)
        else:
            chains[extended].append(item)
            tails[extended] = tail
    return [_sequence(chain) for chain in chains]


def _extends(prompt: IntArray, earlier: IntArray) -> bool:
    return len(earlier) <= len(prompt) and np.array_equal(earlier, prompt[: len(earlier)])


def _sequence(chain: Sequence[CreditedTransition], *, tree: bool = False) -> TrainingSequence:
    """The chain as one row: the tokens of its last call, which hold those of the others."""
    last = chain[-1].transition
    starts = [len(item.transition.prompt_ids) for item in chain]
    lengths = [len(item.transition.response_ids) for item in chain]
    positions = [np.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    return TrainingSequence(
        rollout_id=last.rollout_id,
        token_ids=np.concatenate([last.prompt_ids, last.response_ids]),
        positions=np.concatenate(positions).astype(np.int32),
        transitions=np.repeat(np.arange(len(chain), dtype=np.int32), lengths),
        logprobs=np.concatenate([item.transition.logprobs for item in chain]),
        advantages=np.concatenate([item.advantages for item in chain]),
        versions=np.concatenate([item.transition.versions for item in chain]),
        values=_joined([item.values for item in chain]),
        value_targets=_joined([item.value_targets for item in chain]),
        tree=tree,
    )


def _joined(parts: Sequence[FloatArray | None]) -> FloatArray | None:
    found = [part for part in parts if part is not None]
    return np.concatenate(found) if found else None


def _or_empty(values: FloatArray | None) -> FloatArray:
    return np.zeros(0, np.float32) if values is None else values


def aggregation_weights(
    sequences: Sequence[TrainingSequence], aggregation: Aggregation, constant: int = 0
) -> list[FloatArray]:
    """Weight of each sampled token in the loss of this batch, one float32[N] per sequence.

    - `token-mean`: 1 / (tokens of the batch) (DAPO);
    - `sequence-mean`: mean over a transition's tokens, then over transitions (GRPO);
    - `rollout-mean`: mean over a rollout's tokens, then over rollouts;
    - `constant`: 1 / (transitions · constant), a fixed length that favours no answer for being short (Dr. GRPO)."""
    if aggregation == "token-mean":
        total = sum(len(sequence.positions) for sequence in sequences)
        return [np.full(len(s.positions), 1.0 / total, np.float32) for s in sequences]
    if aggregation == "rollout-mean":
        tokens: dict[str, int] = {}
        for s in sequences:
            tokens[s.rollout_id] = tokens.get(s.rollout_id, 0) + len(s.positions)
        return [np.full(len(s.positions), 1.0 / (len(tokens) * tokens[s.rollout_id]), np.float32) for s in sequences]
    counts = [np.bincount(s.transitions) for s in sequences]
    total = sum(len(count) for count in counts)
    if aggregation == "sequence-mean":
        return [
            (1.0 / (total * count[s.transitions])).astype(np.float32)
            for s, count in zip(sequences, counts, strict=True)
        ]
    return [np.full(len(s.positions), 1.0 / (total * constant), np.float32) for s in sequences]


def micro_batches(
    sequences: Sequence[TrainingSequence],
    weights: Sequence[FloatArray],
    max_tokens: int,
    max_sampled: int | None = None,
) -> Iterator[MicroBatch]:
    """Rows of similar length together, none shorter than half the longest: at most `max_tokens` padded tokens and
    `max_sampled` sampled ones each, where a sequence longer than that goes alone. Sequences of level `tree` go together
    with those they share a prefix with, at most `max_tokens` distinct tokens each."""
    max_sampled = max_sampled or max_tokens
    if any(sequence.tree for sequence in sequences):
        yield from _forests(sequences, weights, max_tokens, max_sampled)
        return
    order = sorted(range(len(sequences)), key=lambda i: len(sequences[i]), reverse=True)
    lengths = -np.array([len(sequences[i]) for i in order])  # ascending, for searchsorted
    start = 0
    while start < len(order):
        width = len(sequences[order[start]])
        stop = min(int(np.searchsorted(lengths, -width / 2, side="right")), start + max_tokens // width)
        sampled = np.cumsum([len(sequences[i].positions) for i in order[start:stop]])
        rows = order[start : start + max(1, int(np.searchsorted(sampled, max_sampled, side="right")))]
        yield pack([sequences[i] for i in rows], [weights[i] for i in rows])
        start += len(rows)


def _forests(
    sequences: Sequence[TrainingSequence], weights: Sequence[FloatArray], max_tokens: int, max_sampled: int
) -> Iterator[MicroBatch]:
    order, shared = prefix_order([sequence.token_ids for sequence in sequences])
    lengths = np.array([len(sequences[i]) for i in order], np.int64)
    sampled = np.array([len(sequences[i].positions) for i in order], np.int64)
    for start, stop in cut(lengths, shared, sampled, max_tokens, max_sampled):
        chosen = [sequences[i] for i in order[start:stop]]
        forest, paths = plant([sequence.token_ids for sequence in chosen], shared[start:stop])
        yield pack(chosen, [weights[i] for i in order[start:stop]], forest, paths)


def pack(
    sequences: Sequence[TrainingSequence],
    weights: Sequence[FloatArray],
    forest: Forest | None = None,
    paths: Sequence[npt.NDArray[np.int64]] = (),
) -> MicroBatch:
    """The sequences as one micro-batch of padded rows or, where `paths` say where their tokens are in it, a forest."""
    lengths = [len(sequence.positions) for sequence in sequences]
    if forest is None:
        token_ids = np.zeros((len(sequences), max(map(len, sequences))), np.int32)
        for row, sequence in zip(token_ids, sequences, strict=True):
            row[: len(sequence)] = sequence.token_ids
        rows, positions = np.arange(len(sequences)), [sequence.positions for sequence in sequences]
    else:
        token_ids, rows = forest.token_ids[None], np.zeros(len(sequences))
        positions = [path[sequence.positions] for path, sequence in zip(paths, sequences, strict=True)]
    counts = [int(sequence.transitions[-1]) + 1 for sequence in sequences]
    first = np.cumsum([0, *counts[:-1]])
    return MicroBatch(
        token_ids=token_ids,
        rows=np.repeat(rows.astype(np.int64), lengths),
        positions=np.concatenate(positions).astype(np.int64),
        logprobs=np.concatenate([s.logprobs for s in sequences]),
        advantages=np.concatenate([s.advantages for s in sequences]),
        weights=np.concatenate(weights),
        transitions=np.concatenate(
            [s.transitions + start for s, start in zip(sequences, first, strict=True)], dtype=np.int64
        ),
        versions=np.concatenate([s.versions for s in sequences]),
        tokens=sum(map(len, sequences)) if forest is None else len(forest.token_ids),
        values=_joined([s.values for s in sequences]),
        value_targets=_joined([s.value_targets for s in sequences]),
        forest=forest,
    )
