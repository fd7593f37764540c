"""Transitions with advantages → training sequences → micro-batches.

A training sequence is a row of token ids, with the loss inputs of each sampled token. At level
`transition` each call is a sequence; at level `tree` too, but prefixes shared within a batch are
computed once. At level `trajectory` a call whose prompt extends an earlier sequence token for token
is appended to it. Each token keeps its transition: "sequence" in a loss means a transition, however
it is packed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from agentlightning.data.forest import Forest, build_forest, cut, prefix_order
from agentlightning.data.functions import call
from agentlightning.data.transitions import FloatArray, IntArray, Transition
from agentlightning.errors import ConfigError

Level: TypeAlias = Literal["transition", "trajectory", "tree"]


@dataclass(frozen=True)
class CreditedTransition:
    """A transition with the advantage of each sampled token, float32[T]; with a critic, also its
    `values` and `value_targets`, float32[T] each. `weights` float32[P + T] cover all tokens, prompt
    included: of a prompt token, the weight of its −log p (default 0); of a sampled token, a factor
    of its advantage (default 1), where 0 leaves the token out of the batch."""

    transition: Transition
    advantages: FloatArray
    values: FloatArray | None = None
    value_targets: FloatArray | None = None
    weights: FloatArray | None = None

    def __post_init__(self) -> None:
        tokens = len(self.transition.prompt_ids) + len(self.transition.response_ids)
        if self.weights is not None and not (
            self.weights.shape == (tokens,) and np.isfinite(self.weights).all()
        ):
            raise ConfigError(
                f"the weights of a call must be a finite number for each of its {tokens} tokens, "
                f"prompt included, and are {self.weights!r:.200}"
            )

    @property
    def trains(self) -> bool:
        """Whether the policy or the critic learns anything from it."""
        values = self.values
        targets = self.value_targets
        off = values is not None and targets is not None and not np.array_equal(values, targets)
        return off or bool(self.advantages.any())


@dataclass(frozen=True)
class Origin:
    """The rollout of a sequence: the number of its `group` in the batch, the rewards of the whole
    group, the agent's `task` and metadata, its own reward and the `terms` that add up to it, by
    name. A rollout and its forks have a `share` of 1 together. Defaults mean unknown."""

    group: int = -1
    group_rewards: Sequence[float] = ()
    task: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])
    reward: float = math.nan
    terms: Mapping[str, float] = field(default_factory=dict[str, float])
    share: float = 1.0


@dataclass(frozen=True)
class Observed:
    """Tokens of a sequence that the policy did not sample but learns to predict. `positions` and
    `transitions` int32[M] are as in `TrainingSequence`; `weights` float32[M] are of −log p. Two
    calls may observe one token."""

    positions: IntArray
    transitions: IntArray
    weights: FloatArray


@dataclass(frozen=True)
class TrainingSequence:
    """One row to compute. `token_ids` int32[L]; the other arrays are per sampled token, float32[N]
    or int32[N].

    `positions` are indices of the sampled tokens in `token_ids`; `transitions` the number of each
    token's transition (from 0 in this sequence); `versions` the policy that sampled it (−1:
    unknown). `values` and `value_targets` are those of `CreditedTransition`. With `tree`, prefixes
    shared within the batch are computed once. `observed` are additional tokens to learn from."""

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
    observed: Observed | None = None
    origin: Origin | None = None

    @classmethod
    def of(
        cls,
        name: str,
        token_ids: Sequence[int],
        positions: Sequence[int],
        *,
        advantage: float = 0.0,
        **more: Any,
    ) -> TrainingSequence:
        """One transition, with these fields; its log-probabilities are 0 and its versions unknown
        by default."""
        count = len(positions)
        usual: dict[str, Any] = {
            "logprobs": np.zeros(count, np.float32),
            "versions": np.full(count, -1, np.int32),
        }
        return cls(
            rollout_id=name,
            token_ids=np.array(token_ids, np.int32),
            positions=np.array(positions, np.int32),
            transitions=np.zeros(count, np.int32),
            advantages=np.full(count, advantage, np.float32),
            **usual | more,
        )

    def __len__(self) -> int:
        return len(self.token_ids)

    def only(self, kept: npt.NDArray[np.bool_]) -> TrainingSequence:
        """The same row with only some of its sampled tokens, bool[N]."""
        names = ("positions", "logprobs", "versions", *_CREDIT)
        parts: dict[str, Any] = {
            name: array[kept] for name in names if (array := getattr(self, name)) is not None
        }
        _, numbers = np.unique(self.transitions[kept], return_inverse=True)
        return replace(self, transitions=numbers.astype(np.int32), **parts)

    @property
    def oldest_version(self) -> int | None:
        """The oldest policy that sampled a token; None if unknown."""
        known = self.versions[self.versions >= 0]
        return int(known.min()) if len(known) else None

    @property
    def tokens_alone(self) -> int:
        """The number of tokens that would be computed if each transition were trained
        separately."""
        ends = self.positions[np.flatnonzero(np.diff(self.transitions, append=-1))]
        return int(ends.sum()) + len(ends)


@dataclass(frozen=True)
class MicroBatch:
    """Right-padded rows, or one row that contains a forest.

    `token_ids` int32[B, L] (0 is padding). Per sampled token, in row order: `logprobs`,
    `advantages`, `weights` and, for a critic, `values` and `value_targets` float32[N], `versions`
    int32[N], and `transitions` int64[N], the number of its transition in the micro-batch (a
    transition is never split). `rows` and `positions` int64[N + M] locate the sampled and then the
    observed tokens; `observed` float32[M] are the weights of the latter. In a forest, several
    transitions may share one position.

    The loss is Σ weights · loss(token). Weights contain the denominators of the whole batch, so the
    losses of micro-batches add up. `tokens` does not count padding."""

    token_ids: IntArray
    rows: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    logprobs: FloatArray
    advantages: FloatArray
    weights: FloatArray
    transitions: npt.NDArray[np.int64]
    versions: IntArray
    tokens: int
    observed: FloatArray
    sequences: Sequence[TrainingSequence]
    values: FloatArray | None = None
    value_targets: FloatArray | None = None
    forest: Forest | None = None

    @property
    def predictors(self) -> npt.NDArray[np.int64]:
        """The index in the flattened `token_ids` of the token before each token with a loss,
        int64[N + M]."""
        if self.forest is not None:
            return self.forest.previous[self.positions]
        return self.rows * self.token_ids.shape[1] + self.positions - 1


def build_sequences(
    credited: Sequence[CreditedTransition], level: Level, origin: Origin | None = None
) -> list[TrainingSequence]:
    """Lay the transitions of one rollout (in call order, with this `origin`) into training
    sequences.

    At level `trajectory`: (O1, A1), (O1+A1+O2, A2) → one sequence O1 A1 O2 A2 with loss on A1 and
    A2. A prompt that extends no earlier sequence starts a new one, so interleaved conversations get
    one each."""
    made: list[TrainingSequence] = []
    for chain in _chains(credited) if level == "trajectory" else [[item] for item in credited]:
        calls = [item.transition for item in chain]
        starts = [(len(call.prompt_ids), len(call.response_ids)) for call in calls]
        sequence = TrainingSequence(
            rollout_id=calls[-1].rollout_id,
            # contain those of the others
            token_ids=calls[-1].token_ids,
            positions=np.concatenate(
                [np.arange(start, start + length, dtype=np.int32) for start, length in starts]
            ),
            transitions=np.repeat(
                np.arange(len(chain), dtype=np.int32), [length for _, length in starts]
            ),
            tree=level == "tree",
            origin=origin,
            **_joined(calls, "logprobs", "versions"),
            **_joined(chain, *_CREDIT),
        )
        made.append(
            sequence
            if all(item.weights is None for item in chain)
            else _with_weights(sequence, chain)
        )
    return made


def _chains(credited: Sequence[CreditedTransition]) -> list[list[CreditedTransition]]:
    """Calls that go on from one another, token for token. Of several that go on from one, the
    first."""
    chains: list[list[CreditedTransition]] = []
    ends: dict[str | None, list[CreditedTransition]] = {}  # chains by their last call
    for item in credited:
        call = item.transition
        chain = ends.get(call.continues)
        if chain is None or not _extends(call, chain[-1].transition):
            chain = []
            chains.append(chain)
        else:
            del ends[call.continues]
        chain.append(item)
        ends[call.span_id] = chain
    return chains


def _extends(call: Transition, earlier: Transition) -> bool:
    before = earlier.token_ids
    return np.array_equal(call.prompt_ids[: len(before)], before)


def _with_weights(
    sequence: TrainingSequence, chain: Sequence[CreditedTransition]
) -> TrainingSequence:
    """The chain's sequence with its token weights applied."""
    factors: list[FloatArray] = []
    observed: list[tuple[npt.NDArray[np.int64], FloatArray]] = []
    for item in chain:
        prompt = len(item.transition.prompt_ids)
        response = len(item.transition.response_ids)
        weights = item.weights
        if weights is None:
            weights = np.repeat(np.array([0, 1], np.float32), [prompt, response])
        positions = np.flatnonzero(weights[1:prompt]) + 1  # nothing predicts the first
        observed.append((positions, weights[positions].astype(np.float32)))
        factors.append(weights[prompt:])
    counts = [len(positions) for positions, _ in observed]
    if any(counts):
        places, weights = (np.concatenate(side) for side in zip(*observed, strict=True))
        numbers = np.repeat(np.arange(len(chain), dtype=np.int32), counts)
        sequence = replace(sequence, observed=Observed(places.astype(np.int32), numbers, weights))
    factor = np.concatenate(factors).astype(np.float32)
    sequence = replace(sequence, advantages=sequence.advantages * factor)
    return sequence if factor.all() else sequence.only(factor != 0)


def weighed(
    calls: Sequence[CreditedTransition], weigh: Callable[[Sequence[Transition]], Iterable[Any]]
) -> Sequence[CreditedTransition]:
    """A rollout's calls with the token weights that `weigh` returns for each. ConfigError if some
    are missing."""
    answer = call("token_weights", weigh, transitions=[item.transition for item in calls])
    found = [np.asarray(weights, np.float32) for weights in answer]
    if len(found) != len(calls):
        raise ConfigError(
            f"token_weights must return an array for each of {len(calls)} calls, not {len(found)}"
        )
    return [replace(item, weights=weights) for item, weights in zip(calls, found, strict=True)]


_CREDIT: Final = ("advantages", "values", "value_targets")


def _joined(parts: Sequence[Any], *names: str) -> dict[str, Any]:
    """The arrays of these names, each of all parts in a row; without those that the parts have
    not."""
    arrays = {name: [getattr(part, name) for part in parts] for name in names}
    return {name: np.concatenate(of) for name, of in arrays.items() if of[0] is not None}


def micro_batches(
    sequences: Sequence[TrainingSequence], weights: Sequence[FloatArray], max_tokens: int
) -> Iterator[MicroBatch]:
    """Rows of similar length together, none shorter than half the longest, of at most `max_tokens`
    tokens, padding included; a longer sequence goes alone. At level `tree`, sequences go with those
    that share their prefixes, at most `max_tokens` distinct and as many sampled tokens. `weights`
    are float32[N + M] per sequence, for sampled then observed tokens, or float32[N] for the sampled
    ones only."""
    if any(sequence.tree for sequence in sequences):
        order, shared = prefix_order([sequence.token_ids for sequence in sequences])
        lengths = np.array([len(sequences[i]) for i in order], np.int64)
        sampled = np.array([len(weights[i]) for i in order], np.int64)
        for start, stop in cut(lengths, shared, sampled, max_tokens):
            chosen = [sequences[i] for i in order[start:stop]]
            forest, paths = build_forest(
                [sequence.token_ids for sequence in chosen], shared[start:stop]
            )
            yield pack(chosen, [weights[i] for i in order[start:stop]], forest, paths)
        return
    order = sorted(range(len(sequences)), key=lambda i: len(sequences[i]), reverse=True)
    lengths = -np.array([len(sequences[i]) for i in order])  # ascending, for searchsorted
    start = 0
    while start < len(order):
        width = len(sequences[order[start]])
        similar = int(np.searchsorted(lengths, -width / 2, side="right"))
        rows = order[start : min(similar, start + max(1, max_tokens // width))]
        yield pack([sequences[i] for i in rows], [weights[i] for i in rows])
        start += len(rows)


def pack(
    sequences: Sequence[TrainingSequence],
    weights: Sequence[FloatArray],
    forest: Forest | None = None,
    paths: Sequence[npt.NDArray[np.int64]] = (),
) -> MicroBatch:
    """The sequences as one micro-batch: padded rows or, with the `paths` of their tokens in it, a
    forest. `weights` are as in `micro_batches`."""
    if forest is None:
        token_ids = np.zeros((len(sequences), max(map(len, sequences))), np.int32)
        for row, sequence in zip(token_ids, sequences, strict=True):
            row[: len(sequence)] = sequence.token_ids
        rows = np.arange(len(sequences))
    else:
        token_ids = forest.token_ids[None]
        rows = np.zeros(len(sequences), np.int64)
    places = [sequence.positions for sequence in sequences]
    lengths = [len(place) for place in places]
    observed: Sequence[FloatArray] = ()
    if sum(map(len, weights)) > sum(lengths):
        observed = [of[count:] for of, count in zip(weights, lengths, strict=True)]
        weights = [of[:count] for of, count in zip(weights, lengths, strict=True)]
        places += [
            np.zeros(0, np.int32) if sequence.observed is None else sequence.observed.positions
            for sequence in sequences
        ]
        lengths += [len(part) for part in observed]
        rows = np.concatenate([rows, rows])
    if forest is not None:
        places = [path[at] for path, at in zip([*paths, *paths], places, strict=False)]
    first = np.cumsum(
        [0, *(int(s.transitions[-1]) + 1 if len(s.transitions) else 0 for s in sequences)]
    )
    return MicroBatch(
        token_ids=token_ids,
        rows=np.repeat(rows.astype(np.int64), lengths),
        positions=np.concatenate(places).astype(np.int64),
        weights=np.concatenate(weights),
        transitions=np.concatenate(
            [s.transitions + start for s, start in zip(sequences, first, strict=False)],
            dtype=np.int64,
        ),
        tokens=sum(map(len, sequences)) if forest is None else len(forest.token_ids),
        observed=np.concatenate(observed) if observed else np.zeros(0, np.float32),
        sequences=sequences,
        forest=forest,
        **_joined(sequences, "logprobs", "versions", *_CREDIT),
    )
