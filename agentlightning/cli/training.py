"""`agl train`, as a run file and flags say; `agl init`, a project with such a file; `agl quickstart`, one of ours."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec
from rich.console import Console

from agentlightning.cli.config import ALGORITHMS, TrainConfig, build, kept, key_flags, load_config
from agentlightning.cli.options import Duration, instrument_agents, json_option, print_json
from agentlightning.cli.place import RUNS
from agentlightning.errors import ConfigError, nearest

if TYPE_CHECKING:
    from agentlightning.trainer import FitResult

RUN_FILE: Final = Path("run.yaml")
TEMPLATE: Final = Path(__file__).parents[1] / "templates" / "agent"
INTERRUPTED: Final = 130
_NOT_THE_TRAINERS: Final = {
    *("agent", "environment", "instrument", "train_dataset", "val_dataset", "resume"),
    *("algorithm", "optimizer", "lora"),
}


@click.command()
@click.argument("run_file", type=click.Path(dir_okay=False, path_type=Path), required=False, metavar="[RUN.yaml]")
@click.option("--set", "assignments", multiple=True, metavar="KEY=VALUE", help="Change one key: algorithm.group_size=4")
@click.option("--steps", type=int, help="Training steps; short for --set algorithm.steps=…")
@json_option
@key_flags()
def train(
    run_file: Path | None,
    assignments: tuple[str, ...],
    as_json: bool,
    steps: int | None,
    **flags: Any,
) -> int:
    """Train an agent from RUN.yaml, flags or both; a flag wins over --set, and --set over the file.

    Without RUN.yaml, --agent or --environment, the run.yaml of this folder is used; with --resume, that of the run to
    resume, so that no other flag is needed. Each run's directory has one, which repeats the run."""
    assignments += () if steps is None else (f"algorithm.steps={steps}",)
    console = Console(stderr=as_json)
    if run_file is None and flags["agent"] is None and flags["environment"] is None:
        if flags["resume"]:
            flags["run_dir"], run_file = _run_to_resume(flags["run_dir"])
        elif RUN_FILE.is_file():
            run_file = RUN_FILE
    config = load_config(run_file, assignments, flags)
    result = fit(config, console)
    show_fit(console, result)
    if as_json:
        print_json(_summary(result, config))
    return exit_code(result.stopped_because)


def _run_to_resume(named: str | None) -> tuple[str, Path]:
    """The directory of the run in `named`, or of the newest below runs/, and its run file. ConfigError for no run."""
    from agentlightning.algorithm.directory import MARK

    found = sorted(RUNS.glob(f"*/{MARK}"), key=lambda mark: mark.stat().st_mtime)
    if named is None and not found:
        raise ConfigError(f"there is no run to resume below {RUNS.absolute()}; name its directory with --run-dir")
    directory = found[-1].parent if named is None else Path(named).expanduser()
    if not (directory / MARK).is_file():
        newest = f"; the newest run here is in {found[-1].parent}" if found else ""
        raise ConfigError(f"{directory} holds no run to resume{newest}")
    if not (directory / RUN_FILE).is_file():
        raise ConfigError(f"{directory} has no {RUN_FILE}: resume the run with the program or command that started it")
    return str(directory), directory / RUN_FILE


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
    from agentlightning.display import runnable

    lines = [f"Stopped: {result.stopped_because}, after {result.seconds:.0f} s."]
    rewards = [f"{evaluation.reward:.3f}" for evaluation in result.evaluations]
    if rewards:
        lines.append(f"Held-out reward: {rewards[0]}" + (f" before, {rewards[-1]} after." if rewards[1:] else "."))
    lines.append(f"Run:        {result.directory}")
    if exit_code(result.stopped_because):
        lines.append(f"Go on:      {runnable(f'agl train --resume --run-dir {result.directory}')}")
    if result.checkpoint is not None:
        lines.append(f"Checkpoint: {result.checkpoint}")
        if not (result.checkpoint / "tinker.json").exists():  # its weights are on the server
            lines.append(f"Serve it:   {runnable(f'agl serve {result.checkpoint}')}")
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


# --- first steps -------------------------------------------------------------------------------------------------


@click.command()
@click.argument("folder", type=click.Path(path_type=Path), default=".", metavar="[FOLDER]")
@json_option
def init(folder: Path, as_json: bool) -> None:
    """Make a project in FOLDER (default: here) that trains at once: an agent, tasks, a reward, a run file, tests."""
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"{folder.resolve()} is not an empty folder; name one that is empty or does not exist")
        shutil.copytree(TEMPLATE, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", ".*"))
        (folder / "gitignore").rename(folder / ".gitignore")  # which would hide files of this package
    except (OSError, shutil.Error) as error:
        raise ConfigError(f"cannot make {folder}: {error}") from None
    if as_json:
        print_json({"folder": str(folder.resolve())})
        return
    from agentlightning.display import runnable

    click.echo(f"An agent with tasks, a reward and tests is in {folder.resolve()}. Now:\n")
    if folder.resolve() != Path.cwd():
        click.echo(f"  cd {folder}")
    click.echo(f"  {runnable('agl train', folder):<22} # about a minute on a laptop, nothing is downloaded")
    click.echo(f"  {runnable('pytest', folder):<22} # the checks that come with it\n")
    click.echo("README.md says how to make it yours.")


@click.command()
@click.option("--seed", type=int, help="The source of all randomness; default 1, or that of the run resumed.")
@click.option("--steps", type=click.IntRange(min=1), help="Training steps, instead of the recipe's.")
@click.option("--time-limit", type=Duration(bare=True), metavar="90s|5m|2h", help="Stop training after so long.")
@click.option("--resume", is_flag=True, help="Continue the newest quickstart, or the one in --out.")
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), metavar="DIR",
    help="Directory of this run; default a new one below runs/.",
)  # fmt: skip
@json_option
def quickstart(as_json: bool, **given: Any) -> int:
    """Train a small tool-using agent from nothing, here and now, and show what it learned."""
    from agentlightning.display import LiveProgress, hide_library_progress
    from agentlightning.quickstart import load_flight_example, run_quickstart

    hide_library_progress()
    total = load_flight_example().recipe.algorithm(given["steps"]).steps
    console = Console(stderr=as_json)
    with LiveProgress(console, steps=total, time_limit=given["time_limit"]) as progress:
        report = run_quickstart(progress, **given)
    report.show(console)
    if as_json:
        print_json(report.summary())
    return exit_code(report.stopped_because)
