"""Prompts, weights, or both, with the same number of rollouts.

    python benchmarks/prompts_and_weights.py [--seeds 3] [--rollouts 300]

A tiny policy is made whose answers depend on its system prompt: for each of two rules that stand in
it, it says the rule's word nine of ten times, else one of ten. The reward is the share of both words
in its answer. An editing model, scripted, adds one of four rules, two of which help. GEPA changes the
prompt, GRPO the weights; `both` spends half of the rollouts on each, one after the other. The reward
after is that of 60 further rollouts on held-out tasks."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from aiohttp import web

import agentlightning as agl
from agentlightning.learner.policy import Policy
from agentlightning.learner.tiny import make_policy
from agentlightning.prompts.components import read_candidate

RESULTS: Final = Path(__file__).parent / "results" / "prompts_and_weights.json"
ROLE: Final = "You are the clerk of a hotel."
RULES: Final = {"Name the day.": "Tuesday", "Say please.": "please"}
IDLE: Final = ("Be brief.", "Be friendly.")
ROOMS: Final = range(100, 160)


def demonstration(draw: random.Random) -> dict[str, Any]:
    rules = [rule for rule in (*RULES, *IDLE) if draw.random() < 0.5]
    draw.shuffle(rules)
    words = [
        word for rule, word in RULES.items() if draw.random() < (0.9 if rule in rules else 0.1)
    ]
    messages = [
        {"role": "system", "content": " ".join([ROLE, *rules])},
        {"role": "user", "content": f"Room {draw.choice(ROOMS)}?"},
        {"role": "assistant", "content": " ".join(["Yes", *words])},
    ]
    return {"messages": messages}


def make(seed: int) -> Policy:
    draw = random.Random(seed)
    return make_policy([demonstration(draw) for _ in range(1500)], seed=seed)


@agl.rollout
async def clerk(task: dict, llm: agl.LLM) -> float:
    client = agl.openai_client(llm)
    messages: list[Any] = [
        {"role": "system", "content": ROLE},
        {"role": "user", "content": f"Room {task['room']}?"},
    ]
    answer = await client.chat.completions.create(model=llm.model, messages=messages, max_tokens=8)
    said = answer.choices[0].message.content or ""
    return sum(word in said for word in RULES.values()) / len(RULES)


@asynccontextmanager
async def editing_model(seed: int) -> AsyncIterator[str]:
    chance = random.Random(seed)

    async def answer(request: web.Request) -> web.Response:
        text = (await request.json())["messages"][0]["content"]
        old = re.split(r'<prompt name="[^"]+">\n|\n</prompt>', text)[1]
        left = [rule for rule in (*RULES, *IDLE) if rule not in old] or list(IDLE)
        said = f"<prompt>{old} {chance.choice(left)}</prompt>"
        choice = {"index": 0, "message": {"role": "assistant", "content": said}}
        return web.json_response({"id": "c", "model": "m", "choices": [choice]})

    application = web.Application(client_max_size=2**26)
    application.router.add_post("/{path:.*}", answer)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    await runner.cleanup()


async def improved(way: str, model: Path, seed: int, rollouts: int, folder: Path) -> float:
    tasks = [{"room": room} for room in ROOMS]
    train, held_out = tasks[:40], tasks[40:]
    given: dict[str, Any] = {"seed": seed, "progress": False, "max_sequence_length": 128}
    each = rollouts // 2 if way == "both" else rollouts
    resources: dict[str, Any] = {}
    place: Path = model
    if way in ("prompts", "both"):
        async with editing_model(seed) as url:
            search = agl.GEPA(
                agl.LLM(endpoint=url, model="m"), budget=agl.Budget(rollouts=each), report_share=0
            )
            trainer = agl.Trainer(
                model=place, algorithm=search, run_dir=folder / "prompts", **given
            )
            await trainer.fit_async(clerk, train, held_out[:10])
        resources = {"prompts": read_candidate(folder / "prompts")}
    if way in ("weights", "both"):
        grpo = agl.GRPO(
            steps=1000,
            tasks_per_step=4,
            group_size=6,
            max_tokens=8,
            budget=agl.Budget(rollouts=each),
        )
        trainer = agl.Trainer(
            model=place,
            algorithm=grpo,
            optimizer=agl.AdamW(learning_rate=1e-3),
            run_dir=folder / "weights",
            initial_resources=resources,
            **given,
        )
        result = await trainer.fit_async(clerk, train)
        assert result.checkpoint is not None
        place = result.checkpoint
    measuring = agl.Baseline(samples=3)
    trainer = agl.Trainer(
        model=place,
        algorithm=measuring,
        run_dir=folder / "measured",
        initial_resources=resources,
        **given,
    )
    await trainer.fit_async(clerk, train, held_out)
    return measuring.evaluations[0].reward


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rollouts", type=int, default=300)
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    results: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as directory:
        models = {}
        for seed in range(1, options.seeds + 1):
            models[seed] = Path(directory) / f"model-{seed}"
            make(seed).save(models[seed])
        for way in ("neither", "prompts", "weights", "both"):
            results[way] = [
                asyncio.run(
                    improved(way, model, seed, options.rollouts, Path(directory) / f"{way}-{seed}")
                )
                for seed, model in models.items()
            ]
            found = ", ".join(f"{reward:.2f}" for reward in results[way])
            print(f"{way:8} {statistics.median(results[way]):.3f}   ({found})", flush=True)
    options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
