"""Prompt searches with a budget of rollouts, beside the schedule of Agent Lightning 0.3.

    python benchmarks/prompt_search.py [--worlds 20] [--rollouts 250]

A prompt has a known quality: a level, at which it solves a task of difficulty d with probability 1
/ (1 + exp(d − level)). An edit changes the level by a normal 0.1 ± 0.6. Each search is a real run (a
store, a runner, a scripted model at a URL); 0.3's is replayed, with its defaults, 64 held-out tasks
and no budget. The quality is the true one of the prompt that a search ends with."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import re
import statistics
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from aiohttp import web

import agentlightning as agl
from agentlightning.types import PromptTemplate

RESULTS = Path(__file__).parent / "results" / "prompt_search.json"
HELD_OUT, WIDTH, BRANCHES, ROUNDS, GRADIENT, BATCH = 64, 4, 4, 3, 4, 16
SEED_LEVEL: Final = -1.0


def solves(level: float, difficulty: float, chance: random.Random) -> float:
    return float(chance.random() < 1 / (1 + math.exp(difficulty - level)))


def quality(level: float, tasks: Sequence[dict]) -> float:
    """What a prompt of this level is truly worth."""
    return statistics.fmean(1 / (1 + math.exp(task["difficulty"] - level)) for task in tasks)


def make_tasks(seed: int, count: int = HELD_OUT) -> list[dict]:
    chance = random.Random(seed)
    return [{"number": number, "difficulty": chance.gauss(0, 1)} for number in range(count)]


def edited(level: float, chance: random.Random) -> float:
    return level + chance.gauss(0.1, 0.6)


def batches(tasks: Sequence[dict], size: int, chance: random.Random) -> Iterator[list[dict]]:
    """0.3's endless batches: every task once before any comes again."""
    batch: list[dict] = []
    while True:
        for task in chance.sample(tasks, len(tasks)):
            if task not in batch:
                batch.append(task)
                if len(batch) == size:
                    yield batch
                    batch = []


def replay_0_3(seed: int) -> tuple[float, int]:
    """True quality of the prompt that 0.3's schedule ends with, and the rollouts it took."""
    tasks, chance = make_tasks(seed), random.Random(seed)
    held_out = batches(tasks, BATCH, chance)
    rollouts = 0

    def mean(level: float, some: Sequence[dict]) -> float:
        nonlocal rollouts
        rollouts += len(some)
        return statistics.fmean(solves(level, task["difficulty"], chance) for task in some)

    best_score, best, beam = mean(SEED_LEVEL, tasks), SEED_LEVEL, [SEED_LEVEL]
    for _ in range(ROUNDS):
        parents = [beam[index % len(beam)] for index in range(WIDTH)]
        candidates = [
            *beam,
            *(edited(parent, chance) for parent in parents for _ in range(BRANCHES)),
        ]
        rollouts += WIDTH * BRANCHES * GRADIENT
        batch = next(held_out)
        scores = [mean(level, batch) for level in candidates]
        ranking = sorted(range(len(candidates)), key=lambda index: -scores[index])
        beam = [candidates[index] for index in ranking[:WIDTH]]
        score = mean(beam[0], tasks)
        if score > best_score:
            best_score, best = score, beam[0]
    return quality(best, tasks), rollouts


@asynccontextmanager
async def editing_model(chance: random.Random) -> AsyncIterator[str]:
    """Critic and editor behind one URL: the next level is drawn, whatever was seen."""

    async def answer(request: web.Request) -> web.Response:
        text = (await request.json())["messages"][0]["content"]
        said = "raise the level"
        if "between <prompt>" in text:
            level = float(re.findall(r"level (-?[\d.e-]+)", text)[0])
            said = f"<prompt>{{number}} level {edited(level, chance)}</prompt>"
        choice = {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": said},
        }
        return web.json_response(
            {"choices": [choice], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}
        )

    application = web.Application(client_max_size=2**26)
    application.router.add_post("/{path:.*}", answer)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    await runner.cleanup()


async def search(make: Callable[[str], Any], held_out: int, seed: int) -> tuple[float, int]:
    """True quality of the prompt that a search ends with, and the rollouts that were run."""
    chance = random.Random(seed)

    @agl.rollout
    async def agent(task: dict, prompt_template: PromptTemplate) -> float:
        text = prompt_template.template
        said = {
            name: json.dumps([{"role": role, "content": text}])
            for name, role in (("input", "user"), ("output", "assistant"))
        }
        agl.emit_annotation(
            {"gen_ai.operation.name": "chat"}
            | {f"gen_ai.{name}.messages": text for name, text in said.items()}
        )
        return solves(float(text.partition("level ")[2]), task["difficulty"], chance)

    tasks = make_tasks(seed)
    with tempfile.TemporaryDirectory() as directory:
        async with editing_model(chance) as url:
            algorithm = make(url)
            trainer = agl.Trainer(
                algorithm=algorithm,
                n_runners=32,
                run_dir=Path(directory) / "run",
                seed=seed,
                progress=False,
                initial_resources={
                    "prompt": PromptTemplate(template=f"{{number}} level {SEED_LEVEL}")
                },
            )
            result = await trainer.fit_async(agent, tasks, tasks[:held_out])
    best = algorithm.get_best_prompt().template
    rollouts = max(int(point.values["rollouts"]) for point in result.metrics)
    return quality(float(best.partition("level ")[2]), tasks), rollouts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--worlds", type=int, default=20)
    parser.add_argument("--rollouts", type=int, default=250)
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    budget = agl.Budget(rollouts=options.rollouts)

    def apo(url: str, **settings: Any) -> agl.APO:
        return agl.APO(agl.LLM(endpoint=url, model="m"), **settings)

    def gepa(url: str, **settings: Any) -> agl.GEPA:
        return agl.GEPA(agl.LLM(endpoint=url, model="m"), budget=budget, **settings)

    searches: dict[str, tuple[Callable[[str], Any], int]] = {
        "agl.APO, no budget": (apo, HELD_OUT),
        f"agl.APO, {options.rollouts} rollouts": (lambda url: apo(url, budget=budget), 16),
        f"agl.GEPA, {options.rollouts} rollouts": (gepa, 16),
    }
    results: dict[str, Any] = {}

    def show(name: str, found: Sequence[tuple[float, int]]) -> None:
        qualities = [one for one, _ in found]
        error = statistics.stdev(qualities) / math.sqrt(len(found)) if len(found) > 1 else 0.0
        results[name] = {
            "quality": statistics.fmean(qualities),
            "standard_error": error,
            "rollouts": statistics.fmean(count for _, count in found),
            "worlds": len(found),
        }
        values = results[name]
        print(
            f"{name:28} {values['quality']:.3f} ± {error:.3f}   {values['rollouts']:6.0f} rollouts",
            flush=True,
        )

    worlds = range(options.worlds)
    show("the first prompt", [(quality(SEED_LEVEL, make_tasks(seed)), 0) for seed in worlds])
    show("0.3's schedule, replayed", [replay_0_3(seed) for seed in worlds])
    for name, (make, held_out) in searches.items():
        show(name, [asyncio.run(search(make, held_out, seed)) for seed in worlds])
    options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
