"""Kills while agents work: is an answer that was committed ever paid for twice?

    python benchmarks/kills.py [--kills 100] [--rollouts 300]

`agl server` in front of a model server that counts what it is asked, `agl runner` with an agent of
ten calls, and as a second part `agl eval` of the same agent. One of the processes is killed (SIGKILL)
at a random moment and started again at once, over and over; the model server among them. Every answer
of the model server is new, so that an answer that was sampled again cannot pass for the first."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Final

from aiohttp import web

from agentlightning import semconv
from agentlightning.store.client import LightningStoreClient
from agentlightning.store.reader import StoreReader
from agentlightning.types import EnqueueRolloutRequest, Rollout, RolloutConfig, Span

CALLS: Final = 10
ANSWER_SECONDS: Final = 0.2
AT_ONCE: Final = 8
PORTS: Final = {"model server": 8911, "server": 8912}
AGL: Final = str(Path(sys.executable).parent / "agl")
RESULTS: Final = Path(__file__).parent / "results" / "kills.json"
RETRIED: Final = RolloutConfig(
    max_attempts=30, retry_condition=("unresponsive", "failed"), retry="replay"
)
AGENT: Final = """
import agentlightning as agl

@agl.rollout
async def agent(task: dict, llm: agl.LLM) -> float:
    client = agl.openai_client(llm).with_options(max_retries=8)
    messages = []
    for turn in range(10):
        messages.append({"role": "user", "content": f"{task['name']} {turn}"})
        answer = await client.chat.completions.create(model=llm.model, messages=messages)
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
    return 1.0
"""


def serve_model(log: Path) -> None:
    """Answer chats, and note in `log` what was asked."""
    numbers = count()
    mark = os.getpid()

    async def answer(request: web.Request) -> web.Response:
        body = await request.json()
        with log.open("a") as lines:
            lines.write(body["messages"][-1]["content"] + "\n")
        await asyncio.sleep(ANSWER_SECONDS)
        said = {"role": "assistant", "content": f"answer {mark}.{next(numbers)}"}
        choice = {"index": 0, "message": said, "finish_reason": "stop"}
        usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
        found = {"id": "x", "object": "chat.completion", "created": 1, "model": body["model"]}
        return web.json_response(found | {"choices": [choice], "usage": usage})

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "m", "object": "model"}]})

    app = web.Application()
    app.add_routes([web.post("/v1/chat/completions", answer), web.get("/v1/models", models)])
    web.run_app(app, port=PORTS["model server"], host="127.0.0.1", print=None)


class Processes:
    """The processes of a campaign, each started again after it was killed."""

    def __init__(self, folder: Path, commands: dict[str, Sequence[str]]) -> None:
        self.folder = folder
        self.commands = commands
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                self.commands[name],
                cwd=self.folder,
                stdout=log,
                stderr=log,
                env={**os.environ, "OPENAI_API_KEY": "none"},
                start_new_session=True,
            )

    def kill(self, name: str) -> None:
        os.killpg(self.running[name].pid, signal.SIGKILL)
        self.running[name].wait()

    def end(self) -> None:
        for name in self.running:
            self.kill(name)


@contextlib.asynccontextmanager
async def opened(store: LightningStoreClient) -> AsyncGenerator[LightningStoreClient]:
    yield store
    await store.close()


def lines_of(log: Path) -> list[str]:
    return log.read_text().splitlines() if log.exists() else []


def paid_twice(
    asked: Counter[str], rollouts: Sequence[tuple[Rollout, list[Span]]]
) -> dict[str, Any]:
    """How the rollouts ended, and how often the model was asked for what was committed before."""
    again: list[str] = []
    extra = incomplete = retried = replayed = 0
    for rollout, spans in rollouts:
        by_attempt: dict[str, list[Span]] = {}
        for span in spans:
            if semconv.CALL_INDEX in span.attributes and span.status.status_code != "ERROR":
                by_attempt.setdefault(span.attempt_id, []).append(span)
        retried += len(by_attempt) > 1
        last = max(by_attempt.values(), key=lambda calls: calls[0].start_time, default=[])
        incomplete += len(last) != CALLS
        sampled = Counter[str]()
        for calls in by_attempt.values():
            for call in calls:
                if semconv.CALL_REPLAYED_ATTEMPT in call.attributes:
                    replayed += 1
                else:
                    turn = json.loads(str(call.attributes[semconv.GEN_AI_INPUT_MESSAGES]))[-1]
                    sampled[turn["content"]] += 1
        again += [name for name, times in sampled.items() if times > 1]
        extra += sum(asked[f"{rollout.input['name']} {turn}"] - 1 for turn in range(CALLS))
    return {
        "rollouts": len(rollouts),
        "succeeded": sum(rollout.status == "succeeded" for rollout, _ in rollouts),
        "with more than one attempt": retried,
        "whose last attempt lacks a call": incomplete,
        "calls answered from the record": replayed,
        "calls in flight, asked again": extra - len(again),
        "committed calls asked again": len(again),
    }


async def with_runners(folder: Path, kills: int, rollouts: int) -> dict[str, Any]:
    """`agl server` and `agl runner`: either, or the model server, is killed."""
    log = folder / "asked.txt"
    url = f"http://127.0.0.1:{PORTS['server']}"
    model = f"http://127.0.0.1:{PORTS['model server']}/v1"
    served = (
        "--backend",
        model,
        "--kind",
        "openai",
        "--model",
        "m",
        "--port",
        str(PORTS["server"]),
    )
    processes = Processes(
        folder,
        {
            "model server": (sys.executable, __file__, "--model-server", str(log)),
            "server": (AGL, "server", "--store", "store.sqlite", *served),
            "runner": (
                AGL,
                "runner",
                "agent.py:agent",
                "--server",
                url,
                "--concurrency",
                str(AT_ONCE),
            ),
        },
    )
    for name in processes.commands:
        processes.start(name)
    chance = random.Random(1)
    killed = Counter[str]()
    try:
        async with opened(LightningStoreClient(url, patience=60.0)) as store:
            requests = [
                EnqueueRolloutRequest(input={"name": f"task-{number}"}, config=RETRIED)
                for number in range(rollouts)
            ]
            names = [one.rollout_id for one in await store.enqueue_many_rollouts(requests)]
            while sum(killed.values()) < kills:
                await asyncio.sleep(chance.uniform(0.5, 2.5))
                name = chance.choice(["runner", "runner", "server", "model server"])
                processes.kill(name)
                processes.start(name)
                killed[name] += 1
            deadline = time.monotonic() + 600
            while time.monotonic() < deadline:
                ended = await store.wait_for_rollouts(names, timeout=5.0)
                if len(ended) == len(names):
                    break
    finally:
        processes.end()
    return {"kills": dict(killed)} | await read(folder / "store.sqlite", log)


async def with_trainer(folder: Path, kills: int, rollouts: int) -> dict[str, Any]:
    """`agl eval`, which has store, gateway and runner in its process, is killed and resumed."""
    log = folder / "asked.txt"
    model = f"http://127.0.0.1:{PORTS['model server']}/v1"
    tasks = "".join(json.dumps({"name": f"task-{number}"}) + "\n" for number in range(rollouts))
    (folder / "tasks.jsonl").write_text(tasks)
    command = (AGL, "eval", "agent.py:agent", "tasks.jsonl", "--endpoint", model, "--model", "m")
    limits = (
        "--n-runners",
        str(AT_ONCE),
        "--run-dir",
        "run",
        "--set",
        "algorithm.rollout.max_attempts=30",
    )
    evaluation = (
        *command,
        *limits,
        "--set",
        "algorithm.rollout.retry=replay",
        "--set",
        "algorithm.rollout.retry_condition=[unresponsive]",
    )
    processes = Processes(
        folder,
        {
            "model server": (sys.executable, __file__, "--model-server", str(log)),
            "first": evaluation,
            "resumed": (*evaluation, "--resume"),
        },
    )
    processes.start("model server")
    processes.start("first")
    running = "first"
    chance = random.Random(2)
    killed = 0
    try:
        while killed < kills and processes.running[running].poll() is None:
            before = len(lines_of(log))
            wanted = chance.randint(5, 40)
            while len(lines_of(log)) < before + wanted:  # it takes seconds to start
                await asyncio.sleep(0.05)
                if processes.running[running].poll() is not None:
                    break
            else:
                processes.kill(running)
                killed += 1
                running = "resumed"
                processes.start(running)
        await asyncio.to_thread(processes.running[running].wait, 900)
    finally:
        processes.kill("model server")
    return {"kills": {"agl eval": killed}} | await read(folder / "run" / "store.sqlite", log)


async def read(store: Path, log: Path) -> dict[str, Any]:
    asked = Counter(lines_of(log))
    reader = await StoreReader.open(str(store))
    found = [
        (rollout, await reader.query_spans(rollout.rollout_id))
        for rollout in await reader.query_rollouts()
    ]
    await reader.close()
    return paid_twice(asked, found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--rollouts", type=int, default=300)
    parser.add_argument("--model-server", type=Path)
    parser.add_argument("--keep", type=Path)
    arguments = parser.parse_args()
    if arguments.model_server:
        serve_model(arguments.model_server)
        return
    results: dict[str, Any] = {}
    parts = {"agl server, agl runner": with_runners, "agl eval --resume": with_trainer}
    for name, campaign in parts.items():
        with tempfile.TemporaryDirectory() as place:
            folder = (arguments.keep or Path(place)) / campaign.__name__
            folder.mkdir(parents=True)
            (folder / "agent.py").write_text(AGENT)
            share = arguments.kills if campaign is with_runners else arguments.kills // 5
            results[name] = asyncio.run(campaign(folder, share, arguments.rollouts))
        print(f"\n{name}")
        for what, value in results[name].items():
            print(f"  {what:<34} {value}")
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
