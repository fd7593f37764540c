"""What is exported from any store and imported into any other is the same there, to the last
bit."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from agentlightning.errors import ConfigError, ConflictError, InvalidError
from agentlightning.semconv import REWARD, reward_value
from agentlightning.store.base import LightningStore
from agentlightning.store.transfer import Exported, Imported, export_rollouts, import_rollouts
from agentlightning.types import Condition, EnqueueRolloutRequest, RolloutConfig
from tests.store.conftest import TOKENS, full_span, opened, span_of

pytestmark = pytest.mark.anyio

SUFFIXES = ["jsonl", "jsonl.gz"]


async def live(store: LightningStore, number: int, **fields) -> str:
    """A rollout with everything a rollout can have: tried twice, called, held, rewarded."""
    request = EnqueueRolloutRequest(
        input={"say": f'"{number}"\n√2 \u2028 \0', "nothing": None, "n": 1.0, "big": 2**60},
        config=RolloutConfig(max_attempts=2, retry_condition=("failed",), timeout_seconds=1e6),
        metadata={"tags": ["a", "b"], "score": 0.1 + 0.2},
        **fields,
    )
    (queued,) = await store.enqueue_many_rollouts([request])
    first = await store.start_attempt(queued.rollout_id)
    ids = first.rollout_id, first.attempt.attempt_id
    await store.update_attempt(*ids, status="failed", metadata={"why": "…"})
    second = await store.start_attempt(first.rollout_id, worker_id="w")
    ids = first.rollout_id, second.attempt.attempt_id
    await store.extend_attempts([ids], 0.1)
    await store.add_many_spans(
        [
            full_span(ids),
            span_of(ids, "reward", name=REWARD, attributes={reward_value(0): 0.3}),
        ]
    )
    await store.update_attempt(*ids, status="succeeded")
    return first.rollout_id


async def all_of(store: LightningStore) -> list[object]:
    return [
        (
            rollout,
            await store.query_attempts(rollout.rollout_id),
            await store.query_spans(rollout.rollout_id),
        )
        for rollout in await store.query_rollouts()
    ]


@pytest.mark.parametrize("suffix", SUFFIXES)
async def test_rollouts_come_back_as_they_were(store, tmp_path, suffix):
    path = tmp_path / f"rollouts.{suffix}"
    for number in range(3):
        await live(store, number)
    assert await export_rollouts(store, path) == Exported(rollouts=3, attempts=6, spans=6)
    before = await all_of(store)
    async with opened() as other:
        assert await import_rollouts(other, path) == Imported(rollouts=3)
        assert await all_of(other) == before
        (reward, call) = await other.query_spans(before[0][0].rollout_id)
        assert reward.attributes == {reward_value(0): 0.3}
        assert call.tokens == TOKENS
        assert await other.check_store() == []
        assert await import_rollouts(other, path) == Imported(stored_already=3)
        again = tmp_path / f"again.{suffix}"
        await export_rollouts(other, again)
        if suffix == "jsonl":
            assert again.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("suffix", SUFFIXES)
async def test_unfinished_rollouts_are_not_exported(tmp_path, suffix):
    path = tmp_path / f"rollouts.{suffix}"
    async with opened() as store, opened() as other:
        await store.enqueue_rollout("queued")
        await store.start_rollout("at work")
        superseded = await store.start_rollout("ended by its second attempt")
        second = await store.start_attempt(superseded.rollout_id)
        await store.update_attempt(second.rollout_id, second.attempt.attempt_id, status="succeeded")
        await live(store, 1)
        assert (await export_rollouts(store, path)).rollouts == 1
        assert (await import_rollouts(other, path)).rollouts == 1


async def exported(path: Path) -> list[str]:
    """The lines of three rollouts."""
    async with opened() as store:
        for number in range(3):
            await live(store, number)
        await export_rollouts(store, path)
    with path.open(newline="\n") as lines:
        return [line.rstrip("\n") for line in lines]


@pytest.mark.parametrize(
    "damage",
    [
        lambda line: line[:-10],
        lambda line: line.replace('"rollout_id"', '"rolout_id"', 1),
        lambda line: line.replace('"status":"succeeded"', '"status":"perfect"', 1),
        lambda line: line.replace('"sequence_id":1', '"sequence_id":3', 1),
        lambda line: line.replace('"span_id":"call"', '"span_id":"a b"', 1),
        lambda line: line.replace('"end_time":2.2', '"end_time":1e999', 1),
        lambda line: "[" * 100_000,
        lambda line: "\udc80",
    ],
)
async def test_a_malformed_line_is_named_and_nothing_of_it_is_stored(tmp_path, damage):
    path = tmp_path / "rollouts.jsonl"
    lines = await exported(path)
    damaged = [lines[0], "", damage(lines[1]), lines[2]]
    assert damaged[2] != lines[1]
    path.write_text("\n".join(damaged), errors="surrogateescape")
    async with opened() as store:
        with pytest.raises(InvalidError, match=r"rollouts\.jsonl, line 3"):
            await import_rollouts(store, path)
        for rollout in await store.query_rollouts():
            assert len(await store.query_spans(rollout.rollout_id)) == 2
        assert await store.check_store() == []
        path.write_text("\n".join(lines))
        await import_rollouts(store, path)
        assert (await store.statistics())["rollouts"] == 3


async def test_a_rollout_that_takes_anothers_place_is_a_conflict_at_its_line(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    lines = await exported(path)
    name = lines[0].partition('"rollout_id":"')[2].partition('"')[0]
    path.write_text("\n".join([lines[1], lines[0], lines[0].replace(name, "ro-other")]))
    async with opened() as store:
        with pytest.raises(
            ConflictError, match=r"line 3: something of this name is stored already"
        ):
            await import_rollouts(store, path)


async def test_a_damaged_file_is_refused(tmp_path):
    await exported(tmp_path / "rollouts.jsonl")
    whole = gzip.compress((tmp_path / "rollouts.jsonl").read_bytes())
    damaged = tmp_path / "damaged.jsonl.gz"
    async with opened() as store:
        for data in (whole[: len(whole) // 2], b"no gzip"):
            damaged.write_bytes(data)
            with pytest.raises((ConfigError, InvalidError), match=r"damaged\.jsonl\.gz"):
                await import_rollouts(store, damaged)
        with pytest.raises(ConfigError, match="No such file"):
            await import_rollouts(store, tmp_path / "none.jsonl")


async def test_a_file_appears_once_it_is_complete_and_is_not_overwritten_unasked(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    async with opened() as store:
        await store.enqueue_rollout(1)
        with pytest.raises(InvalidError):
            await export_rollouts(store, path, where=Condition("nonsense", "eq", 1))
        assert list(tmp_path.iterdir()) == []
        await export_rollouts(store, path)
        with pytest.raises(ConfigError, match="exists already"):
            await export_rollouts(store, path)
        await export_rollouts(store, path, overwrite=True)
        with pytest.raises(ConfigError, match=r"must end in one of \.jsonl"):
            await export_rollouts(store, tmp_path / "rollouts.csv")
        with pytest.raises(ConfigError, match="cannot be written"):
            await export_rollouts(store, tmp_path / "nowhere" / "rollouts.jsonl")
