"""Prompt optimisation by parallel racing against the sequential schedule of Agent Lightning 0.3.

    python benchmarks/apo.py [--worlds 1000] [--runs 1] [--latency 0.5] [--workers 32]

A prompt has a known quality: a level, at which it solves a task of difficulty d with probability 1
/ (1 + exp(d − level)). An edit changes the level by a normal 0.1 ± 0.6. Both schedules have the
same settings (0.3's defaults), 64 held-out tasks, and as many candidates. That of 0.3 is written
after its package: one candidate after the other, one rollout enqueued after the other, finished
ones asked for every 2 s; `--poll 0.02` takes that wait out of it.

`runs` are real: a store, a runner with `workers`, rollouts of `latency` seconds, an optimiser that
answers as fast. `worlds` replay both schedules without either, for the mean quality of what they
find."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import re
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from aiohttp import web

import agentlightning as agl
from agentlightning.algorithm.apo.apo import Standing, rungs, survivors
from agentlightning.store.base import LightningStore
from agentlightning.types import PromptTemplate

RESULTS = Path(__file__).parent / "results" / "apo.json"
HELD_OUT, WIDTH, BRANCHES, ROUNDS, GRADIENT, BATCH = 64, 4, 4, 3, 4, 16
CONFIDENCE: Final = agl.APO.confidence
SEED_LEVEL: Final = -1.0


def solves(level: float, difficulty: float, chance: random.Random) -> float:
    return float(chance.random() < 1 / (1 + math.exp(difficulty - level)))


def quality(level: float, tasks: Sequence[dict]) -> float:
    """What a prompt of this level is truly worth."""
    return statistics.fmean(1 / (1 + math.exp(task["difficulty"] - level)) for task in tasks)


def make_tasks(seed: int) -> list[dict]:
    chance = random.Random(seed)
    return [{"number": number, "difficulty": chance.gauss(0, 1)} for number in range(HELD_OUT)]


def level_of(template: PromptTemplate) -> float:
    return float(template.template.partition("level ")[2])


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


# --- replays: the schedules alone ---


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


def replay_apo(seed: int) -> tuple[float, int]:
    """The same of `agl.APO`."""
    tasks, chance = make_tasks(seed), random.Random(seed)
    levels, origin, rewards = {"seed": SEED_LEVEL}, {"seed": "seed"}, {"seed": dict[int, float]()}
    rollouts = 0

    def measure(name: str, numbers: Sequence[int]) -> list[float]:
        for number in numbers:
            if number not in rewards[name]:
                rewards[name][number] = solves(levels[name], tasks[number]["difficulty"], chance)
        return [rewards[name][number] for number in numbers]

    def race(names: list[str], number: int, beyond: int, count: int, keep: int) -> list[str]:
        order = [(number * BATCH + offset) % HELD_OUT for offset in range(count)]
        for rung in rungs(count, beyond):
            measured = {
                name: measure(name, order if len(names) == 1 else order[:rung]) for name in names
            }
            expected = {name: statistics.fmean(rewards[origin[name]].values()) for name in names}
            names = survivors(
                {name: Standing(measured[name], expected[name]) for name in names}, keep, CONFIDENCE
            )
        return names

    measure("seed", range(HELD_OUT))
    beam, criticised = ["seed"], set[str]()
    for number in range(ROUNDS):
        parents = [beam[index % len(beam)] for index in range(WIDTH)]
        rollouts += GRADIENT * 3 // 2 * len(set(parents) - criticised)
        criticised |= set(parents)
        made: list[str] = []
        for slot in range(WIDTH * BRANCHES):
            name, parent = f"r{number}-{slot}", parents[slot // BRANCHES]
            levels[name], origin[name], rewards[name] = edited(levels[parent], chance), parent, {}
            made.append(name)
        beam = race([*beam, *made], number, 0, BATCH, WIDTH)[:WIDTH]
    best = race(list(dict.fromkeys([*beam, "seed"])), ROUNDS - 1, BATCH, HELD_OUT, 1)[0]
    return quality(levels[best], tasks), rollouts + sum(map(len, rewards.values()))


# --- real runs ---


@asynccontextmanager
async def optimizer(latency: float, chance: random.Random) -> AsyncIterator[str]:
    """Critic and editor behind one URL: the next level is drawn, whatever the critique says."""

    async def answer(request: web.Request) -> web.Response:
        text = (await request.json())["messages"][0]["content"]
        await asyncio.sleep(latency)
        said = "raise the level"
        if "<critique>" in text:
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


class Schedule0_3:
    """0.3's APO as its package has it, on this store and runner."""

    name = "schedule of 0.3"

    def __init__(self, latency: float, poll: float, seed: int) -> None:
        self.latency, self.poll = latency, poll
        self.chance = random.Random(seed)
        self.versions = self.rollouts = 0
        self.best = PromptTemplate(template="")

    async def run(self, context: Any) -> None:
        train, held_out = (
            batches(context.val_tasks, size, self.chance) for size in (GRADIENT, BATCH)
        )
        store, tasks = context.store, context.val_tasks
        self.best = PromptTemplate(template=f"{{number}} level {SEED_LEVEL}")
        beam, best_score = [self.best], await self.mean(store, self.best, tasks, "val")
        for _ in range(ROUNDS):
            parents = [beam[index % len(beam)] for index in range(WIDTH)]
            made: list[PromptTemplate] = []
            for parent in parents:
                for _ in range(BRANCHES):
                    await self.mean(store, parent, next(train), "train")
                    await asyncio.sleep(2 * self.latency)  # the critique and the edit
                    level = edited(level_of(parent), self.chance)
                    made.append(PromptTemplate(template=f"{{number}} level {level}"))
            batch = next(held_out)
            scored = [(await self.mean(store, one, batch, "val"), one) for one in [*beam, *made]]
            beam = [one for _, one in sorted(scored, key=lambda pair: -pair[0])[:WIDTH]]
            score = await self.mean(store, beam[0], tasks, "val")
            if score > best_score:
                self.best, best_score = beam[0], score

    async def mean(
        self, store: LightningStore, prompt: PromptTemplate, tasks: Sequence[dict], mode: Any
    ) -> float:
        self.versions += 1
        update = await store.update_resources(f"v{self.versions}", {"prompt": prompt})
        queued = [
            await store.enqueue_rollout(task, mode=mode, resources_id=update.resources_id)
            for task in tasks
        ]
        self.rollouts += len(queued)
        names = [rollout.rollout_id for rollout in queued]
        while len(await store.wait_for_rollouts(names, timeout=0.0)) < len(names):  # noqa: ASYNC110 (as 0.3 does it)
            await asyncio.sleep(self.poll)
        rewards = [agl.find_final_reward(await store.query_spans(name)) or 0.0 for name in names]
        return statistics.fmean(rewards)


async def real_run(
    make: Callable[[str], Any], latency: float, workers: int, seed: int
) -> dict[str, float]:
    chance = random.Random(seed)

    @agl.rollout
    async def agent(task: dict, prompt_template: PromptTemplate) -> float:
        await asyncio.sleep(latency)
        return solves(level_of(prompt_template), task["difficulty"], chance)

    tasks = make_tasks(seed)
    with tempfile.TemporaryDirectory() as directory:
        async with optimizer(latency, chance) as url:
            algorithm = make(url)
            trainer = agl.Trainer(
                algorithm=algorithm,
                n_runners=workers,
                run_dir=Path(directory) / "run",
                seed=seed,
                initial_resources={
                    "prompt": PromptTemplate(template=f"{{number}} level {SEED_LEVEL}")
                },
            )
            began = time.perf_counter()
            result = await trainer.fit_async(agent, tasks, tasks)
            seconds = time.perf_counter() - began
    if isinstance(algorithm, Schedule0_3):
        best, rollouts = algorithm.best, algorithm.rollouts
    else:
        best, rollouts = algorithm.get_best_prompt(), int(result.metrics[-1].values["rollouts"])
    return {"quality": quality(level_of(best), tasks), "rollouts": rollouts, "seconds": seconds}


def spread(values: Sequence[float]) -> str:
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):.3f} ± {error:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--worlds", type=int, default=1000)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--latency", type=float, default=0.5)
    parser.add_argument("--workers", type=int, default=32)
    parser.add_argument("--poll", type=float, default=2.0)
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    results: dict[str, Any] = {"options": {k: v for k, v in vars(options).items() if k != "json"}}

    print(f"{options.worlds} worlds replayed: true quality of the final prompt, rollouts")
    for name, replay in (("0.3", replay_0_3), ("agl.APO", replay_apo)):
        found = [replay(seed) for seed in range(options.worlds)]
        qualities, rollouts = zip(*found, strict=True)
        results[f"replayed {name}"] = {
            "quality": statistics.fmean(qualities),
            "rollouts": statistics.fmean(rollouts),
        }
        print(f"  {name:8} {spread(qualities)}   {statistics.fmean(rollouts):7.0f}")
    seed_quality = statistics.fmean(
        quality(SEED_LEVEL, make_tasks(seed)) for seed in range(options.worlds)
    )
    print(f"  {'seed':8} {seed_quality:.3f}")

    def apo(url: str) -> agl.APO:
        return agl.APO(agl.LLM(endpoint=url, model="m"))

    for run in range(options.runs):
        makers = {"0.3": lambda _: Schedule0_3(options.latency, options.poll, run), "agl.APO": apo}  # noqa: B023
        for name, make in makers.items():
            measured = asyncio.run(real_run(make, options.latency, options.workers, run))
            results.setdefault(f"real {name}", []).append(measured)
            print(
                f"run {run} {name:8} "
                + "   ".join(f"{key} {value:.3f}" for key, value in measured.items()),
                flush=True,
            )
    options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
