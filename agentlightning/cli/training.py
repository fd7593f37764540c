"""The commands that run an agent to improve or measure it: `agl quickstart`, `agl train`, `agl dev`."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
from rich.console import Console

from agentlightning.cli.config import CommandConfig, TrainConfig, build, kept, load_config
from agentlightning.cli.options import (
    Option,
    instrument_agents,
    instrument_option,
    json_option,
    print_json,
    together,
)
from agentlightning.errors import ConfigError, nearest
from agentlightning.types import LLM

if TYPE_CHECKING:
    from agentlightning.runner.agent import LitAgent
    from agentlightning.runner.processes import Isolation
    from agentlightning.trainer import FitResult

# Algorithms by the name a run file gives them; any other is named by a reference, `file.py:Class`.
ALGORITHMS = {
    name: f"agentlightning.algorithm:{class_}"
    for name, class_ in {
        "grpo": "GRPO",
        "rloo": "RLOO",
        "dr_grpo": "DrGRPO",
        "dapo": "DAPO",
        "gspo": "GSPO",
        "cispo": "CISPO",
        "ppo": "PPO",
        "reinforce++": "REINFORCEPlusPlus",
        "reinforce++_baseline": "REINFORCEPlusPlusBaseline",
        "sft": "SFT",
        "opd": "OPD",
        "apo": "APO",
        "baseline": "Baseline",
    }.items()
}

RUN_FILE = Path("run.yaml")
INTERRUPTED = 130

DIRECTORY = click.Path(file_okay=False, path_type=Path)
FILE = click.Path(dir_okay=False, path_type=Path)


def isolation_option(default: str | None) -> Option:
    return click.option(
        "--isolation", type=click.Choice(["auto", "none", "process"]), default=default, show_default=bool(default),
        help="process: each rollout has one to itself. auto: where the agent takes neither `llm` nor `resources`.",
    )  # fmt: skip


# The keys of a run file that say where and how rollouts are run.
running_flags = together(
    click.option("--n-runners", type=int, help="Rollouts at once in this process; 0 leaves them to `agl runner`."),
    isolation_option(None),
    instrument_option,
    click.option("--seed", type=int, help="The source of all randomness."),
    click.option("--run-dir", "--out", metavar="DIR", help="Directory of this run; default a new one below runs/."),
    click.option("--resume", is_flag=True, default=None, help="Continue the run in --run-dir, or the newest."),
    click.option("--store", metavar="PATH", help="SQLite file; default in the run's directory."),
    click.option("--server", metavar="URL", help="Work with this `agl server`."),
    click.option("--key", "api_key", metavar="KEY", help="The server's key.", envvar="AGL_KEY", show_envvar=True),
    click.option("--port", type=int, help="Port of this process's own server; 0 for any free one."),
    click.option("--max-sequence-length", type=int, metavar="TOKENS", help="Prompt and answer together."),
    click.option("--device", metavar="NAME", help="cpu, cuda or mps; default cuda where there is one, else cpu."),
    click.option(
        "--dtype",
        type=click.Choice(["float32", "bfloat16"]),
        help="Of the weights; default bfloat16 on a GPU, else float32.",
    ),
    click.option("--threads", type=int, help="Torch threads."),
)
# One flag per key of a run file.
mirrored_flags = together(
    click.option("--agent", metavar="FILE.py:NAME", help="The agent: file.py:name or module:name."),
    click.option("--environment", metavar="HUB:NAME", help="An agent with its tasks: verifiers:NAME, inspect:…"),
    click.option("--model", metavar="ID|DIR|FILE.py:NAME", help="Model to train: id, directory or maker."),
    click.option("--model-name", metavar="NAME", help="What agents call it by; default policy."),
    click.option("--train-dataset", metavar="DATA", help="Tasks to learn from: a file, or file.py:name."),
    click.option("--val-dataset", metavar="DATA", help="Held-out tasks, measured before and after."),
    click.option("--algorithm", metavar="NAME", help=f"{', '.join(ALGORITHMS)} or file.py:Class."),
    click.option("--teacher", metavar="ID|DIR|URL", help="Whom to imitate; short for --set algorithm.teacher=…"),
    click.option("--steps", type=int, help="Training steps; short for --set algorithm.steps=…"),
    click.option(
        "--max-usd", type=float, help="What a search for prompts may cost; short for --set algorithm.max_usd=…"
    ),
    click.option("--time-limit", type=float, metavar="SECONDS", help="Stop training then; measure and save."),
    running_flags,
)
# `--model`, or `--endpoint` and the model's name there: what answers an agent that is not trained.
answering_options = together(
    click.option("--model", metavar="ID|DIR|FILE.py:NAME", help="The model that answers: id, directory or maker."),
    click.option("--endpoint", metavar="URL", help="OpenAI-compatible URL that answers instead of --model."),
    click.option("--endpoint-model", metavar="NAME", help="The model's name at --endpoint."),
    click.option("--endpoint-key", metavar="KEY", envvar="OPENAI_API_KEY", show_envvar=True, help="Its key."),
)


def answering(
    model: str | None, endpoint: str | None, endpoint_model: str | None, endpoint_key: str | None
) -> tuple[str | None, dict[str, LLM]]:
    """What `answering_options` say: the model to serve, or the endpoint among the agent's resources. With an endpoint
    `--model` is short for `--endpoint-model`."""
    if endpoint is None:
        if endpoint_model is not None:
            raise click.UsageError("--endpoint-model is the model's name at an --endpoint, which is missing")
        return model, {}
    if (model is None) == (endpoint_model is None):
        raise click.UsageError("--endpoint needs --endpoint-model, the model's name there, and no --model besides")
    return None, {"llm": LLM(endpoint=endpoint, model=model or endpoint_model or "", api_key=endpoint_key)}


# A program in an agent's place.
command_options = together(
    click.option("--command", metavar="LINE", help="Run this program instead: 'python my_agent.py --task {task}'."),
    click.option(
        "--reward", type=click.Choice(["auto", "stdout", "file", "url"]), default="auto", show_default=True,
        help="Where the reward of --command is: its last line, $AGL_REWARD_FILE, $AGL_REWARD_URL.",
    ),
    click.option("--grader", metavar="LINE|FILE.py:NAME", help="What grades --command, a program or a function."),
)  # fmt: skip


def agent_of(named: Sequence[str], options: dict[str, Any], *, here: bool = True) -> LitAgent[Any]:
    """The one agent that arguments or `command_options` name, which are taken out of `options`. What is to be
    instrumented is so before it is imported: in this process, unless it runs not `here`, and in those below."""
    from agentlightning.runner.agent import as_agent

    command, reward, grader, instrument = (options.pop(name) for name in ("command", "reward", "grader", "instrument"))
    if len(named) + (command is not None) != 1:
        raise click.UsageError("give the agent to run, once: FILE.py:NAME, RUN.yaml, or --command with a program")
    if command is None and (grader is not None or reward != "auto"):
        raise click.UsageError("--reward and --grader are for --command; a Python agent returns its reward")
    instrument_agents(instrument, here=here and command is None)
    if command is not None:
        return CommandConfig(command=command, reward=reward, grader=grader).load()
    if named[0].endswith((".yaml", ".yml")) and (here or Path(named[0]).is_file()):
        return as_agent(load_config(Path(named[0])).load_agent())
    return as_agent(named[0])


@click.command()
@click.argument("run_file", type=FILE, required=False, metavar="[RUN.yaml]")
@click.option("--from", "repeat", metavar="RUN_DIR|RUN_ID", help="Repeat this run: its settings instead of RUN.yaml's.")
@click.option("--set", "assignments", multiple=True, metavar="KEY=VALUE", help="Change one key: algorithm.group_size=4")
@json_option
@mirrored_flags
def train(
    run_file: Path | None,
    repeat: str | None,
    assignments: tuple[str, ...],
    as_json: bool,
    teacher: str | None,
    steps: int | None,
    max_usd: float | None,
    **flags: Any,
) -> int:
    """Train an agent as RUN.yaml, or flags, or both say; a flag wins over --set, and --set over the file.

    Without RUN.yaml, --from, --agent and --environment it is the run.yaml of this folder, with --resume --run-dir what
    the run in there began with."""
    short = {"teacher": teacher, "steps": steps, "max_usd": max_usd}
    assignments += tuple(f"algorithm.{key}={value}" for key, value in short.items() if value is not None)
    console = Console(stderr=as_json)
    if repeat is not None:
        if run_file is not None:
            raise click.UsageError("give RUN.yaml or --from, not both: either says what to train")
        config = _repeated(repeat, console, assignments, flags)
    else:
        named = flags["agent"] or flags["environment"]
        told = run_file is not None or named is not None
        kept_there = not told and flags["resume"] and (flags["run_dir"] or not RUN_FILE.is_file())
        began = _to_resume(flags["run_dir"]) if kept_there else None
        if run_file is None and named is None and RUN_FILE.is_file():
            run_file = RUN_FILE
        if began is not None:
            config = _repeated(str(began), console, assignments, {**flags, "run_dir": str(began)})
        else:
            config = load_config(run_file, assignments, flags)
    result = fit(config, console)
    show_fit(console, result)
    if as_json:
        print_json(fit_summary(result, config))
    return exit_code(result.stopped_because)


def _to_resume(run_dir: str | None) -> Path | None:
    """The directory of the run to resume, default the newest, where its settings are stored there too."""
    from agentlightning.algorithm.directory import MARK
    from agentlightning.cli.place import RUNS, STORE_FILE

    marks = [Path(run_dir) / MARK] if run_dir else sorted(RUNS.glob(f"*/{MARK}"), key=lambda one: one.stat().st_mtime)
    found = [one.parent for one in marks if one.with_name(STORE_FILE).is_file()]
    return found[-1] if found else None


def _repeated(name: str, console: Console, assignments: tuple[str, ...], flags: Mapping[str, Any]) -> TrainConfig:
    from agentlightning.algorithm.directory import differences
    from agentlightning.cli.place import Place
    from agentlightning.cli.repeating import find_run, repeated

    run = find_run(name, Place(flags["store"], flags["server"], flags["api_key"]))
    config = repeated(run, assignments, flags)
    for line in differences(run.manifest):
        console.print(f"not as when {run.run_id} ran: {line}", markup=False, highlight=False, soft_wrap=True)
    return config


def fit(config: TrainConfig, console: Console) -> FitResult:
    """Train once, as `config` says, with the progress shown on `console`."""
    algorithm = make_algorithm(config.algorithm)
    from agentlightning.display import LiveProgress, hide_library_progress
    from agentlightning.learner.base import AdamW, LoRA
    from agentlightning.runner.ending import watched
    from agentlightning.trainer import Trainer

    hide_library_progress()
    optimizer = build(AdamW, config.optimizer, "optimizer")
    lora = None if config.lora is None else build(LoRA, config.lora, "lora")
    elsewhere = {
        "agent",
        "environment",
        "instrument",
        "train_dataset",
        "val_dataset",
        "algorithm",
        "optimizer",
        "lora",
        "resume",
    }
    passed = {key: value for key, value in msgspec.structs.asdict(config).items() if key not in elsewhere}
    instrument_agents(config.instrument, here=isinstance(config.agent, str))
    with LiveProgress(console, steps=getattr(algorithm, "steps", None), time_limit=config.time_limit) as progress:
        trainer = Trainer(
            algorithm=algorithm, optimizer=optimizer, lora=lora, progress=progress, run_file=kept(config), **passed
        )
        agent = config.load_agent()
        with watched():
            return trainer.fit(agent, config.train_dataset, config.val_dataset, resume=config.resume)


def make_algorithm(spec: Mapping[str, Any]) -> Any:
    """The algorithm that `{"name": …, field: value}` describes, with every field's name and type checked."""
    from agentlightning.data.references import is_reference, load_reference

    fields = dict(spec)
    name = fields.pop("name", "grpo")
    if not isinstance(name, str) or (name not in ALGORITHMS and not is_reference(name)):
        raise ConfigError(f"algorithm.name: no algorithm {name!r}; {nearest(str(name), ALGORITHMS)} or file.py:Class")
    maker = load_reference(ALGORITHMS.get(name, name))
    if not isinstance(maker, type) or not dataclasses.is_dataclass(maker):
        raise ConfigError(f"algorithm.name: {name} is no dataclass; an algorithm declares its fields as one")
    return build(maker, fields, "algorithm")


def show_fit(console: Console, result: FitResult) -> None:
    """What a run reached, and where it is."""
    lines = [f"Stopped: {result.stopped_because}, after {result.seconds:.0f} s."]
    rewards = [f"{evaluation.reward:.3f}" for evaluation in result.evaluations]
    if len(rewards) > 1:
        lines.append(f"Held-out reward: {rewards[0]} before, {rewards[-1]} after.")
    elif rewards:
        lines.append(f"Held-out reward: {rewards[0]}.")
    lines.append(f"Run:        {result.directory}")
    if exit_code(result.stopped_because):
        lines.append(f"Go on:      agl train --resume --run-dir {result.directory}")
    if result.checkpoint is not None:
        lines.append(f"Checkpoint: {result.checkpoint}")
        if not (result.checkpoint / "tinker.json").exists():  # its weights are on the server
            lines.append(f"Serve it:   agl serve {result.checkpoint}")
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def fit_summary(result: FitResult, config: TrainConfig) -> dict[str, Any]:
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


@click.command()
@click.argument("given", metavar="[FILE.py:NAME] DATA", nargs=-1, required=True)
@command_options
@answering_options
@click.option("--limit", type=click.IntRange(min=1), default=5, show_default=True, help="How many tasks to run.")
@click.option("--run-dir", metavar="DIR", help="Directory of this run; default a new one below runs/.")
@isolation_option("auto")
@instrument_option
@json_option
def dev(
    given: tuple[str, ...], limit: int, run_dir: str | None, isolation: Isolation, as_json: bool, **options: Any
) -> int:
    """Run an agent, a Python object or a --command, on a few tasks without training and print what it did, call by
    call; exit with 1 if all fail."""
    *named, dataset = given
    agent = agent_of(named, options)
    served, resources = answering(**options)
    if served is None and not resources:
        raise click.UsageError("give --model, or --endpoint and --endpoint-model")
    from agentlightning.data.datasets import load_dataset
    from agentlightning.runner.ending import watched
    from agentlightning.trainer import Trainer

    tasks = load_dataset(dataset)[:limit]
    trainer = Trainer(model=served, initial_resources=resources, run_dir=run_dir, isolation=isolation)
    with contextlib.redirect_stdout(sys.stderr if as_json else sys.stdout), watched():  # what the agent prints, too
        ended = trainer.dev(agent, tasks)
    if as_json:
        from agentlightning.algorithm.measures import Measures, measured, summarise

        told = [
            {"rollout_id": one.rollout.rollout_id, "status": one.rollout.status, "reward": one.reward} for one in ended
        ]
        summary = summarise([measured(one.traced, one.spans) for one in ended], Measures())
        print_json({"rollouts": told, **msgspec.to_builtins(summary)})
    return 0 if any(one.rollout.status == "succeeded" for one in ended) else 1


@click.command()
@click.option("--seed", type=int, help="The source of all randomness; default 1, or that of the run resumed.")
@click.option("--steps", type=click.IntRange(min=1), help="Training steps, instead of the recipe's.")
@click.option(
    "--time-limit", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS", help="Stop training then."
)
@click.option("--resume", is_flag=True, help="Continue the newest quickstart, or the one in --out.")
@click.option("--out", type=DIRECTORY, metavar="DIR", help="Directory of this run; default a new one below runs/.")
@click.option("--model", metavar="ID|DIR", help="Train this Hugging Face model instead of one made on the spot.")
@json_option
def quickstart(as_json: bool, **given: Any) -> int:
    """Train a small tool-using agent from nothing, here and now, and show what it learned."""
    from agentlightning.cli.before_after import show_report
    from agentlightning.display import LiveProgress, hide_library_progress
    from agentlightning.quickstart import QuickstartOptions, load_flight_example, run_quickstart

    hide_library_progress()
    options = QuickstartOptions(**given)
    total = load_flight_example().recipe.algorithm(options.steps).steps
    console = Console(stderr=as_json)
    with LiveProgress(console, steps=total, time_limit=options.time_limit) as progress:
        report = run_quickstart(options, progress)
    show_report(console, report)
    if as_json:
        print_json(report.summary())
    return exit_code(report.stopped_because)


def exit_code(stopped_because: str) -> int:
    """What was saved is whole either way; a script must still be able to tell that the job was cut short."""
    from agentlightning.algorithm.base import STOPPED_BY_USER

    return INTERRUPTED if stopped_because == STOPPED_BY_USER else 0
