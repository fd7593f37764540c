"""Warm start → best of 8 → fine-tuning on the traces → reinforcement learning. `python train.py [SEED] [DIRECTORY]`."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

import agentlightning as agl
from agentlightning.algorithm import NoProgress
from agentlightning.quickstart import load_flight_example, make_starting_policy
from agentlightning.types import EnqueueRolloutRequest

FLIGHT = load_flight_example()  # the agent, its tasks and how it is trained: ../flight
SAMPLED = 90  # tasks, each of which is run eight times
KEPT = {"best": 1, "threshold": 0.5}  # of the eight, and good in itself
FINE_TUNING = {"steps": 40, "tasks_per_step": 18, "checkpoint_every": 40}  # one optimiser step for 18 tasks
RATE = 5e-4  # its learning rate


@agl.algo
async def best_of_8(store, train_dataset, context):
    """Run the agent eight times on each task, and change nothing."""
    run_id = context.run.run_id
    groups = [f"{run_id}-{number}" for number in range(len(train_dataset))]
    await asyncio.gather(*(store.create_group(8, run_id=run_id, group_id=group) for group in groups))
    rollouts = await store.enqueue_many_rollouts(
        EnqueueRolloutRequest(input=task, run_id=run_id, group_id=group, group_index=index)
        for task, group in zip(train_dataset, groups, strict=True)
        for index in range(8)
    )
    await store.wait_for_rollouts([rollout.rollout_id for rollout in rollouts])


def trainer(model, algorithm, directory: Path, seed: int, learning_rate: float | None = None) -> agl.Trainer:
    optimizer = FLIGHT.recipe.optimizer()
    if learning_rate is not None:
        optimizer = replace(optimizer, learning_rate=learning_rate)
    settings = {"n_runners": FLIGHT.recipe.CONCURRENCY, "max_sequence_length": FLIGHT.recipe.MAX_SEQUENCE_LENGTH}
    return agl.Trainer(model=model, algorithm=algorithm, optimizer=optimizer, run_dir=directory, seed=seed, **settings)


def main(seed: int, directory: Path) -> None:
    agent, heldout = FLIGHT.train.flight, FLIGHT.tasks.heldout_tasks(FLIGHT.recipe.HELDOUT_TASKS)
    tasks = FLIGHT.tasks.train_tasks(FLIGHT.recipe.TRAIN_TASKS, seed)
    start = make_starting_policy(FLIGHT, seed, NoProgress())
    trainer(start, best_of_8, directory / "sampled", seed).fit(agent, tasks[:SAMPLED])
    imitation = agl.SFT(traces=str(directory / "sampled"), **KEPT, **FINE_TUNING)
    tuned = trainer(start, imitation, directory / "tuned", seed, RATE).fit(agent, val_dataset=heldout)
    learning = FLIGHT.recipe.algorithm(steps=10)
    learned = trainer(tuned.checkpoint, learning, directory / "learned", seed).fit(agent, tasks[SAMPLED:], heldout)
    rewards = [evaluation.reward for evaluation in (*tuned.evaluations, learned.evaluations[-1])]
    print("held-out reward: " + " → ".join(f"{reward:.2f}" for reward in rewards) + f"; {learned.checkpoint}")


if __name__ == "__main__":
    main(
        int(sys.argv[1]) if len(sys.argv) > 1 else 1, Path(sys.argv[2] if len(sys.argv) > 2 else "runs/sft_from_traces")
    )
