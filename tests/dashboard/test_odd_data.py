"""What other programs store under our names, and data of odd sizes, are shown as far as they go."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from agentlightning.dashboard.rollout_views import rows_of
from agentlightning.dashboard.token_views import Tokenizers
from agentlightning.data.token_bytes import TokenBytes
from agentlightning.semconv import GEN_AI_INPUT_MESSAGES, GEN_AI_OUTPUT_MESSAGES
from agentlightning.store.base import LightningStore
from agentlightning.store.calls import StoreCall
from agentlightning.store.sql import SqlStore
from agentlightning.tracing.context import AttemptTracer
from agentlightning.tracing.rewards import reward_attributes
from agentlightning.types import EnqueueRolloutRequest, PromptTemplate, RolloutConfig
from tests.dashboard.test_routes import Place, place, record

__all__ = ["place"]
pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    "manifest",
    [
        {"config": "a text", "data": ["train"], "seed": "three"},
        {"config": {"algorithm": "mine", "models": 5}},
        {"config": {"algorithm": {"steps": "many", "reward": 3}}, "data": {"train": 7}},
        {"config": None},
    ],
)
async def test_a_manifest_of_another_program_hides_nothing(
    place: Place, manifest: dict[str, Any]
) -> None:
    run = await place.store.start_run("own", manifest)
    (rollout,) = await place.store.enqueue_many_rollouts(
        [EnqueueRolloutRequest(input=1, run_id=run.run_id)]
    )
    (row,) = await place.get("/runs")
    assert (row["run_id"], row["seed"], row["total_steps"], row["models"]) == (
        run.run_id,
        None,
        None,
        [],
    )
    assert (await place.post("/series", {"run_ids": [run.run_id], "names": []}))[0]["names"] == []
    assert (await place.get(f"/rollouts/{rollout.rollout_id}"))["shown"] is None
    assert (await place.get(f"/quality?run_id={run.run_id}"))["rollouts"] == 0


def test_each_policy_of_a_run_has_its_own_tokenizer(tmp_path: Path) -> None:
    def saved(folder: str, token: str) -> None:
        (tmp_path / folder).mkdir(parents=True)
        Tokenizer(WordLevel({token: 0}, unk_token=token)).save(
            str(tmp_path / folder / "tokenizer.json")
        )

    saved("checkpoints/step-1/writer", "w")
    saved("checkpoints/step-1/judge", "j")
    served = {
        name: TokenBytes(Tokenizer(WordLevel({name: 0}, unk_token=name))) for name in ("one", "two")
    }
    tokenizers = Tokenizers(lambda _: str(tmp_path / "store.sqlite"), served)
    found = {
        model: tokenizers.find("ro-1", model)
        for model in ("one", "two", "writer", "judge", "nobody")
    }
    assert [known and known[1][0].decode() for known in found.values()] == [
        "one",
        "two",
        "w",
        "j",
        None,
    ]


async def test_metadata_of_another_program_are_no_prompts(place: Place) -> None:
    run = await place.store.start_run("own", {})
    for metadata in (
        {"round": 3},
        {"round": {"number": 1}},
        {"candidate": "x"},
        {"candidate": {"name": "a"}},
    ):
        await place.store.add_resources(
            {"p": PromptTemplate(template="a")}, metadata, run_id=run.run_id
        )
    assert await place.get(f"/prompts?run_id={run.run_id}") == {
        "candidates": [],
        "rounds": [],
        "measured": [],
    }


async def test_a_message_with_a_number_of_any_length_is_shown(place: Place) -> None:
    (one,) = await record(place.store, [1.0])
    attempt = await place.store.get_latest_attempt(one.rollout_id)
    assert attempt is not None
    tracer = AttemptTracer(one.rollout_id, attempt.attempt_id)
    kind = {"openinference.span.kind": "LLM"}
    tracer.record("long", kind | {f"llm.input_messages.{'9' * 5000}.message.role": "user"})
    tracer.record(
        "odd",
        kind
        | {GEN_AI_INPUT_MESSAGES: '[{"role": {}, "content": [1]}]', GEN_AI_OUTPUT_MESSAGES: "[5]"},
    )
    await place.store.add_many_spans(tracer.drain())
    assert (await place.get(f"/rollouts/{one.rollout_id}"))["row"]["calls"] == 4


async def test_the_facts_of_a_rollout_are_of_its_last_attempt_whichever_is_shown(
    place: Place,
) -> None:
    config = RolloutConfig(max_attempts=2, retry_condition=["failed"])
    made = await place.store.start_rollout("twice", config=config)
    for number, (reward, status) in enumerate([(0.9, "failed"), (0.1, "succeeded")], start=1):
        if number > 1:
            await place.store.dequeue_rollout()
        attempt = await place.store.get_latest_attempt(made.rollout_id)
        assert attempt is not None and attempt.sequence_id == number
        tracer = AttemptTracer(made.rollout_id, attempt.attempt_id)
        tracer.record("reward", reward_attributes(reward))
        await place.store.add_many_spans(tracer.drain())
        await place.store.update_attempt(made.rollout_id, attempt.attempt_id, status=status)
    view = await place.get(f"/rollouts/{made.rollout_id}?attempt=1")
    assert (view["row"]["reward"], view["rewards"][0]["dimensions"][0]["value"]) == (0.1, 0.9)


class Watched(LightningStore):
    """A store, and how many readings of spans went on at once."""

    def __init__(self, store: SqlStore) -> None:
        self.store, self.now, self.most = store, Counter[str](), 0

    async def perform(self, call: StoreCall) -> Any:
        name = "spans" if call.method == "page_spans" else ""
        self.now[name] += 1
        self.most = max(self.most, self.now["spans"])
        try:
            return await self.store.perform(call)
        finally:
            self.now[name] -= 1

    async def close(self) -> None:
        pass


async def test_a_list_holds_the_spans_of_a_few_rollouts_at_once() -> None:
    store = await SqlStore.open(":memory:")
    rollouts = await record(store, [float(n) for n in range(30)])
    watched = Watched(store)
    rows = await rows_of(watched, rollouts)
    assert [row.reward for row in rows] == [float(n) for n in range(30)]
    assert watched.most <= 8
    await store.close()
