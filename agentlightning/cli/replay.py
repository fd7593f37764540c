"""The command that trains recorded steps again: `agl data replay`.

It rebuilds the run's algorithm and learner as `agl train --resume` would, and prints; the training is
`agentlightning.algorithm.rl.replay`'s.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from agentlightning.cli.as_json import json_option, print_json
from agentlightning.cli.config import build, load_config
from agentlightning.cli.runs import STORE_FILE
from agentlightning.cli.store import open_store, run
from agentlightning.cli.training import DIRECTORY, FILE, make_algorithm
from agentlightning.errors import ConfigError, NotFoundError

if TYPE_CHECKING:
    from agentlightning.algorithm.rl import Reinforcement
    from agentlightning.algorithm.rl.policies import Policies
    from agentlightning.algorithm.rl.replay import ReplayedStep, ReplayPlan
    from agentlightning.learner.torch import TorchLearner
    from agentlightning.types import Run

DIFFERENT: Final = 1


class _Steps(click.ParamType):
    """`4` or `2-4`."""

    name = "steps"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", str(value))
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= first <= last:
            self.fail(f"{value!r} is no step and no range of steps; write 4, or 2-4", param, ctx)
        return first, last


@click.command()
@click.argument("directory", metavar="RUN_DIR", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--steps", "--step", type=_Steps(), metavar="N|A-B", help="Default: what led to the newest checkpoint.")
@click.option("--out", type=DIRECTORY, metavar="DIR", help="Save the weights there.")
@click.option("--run-file", type=FILE, metavar="RUN.yaml", help="The algorithm, where the run does not say it all.")
@click.option("--model", metavar="ID|DIR|FILE.py:NAME", help="The model it started from, if not what the run says.")
@click.option("--store", "address", metavar="PATH|URL", help="The run's store, if it is not in RUN_DIR.")
@click.option("--server", metavar="URL", help="The `agl server` that has the store open.")
@click.option("--key", metavar="KEY", envvar="AGL_KEY", show_envvar=True, help="The server's key.")
@json_option
def replay(
    directory: Path,
    steps: tuple[int, int] | None,
    out: Path | None,
    run_file: Path | None,
    model: str | None,
    address: str | None,
    server: str | None,
    key: str | None,
    as_json: bool,
) -> int:
    """Train recorded steps again, from the newest checkpoint before them, and compare the weights with what the run
    saved.

    Needs neither engine nor agents. Exits with 1 where the weights differ."""
    from agentlightning.algorithm.directory import read_mark
    from agentlightning.algorithm.rl import replay as replaying
    from agentlightning.display import hide_library_progress

    hide_library_progress()
    mark = read_mark(directory)
    first, last = steps or (None, None)
    plan = replaying.plan_replay(directory, first, last)
    if out is not None and out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} is not empty; choose another directory")

    trained: list[ReplayedStep] = []

    def report(step: ReplayedStep) -> None:
        trained.append(step)
        if not as_json:
            print(_told(step))

    async def work() -> int:
        place = address if server else address or str(directory / STORE_FILE)
        async with open_store(place, server, key, reading=True) as store:
            found = next((one for one in await store.query_runs() if one.run_id == mark.run_id), None)
            if found is None:
                raise NotFoundError(f"the store has no run {mark.run_id}; name the run's own with --store or --server")
            algorithm = _algorithm(found, run_file)
            policies = _policies(directory, found, plan, algorithm, model, mark.seed)
            if not as_json:
                print(f"starting from {plan.start or 'the weights before the first step'}")
            await replaying.replay(plan, store, algorithm, policies, seed=mark.seed, on_step=report)
        with contextlib.ExitStack() as stack:
            saved = out or Path(stack.enter_context(tempfile.TemporaryDirectory()))
            saved.mkdir(parents=True, exist_ok=True)
            policies.save(saved)
            digests = [replaying.weights_digest(one) for one in (saved, plan.goal) if one is not None]
        return _conclude(plan, trained, digests, as_json)

    return run(work())


def _algorithm(found: Run, run_file: Path | None) -> Reinforcement:
    from agentlightning.algorithm.rl import Reinforcement

    try:
        spec = found.manifest["config"]["algorithm"] if run_file is None else load_config(run_file).algorithm
        algorithm = make_algorithm(spec)
    except (ConfigError, KeyError) as error:
        if run_file is not None:
            raise
        raise ConfigError(
            f"the algorithm cannot be made again from what run {found.run_id} tells of it: {error}. Give the run file "
            "with --run-file"
        ) from None
    if not isinstance(algorithm, Reinforcement):
        raise ConfigError(f"run {found.run_id} is of kind {found.kind!r}, which trains no weights")
    return algorithm


def _policies(
    directory: Path, found: Run, plan: ReplayPlan, algorithm: Reinforcement, model: str | None, seed: int
) -> Policies:
    from agentlightning.algorithm.directory import START
    from agentlightning.algorithm.rl.policies import Policies

    config: dict[str, Any] = found.manifest["config"]
    models: dict[str, str] = config["models"]
    if len(models) > 1 and model is not None:
        raise ConfigError(f"the run trained {', '.join(models)}; --model is for a run that trained one model")
    own = directory / START
    # A checkpoint holds all that is needed, but for the reference, which is what the run started from.
    # An adapter's holds the adapter alone.
    saved = plan.start if model is None and not algorithm.reference and not config.get("lora") else None
    learners: dict[str, TorchLearner] = {}
    for name, given in models.items():
        place = None if saved is None else str(saved if len(models) == 1 else saved / name)
        start = model or place or (str(own) if own.is_dir() else given)
        learners[name] = _learner(start, config, algorithm, seed)
    return Policies(learners)


def _learner(model: str, config: Mapping[str, Any], algorithm: Reinforcement, seed: int) -> TorchLearner:
    """A learner that holds the weights the run started from, with the run's threads."""
    from agentlightning.data.references import is_reference
    from agentlightning.learner.base import AdamW, LoRA
    from agentlightning.learner.policy import load_policy, open_policy
    from agentlightning.learner.serving import choose_threads
    from agentlightning.learner.torch import TorchLearner

    if model == "Policy":
        raise ConfigError("the run was given its model as an object; say with --model what it started from")
    device = config.get("device")
    told = config.get("lora")
    lora = None if told is None else build(LoRA, told, typing.get_type_hints(LoRA), "lora")
    if is_reference(model) or lora is not None:
        policy = open_policy(model, seed=seed, device=device, dtype=config.get("dtype"), lora=lora)
    else:
        policy = load_policy(model, device=device, dtype=_dtype(Path(model), config.get("dtype") or "float32"))
    choose_threads(policy.model, config.get("threads"))
    optimizer = build(AdamW, config["optimizer"], typing.get_type_hints(AdamW), "optimizer")
    return TorchLearner(policy, optimizer, reference=algorithm.reference, critic=algorithm.trained_critic)


def _dtype(model: Path, usual: str) -> str:
    """What a run saved is loaded as it was; any other model as the trainer does."""
    config = model / "config.json"
    if not (model.parent.name == "checkpoints" and config.is_file()):
        return usual
    return str(msgspec.json.decode(config.read_bytes()).get("dtype", "float32"))


def _told(step: ReplayedStep) -> str:
    if not step.metrics:
        return f"step {step.step}: taught nothing"
    steps = [f"loss {one['loss']:.6g}, gradient norm {one['grad_norm']:.6g}" for one in step.metrics]
    return f"step {step.step}: {step.sequences} sequences; {'; '.join(steps)}"


def _conclude(plan: ReplayPlan, trained: list[ReplayedStep], digests: list[str], as_json: bool) -> int:
    equal = len(set(digests)) == 1 if plan.goal is not None else None
    if as_json:
        told = {"steps": trained, "sha256": digests[0], "checkpoint": plan.goal and str(plan.goal), "equal": equal}
        print_json(told)
    elif plan.goal is None:
        print(f"weights {digests[0]}; no checkpoint was kept after step {trained[-1].step} to compare them with")
    elif equal:
        print(f"weights {digests[0]}: bit for bit those of {plan.goal}")
    else:
        print(
            f"weights {digests[0]}, but those of {plan.goal} are {digests[1]}: another version of torch, another "
            "processor or number of threads, or rollouts that were changed since give other bits"
        )
    return DIFFERENT if equal is False else 0
