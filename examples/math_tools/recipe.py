"""How the assistant is trained and what is written of it: every number, every option, and the report."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import yaml
from demonstrations import demonstrations, tool_schemas

from agentlightning.algorithm.curves import draw_learning_curve
from agentlightning.cli import training
from agentlightning.errors import ConfigError
from agentlightning.learner.base import AdamW
from agentlightning.learner.policy import Policy, load_policy
from agentlightning.learner.warm_start import WarmStart, make_policy
from agentlightning.trainer import FitResult

DEMONSTRATIONS = 2000
WARM_START = WarmStart(copying=0.95)
HELDOUT_TASKS = 120
MAX_SEQUENCE_LENGTH = 512
ALGORITHM: dict[str, Any] = {
    "name": "grpo",
    "steps": 30,
    "tasks_per_step": 16,
    "group_size": 8,
    "minibatches": 2,
    "clip_high": 0.28,
    "baseline": "dr_grpo",  # dividing by what rollouts differ by would blow up what calls differ by under AIR
    "max_tokens": 48,
    "evaluate_every": 10,
}
# Automatic intermediate rewards: of each call, what becomes of the tools it asks for, beside the reward of the rollout.
AIR: dict[str, Any] = {"returns": "air", "returns_options": {"alpha": 0.2, "tool_weights": 1.0}}


def arguments(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, help=f"training steps; default {ALGORITHM['steps']}")
    parser.add_argument("--out", default="runs/math_tools", help="directory of the run and of result.json")
    parser.add_argument("--air", action="store_true", help=f"reward tools that work, by {json.dumps(AIR)}")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="such as returns=air, or algorithm.returns=air"
    )
    parser.add_argument("--model", help="a Hugging Face id or directory instead of the tiny transformer")
    parser.add_argument("--start", metavar="FOLDER", help="keeps the warm-started transformer, for runs of one seed")
    parser.add_argument("--lora", type=int, metavar="RANK", help="train an adapter instead of all weights")
    parser.add_argument("--learning-rate", type=float, help="default 1.5e-4 for the tiny transformer, 1e-6 for --model")
    parser.add_argument("--calc-x", metavar="FOLDER", help="problems of Calc-X instead of generated ones")
    options = parser.parse_args()
    if options.calc_x and not options.model:
        parser.error("--calc-x needs --model: the tiny transformer speaks the language of the generated problems only")
    if wrong := [one for one in options.set if "=" not in one]:
        parser.error(f"--set {wrong[0]} is no assignment; write --set group_size=4")
    if options.model and options.start:
        parser.error("--start keeps the tiny transformer; with --model there is none")
    return options


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """The algorithm as a run file would describe it."""
    try:
        changed = {
            key.strip().removeprefix("algorithm."): yaml.safe_load(value)
            for key, _, value in (one.partition("=") for one in options.set)
        }
    except yaml.YAMLError as error:
        raise ConfigError(f"--set: a value is no YAML: {' '.join(str(error).split())}") from None
    steps = {"steps": options.steps} if options.steps is not None else {}
    return {**ALGORITHM, **(AIR if options.air else {}), **steps, **changed}


def make_algorithm(options: argparse.Namespace) -> Any:
    return training.make_algorithm(settings(options))


def optimizer(options: argparse.Namespace) -> AdamW:
    rate = options.learning_rate or (1e-6 if options.model else 1.5e-4)
    return AdamW(learning_rate=rate, micro_batch_tokens=4096)


def starting_policy(options: argparse.Namespace, progress: Any) -> Policy:
    """The tiny transformer, warm-started on mediocre demonstrations, or as an earlier run kept it in --start."""
    directory = Path(options.start or Path(options.out, "start"))
    if (directory / "config.json").is_file():
        return load_policy(directory)
    progress.phase("warm start", WARM_START.max_steps)
    policy = make_policy(
        demonstrations(DEMONSTRATIONS, options.seed),
        tools=tool_schemas(),
        seed=options.seed,
        options=WARM_START,
        on_step=lambda state: progress.advance(state.step),
    )
    policy.save(directory)
    return policy


def report(result: FitResult, options: argparse.Namespace, seconds: float) -> None:
    """Write result.json and the learning curve below --out, and say in a line what was reached."""
    heldout = [one.values for one in result.metrics if "val_reward" in one.values]
    before, after = heldout[0], heldout[-1]
    summary = {
        "seed": options.seed,
        "before": before["val_reward"],
        "after": after["val_reward"],
        "tool_success": after.get("val_tool_success"),
        "curve": [{"step": one.step, **one.values} for one in result.metrics],
        "seconds": seconds,
        "settings": settings(options),
    }
    out = Path(options.out)
    (out / "result.json").write_text(json.dumps(summary, indent=1) + "\n")
    draw_learning_curve(result.metrics, out / "learning_curve.png", f"math with tools, seed {options.seed}")
    worked = [one.get("val_tool_success", 0.0) for one in (before, after)]
    print(
        f"held-out reward {summary['before']:.3f} → {summary['after']:.3f}, tool calls that worked {worked[0]:.0%} → "
        f"{worked[1]:.0%}, in {seconds:.0f} s; {out / 'result.json'}"
    )
