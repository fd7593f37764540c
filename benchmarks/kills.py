"""Kills while agents work: is an answer that was committed ever paid for twice?

    python benchmarks/kills.py [--kills 100] [--rollouts 300] [--kinds processes,eval[,vllm,train]]

`agl server` in front of a model server that counts what it is asked, `agl runner` with an agent of
ten calls, and as a second part `agl eval` of the same agent. One of the processes is killed (SIGKILL)
at a random call and started again at once, over and over; the model server among them. Every answer
of the model server is new, so that an answer that was sampled again cannot pass for the first.

`vllm` kills a vLLM (of `make .venv-vllm/.setup`) that the server is in front of, and `train` kills
`agl train`, whose sampler that vLLM is, a tenth of the kills each."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Final

import torch
from aiohttp import web

from agentlightning import semconv
from agentlightning.data.call_filter import call_index, discarded_calls
from agentlightning.learner.policy import Policy
from agentlightning.learner.tiny import make_model, make_tokenizer
from agentlightning.store.client import LightningStoreClient
from agentlightning.store.reader import StoreReader
from agentlightning.types import EnqueueRolloutRequest, Rollout, RolloutConfig, Span

CALLS: Final = 10
ANSWER_SECONDS: Final = 0.2
AT_ONCE: Final = 8
PORTS: Final = {"model server": 8911, "server": 8912}
HERE: Final = Path(__file__).parent
AGL: Final = str(Path(sys.executable).parent / "agl")
RESULTS: Final = HERE / "results" / "kills.json"
VLLM: Final = (
    *(str(HERE.parent / ".venv-vllm/bin/vllm"), "serve", "model", "--port", "8911"),
    *("--dtype", "float32", "--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "64"),
    *("--logprobs-mode", "processed_logprobs", "--enable-scale-out", "--middleware", "_asked.note"),
)
VLLM_ENVIRONMENT: Final = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(HERE),
    "ASKED": "asked.txt",
    "ASKED_MODEL": "model",
}
TRAINING: Final = """
agent: agent.py:agent
model: model
train_dataset: tasks.jsonl
sampler: {vllm: http://127.0.0.1:8911}
algorithm:
  name: grpo
  steps: STEPS
  tasks_per_step: 4
  group_size: 8
  checkpoint_every: 1
  rollout: {max_attempts: 30}
max_sequence_length: 1024
n_runners: 8
"""
RETRIED: Final = RolloutConfig(
    max_attempts=30, retry_condition=("unresponsive", "failed"), retry="replay"
)
AGENT: Final = """
import agentlightning as agl

@agl.rollout
async def agent(task: dict, llm: agl.LLM, rollout: agl.Rollout) -> float:
    client = agl.openai_client(llm).with_options(max_retries=8)
    messages = []
    for turn in range(10):
        messages.append({"role": "user", "content": f"{rollout.rollout_id[-12:]} {turn}"})
        answer = await client.chat.completions.create(
            model=llm.model, messages=messages, max_tokens=8
        )
        said = answer.choices[0].message.content or "nothing"
        messages.append({"role": "assistant", "content": said})
    return len(said) % 4 / 4
"""


def serve_model(log: Path) -> None:
    """Answer chats, and note in `log` what was asked."""
    numbers = count()
    mark = os.getpid()

    async def answer(request: web.Request) -> web.Response:
        body = await request.json()
        with log.open("a") as lines:
            lines.write(f"{time.time()} {body['messages'][-1]['content']}\n")
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

    def __init__(self, folder: Path, commands: Mapping[str, Sequence[str]]) -> None:
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
                env={**os.environ, **VLLM_ENVIRONMENT, "OPENAI_API_KEY": "none"},
                start_new_session=True,
            )

    def kill(self, name: str) -> None:
        os.killpg(self.running[name].pid, signal.SIGKILL)
        self.running[name].wait()

    def end(self) -> None:
        for name, process in self.running.items():
            if process.poll() is None:
                self.kill(name)


@contextlib.asynccontextmanager
async def opened(store: LightningStoreClient) -> AsyncGenerator[LightningStoreClient]:
    yield store
    await store.close()


def lines_of(log: Path) -> list[str]:
    return log.read_text().splitlines() if log.exists() else []


async def asked_more(log: Path, calls: int, process: subprocess.Popen[bytes]) -> bool:
    """Whether the model is asked for so many calls before the process ends. It takes seconds to
    start."""
    wanted = len(lines_of(log)) + calls
    while process.poll() is None:
        if len(lines_of(log)) >= wanted:
            return True
        await asyncio.sleep(0.05)
    return False


async def start_vllm(processes: Processes) -> None:
    """Save a model of random weights, whose output layer is its own, and wait until it is served."""
    tokenizer = make_tokenizer([AGENT] * 3, 300)
    model: Any = make_model(tokenizer, seed=0)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    Policy(model, tokenizer).save(processes.folder / "model")
    processes.start("vLLM")
    while processes.running["vLLM"].poll() is None:
        with contextlib.suppress(OSError):
            (await asyncio.open_connection("127.0.0.1", 8911))[1].close()
            return
        await asyncio.sleep(1)
    sys.exit(f"vLLM has ended: see {processes.folder / 'vLLM.log'}, with --keep")


def is_answer(span: Span) -> bool:
    return semconv.CALL_INDEX in span.attributes and span.status.status_code != "ERROR"


def began(calls: Sequence[Span]) -> float:
    return calls[0].start_time


def paid_twice(
    asked: dict[str, list[float]], rollouts: Sequence[tuple[Rollout, list[Span]]]
) -> dict[str, Any]:
    """How the rollouts ended, and how often the model was asked, at these times by call, for what
    was committed before. An answer that the agent did not receive, since the server was killed
    between its commit and its delivery, was in flight."""
    extra = again = incomplete = retried = replayed = undelivered = 0
    for rollout, spans in rollouts:
        by_attempt: dict[str, list[Span]] = {}
        for span in spans:
            by_attempt.setdefault(span.attempt_id, []).append(span)
        for attempt, written in by_attempt.items():
            lost = discarded_calls(written)
            answered = [span for span in written if is_answer(span)]
            by_attempt[attempt] = [one for one in answered if call_index(one) not in lost]
            undelivered += len(answered) - len(by_attempt[attempt])
        attempts = [calls for calls in by_attempt.values() if calls]
        retried += len(attempts) > 1
        last = max(attempts, key=began, default=[])
        incomplete += len(last) != CALLS
        committed: dict[str, float] = {}
        for call in itertools.chain(*attempts):
            if semconv.CALL_REPLAYED_ATTEMPT in call.attributes:
                replayed += 1
            else:
                turn = json.loads(str(call.attributes[semconv.GEN_AI_INPUT_MESSAGES]))[-1]
                name = turn["content"]
                committed[name] = min(call.end_time, committed.get(name, math.inf))
        for turn in range(CALLS):
            name = f"{rollout.rollout_id[-12:]} {turn}"
            times = asked.get(name, [])
            extra += max(0, len(times) - 1)
            again += sum(when > committed.get(name, math.inf) for when in times[1:])
    return {
        "rollouts": len(rollouts),
        "succeeded": sum(rollout.status == "succeeded" for rollout, _ in rollouts),
        "with more than one attempt": retried,
        "whose last attempt lacks a call": incomplete,
        "calls answered from the record": replayed,
        "answers stored and not delivered": undelivered,
        "calls in flight, asked again": extra - again,
        "committed calls asked again": again,
    }


async def with_runners(
    folder: Path, kills: int, rollouts: int, *, vllm: bool = False
) -> dict[str, Any]:
    """`agl server` and `agl runner`: either, or the model server, is killed; or vLLM alone."""
    log = folder / "asked.txt"
    url = f"http://127.0.0.1:{PORTS['server']}"
    model = f"http://127.0.0.1:{PORTS['model server']}/v1"
    model_server = "vLLM" if vllm else "model server"
    kind = (
        ("vllm", "--tokenizer", "model", "--model", "model") if vllm else ("openai", "--model", "m")
    )
    served = ("--backend", model, "--port", str(PORTS["server"]), "--kind", *kind)
    processes = Processes(
        folder,
        {
            model_server: VLLM if vllm else (sys.executable, __file__, "--model-server", str(log)),
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
    if vllm:
        await start_vllm(processes)
    for name in processes.commands.keys() - processes.running.keys():
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
                await asked_more(log, chance.randint(1, 60), processes.running["runner"])
                name = (
                    "vLLM" if vllm else chance.choice(["runner", "runner", "server", model_server])
                )
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


async def with_trainer(
    folder: Path, kills: int, rollouts: int, *, vllm: bool = False
) -> dict[str, Any]:
    """`agl eval`, which has store, gateway and runner in its process, is killed and resumed; or
    `agl train`, which samples from vLLM."""
    log = folder / "asked.txt"
    model = f"http://127.0.0.1:{PORTS['model server']}/v1"
    tasks = "".join(json.dumps({"name": f"task-{number}"}) + "\n" for number in range(rollouts))
    (folder / "tasks.jsonl").write_text(tasks)
    (folder / "run.yaml").write_text(TRAINING.replace("STEPS", str(rollouts // 32)))
    command = ("train", "run.yaml")
    if not vllm:
        command = ("eval", "agent.py:agent", "tasks.jsonl", "--endpoint", model, "--model", "m")
        for setting in ("max_attempts=30", "retry=replay", "retry_condition=[unresponsive]"):
            command += ("--set", f"algorithm.rollout.{setting}")
    command = (AGL, *command, "--n-runners", str(AT_ONCE), "--run-dir", "run")
    model_server = (sys.executable, __file__, "--model-server", str(log))
    commands = {"first": command, "resumed": (*command, "--resume")}
    processes = Processes(folder, commands | {"vLLM": VLLM, "model server": model_server})
    if vllm:
        await start_vllm(processes)
    else:
        processes.start("model server")
    processes.start("first")
    running = "first"
    chance = random.Random(2)
    killed = 0
    try:
        most = 200 if vllm else 40
        while killed < kills and await asked_more(
            log, chance.randint(5, most), processes.running[running]
        ):
            processes.kill(running)
            killed += 1
            running = "resumed"
            processes.start(running)
        await asyncio.to_thread(processes.running[running].wait, 900)
    finally:
        processes.end()
    return {"kills": {f"agl {command[1]}": killed}} | await read(folder / "run/store.sqlite", log)


async def read(store: Path, log: Path) -> dict[str, Any]:
    asked: dict[str, list[float]] = {}
    for line in lines_of(log):
        when, name = line.split(" ", 1)
        asked.setdefault(name, []).append(float(when))
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
    parser.add_argument("--kinds", default="processes,eval")
    parser.add_argument("--model-server", type=Path)
    parser.add_argument("--keep", type=Path)
    arguments = parser.parse_args()
    if arguments.model_server:
        serve_model(arguments.model_server)
        return
    kinds = arguments.kinds.split(",")
    if unknown := set(kinds) - set(PARTS):
        parser.error(f"--kinds is {', '.join(unknown)}; known: {', '.join(PARTS)}")
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for kind in kinds:
        name, campaign, part = PARTS[kind]
        with tempfile.TemporaryDirectory() as place:
            folder = (arguments.keep or Path(place)) / kind
            folder.mkdir(parents=True)
            (folder / "agent.py").write_text(AGENT)
            kills = max(1, round(arguments.kills * part))
            results[name] = asyncio.run(campaign(folder, kills, arguments.rollouts))
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        print(f"\n{name}")
        for what, value in results[name].items():
            print(f"  {what:<34} {value}")


PARTS: Final = {
    "processes": ("agl server, agl runner", with_runners, 1),
    "eval": ("agl eval --resume", with_trainer, 0.2),
    "vllm": ("agl server in front of vLLM", partial(with_runners, vllm=True), 0.1),
    "train": ("agl train --resume, sampling from vLLM", partial(with_trainer, vllm=True), 0.1),
}


if __name__ == "__main__":
    main()
