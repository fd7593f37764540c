"""Whose turn it is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agentlightning.gateway.fairness import FairQueue

SESSIONS = st.sampled_from("abcd")


def queue_of(names: str) -> FairQueue[str]:
    """`aab`: a's first and second item, then b's first."""
    queue: FairQueue[str] = FairQueue()
    for place, session in enumerate(names):
        queue.push(session, f"{session}{names[:place].count(session) + 1}")
    return queue


def test_sessions_take_turns_and_each_is_served_in_its_own_order() -> None:
    queue = queue_of("aaabc")
    assert [queue.pop() for _ in range(5)] == ["a1", "b1", "c1", "a2", "a3"]
    assert queue.pop() is None
    assert len(queue) == 0


def test_who_comes_back_waits_behind_those_who_have_not_been_served() -> None:
    queue = queue_of("abc")
    assert queue.pop() == "a1"
    queue.push("a", "a2")
    assert [queue.pop() for _ in range(3)] == ["b1", "c1", "a2"]


def test_an_item_that_does_not_suit_keeps_its_place() -> None:
    queue = queue_of("aab")
    assert queue.pop(lambda item: item != "a1") == "a2"
    assert queue.pop(lambda item: item.startswith("c")) is None
    assert [queue.pop(), queue.pop()] == ["b1", "a1"]


def test_an_item_that_was_taken_out_is_served_no_more() -> None:
    queue = queue_of("aab")
    queue.remove("a", "a1")
    queue.remove("a", "a1")
    queue.remove("z", "z1")
    assert len(queue) == 2
    assert [queue.pop(), queue.pop(), queue.pop()] == ["a2", "b1", None]


@given(st.lists(st.tuples(st.sampled_from(["push", "push", "pop", "leave"]), SESSIONS), max_size=80))
def test_nobody_is_served_twice_while_another_waits(steps: list[tuple[str, str]]) -> None:
    queue: FairQueue[tuple[str, int]] = FairQueue()
    waiting: dict[str, list[int]] = {session: [] for session in "abcd"}  # the numbers of each one's items
    served_since: dict[str, set[str]] = {}  # who was served since this session's last turn, or since it began to wait
    for number, (what, session) in enumerate(steps):
        if what == "push":
            if not waiting[session]:
                served_since[session] = set()
            queue.push(session, (session, number))
            waiting[session].append(number)
        elif what == "leave" and waiting[session]:
            queue.remove(session, (session, waiting[session].pop()))
        elif what == "pop":
            item = queue.pop()
            assert (item is None) == (not any(waiting.values()))
            if item is not None:
                served, of_item = item
                assert waiting[served].pop(0) == of_item  # first come, first served within a session
                for other in "abcd":
                    if waiting[other] and other != served:
                        assert served not in served_since[other]
                        served_since[other].add(served)
                served_since[served] = set()
        assert len(queue) == sum(map(len, waiting.values()))
