"""One run of `Trainer.fit` on the travel desk: its agents on OpenAI's SDK, in a runner process of
their own, over HTTP, through gateway and store. `benchmarks/rl.py` starts it. It prints an
`Outcome`."""

from __future__ import annotations

import asyncio
import random
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "flight"))

import _rl_sums as sums
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
async def adder(task: dict[str, Any], llm: agl.LLM) -> float:
    answer = await agl.openai_client(llm).chat.completions.create(
        model=llm.model, messages=sums.opening(task)
    )
    return sums.grade(task, answer.choices[0].message.content or "")


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
        answer = await client.chat.completions.create(
            model=llm.model, messages=messages, tools=agent.TOOLS
        )
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


def main() -> None:
    options = Options.parse(sys.argv[1])
    random.seed(options.seed)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    rollouts = options.tasks_per_step * options.group_size
    chosen = "adder" if options.sums else "slow_desk" if options.slow_tool else "desk"
    agents = f"{__file__}:{chosen}"
    command = [sys.executable, "-m", "agentlightning.cli.main", "runner", agents]
    command += ["--server", f"http://127.0.0.1:{port}", "--concurrency", str(rollouts)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as runner:
        try:
            outcome = train(options, port)
        finally:
            runner.kill()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    outcome.agents_cpu_seconds = used.ru_utime + used.ru_stime
    outcome.tell()


def train(options: Options, port: int) -> Outcome:
    """The runner leases its rollouts at the port."""
    started = time.perf_counter()
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
        n_runners=0,
        port=port,
        max_sequence_length=512,
        run_dir=options.directory,
        threads=options.threads,
        seed=options.seed,
    )
    if options.sums:
        some = [sums.read(options.sums, name) for name in ("train", "heldout")]
        result = trainer.fit(adder, *some)
    else:
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
    return outcome


if __name__ == "__main__":
    main()
