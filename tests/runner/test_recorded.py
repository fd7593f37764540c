"""Tools of an attempt that walks a recorded one again: a real server, a real runner, a tiny model.

`walking` calls its model, gives a reward of 0.5, rolls (0.25 inside), calls, books, calls, rolls,
calls; its file says which tools have run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

import agentlightning as agl
from agentlightning import semconv
from agentlightning.gateway.gateway import Gateway
from agentlightning.gateway.models import ModelEntry, ModelTable
from agentlightning.server.app import create_app
from agentlightning.server.serve import HttpServer
from agentlightning.store.client import LightningStoreClient
from agentlightning.store.redaction import Redact, redaction
from agentlightning.store.sources import forked
from agentlightning.store.sql import SqlStore
from agentlightning.tracing.rewards import find_reward_spans, get_reward_value
from agentlightning.types import (
    LLM,
    OWN_ENDPOINT,
    EnqueueRolloutRequest,
    ForkSource,
    Rollout,
    RolloutConfig,
    Span,
)
from tests.gateway.world import GREEDY, talking
from tests.runner.agents import walking
from tests.runner.world import reason_of, running, statuses, until

pytestmark = pytest.mark.anyio

RETRIED = RolloutConfig(max_attempts=3, retry_condition=("failed",), retry="replay")
PLAIN = redaction()
WAYS: list[tuple[Any, Any]] = [
    (walking.walk, "none"),
    (walking.walk_async, "none"),
    (walking.walk, "process"),
    (walking.walk_async, "process"),
]
each_way = pytest.mark.parametrize(
    ("agent", "isolation"), WAYS, ids=["thread", "loop", "process", "process, async"]
)


class World:
    def __init__(self, store: SqlStore, url: str, log: Path, resources_id: str) -> None:
        self.store = store
        self.url = url
        self.log = log
        self.resources_id = resources_id

    async def run(
        self, request: EnqueueRolloutRequest, agent: Any = walking.walk, isolation: Any = "none"
    ) -> Rollout:
        """Queue a rollout, and run it to its end by a runner that reaches the store by HTTP."""
        client = LightningStoreClient(self.url)
        (queued,) = await self.store.enqueue_many_rollouts([request])
        runner = agl.Runner(client, agent, isolation=isolation, concurrency=1)
        async with running(runner):
            (ended,) = await self.store.wait_for_rollouts([queued.rollout_id], timeout=60)
        await client.close()
        return ended

    async def first(
        self, agent: Any = walking.walk, isolation: Any = "none", **task: Any
    ) -> Rollout:
        return await self.run(self.request(**task), agent, isolation)

    def request(self, config: RolloutConfig = RETRIED, **task: Any) -> EnqueueRolloutRequest:
        return EnqueueRolloutRequest(
            input={"log": str(self.log), **task}, resources_id=self.resources_id, config=config
        )

    def ran(self) -> list[str]:
        """The tools that have run since the last look."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return lines

    async def spans(self, rollout: Rollout) -> list[Span]:
        return await self.store.query_spans(rollout.rollout_id, "latest")

    async def results(self, rollout: Rollout) -> list[tuple[Any, Any, bool]]:
        """Name and result of each operation, and whether it was served."""
        found = [span for span in await self.spans(rollout) if span.name == semconv.OPERATION]
        return [
            (
                span.attributes[semconv.OPERATION_NAME],
                span.attributes.get(semconv.OPERATION_RESULT),
                semconv.OPERATION_REPLAYED in span.attributes,
            )
            for span in found
        ]


@asynccontextmanager
async def serving(
    tmp_path: Path, redact: Redact = PLAIN, *, policy: Any = None, **options: Any
) -> AsyncGenerator[World]:
    store = await SqlStore.open(
        tmp_path / "store.db", synchronous="NORMAL", redact=redact, **options
    )
    async with talking(policy, length=4096 if policy else 1024) as (backend, _):
        models = ModelTable([ModelEntry("policy", backend, train=GREEDY)])
        gateway = Gateway(models, store, redact=redact)
        async with HttpServer(create_app(store, gateway=gateway)) as server:
            llm = LLM(endpoint=OWN_ENDPOINT, model="policy", gateway=True)
            resources = await store.add_resources({"llm": llm})
            yield World(store, server.url, tmp_path / "ran.txt", resources.resources_id)
        await gateway.close()
    await store.close()


@pytest.fixture
async def there(tmp_path: Path) -> AsyncIterator[World]:
    async with serving(tmp_path) as world:
        yield world


def fork(rollout: Rollout, at: int, tools: Any = "run") -> EnqueueRolloutRequest:
    config = msgspec.structs.replace(rollout.config, tools=tools)
    return forked(rollout, ForkSource(rollout_id=rollout.rollout_id, at=at), config=config)


def values(spans: list[Span]) -> list[float | None]:
    return [get_reward_value(span) for span in find_reward_spans(spans)]


@each_way
async def test_recorded_tools_do_not_run_before_the_fork_and_run_behind_it(
    there: World, agent: Any, isolation: Any
) -> None:
    source = await there.first(agent, isolation, random=True)
    assert source.status == "succeeded"
    assert there.ran() == ["roll 6", "book A1", "roll 6"]
    recorded = await there.results(source)
    ended = await there.run(fork(source, 2, tools="recorded"), agent, isolation)
    assert ended.status == "succeeded"
    assert there.ran() == ["roll 6"]
    first, booked, last = await there.results(ended)
    assert (first[:2], booked[:2]) == (recorded[0][:2], recorded[1][:2])
    assert [first[2], booked[2], last[2]] == [True, True, False]
    assert last[1] not in (recorded[0][1], recorded[2][1])


async def test_tools_run_again_by_default_and_a_random_one_diverges(there: World) -> None:
    source = await there.first(random=True)
    there.ran()
    ended = await there.run(msgspec.structs.replace(fork(source, 2), config=RolloutConfig()))
    assert ended.status == "failed"
    assert "409" in await reason_of(there.store, ended.rollout_id)
    assert there.ran() == ["roll 6"]


async def test_what_runs_once_is_served_behind_call_k_as_well(there: World) -> None:
    source = await there.first()
    there.ran()
    ended = await there.run(fork(source, 0))
    assert ended.status == "succeeded"
    assert there.ran() == ["roll 6", "roll 6"]
    assert [served for _, _, served in await there.results(ended)] == [False, True, False]


@pytest.mark.parametrize("tools", ["run", "recorded"])
@each_way
async def test_a_fork_has_the_rewards_of_its_sources_beginning_once(
    there: World, agent: Any, isolation: Any, tools: str
) -> None:
    source = await there.first(agent, isolation)
    assert values(await there.spans(source)) == [0.5, 0.25, 0.25, 1.0]
    there.ran()
    ended = await there.run(fork(source, 3, tools=tools), agent, isolation)
    assert there.ran() == (["roll 6", "roll 6"] if tools == "run" else [])
    spans = await there.spans(ended)
    assert values(spans) == [0.5, 0.25, 0.25, 1.0]
    inside = {span.span_id for span in spans if span.name == semconv.OPERATION}
    given = [span.parent_id in inside for span in find_reward_spans(spans)]
    assert given == [False, True, True, False]


@each_way
async def test_what_ran_once_is_served_to_a_retry_and_the_next(
    there: World, agent: Any, isolation: Any
) -> None:
    ended = await there.first(agent, isolation, interrupted="raise")
    assert await statuses(there.store, ended.rollout_id) == [["failed", "succeeded"]]
    assert there.ran() == ["roll 6", "book A1", "roll 6", "roll 6"]
    _, booked, _ = await there.results(ended)
    assert booked[2]
    assert '"paid": null' in booked[1]
    # its own record is whole: a fork of the retry is served the same
    forked_again = await there.run(fork(ended, 3, tools="recorded"), agent, isolation)
    assert there.ran() == []
    assert (await there.results(forked_again))[1][:2] == booked[:2]


async def test_a_retry_that_samples_anew_books_anew(there: World) -> None:
    config = RolloutConfig(max_attempts=2, retry_condition=("failed",))
    await there.run(there.request(config, interrupted="raise"))
    assert there.ran().count("book A1") == 2


async def test_a_retry_of_a_fork_walks_both(there: World) -> None:
    source = await there.first(interrupted="raise")
    there.ran()
    there.log.with_suffix(".on").unlink()
    again = await there.run(fork(source, 3, tools="recorded"))
    assert await statuses(there.store, again.rollout_id) == [["failed", "succeeded"]]
    assert there.ran() == []
    assert await there.results(again) == [
        (name, result, True) for name, result, _ in await there.results(source)
    ]


@pytest.mark.parametrize("result", ["tuple", "secret"])
async def test_what_is_not_recorded_whole_does_not_run_again_and_says_so(
    there: World, result: str
) -> None:
    ended = await there.first(interrupted="raise", result=result)
    assert ended.status == "failed"
    reason = await reason_of(there.store, ended.rollout_id)
    assert "NotRecordedError" in reason
    assert "must not run twice" in reason
    assert there.ran().count("book A1") == 1
    stored = str(await there.store.query_spans(ended.rollout_id))
    assert "a1b2c3d4" not in stored


async def test_a_hook_that_redacts_a_result_or_an_argument_is_noticed(tmp_path: Path) -> None:
    def hook(span: Span) -> Span:
        flight = f"{semconv.OPERATION_INPUT}.flight"
        if flight in span.attributes:
            span.attributes[flight] = "somewhere"
        return span

    async with serving(tmp_path, redaction(hook=hook)) as there:
        ended = await there.first(interrupted="raise")
        assert "must not run twice" in await reason_of(there.store, ended.rollout_id)
        assert there.ran().count("book A1") == 1


async def test_without_content_nothing_is_served(tmp_path: Path) -> None:
    async with serving(tmp_path, redaction("tokens")) as there:
        ended = await there.first(interrupted="raise")
        assert "NotRecordedError" in await reason_of(there.store, ended.rollout_id)
        assert there.ran().count("book A1") == 1


async def test_a_tool_that_calls_the_model_runs_again_and_its_calls_are_served(
    there: World,
) -> None:
    source = await there.first(research=True, random=True)
    assert source.status == "succeeded"
    there.ran()
    ended = await there.run(fork(source, 3, tools="recorded"))
    assert ended.status == "succeeded"
    assert there.ran() == ["research", "roll 6"]
    calls = [s.attributes for s in await there.spans(ended) if semconv.CALL_INDEX in s.attributes]
    flags = [call.get(semconv.CALL_FLAG) for call in calls]
    assert flags == ["replayed", "replayed", "replayed", None, None]


async def test_what_must_run_once_is_refused_in_the_program_of_a_command(there: World) -> None:
    code = "import agentlightning as agl; agl.operation(once=True)(print)('paid')"
    ended = await there.run(there.request(), agl.command([sys.executable, "-c", code]))
    assert "so that it would run again" in await reason_of(there.store, ended.rollout_id)
    output = [span.attributes.get(semconv.LOG_TEXT) for span in await there.spans(ended)]
    assert "paid\n" not in output


def runner(url: str) -> subprocess.Popen[bytes]:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.Popen([sys.executable, "-c", RUNNER, url], env=environment)


RUNNER = """
import asyncio, sys
import agentlightning as agl
from agentlightning.store.client import LightningStoreClient
from tests.runner.agents import walking

async def main():
    await agl.Runner(LightningStoreClient(sys.argv[1]), walking.walk).run()

asyncio.run(main())
"""


@pytest.mark.slow
async def test_what_ran_once_outlives_a_runner_that_is_killed_right_behind_it(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, lease_seconds=20.0) as there:
        config = RolloutConfig(max_attempts=3, retry_condition=("unresponsive",), retry="replay")
        request = there.request(config, interrupted="kill")
        (queued,) = await there.store.enqueue_many_rollouts([request])
        process = runner(there.url)
        await until(there.log.with_suffix(".on").exists)
        process.kill()
        process.wait()
        spans = await there.store.query_spans(queued.rollout_id)
        names = [span.attributes.get(semconv.OPERATION_NAME) for span in spans]
        assert "book" in names  # long before the next heartbeat
        attempt_id = spans[0].attempt_id
        await there.store.update_attempt(queued.rollout_id, attempt_id, status="unresponsive")
        process = runner(there.url)
        (ended,) = await there.store.wait_for_rollouts([queued.rollout_id], timeout=60)
        process.kill()
        process.wait()
        assert ended.status == "succeeded"
        assert there.ran().count("book A1") == 1
