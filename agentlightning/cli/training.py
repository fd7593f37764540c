"""`agl train`: an agent is trained as a run file and flags say, or as an earlier run was."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec
from rich.console import Console

from agentlightning.cli.config import ALGORITHMS, TrainConfig, build, kept, key_flags, load_config
from agentlightning.cli.options import instrument_agents, json_option, print_json
from agentlightning.cli.place import RUNS, STORE_FILE, Place
from agentlightning.errors import ConfigError, nearest
from agentlightning.types import Run

if TYPE_CHECKING:
    from agentlightning.trainer import FitResult

RUN_FILE: Final = Path("run.yaml")
INTERRUPTED: Final = 130
_NOT_THE_TRAINERS: Final = {
    *("agent", "environment", "instrument", "train_dataset", "val_dataset", "resume"),
    *("algorithm", "optimizer", "lora"),
}


@click.command()
@click.argument("run_file", type=click.Path(dir_okay=False, path_type=Path), required=False, metavar="[RUN.yaml]")
@click.option("--from", "repeat", metavar="RUN_DIR|RUN_ID", help="Repeat this run: its settings instead of RUN.yaml's.")
@click.option("--set", "assignments", multiple=True, metavar="KEY=VALUE", help="Change one key: algorithm.group_size=4")
@click.option("--steps", type=int, help="Training steps; short for --set algorithm.steps=…")
@json_option
@key_flags()
def train(
    run_file: Path | None,
    repeat: str | None,
    assignments: tuple[str, ...],
    as_json: bool,
    steps: int | None,
    **flags: Any,
) -> int:
    """Train an agent as RUN.yaml, or flags, or both say; a flag wins over --set, and --set over the file.

    Without RUN.yaml, --from, --agent and --environment it is the run.yaml of this folder, with --resume --run-dir what
    the run in there began with."""
    assignments += () if steps is None else (f"algorithm.steps={steps}",)
    console = Console(stderr=as_json)
    named = flags["agent"] or flags["environment"]
    if repeat is not None and run_file is not None:
        raise click.UsageError("give RUN.yaml or --from, not both: either says what to train")
    if repeat is None and run_file is None and named is None:
        if flags["resume"] and (flags["run_dir"] or not RUN_FILE.is_file()) and (began := _to_resume(flags["run_dir"])):
            repeat, flags["run_dir"] = str(began), str(began)
        elif RUN_FILE.is_file():
            run_file = RUN_FILE
    config = (
        load_config(run_file, assignments, flags) if repeat is None else _repeated(repeat, console, assignments, flags)
    )
    result = fit(config, console)
    show_fit(console, result)
    if as_json:
        print_json(_summary(result, config))
    return exit_code(result.stopped_because)


def fit(config: TrainConfig, console: Console, limit: int | None = None) -> FitResult:
    """Train once, as `config` says, with the progress shown on `console`; of held-out tasks only the first `limit`."""
    algorithm = make_algorithm(config.algorithm)
    from agentlightning.display import LiveProgress, hide_library_progress
    from agentlightning.environments.base import tasks_of
    from agentlightning.learner.base import AdamW, LoRA
    from agentlightning.runner.ending import watched
    from agentlightning.trainer import Trainer

    hide_library_progress()
    optimizer = build(AdamW, config.optimizer, "optimizer")
    lora = None if config.lora is None else build(LoRA, config.lora, "lora")
    passed = {key: value for key, value in msgspec.structs.asdict(config).items() if key not in _NOT_THE_TRAINERS}
    instrument_agents(config.instrument, here=isinstance(config.agent, str))
    with LiveProgress(console, steps=getattr(algorithm, "steps", None), time_limit=config.time_limit) as progress:
        trainer = Trainer(
            algorithm=algorithm, optimizer=optimizer, lora=lora, progress=progress, run_file=kept(config), **passed
        )
        agent, val_dataset = config.load_agent(), config.val_dataset
        if limit is not None:
            val_dataset = tasks_of(agent, config.train_dataset, val_dataset)[1][:limit]
        with watched():
            return trainer.fit(agent, config.train_dataset, val_dataset, resume=config.resume)


def make_algorithm(spec: Mapping[str, Any]) -> Any:
    """The algorithm that `{"name": …, field: value}` describes, with every field's name and type checked."""
    from agentlightning.data.references import is_reference, load_reference

    fields = dict(spec)
    name = fields.pop("name", "grpo")
    if not isinstance(name, str) or (name not in ALGORITHMS and not is_reference(name)):
        raise ConfigError(f"algorithm.name: no algorithm {name!r}; {nearest(str(name), ALGORITHMS)} or file.py:Class")
    maker = load_reference(f"agentlightning.algorithm:{ALGORITHMS[name]}" if name in ALGORITHMS else name)
    if not isinstance(maker, type) or not dataclasses.is_dataclass(maker):
        raise ConfigError(f"algorithm.name: {name} is no dataclass; an algorithm declares its fields as one")
    return build(maker, fields, "algorithm")


def show_fit(console: Console, result: FitResult) -> None:
    """What a run reached, and where it is."""
    lines = [f"Stopped: {result.stopped_because}, after {result.seconds:.0f} s."]
    rewards = [f"{evaluation.reward:.3f}" for evaluation in result.evaluations]
    if rewards:
        lines.append(f"Held-out reward: {rewards[0]}" + (f" before, {rewards[-1]} after." if rewards[1:] else "."))
    lines.append(f"Run:        {result.directory}")
    if exit_code(result.stopped_because):
        lines.append(f"Go on:      agl train --resume --run-dir {result.directory}")
    if result.checkpoint is not None:
        lines.append(f"Checkpoint: {result.checkpoint}")
        if not (result.checkpoint / "tinker.json").exists():  # its weights are on the server
            lines.append(f"Serve it:   agl serve {result.checkpoint}")
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _summary(result: FitResult, config: TrainConfig) -> dict[str, Any]:
    """The object that `--json` prints."""
    rewards = [evaluation.reward for evaluation in result.evaluations]
    return {
        "run_id": result.run_id,
        "directory": str(result.directory),
        "checkpoint": None if result.checkpoint is None else str(result.checkpoint),
        "stopped_because": result.stopped_because,
        "reward": {"before": rewards[0], "after": rewards[-1]} if rewards else None,
        "seconds": round(result.seconds, 3),
        "seed": config.seed,
    }


def exit_code(stopped_because: str) -> int:
    """What was saved is whole either way; a script must still be able to tell that the job was cut short."""
    from agentlightning.algorithm.base import STOPPED_BY_USER

    return INTERRUPTED if stopped_because == STOPPED_BY_USER else 0


# --- again -------------------------------------------------------------------------------------------------------


def _to_resume(run_dir: str | None) -> Path | None:
    """The directory of the run to resume, default the newest, where its settings are stored there too."""
    from agentlightning.algorithm.directory import MARK

    marks = [Path(run_dir) / MARK] if run_dir else sorted(RUNS.glob(f"*/{MARK}"), key=lambda one: one.stat().st_mtime)
    found = [one.parent for one in marks if one.with_name(STORE_FILE).is_file()]
    return found[-1] if found else None


def _repeated(name: str, console: Console, assignments: tuple[str, ...], flags: Mapping[str, Any]) -> TrainConfig:
    from agentlightning.algorithm.directory import differences
    from agentlightning.cli.runs import choose_run

    found = asyncio.run(choose_run(name, Place(flags["store"], flags["server"], flags["api_key"])))
    config = repeated(found.run, assignments, flags)
    for line in differences(found.run.manifest):
        console.print(f"not as when {found.run.run_id} ran: {line}", markup=False, highlight=False, soft_wrap=True)
    return config


def repeated(run: Run, assignments: Iterable[str], flags: Mapping[str, Any]) -> TrainConfig:
    """The configuration of `run` with everything as it was then, defaults too, but for what is said otherwise.

    ConfigError for a run that was started from Python, and for datasets that hold other tasks now."""
    resolved: dict[str, Any] = run.manifest["config"]
    written = resolved.get("run_file")
    if written is None:
        raise ConfigError(
            f"run {run.run_id} was started from Python: its manifest has no names for its agent, its model and its "
            f"datasets. Start it again by: {' '.join(run.manifest.get('command', ())) or 'the command is not known'}"
        )
    config = load_config(written, assignments, flags)
    changed: dict[str, Any] = {"optimizer": {**resolved["optimizer"], **config.optimizer}}
    if config.algorithm.get("name") == written["algorithm"].get("name"):
        changed["algorithm"] = {**resolved["algorithm"], **config.algorithm}
    if config.lora is not None:
        changed["lora"] = {**(resolved["lora"] or {}), **config.lora}
    config = msgspec.structs.replace(config, **changed)
    if config.environment == written.get("environment"):
        _check_tasks(run, written, config)
    return config


def _check_tasks(run: Run, written: Mapping[str, Any], config: TrainConfig) -> None:
    from agentlightning.algorithm.directory import fingerprint
    from agentlightning.environments.base import tasks_of

    tasks = tasks_of(config.load_agent(), config.train_dataset, config.val_dataset)
    for name, now in zip(("train", "val"), map(fingerprint, tasks), strict=True):
        then, source = run.manifest["data"][name], getattr(config, f"{name}_dataset")
        if then != now and source == written.get(f"{name}_dataset"):
            raise ConfigError(
                f"{source or 'the environment'} holds other tasks than when run {run.run_id} was started "
                f"({then['tasks']} then, {now['tasks']} now): bring them back, or name a copy with "
                f"--{name}-dataset to train on other tasks knowingly"
            )
