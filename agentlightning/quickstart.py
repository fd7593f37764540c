"""The quickstart: a new tiny policy learns to use tools in the flight example, in minutes on a laptop.

It trains like any run: an agent, a policy, `Trainer.fit`. It also makes the policy and reports what changed.
"""

from __future__ import annotations

import importlib
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentlightning.algorithm.base import Progress
from agentlightning.algorithm.directory import MARK, START, read_mark
from agentlightning.algorithm.evaluation import Evaluation
from agentlightning.data.conversations import first_tool
from agentlightning.display import runnable
from agentlightning.errors import ConfigError, TrainingError
from agentlightning.trainer import FitResult, Trainer

if TYPE_CHECKING:
    from agentlightning.learner.policy import Policy

DEFAULT_SEED: Final = 1
NEXT: Final = (
    ("Talk to it, from any OpenAI client", "agl serve {checkpoint}"),
    ("Train on where it stopped", "agl quickstart --resume --out {directory} --steps {more_steps}"),
    ("See another seed", "agl quickstart --seed {next_seed}"),
    ("Train your own agent", "agl train --agent my_agent.py:agent --model MODEL --train-dataset tasks.jsonl"),
)

Pair: TypeAlias = tuple[float, float]  # before and after


class FlightExample:
    """The modules of examples/flight, imported by name as its scripts do."""

    def __init__(self, directory: Path) -> None:
        if str(directory) not in sys.path:
            sys.path.insert(0, str(directory))
        self.tasks: Any = importlib.import_module("tasks")
        self.demonstrations: Any = importlib.import_module("demonstrations")
        self.recipe: Any = importlib.import_module("recipe")
        self.train: Any = importlib.import_module("train")


def load_flight_example() -> FlightExample:
    """Load it from the installed package, or from the checkout."""
    package = Path(__file__).parent
    for directory in (package / "examples" / "flight", package.parent / "examples" / "flight"):
        if (directory / "agent.py").is_file():
            return FlightExample(directory)
    raise ConfigError("the flight example is missing from this installation; install agent-lightning-next again")


def run_quickstart(
    progress: Progress, seed: int | None, steps: int | None, time_limit: float | None, resume: bool, out: Path | None
) -> QuickstartReport:
    """Make or load the policy, train it on the flight example, and report what changed."""
    started = time.monotonic()
    example = load_flight_example()
    directory = _choose_directory(out, resume, seed)
    resume = (directory / MARK).is_file()
    seed = seed if seed is not None else read_mark(directory).seed if resume else DEFAULT_SEED
    policy = _starting_policy(example, directory, resume, seed, progress)
    limit = None if time_limit is None else time_limit - (time.monotonic() - started)
    if limit is not None and limit <= 0:
        raise TrainingError(f"the warm start alone took the {time_limit:.0f} s of --time-limit; allow more")
    recipe = example.recipe
    trainer = Trainer(
        model=policy,
        algorithm=recipe.algorithm(steps),
        optimizer=recipe.optimizer(),
        n_runners=recipe.CONCURRENCY,
        max_sequence_length=recipe.MAX_SEQUENCE_LENGTH,
        run_dir=directory,
        seed=seed,
        time_limit=limit,
        progress=progress,
    )
    train_tasks = example.tasks.train_tasks(recipe.TRAIN_TASKS, seed)
    heldout_tasks = example.tasks.heldout_tasks(recipe.HELDOUT_TASKS)
    result = trainer.fit(example.train.flight, train_tasks, heldout_tasks, resume=resume)
    return _report(result, example, seed, time.monotonic() - started)


def _choose_directory(out: Path | None, resume: bool, seed: int | None) -> Path:
    if out is not None:
        if not resume and (out / MARK).is_file():
            raise ConfigError(f"{out} holds a run already; add --resume, or choose another --out")
        return out
    if not resume:
        return Path("runs") / f"quickstart-{time.strftime('%Y%m%d-%H%M%S')}-seed{seed or DEFAULT_SEED}"
    found = sorted(Path("runs").glob(f"quickstart-*/{START}/config.json"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise ConfigError("there is no quickstart to resume below runs/; start one without --resume")
    return found[-1].parents[1]


def _starting_policy(example: FlightExample, directory: Path, resume: bool, seed: int, progress: Progress) -> Policy:
    """The policy that training starts from: loaded, or made, warm-started and saved, so that a resumed run finds it."""
    if resume:
        from agentlightning.learner.policy import load_policy

        return load_policy(directory / START)
    policy = make_starting_policy(example, seed, progress)
    try:
        policy.save(directory / START)
    except OSError as error:
        raise ConfigError(f"cannot write to {directory}: {error.strerror}. Choose another --out") from None
    return policy


def make_starting_policy(example: FlightExample, seed: int, progress: Progress) -> Policy:
    """The tiny policy, warm-started on deliberately mediocre demonstrations. The same seed gives the same policy."""
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


# --- the report --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class QuickstartReport:
    """What changed on the held-out tasks, sampled at temperature 1.

    `first_tools[kind][tool]` is the share of the kind's tasks whose first call was `tool` ("none" for no call),
    `right[kind]` the right tool."""

    result: FitResult
    seed: int
    seconds: float
    steps: int
    first_tools: dict[str, dict[str, Pair]]
    right: dict[str, str]

    @property
    def stopped_because(self) -> str:
        return self.result.stopped_because

    @property
    def reward(self) -> Pair:
        return self.result.evaluations[0].reward, self.result.evaluations[-1].reward

    def summary(self) -> dict[str, Any]:
        """The object printed by `--json`."""
        right = {kind: _rounded(self.first_tools[kind][tool]) for kind, tool in self.right.items()}
        return {
            "memory_first": right["cancelled"],
            "right_first_tool": right,
            "reward": _rounded(self.reward),
            "seconds": round(self.seconds, 1),
            "seed": self.seed,
            "steps": self.steps,
            "stopped_because": self.stopped_because,
            "checkpoint": None if self.result.checkpoint is None else str(self.result.checkpoint),
            "directory": str(self.result.directory),
        }

    def show(self, console: Console) -> None:
        """Print it, with what to try next."""
        console.print(self._table())
        before, after = self.reward
        console.print(
            Text.assemble(
                f"Held-out reward over {len(self.result.evaluations[0].tasks)} tasks: ",
                (f"{before:.3f} → {after:.3f}", "bold"),
                f"   {self.steps} steps in {self.seconds:.0f} s, seed {self.seed} ({self.stopped_because})",
            )
        )
        checkpoint, directory = self.result.checkpoint, self.result.directory
        values = {"checkpoint": checkpoint, "directory": directory}
        values |= {"more_steps": self.steps + 20, "next_seed": self.seed + 1}
        lines = [(f"{'Checkpoint:':<16}{checkpoint}", ""), (f"{'Everything:':<16}{directory}", "")]
        lines.append(("\nWhat to try next", "bold"))
        for purpose, command in NEXT:
            if checkpoint is not None or "{checkpoint}" not in command:
                lines += [(f"  {purpose}:", ""), (f"    {runnable(command.format(**values))}", "cyan")]
        for line, style in lines:  # unwrapped, so that they can be copied
            console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)

    def _table(self) -> Table:
        """Rows are kinds of task, columns first tools; the right tool of each kind is marked."""
        table = Table(title="First tool called, share of held-out tasks before → after", title_justify="left")
        table.add_column("kind of task")
        for tool in next(iter(self.first_tools.values())):
            table.add_column(tool, justify="right")
        for kind, shares in self.first_tools.items():
            styles = {tool: "bold green" if tool == self.right[kind] else "dim" for tool in shares}
            cells = [Text(f"{before:.2f} → {after:.2f}", styles[tool]) for tool, (before, after) in shares.items()]
            table.add_row(kind.replace("_", " "), *cells)
        return table


def _report(result: FitResult, example: FlightExample, seed: int, seconds: float) -> QuickstartReport:
    if not result.evaluations:
        raise TrainingError(
            f"stopped before the first evaluation was done ({result.stopped_because}); "
            f"continue with: {runnable(f'agl quickstart --resume --out {result.directory}')}"
        )
    before, after = result.evaluations[0], result.evaluations[-1]
    right: dict[str, str] = example.tasks.RIGHT_FIRST_TOOL
    tools = dict.fromkeys([*right.values(), "none"])
    return QuickstartReport(
        result=result,
        seed=seed,
        seconds=seconds,
        steps=max((one.step for one in result.metrics), default=0),
        first_tools={
            kind: {tool: (_share(before, kind, tool), _share(after, kind, tool)) for tool in tools} for kind in right
        },
        right=right,
    )


def _share(evaluation: Evaluation, kind: str, tool: str) -> float:
    firsts = [first_tool(task.spans) or "none" for task in evaluation.tasks if task.rollout.input["kind"] == kind]
    return sum(first == tool for first in firsts) / max(1, len(firsts))


def _rounded(pair: Pair) -> dict[str, float]:
    return {"before": round(pair[0], 4), "after": round(pair[1], 4)}
