"""One run of `Trainer.fit` on the travel desk: its agent on OpenAI's SDK, over HTTP, through gateway and store.
`benchmarks/rl.py` starts it. It prints an `Outcome`."""

from __future__ import annotations

import asyncio
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "flight"))

import agent
import tasks
from _rl_options import Options, Outcome

import agentlightning as agl

# Mean 0.5 s and 99th percentile 5 s, of exp(MU + SIGMA · z).
MU, SIGMA = -1.7143, 1.4292


@agl.rollout
async def desk(task: dict[str, Any], llm: agl.LLM) -> float:
    return await agent.solve(task, client=agl.openai_client(llm), model=llm.model)


@agl.rollout
async def slow_desk(task: dict[str, Any], llm: agl.LLM) -> float:
    """The same agent, with tools that take their time."""
    client = agl.openai_client(llm)
    messages: list[Any] = [
        {"role": "system", "content": agent.SYSTEM},
        {"role": "user", "content": task["question"]},
    ]
    calls: list[str] = []
    for _ in range(agent.MAX_TURNS):
        answer = await client.chat.completions.create(model=llm.model, messages=messages, tools=agent.TOOLS)
        message = answer.choices[0].message
        if not message.tool_calls:
            return agent.grade(task, message.content or "", calls)
        messages.append(message.model_dump(include={"role", "content", "tool_calls"}))
        for call in message.tool_calls:
            calls.append(call.function.name)
            await asyncio.sleep(random.lognormvariate(MU, SIGMA))
            result = agent.use_tool(task, call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return 0.0


@contextmanager
def agents_apart(concurrency: int) -> Iterator[int]:
    """Where the tools are slow the agents have a process of their own, as they have wherever many machines work: it
    leases its rollouts from the port that this gives."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = [sys.executable, "-m", "agentlightning.cli.main", "runner", f"{__file__}:slow_desk"]
    command += ["--server", f"http://127.0.0.1:{port}", "--concurrency", str(concurrency)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as runner:
        try:
            yield port
        finally:
            runner.kill()


def main() -> None:
    options = Options.parse(sys.argv[1])
    random.seed(options.seed)
    if not options.slow_tool:
        train(options)
        return
    with agents_apart(options.tasks_per_step * options.group_size) as port:
        train(options, port)


def train(options: Options, port: int = 0) -> None:
    """With a port, agents are in another process."""
    started = time.perf_counter()
    rollouts = options.tasks_per_step * options.group_size
    trainer = agl.Trainer(
        model=options.start,
        algorithm=agl.GRPO(
            steps=options.steps,
            tasks_per_step=options.tasks_per_step,
            group_size=options.group_size,
            baseline_options={"epsilon": 1e-4},
            level=options.level,  # type: ignore[arg-type]
            max_tokens=options.call_tokens,
            max_staleness=options.max_staleness,
            evaluate_every=options.evaluate_every,
            checkpoint_every=options.steps,
        ),
        optimizer=agl.AdamW(learning_rate=options.learning_rate),
        n_runners=0 if port else rollouts,
        port=port,
        max_sequence_length=512,
        run_dir=options.directory,
        threads=options.threads,
        seed=options.seed,
    )
    result = trainer.fit(
        slow_desk if options.slow_tool else desk,
        tasks.train_tasks(options.steps * options.tasks_per_step, options.seed),
        tasks.heldout_tasks(options.heldout),
    )
    outcome = Outcome(whole_seconds=time.perf_counter() - started, cpu_seconds=time.process_time())
    for one in sorted(result.metrics, key=lambda metrics: metrics.step):
        values = one.values
        if "rollout_seconds" in values:
            outcome.sample_seconds += values["rollout_seconds"]
            outcome.learn_seconds += values["learn_seconds"]
            outcome.train_seconds = outcome.sample_seconds + outcome.learn_seconds
            outcome.generated += values["sampled_tokens"]
            outcome.trained += values.get("tokens", 0.0)
            outcome.computed += values.get("tokens_computed", 0.0)
            outcome.rollouts += values["rollouts"]
        if "val_reward" in values:
            outcome.curve.append((one.step, outcome.train_seconds, values["val_reward"]))
    outcome.tell()


if __name__ == "__main__":
    main()
