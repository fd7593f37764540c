"""The quickstart: a tiny policy made on the spot learns to use tools in the flight example, in minutes on a laptop.

It goes the way of any training run: the example's agent, a policy, `Trainer.fit`. What it adds is the making of the
policy and a report of what changed.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentlightning.algorithm.base import Progress
from agentlightning.algorithm.directory import MARK, START, read_mark
from agentlightning.algorithm.evaluation import EvaluatedTask, Evaluation
from agentlightning.data.conversations import conversation, first_tool
from agentlightning.errors import ConfigError, TrainingError
from agentlightning.trainer import FitResult, Trainer

if TYPE_CHECKING:
    from agentlightning.learner.policy import Policy

DEFAULT_SEED = 1


@dataclass(frozen=True)
class QuickstartOptions:
    """What `agl quickstart` was asked for. `model` trains a Hugging Face model instead of the tiny one. Without a
    `seed` it is 1, or that of the run to be resumed."""

    seed: int | None = None
    steps: int | None = None
    time_limit: float | None = None
    resume: bool = False
    out: Path | None = None
    model: str | None = None


@dataclass(frozen=True)
class BeforeAfter:
    before: float
    after: float


@dataclass(frozen=True)
class QuickstartReport:
    """What changed. Shares and rewards are over the held-out tasks, sampled at temperature 1.

    `first_tools[kind][tool]` is the share of tasks of that kind whose first call was `tool` ("none" for no call);
    `examples` is one cancelled-flight conversation before and after, as chat messages."""

    seed: int
    seconds: float
    directory: Path
    checkpoint: Path | None
    stopped_because: str
    steps: int
    tasks: int
    reward: BeforeAfter
    right_first_tool: dict[str, BeforeAfter]
    first_tools: dict[str, dict[str, BeforeAfter]]
    examples: tuple[list[dict[str, Any]], list[dict[str, Any]]]

    @property
    def memory_first(self) -> BeforeAfter:
        return self.right_first_tool["cancelled"]

    def summary(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        return {
            "memory_first": _rounded(self.memory_first),
            "right_first_tool": {kind: _rounded(shares) for kind, shares in self.right_first_tool.items()},
            "reward": _rounded(self.reward),
            "seconds": round(self.seconds, 1),
            "seed": self.seed,
            "steps": self.steps,
            "stopped_because": self.stopped_because,
            "checkpoint": None if self.checkpoint is None else str(self.checkpoint),
            "directory": str(self.directory),
        }


def run_quickstart(options: QuickstartOptions, progress: Progress) -> QuickstartReport:
    """Make or load the policy, train it on the flight example, and report what changed."""
    started = time.monotonic()
    if options.steps is not None and options.steps < 1:
        raise ConfigError(f"--steps is {options.steps}; it must be at least 1")
    example = load_flight_example()
    directory = _choose_directory(options)
    resume = (directory / MARK).is_file()
    seed = options.seed if options.seed is not None else read_mark(directory).seed if resume else DEFAULT_SEED
    policy = _starting_policy(example, options.model, directory, seed, progress)
    limit = None if options.time_limit is None else options.time_limit - (time.monotonic() - started)
    if limit is not None and limit <= 0:
        raise TrainingError(f"the warm start alone took the {options.time_limit:.0f} s of --time-limit; allow more")
    recipe = example.recipe
    trainer = Trainer(
        model=policy,
        algorithm=recipe.algorithm(options.steps),
        optimizer=recipe.optimizer(),
        n_runners=recipe.CONCURRENCY,
        max_sequence_length=recipe.MAX_SEQUENCE_LENGTH if options.model is None else None,
        run_dir=directory,
        seed=seed,
        time_limit=limit,
        progress=progress,
    )
    result = trainer.fit(
        example.train.flight,
        example.tasks.train_tasks(recipe.TRAIN_TASKS, seed),
        example.tasks.heldout_tasks(recipe.HELDOUT_TASKS),
        resume=resume,
    )
    return _report(result, example, seed, time.monotonic() - started)


class FlightExample:
    """The modules of examples/flight, imported by name as its own scripts do."""

    def __init__(self, directory: Path) -> None:
        if str(directory) not in sys.path:
            sys.path.insert(0, str(directory))
        self.tasks: Any = importlib.import_module("tasks")
        self.demonstrations: Any = importlib.import_module("demonstrations")
        self.recipe: Any = importlib.import_module("recipe")
        self.train: Any = importlib.import_module("train")


def load_flight_example() -> FlightExample:
    """From the installed package, or from the checkout it runs in."""
    package = Path(__file__).parent
    for directory in (package / "examples" / "flight", package.parent / "examples" / "flight"):
        if (directory / "agent.py").is_file():
            return FlightExample(directory)
    raise ConfigError("the flight example is missing from this installation; install agent-lightning-next again")


def _choose_directory(options: QuickstartOptions) -> Path:
    if options.out is not None:
        if not options.resume and (options.out / MARK).is_file():
            raise ConfigError(f"{options.out} holds a run already; add --resume, or choose another --out")
        return options.out
    if not options.resume:
        return Path("runs") / f"quickstart-{time.strftime('%Y%m%d-%H%M%S')}-seed{options.seed or DEFAULT_SEED}"
    found = sorted(Path("runs").glob(f"quickstart-*/{START}/config.json"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise ConfigError("there is no quickstart to resume below runs/; start one without --resume")
    return found[-1].parents[1]


def _starting_policy(
    example: FlightExample, model: str | None, directory: Path, seed: int, progress: Progress
) -> Policy:
    """The policy training starts from: loaded, or made, warm-started and saved so that a resumed run finds it."""
    from agentlightning.learner.policy import load_policy

    if model is not None:
        return load_policy(model)
    saved = directory / START
    if (directory / MARK).is_file():
        return load_policy(saved)
    policy = make_starting_policy(example, seed, progress)
    try:
        policy.save(saved)
    except OSError as error:
        raise ConfigError(f"cannot write to {directory}: {error.strerror}. Choose another --out") from None
    return policy


def make_starting_policy(example: FlightExample, seed: int, progress: Progress) -> Policy:
    """The tiny policy, warm-started on deliberately mediocre demonstrations; the same for the same seed."""
    from agentlightning.learner.warm_start import make_policy

    recipe = example.recipe
    progress.phase("make demonstrations")
    shown = example.demonstrations.demonstrations(recipe.DEMONSTRATIONS, seed)
    progress.phase("warm start", recipe.WARM_START.max_steps)
    return make_policy(
        shown,
        tools=example.demonstrations.TOOLS,
        seed=seed,
        vocabulary_size=recipe.VOCABULARY_SIZE,
        options=recipe.WARM_START,
        on_step=lambda state: progress.advance(state.step),
    )


def _report(result: FitResult, example: FlightExample, seed: int, seconds: float) -> QuickstartReport:
    if not result.evaluations:
        raise TrainingError(
            f"stopped before the first evaluation was done ({result.stopped_because}); "
            f"continue with: agl quickstart --resume --out {result.directory}"
        )
    before, after = result.evaluations[0], result.evaluations[-1]
    right: dict[str, str] = example.tasks.RIGHT_FIRST_TOOL
    names = [*dict.fromkeys([*right.values(), "none"])]
    first_tools = {
        kind: {tool: _compare(before, after, lambda e, k=kind, t=tool: _first_share(e, k, t)) for tool in names}
        for kind in right
    }
    steps = max((one.step for one in result.metrics), default=0)
    return QuickstartReport(
        seed=seed,
        seconds=seconds,
        directory=result.directory,
        checkpoint=result.checkpoint,
        stopped_because=result.stopped_because,
        steps=steps,
        tasks=len(before.tasks),
        reward=BeforeAfter(before.reward, after.reward),
        right_first_tool={kind: first_tools[kind][tool] for kind, tool in right.items()},
        first_tools=first_tools,
        examples=_examples(before.tasks, after.tasks),
    )


def _compare(before: Evaluation, after: Evaluation, measure: Callable[[Evaluation], float]) -> BeforeAfter:
    return BeforeAfter(measure(before), measure(after))


def _first_share(evaluation: Evaluation, kind: str, tool: str) -> float:
    firsts = [first_tool(task.spans) or "none" for task in evaluation.tasks if task.rollout.input["kind"] == kind]
    return sum(first == tool for first in firsts) / max(1, len(firsts))


def _examples(
    before: Sequence[EvaluatedTask], after: Sequence[EvaluatedTask]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The same cancelled-flight task before and after: one that went wrong first and right later, if there is one."""
    pairs = [(one, two) for one, two in zip(before, after, strict=True) if one.rollout.input["kind"] == "cancelled"]
    first, later = max(pairs, key=lambda pair: (pair[1].reward or 0.0) - (pair[0].reward or 0.0))
    return conversation(first.spans), conversation(later.spans)


def _rounded(pair: BeforeAfter) -> dict[str, float]:
    return {"before": round(pair.before, 4), "after": round(pair.after, 4)}
