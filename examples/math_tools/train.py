"""Train the calculating assistant. Without --model, a tiny transformer is made on the spot and warm-started first.

python examples/math_tools/train.py --air --out runs/math-air
python examples/math_tools/train.py --model meta-llama/Llama-3.2-3B-Instruct --lora 16 --calc-x data/calc-x
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import recipe
from agent import answer
from grading import grade
from rich.console import Console
from tasks import calc_x_tasks, heldout_tasks, train_tasks

import agentlightning as agl
from agentlightning.cli.display import LiveProgress
from agentlightning.errors import AgentLightningError


@agl.rollout
async def mathematician(task: dict, llm: agl.LLM) -> float:
    return grade(task, await answer(task["question"], client=agl.openai_client(llm), model=llm.model))


def main() -> None:
    started = time.monotonic()
    options = recipe.arguments(__doc__)
    algorithm = recipe.make_algorithm(options)
    if options.calc_x:
        train, heldout = calc_x_tasks(options.calc_x, "train"), calc_x_tasks(options.calc_x, "test")[:500]
    else:
        train, heldout = train_tasks(3000, options.seed), heldout_tasks(recipe.HELDOUT_TASKS)
    with LiveProgress(Console(stderr=True), steps=algorithm.steps, time_limit=None) as progress:
        trainer = agl.Trainer(
            model=options.model or recipe.starting_policy(options, progress),
            algorithm=algorithm,
            optimizer=recipe.optimizer(options),
            lora=agl.LoRA(rank=options.lora) if options.lora else None,
            n_runners=96,
            max_sequence_length=None if options.model else recipe.MAX_SEQUENCE_LENGTH,
            run_dir=Path(options.out, "run"),
            seed=options.seed,
            progress=progress,
        )
        result = trainer.fit(mathematician, train, heldout)
    recipe.report(result, options, seconds=time.monotonic() - started)


if __name__ == "__main__":
    try:
        main()
    except AgentLightningError as error:
        sys.exit(f"error: {error}")
