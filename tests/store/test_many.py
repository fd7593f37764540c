"""Many stores read as one: every run, rollout and span is found, page by page, beside whatever
writes them."""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import shutil
import socket
from pathlib import Path

import pytest

from agentlightning.errors import ConfigError, ConflictError, InvalidError, NotFoundError
from agentlightning.store.many import ManyStores
from agentlightning.store.sql import SqlStore
from agentlightning.tracing.context import AttemptTracer
from agentlightning.tracing.rewards import reward_attributes
from agentlightning.types import And, Condition, EnqueueRolloutRequest, Metrics, Order

pytestmark = pytest.mark.anyio


async def filled(path: Path, name: str, count: int) -> SqlStore:
    path.parent.mkdir(parents=True, exist_ok=True)
    store = await SqlStore.open(path)
    run = await store.start_run("grpo", {"seed": 1}, run_id=f"run-{name}")
    await store.add_metrics(Metrics(run_id=run.run_id, step=1, time=1.0, values={"reward": 0.5}))
    requests = [EnqueueRolloutRequest(input=f"{name} {n}", run_id=run.run_id) for n in range(count)]
    await store.enqueue_many_rollouts(requests)
    return store


async def test_all_runs_and_rollouts_are_found_while_they_are_written(tmp_path: Path) -> None:
    written = await filled(tmp_path / "runs" / "one" / "store.sqlite", "one", 7)
    await (await filled(tmp_path / "two.sqlite", "two", 5)).close()
    (tmp_path / "other.sqlite").write_bytes(b"not a store")
    many = await ManyStores.open([tmp_path])
    assert {run.manifest["name"]: run.run_id for run in await many.query_runs()} == {
        "one": "run-one",
        "two": "run-two",
    }
    assert list(many.problems) == [tmp_path / "other.sqlite"]
    for limit in (1, 3, 5, 100):
        found, cursor = [], None
        while True:
            page = await many.page_rollouts(limit=limit, cursor=cursor, with_total=True)
            assert page.total == 12
            found += page.items
            cursor = page.next_cursor
            if cursor is None:
                break
        assert len(found) == len({one.rollout_id for one in found}) == 12
    of_one = await many.page_rollouts(And([Condition("run_id", "eq", "run-one")]), limit=3)
    assert [one.run_id for one in of_one.items] == [
        "run-one"
    ] * 3 and of_one.next_cursor is not None
    rest = await many.page_rollouts(
        And([Condition("run_id", "eq", "run-one")]), limit=9, cursor=of_one.next_cursor
    )
    assert len(rest.items) == 4
    assert (await many.query_metrics("run-two"))[0].values == {"reward": 0.5}
    assert (await many.get_rollout_by_id(found[-1].rollout_id)) == found[-1]
    assert await many.get_rollout_by_id("nobody") is None
    assert (await many.statistics())["rollouts"] == 12
    await many.close()
    await written.close()


async def test_a_store_that_comes_is_found_and_listeners_are_told_and_one_that_goes_is_left_out(
    tmp_path: Path,
) -> None:
    one = await filled(tmp_path / "one" / "store.sqlite", "one", 1)
    many = await ManyStores.open([tmp_path])
    with many.events() as queue:
        two = await filled(tmp_path / "two" / "store.sqlite", "two", 1)
        async with asyncio.timeout(20):
            while len(await many.query_runs()) < 2:
                assert await queue.get() is None
        await two.close()
        while not queue.empty():
            queue.get_nowait()
        await (await filled(tmp_path / "three" / "store.sqlite", "three", 1)).close()
        assert len(await many.query_runs()) == 3  # who asks finds it, and everybody is told
        assert queue.get_nowait() is None
        shutil.rmtree(tmp_path / "three")
        for file in (tmp_path / "two").iterdir():
            file.unlink()
        async with asyncio.timeout(20):
            while len(await many.query_runs()) > 1:
                await queue.get()
    with pytest.raises(ConflictError, match="open for reading"):
        await many.enqueue_rollout(input="x")
    with pytest.raises(NotFoundError):
        await many.query_metrics("run-two")
    with pytest.raises(NotFoundError):
        await many.query_attempts("nobody")
    await many.close()
    await one.close()


async def test_pages_miss_and_repeat_nothing_where_stores_are_written_between_them(
    tmp_path: Path,
) -> None:
    stores = [
        await filled(tmp_path / name / "store.sqlite", name, 4) for name in ("one", "two", "three")
    ]
    many = await ManyStores.open([tmp_path])
    found, cursor = [], None
    for turn in range(6):
        page = await many.page_rollouts(limit=2, cursor=cursor)
        found += [one.rollout_id for one in page.items]
        cursor = page.next_cursor
        # what was written last is another store each time
        await stores[turn % 3].update_worker(f"worker-{turn}", {})
        await many.query_runs()
    assert cursor is None and len(found) == len({*found}) == 12
    with pytest.raises(InvalidError, match="ask from the start"):
        await many.page_rollouts(cursor='{"nowhere":null}')
    with pytest.raises(InvalidError, match="ask from the start"):
        await many.page_rollouts(cursor="nowhere")
    await many.close()
    for store in stores:
        await store.close()


@pytest.mark.parametrize("limit", [1, 3, 100])
@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("field", ["reward", "start_time", "status", "error", "number"])
async def test_rollouts_of_several_stores_are_sorted_together(
    field: str, descending: bool, limit: int, tmp_path: Path
) -> None:
    """As one store sorts them that holds them all."""
    clock = functools.partial(next, itertools.count(1e9))  # one for all
    files = [*(f"many/{n}.sqlite" for n in range(3)), "one.sqlite"]
    *stores, together = [await SqlStore.open(tmp_path / file, clock=clock) for file in files]
    for number, reward in enumerate([0.5, None, 1.0, 0.25, None, 0.75, 0.0]):
        for store in (stores[number % 3], together):
            begun = await store.start_rollout(number, rollout_id=f"ro-{number}")
            tracer = AttemptTracer(begun.rollout_id, begun.attempt.attempt_id)
            if reward is not None:
                tracer.record("agentlightning.annotation", reward_attributes(reward))
                await store.add_many_spans(tracer.drain())
            why = {"reason": f"reason {number}"} if number % 2 else {}
            status = "failed" if number % 2 else "succeeded"
            await store.update_attempt(
                begun.rollout_id, begun.attempt.attempt_id, status=status, metadata=why
            )
    many = await ManyStores.open([tmp_path / "many"])
    order = [Order(field=field, descending=descending), Order(field="start_time")]
    found, cursor, first = list[str](), None, True
    while first or cursor:
        page = await many.page_rollouts(order=order, limit=limit, cursor=cursor, with_total=first)
        assert page.total == (7 if first else None) and len(page.items) <= limit
        found, cursor, first = (
            [*found, *(one.rollout_id for one in page.items)],
            page.next_cursor,
            False,
        )
    assert found == [one.rollout_id for one in (await together.page_rollouts(order=order)).items]
    skipped = await many.page_rollouts(order=order, limit=2, offset=3)
    assert [one.rollout_id for one in skipped.items] == found[3:5]
    with pytest.raises(InvalidError, match="cannot be sorted by group_end_time"):
        await many.page_rollouts(order=[Order(field="group_end_time")])
    for store in (many, together, *stores):
        await store.close()


async def test_a_file_is_named_itself(tmp_path: Path) -> None:
    await (await filled(tmp_path / "one.store", "one", 2)).close()
    await (await filled(tmp_path / "two" / "store.sqlite", "two", 1)).close()
    many = await ManyStores.open([tmp_path / "one.store", tmp_path / "two" / "store.sqlite"])
    assert len(await many.query_rollouts()) == 3
    await many.close()


async def test_a_run_of_a_copied_store_is_there_once_and_a_replaced_store_is_read_anew(
    tmp_path: Path,
) -> None:
    await (await filled(tmp_path / "one" / "store.sqlite", "one", 1)).close()
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    many = await ManyStores.open([tmp_path])
    assert [run.run_id for run in await many.query_runs()] == ["run-one"]
    for name in ("one", "copy"):
        shutil.rmtree(tmp_path / name)
    await (await filled(tmp_path / "one" / "store.sqlite", "new", 3)).close()
    assert [run.run_id for run in await many.query_runs()] == ["run-new"]
    assert len((await many.page_rollouts(limit=10)).items) == 3
    await many.close()


@pytest.mark.parametrize("part", ["", "-wal", "-shm", "-journal", "-owner"])
async def test_what_is_no_regular_file_is_left_out_and_keeps_nobody_waiting(
    tmp_path: Path, part: str
) -> None:
    await (await filled(tmp_path / "one.sqlite", "one", 1)).close()
    pipe, socket_path = tmp_path / "pipe.sqlite", tmp_path / "socket.sqlite"
    if part:
        await (await filled(pipe, "pipe", 1)).close()
        pipe.with_name(f"pipe.sqlite{part}").unlink(missing_ok=True)
    os.mkfifo(pipe.with_name(f"pipe.sqlite{part}"))
    (tmp_path / "device.sqlite").symlink_to("/dev/zero")
    (tmp_path / "circle.sqlite").symlink_to("circle.sqlite")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(socket_path))
        async with asyncio.timeout(20):
            many = await ManyStores.open([tmp_path])
            assert [run.run_id for run in await many.query_runs()] == ["run-one"]
    assert set(many.problems) == {pipe, socket_path, tmp_path / "device.sqlite"}
    assert all("it is no regular file" in problem for problem in many.problems.values())
    await many.close()
    with pytest.raises(ConfigError, match="no regular file"):
        await SqlStore.open(pipe)
