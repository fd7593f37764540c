"""A runner is killed in the middle of its rollouts, and the next one goes on where it was: what was
answered is not sampled again, and all of it trains."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import msgspec
import pytest

from agentlightning import semconv
from agentlightning.data.transitions import trace_rollout
from agentlightning.gateway.gateway import Gateway
from agentlightning.gateway.models import ModelEntry, ModelTable
from agentlightning.server.app import create_app
from agentlightning.server.serve import HttpServer
from agentlightning.store.sql import SqlStore
from agentlightning.types import LLM, OWN_ENDPOINT, EnqueueRolloutRequest, RolloutConfig, Span
from tests.gateway.world import GREEDY, talking
from tests.runner.world import until

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

CALLS = ("weather", "hello", "count", "hello", "count", "hello")
RUNNER = """
import asyncio, sys
from openai import AsyncOpenAI
from agentlightning.runner.runner import Runner
from agentlightning.store.client import LightningStoreClient
from tests.gateway.talker import SEARCH_TOOL
from tests.test_retry import CALLS

async def agent(task, llm):
    messages = []
    async with AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key, max_retries=0) as client:
        for text in CALLS:
            messages.append({"role": "user", "content": text})
            answer = await client.chat.completions.create(
                model=llm.model, messages=messages, tools=[SEARCH_TOOL]
            )
            message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls or ():
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "20 degrees"})
    return 1.0

async def main():
    store = LightningStoreClient(sys.argv[1])
    await Runner(store, agent, concurrency=4).run()

asyncio.run(main())
"""


def runner(url: str) -> subprocess.Popen[bytes]:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    return subprocess.Popen([sys.executable, "-c", RUNNER, url], env=environment)


@asynccontextmanager
async def served(directory: Path) -> AsyncIterator[tuple[SqlStore, str]]:
    store = await SqlStore.open(directory / "store.sqlite", synchronous="NORMAL", lease_seconds=2.0)
    async with talking(length=1024) as (backend, _):
        gateway = Gateway(ModelTable([ModelEntry("policy", backend, train=GREEDY)]), store)
        async with HttpServer(create_app(store, gateway=gateway)) as server:
            yield store, server.url
        await gateway.close()
    await store.close()


def sampled(spans: list[Span]) -> list[Span]:
    """The calls that were answered by the model, and received."""
    return [
        span
        for span in spans
        if semconv.CALL_INDEX in span.attributes
        and semconv.CALL_REPLAYED_ATTEMPT not in span.attributes
        and span.status.status_code != "ERROR"
    ]


async def has_sampled(store: SqlStore, rollout_id: str, calls: int) -> bool:
    return len(sampled(await store.query_spans(rollout_id))) >= calls


async def test_a_killed_runners_rollouts_go_on_and_nothing_is_sampled_twice(
    tmp_path: Path,
) -> None:
    async with served(tmp_path) as (store, url):
        llm = LLM(endpoint=OWN_ENDPOINT, model="policy", gateway=True)
        resources = await store.add_resources({"llm": llm})
        request = EnqueueRolloutRequest(
            input="task",
            resources_id=resources.resources_id,
            config=RolloutConfig(max_attempts=9, retry_condition=("unresponsive",), retry="replay"),
        )
        rollouts = await store.enqueue_many_rollouts([request] * 3)
        ids = [rollout.rollout_id for rollout in rollouts]
        for wanted in (2, 5):  # calls of the first rollout, at which the runner is killed
            process = runner(url)
            await until(partial(has_sampled, store, ids[0], wanted))
            process.kill()
            process.wait()
        process = runner(url)
        ended = await store.wait_for_rollouts(ids, timeout=60)
        process.kill()
        process.wait()
        assert [rollout.status for rollout in ended] == ["succeeded"] * 3
        for rollout in ended:
            spans = await store.query_spans(rollout.rollout_id)
            assert len(sampled(spans)) == len(CALLS)
            traced = trace_rollout(rollout, spans)
            assert len(traced.transitions) == len(CALLS)
            assert not traced.excluded.total()
            by_name = {
                (span.attempt_id, span.attributes[semconv.CALL_INDEX]): span
                for span in sampled(spans)
            }
            last = await store.query_spans(rollout.rollout_id, "latest")
            copies = [span for span in last if semconv.CALL_REPLAYED_ATTEMPT in span.attributes]
            for copy in copies:
                name = (
                    copy.attributes[semconv.CALL_REPLAYED_ATTEMPT],
                    copy.attributes[semconv.CALL_REPLAYED_INDEX],
                )
                assert msgspec.structs.asdict(by_name[name])["tokens"] == copy.tokens
        first = await store.query_spans(ids[0], "latest")
        replayed = [span for span in first if semconv.CALL_REPLAYED_ATTEMPT in span.attributes]
        assert len(replayed) >= 4
