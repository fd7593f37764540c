"""Keeps which sequence is in which slot of the cache, and finds prefixes that can be reused.

A finished sequence stays until its slot is needed, so that its next turn continues in place; a
prefix in another slot is copied. This is bookkeeping on token ids, without tensors."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

TokenArray = npt.NDArray[np.int64]

# Copying fewer positions than this costs about as much as computing them again.
SHORTEST_COPY = 8


class Placement(NamedTuple):
    """Where a sequence goes: positions below `start` are in `slot` already, `start … copied` are
    copied from the slot `source`, the rest is computed."""

    slot: int
    start: int
    source: int
    copied: int

    @property
    def reused(self) -> int:
        return max(self.start, self.copied)


class SlotTable:
    """The contents of `slots` slots with `capacity` positions each.

    `length[slot]` counts the positions that are valid, or will be after the planned pieces have run
    in order; `token_ids[slot, :length[slot]]` are their tokens."""

    def __init__(self, slots: int, capacity: int, *, reuse: bool, share: bool) -> None:
        self.token_ids = np.zeros((slots, capacity), dtype=np.int64)
        self.length = np.zeros(slots, dtype=np.int64)
        self.busy = np.zeros(slots, dtype=np.bool_)
        self._released = np.zeros(slots, dtype=np.int64)
        self._clock = 0
        self._reuse = reuse
        self._share = share

    @property
    def free(self) -> int:
        return int((~self.busy).sum())

    def acquire(self, tokens: TokenArray) -> Placement:
        """A free slot for a sequence `[n]`, with as much of its prefix as is cached anywhere.

        The last token is never reused, since its logits are needed. Call only while `free` is above
        0."""
        shared = self._shared_prefix(tokens[:-1])
        continued = ~self.busy & (self.length > 0) & (shared == self.length)
        if continued.any():
            slot = int(np.where(continued, shared, -1).argmax())
        else:
            # Empty slots first, then the one that was left alone for longest: nothing better known
            # is lost.
            age = np.where(self.length > 0, self._released, -1)
            slot = int(np.where(self.busy, self._clock + 1, age).argmin())
        self.busy[slot] = True
        return self._place(slot, shared)

    def reassign(self, slot: int, tokens: TokenArray) -> Placement:
        """A placement for a sequence `[n]` in its busy `slot`, whose contents are stale."""
        return self._place(slot, self._shared_prefix(tokens[:-1]))

    def extend(self, slot: int, tokens: TokenArray, start: int) -> None:
        """Record that `tokens` `[n]` are at positions `start …` of a slot."""
        stop = start + len(tokens)
        self.token_ids[slot, start:stop] = tokens
        self.length[slot] = stop

    def release(self, slot: int) -> None:
        """The sequence in a slot has ended; its prefix stays reusable until the slot is needed."""
        self._clock += 1
        self._released[slot] = self._clock
        self.busy[slot] = False
        if not self._reuse:
            self.length[slot] = 0

    def exchange(self, first: int, second: int) -> None:
        """Swap two slots with contents and state."""
        pair = [first, second]
        swapped = [second, first]
        for state in (self.token_ids, self.length, self.busy, self._released):
            state[pair] = state[swapped]

    def flush(self) -> None:
        """Forget all contents, which other weights computed. Busy slots stay busy."""
        self.length[:] = 0

    def _place(self, slot: int, shared: TokenArray) -> Placement:
        start = int(shared[slot])
        source = int(shared.argmax())
        copied = int(shared[source])
        if not self._share or copied - start < SHORTEST_COPY:
            copied = start
            source = slot
        self.token_ids[slot, start:copied] = self.token_ids[source, start:copied]
        self.length[slot] = copied
        return Placement(slot, start, source, copied)

    def _shared_prefix(self, tokens: TokenArray) -> TokenArray:
        """The number of leading tokens of a sequence `[n]` that each slot holds, `[slots]`."""
        if not self._reuse or len(tokens) == 0:
            return np.zeros(len(self.length), dtype=np.int64)
        differs = self.token_ids[:, : len(tokens)] != tokens
        first = np.where(differs.any(axis=1), differs.argmax(axis=1), len(tokens))
        shared = np.minimum(first, self.length)
        if not self._share:
            # Contents that cannot be cut back are usable only as a whole.
            shared[shared < self.length] = 0
        return shared
