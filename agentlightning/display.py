"""Shows a running job: phase, step, reward, speed and time left. A live panel on a terminal;
elsewhere, a line now and then."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Self, TextIO, cast

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from agentlightning.tracing.tree import printable, rollout_tree

PLAIN_INTERVAL = 5.0  # seconds between two lines about steps where there is no terminal
BLOCKS = "▁▂▃▄▅▆▇█"
FIGURES: Final = {
    "reward": "reward {:.3f}",
    "val_reward": "held-out {:.3f}",
    "rollouts_per_second": "{:.1f} rollouts/s",
    "tokens_per_second": "{:,.0f} tokens/s",
    "loss": "loss {:+.4f}",
}
"""The metrics worth a line, in words."""
LONG_PHASE = 30.0  # seconds without a line after which there is one about a phase that goes on


def runnable(command: str, folder: Path = Path()) -> str:
    """`agl …` as it runs in `folder` in this shell: with its path if PATH has another `agl`, or
    none."""
    name, _, arguments = command.partition(" ")
    program = Path(sys.executable).with_name(name)
    found = shutil.which(name)
    if not program.exists() or (found is not None and Path(found).resolve() == program.resolve()):
        return command
    return f"{shlex.quote(near(program, folder))} {arguments}".rstrip()


def resume_command(directory: Path | None, manifest: Mapping[str, Any]) -> str:
    """The command that continues the interrupted run in this directory, or in an unknown one."""
    command = [printable(str(word)) for word in manifest.get("command", ())]
    where = "" if directory is None else shlex.quote(os.path.relpath(directory))
    if directory is not None and not (directory / "run.yaml").is_file():
        return (
            f"{shlex.join(command) or 'the program that started it'}, with resume=True and "
            f"run_dir={where}"
        )
    return runnable(f"agl train --resume {where and f'--run-dir {where}'}".strip())


def duration(seconds: float) -> str:
    """`75.2` → `1:15`, `3700` → `1:01:40`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def sparkline(values: Sequence[float], span: tuple[float, float] | None = None) -> str:
    """The last 40 values as blocks over `span`, by default min(0, values) to max(1, values).

    `[0.0, 0.5, 1.0]` → `▁▄█`."""
    shown = values[-40:]
    if not shown:
        return ""
    low, high = span or (min(0.0, *shown), max(1.0, *shown))
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[int((value - low) * scale)] for value in shown)


def pace(task: Task) -> str:
    """`120/480 · 24/s · about 0:15 left`; without a total `120 · 24/s`; before the first
    `0/480`."""
    done = int(task.completed)
    total = None if task.total is None else int(task.total)
    done = done if total is None else min(done, total)  # of rollouts more may be there already
    words = [f"{done:,}" if total is None else f"{done:,}/{total:,}"]
    if done and task.elapsed:
        rate = done / task.elapsed
        words.append(f"{rate:,.0f}/s" if rate >= 10 else f"{rate:.2g}/s")
        if total is not None and done < total:
            words.append(f"about {duration((total - done) / rate)} left")
    return " · ".join(words)


class _Pace(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(pace(task) if task.total or task.completed else "")


class _RobustStream:
    """A stream that goes on when agents put another in its place. What it refuses to write is lost:
    agents may close it, and no run ends for that."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):
            return self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()


def terminal(*, stderr: bool = False, **settings: Any) -> Console:
    """A console on stdout or stderr as they are now, whatever agents put in their place."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(file=cast(TextIO, _RobustStream(stream)), **settings)


def _stderr() -> Console:
    """Lines in a notebook's one stream, where rich would make an output of each, or move a cursor
    that is not there."""
    plain = False if Console(stderr=True).is_jupyter else None
    return terminal(stderr=True, force_jupyter=False, force_terminal=plain)


def near(path: str | Path, folder: Path = Path()) -> str:
    """A path as it is short to write in `folder`: from there, or absolute."""
    return min(str(path), os.path.relpath(path, folder), key=len)


def _bars(**settings: Any) -> Progress:
    return Progress(
        TextColumn("{task.description}", "bold", markup=False), BarColumn(30), _Pace(), **settings
    )


@contextmanager
def counting_rollouts(total: int | None, *, hidden: bool) -> Generator[Callable[[int], None]]:
    """Show on stderr how many rollouts are done, on a terminal and unless `hidden`. Call the
    returned function with that number."""
    with _bars(console=_stderr(), transient=True, disable=hidden) as bars:
        task = bars.add_task("rollouts", total=total)
        yield lambda done: bars.update(task, completed=done)


class LiveProgress:
    """A `Progress` of algorithms to watch, on stderr or a console. Use it as a context manager
    around the job.

    `steps` and `time_limit` (seconds) are the limits of the job; None if there are none."""

    def __init__(
        self,
        console: Console | None = None,
        *,
        steps: int | None = None,
        time_limit: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console = console or _stderr()
        self._steps = steps
        self._time_limit = time_limit
        self._clock = clock
        # of the job, and of the last line where there is no panel
        self._start = self._line_time = clock()
        self._bars = _bars(get_time=clock)  # one, of the phase
        self._first: tuple[int, float] | None = None  # a step and when it ended
        self._step = 0
        self._step_end = 0.0
        self._metrics = dict[str, float]()
        self._rewards = list[float]()
        self._step_shown = 0
        self._step_time = 0.0
        self._phases_shown: set[str] = set()
        self._live = (
            Live(console=console, get_renderable=self._panel, transient=True)
            if console.is_terminal
            else None
        )

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
        elif self._step > self._step_shown:
            self._print_step()

    def phase(self, name: str, total: int | None = None) -> None:
        for task in self._bars.task_ids:
            self._bars.remove_task(task)
        self._bars.add_task(name, total=total)
        if self._live is None and name not in self._phases_shown:
            self._phases_shown.add(name)
            self._print(f"{name} …")

    def advance(self, done: int) -> None:
        for task in self._bars.tasks:
            self._bars.update(task.id, completed=done)
            if self._live is None and self._clock() - self._line_time >= LONG_PHASE:
                self._print(f"{task.description} {pace(task)}")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._step = step
        self._step_end = self._clock()
        self._first = self._first or (step, self._step_end)
        self._metrics.update(metrics)
        self._rewards += [metrics["reward"]] if "reward" in metrics else []
        if self._live is None and (
            not self._step_shown or self._clock() - self._step_time >= PLAIN_INTERVAL
        ):
            self._print_step()

    def note(self, message: str) -> None:
        if self._live is None:
            self._print(message)
        else:
            self._live.console.print(Text(printable(message)))

    def time_left(self) -> float | None:
        """Seconds until the last step at the pace so far, or until the time limit if that is
        sooner; None if neither is known."""
        limits = list[float]()
        if self._time_limit is not None:
            limits.append(self._time_limit - self._elapsed())
        first, began = self._first or (0, 0.0)
        # the first is slow, for it includes the start
        if self._steps is not None and self._step > first > 0:
            seconds = (self._step_end - began) / (self._step - first)
            limits.append((self._steps - self._step) * seconds - (self._clock() - self._step_end))
        return max(0.0, min(limits)) if limits else None

    def _elapsed(self) -> float:
        return self._clock() - self._start

    def _headline(self) -> str:
        """`step 3/40`, or without a limit `step 3`."""
        return f"step {self._step}/{self._steps}" if self._steps else f"step {self._step}"

    def _figures(self) -> list[str]:
        return [
            pattern.format(self._metrics[name])
            for name, pattern in FIGURES.items()
            if name in self._metrics
        ]

    def _time_left_words(self) -> list[str]:
        left = self.time_left()
        return [] if left is None else [f"about {duration(left)} left"]

    def _print_step(self) -> None:
        self._step_time = self._clock()
        self._step_shown = self._step
        self._print(" · ".join([self._headline(), *self._figures(), *self._time_left_words()]))

    def _print(self, message: str) -> None:
        self._line_time = self._clock()
        self._console.print(
            Text(f"[{duration(self._elapsed())}] {printable(message)}"), soft_wrap=True
        )

    def _panel(self) -> RenderableType:
        lines: list[RenderableType] = [self._bars]
        if self._step:
            lines.append(
                Text(
                    f"{self._headline()}  {sparkline(self._rewards)}  {' · '.join(self._figures())}"
                )
            )
        lines.append(
            Text(
                " · ".join([f"{duration(self._elapsed())} elapsed", *self._time_left_words()]),
                style="dim",
            )
        )
        return Group(*lines)


def show_tasks(console: Console, tasks: Sequence[Any]) -> None:
    """Print what the agent did on each `EvaluatedTask`, call by call."""
    for task in tasks:
        console.print(rollout_tree(task.rollout, task.spans))
        if task.traced.excluded:
            console.print(f"calls not trainable: {dict(task.traced.excluded)}", markup=False)


def hide_library_progress() -> None:
    """Hide the progress bars of transformers, which would break ours. Downloads from the hub keep
    theirs."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
