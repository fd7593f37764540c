"""A slot table finds the longest known prefix and loses as little as possible."""

from __future__ import annotations

import numpy as np

from agentlightning.engine.slots import SlotTable


def tokens(*groups: int) -> np.ndarray:
    """`tokens(10, 105)`: ten tokens 0, 1, 2 …, then five of 100, 101 …; the last is the one to compute."""
    return np.concatenate([np.arange(group % 100) + group // 100 * 100 for group in groups])


def fill(table: SlotTable, sequence: np.ndarray) -> int:
    """Acquire a slot for a sequence and compute all of it."""
    placement = table.acquire(sequence)
    table.extend(placement.slot, sequence[placement.reused :], placement.reused)
    return placement.slot


def make(slots: int = 4, *, reuse: bool = True, share: bool = True) -> SlotTable:
    return SlotTable(slots, 100, reuse=reuse, share=share)


def test_a_continued_sequence_stays_in_its_slot() -> None:
    table = make()
    slot = fill(table, tokens(20))
    table.release(slot)
    placement = table.acquire(tokens(20, 105))
    assert (placement.slot, placement.start, placement.copied) == (slot, 20, 20)


def test_the_last_token_is_always_computed() -> None:
    table = make()
    table.release(fill(table, tokens(20)))
    assert table.acquire(tokens(20)).reused == 19


def test_a_prefix_in_a_busy_slot_is_copied() -> None:
    table = make()
    source = fill(table, tokens(20, 105))
    placement = table.acquire(tokens(20, 205))
    assert placement.slot != source
    assert (placement.source, placement.start, placement.copied) == (source, 0, 20)
    assert (table.token_ids[placement.slot, :20] == tokens(20)).all()


def test_a_short_shared_prefix_is_computed_rather_than_copied() -> None:
    table = make()
    fill(table, tokens(5, 110))
    assert table.acquire(tokens(5, 210)).reused == 0


def test_a_newcomer_that_only_shares_a_prefix_does_not_displace_a_finished_sequence() -> None:
    table = make()
    finished = fill(table, tokens(20, 110))
    table.release(finished)
    newcomer = table.acquire(tokens(20, 210))
    assert newcomer.slot != finished
    assert newcomer.copied == 20
    assert table.acquire(tokens(20, 110, 305)).slot == finished


def test_when_all_slots_hold_something_the_longest_unused_is_given_up() -> None:
    table = make(3)
    slots = [fill(table, tokens(start + 20)) for start in (100, 200, 300)]
    for slot in (slots[1], slots[2], slots[0]):
        table.release(slot)
    assert table.acquire(tokens(430)).slot == slots[1]
    assert table.free == 2


def test_a_given_up_slot_keeps_what_it_shares_with_the_newcomer() -> None:
    table = make(1)
    table.release(fill(table, tokens(20, 110)))
    placement = table.acquire(tokens(20, 210))
    assert (placement.slot, placement.start, placement.copied) == (0, 20, 20)
    assert table.length[0] == 20


def test_contents_that_cannot_be_cut_or_copied_are_used_whole_or_not_at_all() -> None:
    table = make(share=False)
    slot = fill(table, tokens(20))
    table.release(slot)
    assert table.acquire(tokens(15, 205)).reused == 0
    assert table.acquire(tokens(20, 105)).slot == slot


def test_after_a_flush_nothing_is_known() -> None:
    table = make()
    table.release(fill(table, tokens(20)))
    busy = fill(table, tokens(120))
    table.flush()
    assert table.acquire(tokens(20, 105)).reused == 0
    assert table.busy[busy]


def test_without_reuse_a_released_slot_is_empty() -> None:
    table = make(reuse=False, share=False)
    table.release(fill(table, tokens(20)))
    assert table.acquire(tokens(20, 105)).reused == 0


def test_exchanged_slots_keep_their_contents_and_state() -> None:
    table = make(2)
    first = fill(table, tokens(20))
    second = fill(table, tokens(130))
    table.release(second)
    table.exchange(first, second)
    assert table.busy.tolist() == [False, True]
    assert table.acquire(tokens(130, 205)).slot == first
