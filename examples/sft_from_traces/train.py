"""Warm start → best of 8 → fine-tuning on the traces → reinforcement learning.
`python train.py [SEED] [DIRECTORY]`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from msgspec.structs import replace

import agentlightning as agl
from agentlightning.types import EnqueueRolloutRequest

# the agent, its tasks and how it is trained
sys.path.insert(0, str(Path(__file__).parents[1] / "flight"))
from agent import solve
from recipe import SIZES, algorithm, optimizer, starting_policy
from tasks import heldout_tasks, train_tasks

SAMPLED = 90  # tasks, each of which is run eight times
KEPT = {"best": 1, "threshold": 0.5}  # of the eight, and good in itself
# one optimiser step for 18 tasks
FINE_TUNING = {"steps": 40, "tasks_per_step": 18, "checkpoint_every": 40}
RATE = 5e-4  # its learning rate


@agl.rollout
async def flight(task: dict, llm: agl.LLM) -> float:
    return await solve(task, client=agl.openai_client(llm), model=llm.model)


@agl.algo
async def best_of_8(store, train_dataset, context):
    """Run the agent eight times on each task, and change nothing."""
    run_id = context.run.run_id
    groups = [f"{run_id}-{number}" for number in range(len(train_dataset))]
    await asyncio.gather(
        *(store.create_group(8, run_id=run_id, group_id=group) for group in groups)
    )
    rollouts = await store.enqueue_many_rollouts(
        EnqueueRolloutRequest(input=task, run_id=run_id, group_id=group, group_index=index)
        for task, group in zip(train_dataset, groups, strict=True)
        for index in range(8)
    )
    await store.wait_for_rollouts([rollout.rollout_id for rollout in rollouts])


def trainer(
    model, learning, directory: Path, seed: int, learning_rate: float | None = None
) -> agl.Trainer:
    chosen = (
        optimizer() if learning_rate is None else replace(optimizer(), learning_rate=learning_rate)
    )
    return agl.Trainer(
        model=model, algorithm=learning, optimizer=chosen, run_dir=directory, seed=seed, **SIZES
    )


def main(seed: int, directory: Path) -> None:
    tasks, heldout = train_tasks(seed=seed), heldout_tasks()
    start = starting_policy(seed)
    trainer(start, best_of_8, directory / "sampled", seed).fit(flight, tasks[:SAMPLED])
    imitation = agl.SFT(traces=str(directory / "sampled"), **KEPT, **FINE_TUNING)
    tuned = trainer(start, imitation, directory / "tuned", seed, RATE).fit(
        flight, val_dataset=heldout
    )
    learning = algorithm(steps=10)
    learned = trainer(tuned.checkpoint, learning, directory / "learned", seed).fit(
        flight, tasks[SAMPLED:], heldout
    )
    rewards = [evaluation.reward for evaluation in (*tuned.evaluations, learned.evaluations[-1])]
    print(
        "held-out reward: "
        + " → ".join(f"{reward:.2f}" for reward in rewards)
        + f"; {learned.checkpoint}"
    )


if __name__ == "__main__":
    main(
        int(sys.argv[1]) if len(sys.argv) > 1 else 1,
        Path(sys.argv[2] if len(sys.argv) > 2 else "runs/sft_from_traces"),
    )
