"""Transitions with advantages → training sequences → micro-batches.

A training sequence is a row of token ids with a loss row per sampled token. At level `transition` each call is a
sequence of its own; at level `tree` too, and whatever prefix the sequences of a batch share is computed once. At level
`trajectory` a call whose prompt extends an earlier sequence token for token is appended to it; at level `concat`
everything new is, whether or not it fits. Which token belongs to which transition is kept: "sequence" in a loss means a
transition, however it was packed. Sequences may have limits, by the names that Agent Lightning 0.3 gave them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from agentlightning.data.forest import Forest, cut, plant, prefix_order, shared_length
from agentlightning.data.transitions import FloatArray, IntArray, Transition
from agentlightning.errors import ConfigError, nearest

Level: TypeAlias = Literal["transition", "trajectory", "tree", "concat"]
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
    def teaches(self) -> bool:
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
    extends no earlier sequence starts a new one, and interleaved conversations each keep their own. At level `concat`
    there is one sequence, whatever the prompts are: of each, what follows the prefix it shares with the call before is
    appended, so that an answer may be trained after tokens that it was not sampled after."""
    if level in ("transition", "tree"):
        return [_sequence([item], tree=level == "tree") for item in credited]
    if level == "concat":
        return [_concatenated(credited)] if credited else []
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


def _concatenated(chain: Sequence[CreditedTransition]) -> TrainingSequence:
    parts: list[IntArray] = []
    starts: list[int] = []  # of the answers
    earlier = np.zeros(0, np.int32)
    for item in chain:
        prompt, answer = item.transition.prompt_ids, item.transition.response_ids
        parts += [prompt[shared_length(earlier, prompt) :], answer]
        starts.append(sum(map(len, parts)) - len(answer))
        earlier = np.concatenate([prompt, answer])
    return _sequence(chain, np.concatenate(parts), starts)


def _sequence(
    chain: Sequence[CreditedTransition],
    token_ids: IntArray | None = None,
    starts: Sequence[int] | None = None,
    *,
    tree: bool = False,
) -> TrainingSequence:
    """The chain as one row: the tokens of its last call, which hold those of the others, unless others are given with
    where the answers start in them."""
    last = chain[-1].transition
    starts = starts or [len(item.transition.prompt_ids) for item in chain]
    lengths = [len(item.transition.response_ids) for item in chain]
    positions = [np.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    return TrainingSequence(
        rollout_id=last.rollout_id,
        token_ids=np.concatenate([last.prompt_ids, last.response_ids]) if token_ids is None else token_ids,
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
        yield _pad([sequences[i] for i in rows], [weights[i] for i in rows], width)
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
        positions = [path[sequence.positions] for path, sequence in zip(paths, chosen, strict=True)]
        rows = np.zeros(sum(map(len, positions)), np.int64)
        yield _micro_batch(
            chosen, [weights[i] for i in order[start:stop]], forest.token_ids[None], rows, positions, forest
        )


def _pad(sequences: list[TrainingSequence], weights: Iterable[FloatArray], width: int) -> MicroBatch:
    token_ids = np.zeros((len(sequences), width), np.int32)
    for row, sequence in enumerate(sequences):
        token_ids[row, : len(sequence)] = sequence.token_ids
    rows = np.repeat(np.arange(len(sequences), dtype=np.int64), [len(s.positions) for s in sequences])
    return _micro_batch(sequences, weights, token_ids, rows, [s.positions for s in sequences])


def _micro_batch(
    sequences: list[TrainingSequence],
    weights: Iterable[FloatArray],
    token_ids: IntArray,
    rows: npt.NDArray[np.int64],
    positions: Sequence[npt.NDArray[np.integer]],
    forest: Forest | None = None,
) -> MicroBatch:
    counts = [int(sequence.transitions[-1]) + 1 for sequence in sequences]
    first = np.cumsum([0, *counts[:-1]])
    return MicroBatch(
        token_ids=token_ids,
        rows=rows,
        positions=np.concatenate(positions).astype(np.int64),
        logprobs=np.concatenate([s.logprobs for s in sequences]),
        advantages=np.concatenate([s.advantages for s in sequences]),
        weights=np.concatenate(list(weights)),
        transitions=np.concatenate(
            [s.transitions + start for s, start in zip(sequences, first, strict=True)], dtype=np.int64
        ),
        versions=np.concatenate([s.versions for s in sequences]),
        tokens=sum(map(len, sequences)) if forest is None else len(forest.token_ids),
        values=_joined([s.values for s in sequences]),
        value_targets=_joined([s.value_targets for s in sequences]),
        forest=forest,
    )


# --- limits ------------------------------------------------------------------------------------------------------

_KEYS: Final = ("level", "trajectory_max_prompt_length", "trajectory_max_response_length")


@dataclass(frozen=True)
class TrajectoryLimits:
    """A sequence begins with a prompt of at most `max_prompt_length` tokens and goes on for at most
    `max_response_length`, sampled or not; None is no limit."""

    max_prompt_length: int | None = None
    max_response_length: int | None = None


def read_trace_aggregator(settings: Mapping[str, Any]) -> tuple[Level, TrajectoryLimits]:
    """What 0.3's `trace_aggregator` says. ConfigError for an unknown key, a level that there is not, a limit that is no
    positive integer, or limits of trajectories at another level."""
    for key in settings:
        if key not in _KEYS:
            raise ConfigError(f"trace_aggregator has no key {key!r}; {nearest(str(key), _KEYS)}")
    level = settings.get("level", "transition")  # as in 0.3
    if level not in get_args(Level):
        raise ConfigError(f"trace_aggregator.level is {level!r}; {nearest(str(level), get_args(Level))}")
    limits = [settings.get(key) for key in _KEYS[1:]]
    for key, limit in zip(_KEYS[1:], limits, strict=True):
        if limit is not None and (type(limit) is not int or limit < 1):
            raise ConfigError(f"trace_aggregator.{key} is {limit!r}; give a number of tokens, at least 1")
        if limit is not None and level != "trajectory":
            raise ConfigError(
                f"trace_aggregator.{key} limits merged trajectories and level is {level!r}: leave it out, or limit "
                f"single calls by {key.removeprefix('trajectory_')}"
            )
    return level, TrajectoryLimits(*limits)


def cut_sequences(
    sequences: Sequence[TrainingSequence], limits: TrajectoryLimits
) -> tuple[list[TrainingSequence], Counter[str]]:
    """The sequences within the limits, and how many `calls` were cut whole, how many sampled `tokens` with them and
    from others, and how many `sequences` were begun anew because one was full. Calls are cut whole where another
    sequence can begin with them or nothing of them fits.

    With a response limit of 4, (P A1 O A2), of which A2 does not fit: A2 is trained in a sequence of its own, after the
    prompt P A1 O, if that is short enough for a prompt; else its first tokens are, as many as fit."""
    cuts: Counter[str] = Counter()
    if limits == TrajectoryLimits():
        return list(sequences), cuts
    within: list[TrainingSequence] = []
    for sequence in sequences:
        parts = list(_parts(sequence, limits))
        within += parts
        kept = sum(len(part.positions) for part in parts)
        calls = sum(int(part.transitions[-1]) + 1 for part in parts)
        cuts["tokens"] += len(sequence.positions) - kept
        cuts["calls"] += int(sequence.transitions[-1]) + 1 - calls
        cuts["sequences"] += max(0, len(parts) - 1)
    return within, cuts


def _parts(sequence: TrainingSequence, limits: TrajectoryLimits) -> list[TrainingSequence]:
    """What of a sequence fits, as one or several."""
    longest_prompt = limits.max_prompt_length or len(sequence)
    longest_response = limits.max_response_length or len(sequence)
    parts: list[list[npt.NDArray[np.int64]]] = []  # of each, the indices of the sampled tokens of each call
    end = 0  # where what is open has to end
    for sampled in np.split(np.arange(len(sequence.positions)), np.flatnonzero(np.diff(sequence.transitions)) + 1):
        positions = sequence.positions[sampled]
        prompt = int(positions[0])
        if int(positions[-1]) >= end and prompt <= longest_prompt:
            parts.append([])
            end = prompt + longest_response
        if prompt < end:
            parts[-1].append(sampled[positions < end])
    return [_part(sequence, np.concatenate(part)) for part in parts]


def _part(sequence: TrainingSequence, sampled: npt.NDArray[np.int64]) -> TrainingSequence:
    if len(sampled) == len(sequence.positions):
        return sequence
    transitions = sequence.transitions[sampled]
    return replace(
        sequence,
        token_ids=sequence.token_ids[: sequence.positions[sampled[-1]] + 1],
        positions=sequence.positions[sampled],
        transitions=transitions - transitions[0],
        logprobs=sequence.logprobs[sampled],
        advantages=sequence.advantages[sampled],
        versions=sequence.versions[sampled],
        values=None if sequence.values is None else sequence.values[sampled],
        value_targets=None if sequence.value_targets is None else sequence.value_targets[sampled],
    )
