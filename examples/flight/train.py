"""Train the travel desk by reinforcement learning. `python train.py MODEL` takes a Hugging Face id
or a directory."""

from __future__ import annotations

import sys

import recipe
from agent import solve
from tasks import heldout_tasks, train_tasks

import agentlightning as agl


@agl.rollout
async def flight(task: dict, llm: agl.LLM) -> float:
    return await solve(task, client=agl.openai_client(llm), model=llm.model)


def main(model: str) -> None:
    trainer = agl.Trainer(
        model=model, algorithm=recipe.algorithm(), optimizer=recipe.optimizer(), seed=1
    )
    result = trainer.fit(
        flight, train_dataset=train_tasks(2000, seed=1), val_dataset=heldout_tasks(96)
    )
    before, after = result.evaluations[0].reward, result.evaluations[-1].reward
    print(f"held-out reward {before:.2f} → {after:.2f}; the policy is in {result.checkpoint}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(
            "usage: python train.py MODEL    (agl quickstart makes a model: "
            "runs/quickstart-…/checkpoints/best)"
        )
    main(sys.argv[1])
