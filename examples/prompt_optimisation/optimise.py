"""Finds a better prompt for the room agent. Without --model a scripted endpoint plays agent, critic
and editor.

    python examples/prompt_optimisation/optimise.py
    OPENAI_API_KEY=… python examples/prompt_optimisation/optimise.py --model gpt-4.1-mini --max-usd 2 \
        --price gpt-4.1-mini=0.4,1.6
"""

from __future__ import annotations

import argparse
import asyncio
import os
from contextlib import nullcontext

from agent import PROMPT, book_room
from scripted import Scripted, serving
from tasks import make_tasks

import agentlightning as agl


async def optimise(options: argparse.Namespace) -> None:
    endpoint = options.endpoint or os.environ.get("OPENAI_BASE_URL", "https://api.openai.com/v1")
    prices = {
        name: tuple(map(float, price.split(",")))
        for name, _, price in (one.partition("=") for one in options.price)
    }
    async with serving(Scripted()) if options.model is None else nullcontext(endpoint) as url:
        model = options.model or "scripted"
        llm = agl.LLM(endpoint=url, model=model, api_key=os.environ.get("OPENAI_API_KEY"))
        apo = agl.APO(
            llm,
            gradient_model=options.optimizer or model,
            apply_edit_model=options.optimizer or model,
            beam_rounds=options.rounds,
            budget=agl.Budget(usd=options.max_usd),
            prices=prices or ({"scripted": (0.0, 0.0)} if options.model is None else {}),
        )
        trainer = agl.Trainer(
            algorithm=apo,
            n_runners=32,
            initial_resources={"llm": llm, "prompt": agl.PromptTemplate(template=PROMPT)},
            run_dir=options.run_dir,
        )
        result = await trainer.fit_async(
            book_room, make_tasks(64, seed=1), make_tasks(64, seed=2), resume=options.resume
        )
    for when, evaluation in zip(("before", "after"), result.evaluations, strict=False):
        print(f"held-out reward {when}: {evaluation.reward:.3f} on {len(evaluation.tasks)} tasks")
    print(
        f"stopped: {result.stopped_because}, after {result.seconds:.1f} s\n"
        "\n"
        f"{apo.get_best_prompt().template}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="the agent's model, with its key in OPENAI_API_KEY")
    parser.add_argument(
        "--optimizer", help="the model that criticises and edits; default the agent's"
    )
    parser.add_argument("--endpoint", help="an OpenAI-compatible URL")
    parser.add_argument(
        "--price", action="append", default=[], metavar="MODEL=IN,OUT", help="per million tokens"
    )
    parser.add_argument("--max-usd", type=float)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--run-dir")
    parser.add_argument("--resume", action="store_true")
    asyncio.run(optimise(parser.parse_args()))


if __name__ == "__main__":
    main()
