"""A slot table finds the longest known prefix and loses as little as possible."""

from __future__ import annotations

import random

import numpy as np
import pytest

from agentlightning.engine.slots import SHORTEST_COPY, SlotTable


def tokens(*groups: int) -> np.ndarray:
    """`tokens(10, 105)`: ten tokens 0, 1, 2 …, then five of 100, 101 …; the last is the one to
    compute."""
    return np.concatenate([np.arange(group % 100) + group // 100 * 100 for group in groups])


def fill(table: SlotTable, sequence: np.ndarray) -> int:
    """Acquire a slot for a sequence and compute all of it."""
    placement = table.acquire(sequence)
    table.extend(placement.slot, sequence[placement.reused :], placement.reused)
    return placement.slot


def common(one: np.ndarray, other: np.ndarray) -> int:
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length


@pytest.mark.parametrize(("reuse", "share"), [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("seed", range(5))
def test_as_much_is_reused_as_the_slots_hold(reuse: bool, share: bool, seed: int) -> None:
    drawing, table = random.Random(seed), SlotTable(4, 200, reuse=reuse, share=share)
    held: dict[int, np.ndarray] = {}
    busy: list[int] = []
    for _ in range(300):
        step = drawing.random()
        if step < 0.4 and busy:
            table.release(busy.pop(drawing.randrange(len(busy))))
        elif step < 0.45 and busy:
            first, second = busy[0], drawing.randrange(4)
            table.exchange(first, second)
            swap = {first: second, second: first}
            held = {swap.get(slot, slot): sequence for slot, sequence in held.items()}
            busy = [swap.get(slot, slot) for slot in busy]
        elif step < 0.47:
            table.flush()
            held = {}
        elif table.free:
            start = drawing.choice([*held.values(), np.zeros(0, dtype=np.int64)])
            new = np.array([drawing.randrange(2) for _ in range(drawing.randint(1, 20))])
            sequence = np.concatenate(
                [start[: drawing.choice([len(start), len(start) // 2])], new]
            )[:200]
            whole = [
                slot
                for slot, known in held.items()
                if slot not in busy and common(known, sequence[:-1]) == len(known)
            ]
            best = max((common(known, sequence[:-1]) for known in held.values()), default=0)
            placement = table.acquire(sequence)
            assert placement.slot not in busy
            if not reuse:
                assert placement.reused == 0
            elif share:
                assert best - SHORTEST_COPY < placement.reused <= best
            else:
                assert placement.reused == max((len(held[slot]) for slot in whole), default=0)
            assert not reuse or not whole or placement.slot in whole
            table.extend(placement.slot, sequence[placement.reused :], placement.reused)
            assert (table.token_ids[placement.slot, : len(sequence)] == sequence).all()
            held[placement.slot] = sequence
            busy.append(placement.slot)
        if not reuse:
            held = {slot: sequence for slot, sequence in held.items() if slot in busy}


def test_a_newcomer_that_only_shares_a_prefix_does_not_displace_a_finished_sequence() -> None:
    table = SlotTable(4, 100, reuse=True, share=True)
    finished = fill(table, tokens(20, 110))
    table.release(finished)
    newcomer = table.acquire(tokens(20, 210))
    assert newcomer.slot != finished
    assert newcomer.copied == 20
    assert table.acquire(tokens(20, 110, 305)).slot == finished


def test_when_all_slots_hold_something_the_longest_unused_is_given_up() -> None:
    table = SlotTable(3, 100, reuse=True, share=True)
    slots = [fill(table, tokens(start + 20)) for start in (100, 200, 300)]
    for slot in (slots[1], slots[2], slots[0]):
        table.release(slot)
    assert table.acquire(tokens(430)).slot == slots[1]
