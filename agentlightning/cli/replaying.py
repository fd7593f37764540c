"""Trains recorded steps of a run again, from the newest checkpoint before them, without engine or
agents, and compares the weights with what the run saved.

It rebuilds the run's algorithm and learner as `agl train --resume` would."""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
from safetensors import deserialize

from agentlightning.algorithm.directory import START, read_mark
from agentlightning.algorithm.rl.batch import (
    BATCHES_FILE,
    RecordedBatch,
    make_batches,
    recorded_batches,
)
from agentlightning.algorithm.rl.groups import trace_group
from agentlightning.algorithm.rl.job import STATE_FILE
from agentlightning.algorithm.rl.policies import Policies, optimiser_steps
from agentlightning.algorithm.rl.reinforcement import Reinforcement
from agentlightning.cli.explanation import explain_token, show_path
from agentlightning.cli.options import print_json
from agentlightning.cli.run_file import load_config
from agentlightning.cli.store_location import STORE_FILE, StoreLocation
from agentlightning.config import convert, make_algorithm
from agentlightning.data.recordings import rewarded_group
from agentlightning.data.sequences import TrainingSequence
from agentlightning.display import hide_library_progress
from agentlightning.errors import ConfigError, NotFoundError, TrainingError
from agentlightning.store.base import LightningStore

if TYPE_CHECKING:
    from agentlightning.learner.torch import TorchLearner
    from agentlightning.types import Run

DIFFERENT: Final = 1
_SHOWN: Final = 5  # ids in a message


async def replay_steps(
    directory: Path,
    steps: tuple[int, int] | None,
    token_of: tuple[str, tuple[int, int]] | None,
    out: Path | None,
    run_file: Path | None,
    model: str | None,
    place: StoreLocation,
    as_json: bool,
) -> int:
    """See `agl replay --help`. The exit code."""
    hide_library_progress()
    mark = read_mark(directory)
    explained = None if token_of is None else _step_of(directory, token_of[0])
    first, last = (explained.step, explained.step) if explained else steps or (None, None)
    plan = plan_replay(directory, first, last)
    if explained is not None:
        # the step itself is made where it is explained
        plan = replace(plan, batches=plan.batches[:-1])

    trained: list[ReplayedStep] = []
    tells = not as_json and token_of is None

    def report(step: ReplayedStep) -> None:
        trained.append(step)
        if tells:
            print(_step_line(step))

    store_of_run = StoreLocation(str(directory / STORE_FILE))
    async with (place if place.named else store_of_run).open(reading=True) as store:
        found = next((one for one in await store.query_runs() if one.run_id == mark.run_id), None)
        if found is None:
            raise NotFoundError(
                f"the store has no run {mark.run_id}; name the run's own with --store or --server"
            )
        algorithm = _algorithm(found, run_file)
        policies = _policies(directory, found, plan, algorithm, model, mark.seed)
        if tells:
            print(f"starting from {plan.start or 'the weights before the first step'}")
        await train_again(plan, store, algorithm, policies, seed=mark.seed, on_step=report)
        if token_of is not None and explained is not None:
            rollout_id, at = token_of
            async with algorithm.traces_beside(store) as traces:
                path = await explain_token(
                    traces, explained, algorithm, policies, mark.seed, rollout_id, *at
                )
            (print_json if as_json else show_path)(path)
            return 0
    with contextlib.ExitStack() as stack:
        saved = out or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        saved.mkdir(parents=True, exist_ok=True)
        policies.save(saved)
        digests = [weights_digest(one) for one in (saved, plan.goal) if one is not None]
    return _print_comparison(plan, trained, digests, as_json)


def _step_of(directory: Path, rollout_id: str) -> RecordedBatch:
    """The step of the run that was given the rollout. NotFoundError if none was."""
    step = next(
        (
            batch
            for batch in recorded_batches(directory).values()
            if rollout_id in sum(batch.groups, ())
        ),
        None,
    )
    if step is None:
        raise NotFoundError(
            f"no step of the run in {directory} was given rollout {rollout_id}: it was held out "
            "or dropped, or another run's. `agl rollouts ls --mode train` lists those that train"
        )
    return step


def _algorithm(found: Run, run_file: Path | None) -> Reinforcement:
    try:
        spec = (
            found.manifest["config"]["algorithm"]
            if run_file is None
            else load_config(run_file).algorithm
        )
        algorithm = make_algorithm(spec)
    except (ConfigError, KeyError) as error:
        if run_file is not None:
            raise
        raise ConfigError(
            f"the algorithm cannot be made again from what run {found.run_id} tells of it: "
            f"{error}. Give the run file with --run-file"
        ) from None
    if not isinstance(algorithm, Reinforcement):
        raise ConfigError(f"run {found.run_id} is of kind {found.kind!r}, which trains no weights")
    return algorithm


def _policies(
    directory: Path,
    found: Run,
    plan: ReplayPlan,
    algorithm: Reinforcement,
    model: str | None,
    seed: int,
) -> Policies:
    config: dict[str, Any] = found.manifest["config"]
    models: dict[str, str] = config["models"]
    if len(models) > 1 and model is not None:
        raise ConfigError(
            f"the run trained {', '.join(models)}; --model is for a run that trained one model"
        )
    own = directory / START
    # A checkpoint holds all that is needed, but for the reference, which is what the run started
    # from. An adapter's holds the adapter alone.
    saved = (
        plan.start if model is None and not algorithm.reference and not config.get("lora") else None
    )
    learners: dict[str, TorchLearner] = {}
    for name, given in models.items():
        place = None if saved is None else str(saved if len(models) == 1 else saved / name)
        start = model or place or (str(own) if own.is_dir() else given)
        learners[name] = _learner(start, config, algorithm, seed)
    return Policies(learners)


def _learner(
    model: str, config: Mapping[str, Any], algorithm: Reinforcement, seed: int
) -> TorchLearner:
    """A learner that holds the weights the run started from, with the run's threads."""
    from agentlightning.data.references import is_reference
    from agentlightning.learner.embedded_sampler import choose_threads
    from agentlightning.learner.policy import load_policy, open_policy
    from agentlightning.learner.policy_config import AdamW, LoRA
    from agentlightning.learner.torch import TorchLearner

    if model == "Policy":
        raise ConfigError(
            "the run was given its model as an object; say with --model what it started from"
        )
    device = config.get("device")
    told = config.get("lora")
    lora = None if told is None else convert(told, LoRA, "lora")
    if is_reference(model) or lora is not None:
        policy = open_policy(model, seed=seed, device=device, dtype=config.get("dtype"), lora=lora)
    else:
        policy = load_policy(
            model, device=device, dtype=_dtype(Path(model), config.get("dtype") or "float32")
        )
    choose_threads(policy.model, config.get("threads"))
    optimizer = convert(config["optimizer"], AdamW, "optimizer")
    return TorchLearner(
        policy, optimizer, reference=algorithm.reference, critic=algorithm.trained_critic
    )


def _dtype(model: Path, usual: str) -> str:
    """The dtype to load a model in: that of what a run saved, or else the trainer's."""
    config = model / "config.json"
    if not (model.parent.name == "checkpoints" and config.is_file()):
        return usual
    return str(msgspec.json.decode(config.read_bytes()).get("dtype", "float32"))


def _step_line(step: ReplayedStep) -> str:
    if not step.metrics:
        return f"step {step.step}: taught nothing"
    steps = [
        f"loss {one['loss']:.6g}, gradient norm {one['grad_norm']:.6g}" for one in step.metrics
    ]
    return f"step {step.step}: {step.sequences} sequences; {'; '.join(steps)}"


def _print_comparison(
    plan: ReplayPlan, trained: list[ReplayedStep], digests: list[str], as_json: bool
) -> int:
    equal = len(set(digests)) == 1 if plan.goal is not None else None
    if as_json:
        told = {
            "steps": trained,
            "sha256": digests[0],
            "checkpoint": plan.goal and str(plan.goal),
            "equal": equal,
        }
        print_json(told)
    elif plan.goal is None:
        print(
            f"weights {digests[0]}; no checkpoint was kept after step {trained[-1].step} to "
            "compare them with"
        )
    elif equal:
        print(f"weights {digests[0]}: bit for bit those of {plan.goal}")
    else:
        print(
            f"weights {digests[0]}, but those of {plan.goal} are {digests[1]}: another version of "
            "torch, another processor or number of threads, or rollouts that were changed since "
            "give other bits"
        )
    return DIFFERENT if equal is False else 0


# --- the training ---


@dataclass(frozen=True)
class ReplayPlan:
    """The weights to load (None: the weights that the run started from), what to train after it, in
    order, and the checkpoint that the result should equal, None where none was kept."""

    start: Path | None
    batches: tuple[RecordedBatch, ...]
    goal: Path | None


@dataclass(frozen=True)
class ReplayedStep:
    """A step that was trained again, and the metrics of each of its optimiser steps; none where it
    taught nothing."""

    step: int
    sequences: int
    metrics: tuple[dict[str, float], ...]


def plan_replay(directory: Path, first: int | None = None, last: int | None = None) -> ReplayPlan:
    """Plan how to train the steps `first` to `last` of the run in `directory` again: from the
    newest checkpoint before.

    Without steps, those that led to the newest checkpoint from the one before it. ConfigError names
    the steps that were not recorded."""
    batches = recorded_batches(directory)
    checkpoints = {
        int(state.parent.name.removeprefix("step-")): state.parent
        for state in (directory / "checkpoints").glob(f"step-*/{STATE_FILE}")
    }
    if last is None:
        last = max(checkpoints, default=max(batches))
    if first is None:
        first = max((step for step in checkpoints if step < last), default=0) + 1
    start = max((step for step in checkpoints if step < first), default=0)
    wanted = range(start + 1, last + 1)
    missing = [step for step in wanted if step not in batches]
    if missing or not wanted:
        raise ConfigError(
            f"steps {first} to {last} cannot be trained again from step {start} on: "
            f"{f'step {missing[0]} is' if missing else 'none of them is'} not in "
            f"{directory / BATCHES_FILE}, which holds steps {min(batches)} to {max(batches)}"
        )
    return ReplayPlan(
        checkpoints.get(start), tuple(batches[step] for step in wanted), checkpoints.get(last)
    )


async def train_again(
    plan: ReplayPlan,
    store: LightningStore,
    algorithm: Reinforcement,
    policies: Policies,
    *,
    seed: int,
    on_step: Callable[[ReplayedStep], None] = lambda step: None,
) -> None:
    """Train the steps of the plan, whose rollouts are in `store` unless the algorithm says where.
    The policies hold the weights that the run started from, and are called what its agents called
    them.

    NotFoundError names rollouts of a step that are not in the store any more; TrainingError the
    step in which a loss or a gradient is not finite."""
    if plan.start is not None:
        policies.load(plan.start)
    async with algorithm.traces_beside(store) as traces:
        for batch in plan.batches:
            metrics: list[dict[str, float]] = []
            sequences = await _sequences(batch, traces, algorithm, policies)
            for name, learner in policies.learners.items():
                steps = optimiser_steps(
                    learner, sequences[name], algorithm, seed=seed, step=batch.step, version=None
                )
                try:
                    metrics += steps
                except TrainingError as error:
                    raise TrainingError(
                        f"step {batch.step}, optimiser step {len(metrics) + 1}: {error}"
                    ) from error
            on_step(ReplayedStep(batch.step, sum(map(len, sequences.values())), tuple(metrics)))


async def _sequences(
    batch: RecordedBatch, store: LightningStore, algorithm: Reinforcement, policies: Policies
) -> dict[str, list[TrainingSequence]]:
    """The sequences that the step trained each model on, made as the loop makes them."""
    ids = [name for group in batch.groups for name in group]
    there = {rollout.rollout_id for rollout in await store.query_rollouts(rollout_id_in=ids)}
    gone = [name for name in ids if name not in there]
    if gone:
        raise NotFoundError(
            f"step {batch.step} cannot be trained again: {len(gone)} of its {len(ids)} rollouts "
            "are not in the store any more: "
            f"{', '.join(gone[:_SHOWN])}{' …' if len(gone) > _SHOWN else ''}"
        )
    traced = [await trace_group(store, group, algorithm, policies.names) for group in batch.groups]
    rewarded = [rewarded_group(group, algorithm.unrewarded) for group in traced]
    batches = make_batches(algorithm, rewarded, policies.critics(algorithm))
    return {model: made.sequences for model, made in batches.items()}


# --- the same bits --------------------------------------------------------------------------------


def weights_digest(directory: Path) -> str:
    """SHA-256 of all tensors in a directory's safetensors files: their names, types, shapes and
    bytes, by name."""
    digest = hashlib.sha256()
    files = sorted(directory.rglob("*.safetensors"))
    tensors: list[tuple[str, Any]] = [
        one for file in files for one in deserialize(file.read_bytes())
    ]
    for name, tensor in sorted(tensors, key=itemgetter(0)):
        digest.update(f"{name} {tensor['dtype']} {tensor['shape']}\n".encode() + tensor["data"])
    return digest.hexdigest()
