"""What a person sees while a job runs: phase, step, reward, speed and the time that is left.

On a terminal it is one live panel; elsewhere (a log file, a CI job) it is a line now and then. This module shows what
it is told through the `Progress` protocol and knows nothing of the job.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

BLOCKS = "▁▂▃▄▅▆▇█"
RECENT_STEPS = 5  # the time left is judged by the pace of these
PLAIN_INTERVAL = 5.0  # seconds between two lines about steps where there is no terminal


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """The last `width` values as blocks; the lowest block is min(0, values) and the highest max(1, values).

    `[0.0, 0.5, 1.0]` → `▁▄█`."""
    shown = values[-width:]
    if not shown:
        return ""
    low, high = min(0.0, *shown), max(1.0, *shown)
    return "".join(BLOCKS[int((value - low) / (high - low) * (len(BLOCKS) - 1))] for value in shown)


def duration(seconds: float) -> str:
    """`75.2` → `1:15`, `3700` → `1:01:40`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class JobState:
    """What is known about a running job; times are seconds of `clock`."""

    def __init__(self, steps: int | None, time_limit: float | None, clock: Callable[[], float]) -> None:
        self.steps = steps
        self.phase_name = "starting"
        self.phase_total: int | None = None
        self.phase_done = 0
        self.beside: dict[str, tuple[int, int]] = {}  # what goes on beside the phase: how much is done, of how much
        self.step = 0
        self.metrics: dict[str, float] = {}
        self.rewards: list[float] = []
        self._clock = clock
        self._start = clock()
        self._time_limit = time_limit
        self._step_times: list[float] = []

    def finish_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.step = step
        self.metrics.update(metrics)
        if "reward" in metrics:
            self.rewards.append(metrics["reward"])
        self._step_times = [*self._step_times, self._clock()][-RECENT_STEPS - 1 :]

    def elapsed(self) -> float:
        return self._clock() - self._start

    def time_left(self) -> float | None:
        """Seconds until the last step at the pace of the recent ones, or until the time limit if that is sooner;
        None before either is known."""
        limits: list[float] = []
        if self._time_limit is not None:
            limits.append(self._time_limit - self.elapsed())
        if self.steps is not None and len(self._step_times) > 1:
            pace = (self._step_times[-1] - self._step_times[0]) / (len(self._step_times) - 1)
            limits.append((self.steps - self.step) * pace - (self._clock() - self._step_times[-1]))
        return max(0.0, min(limits)) if limits else None

    def headline(self) -> str:
        """`step 3/40`, or without a known number of steps `step 3`; empty before the first."""
        if not self.step:
            return ""
        return f"step {self.step}/{self.steps}" if self.steps else f"step {self.step}"

    def figures(self) -> list[str]:
        """The metrics worth a line, in words."""
        metrics = self.metrics
        formats = {
            "reward": "reward {:.3f}",
            "val_reward": "held-out {:.3f}",
            "rollouts_per_second": "{:.1f} rollouts/s",
            "tokens_per_second": "{:,.0f} tokens/s",
            "loss": "loss {:+.4f}",
        }
        return [pattern.format(metrics[name]) for name, pattern in formats.items() if name in metrics]

    def times(self) -> list[str]:
        left = self.time_left()
        return [f"{duration(self.elapsed())} elapsed", *([] if left is None else [f"about {duration(left)} left"])]


class LiveProgress:
    """A `Progress` that a person can watch. Use it as a context manager around the job.

    `steps` and `time_limit` (seconds) are what the job was asked for, None where it was not."""

    def __init__(
        self,
        console: Console,
        *,
        steps: int | None = None,
        time_limit: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.state = JobState(steps, time_limit, clock)
        self._console = console
        self._clock = clock
        self._live = Live(console=console, get_renderable=self._panel, transient=True) if console.is_terminal else None
        self._phases_told: set[str] = set()
        self._line_time: float | None = None
        self._step_told = 0

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
        elif self.state.step > self._step_told:
            self._tell_step()

    def phase(self, name: str, total: int | None = None, *, beside: bool = False) -> None:
        if beside:
            self.state.beside[name] = (0, total or 0)
        else:
            self.state.beside.pop(name, None)  # it was given up, and begins anew
            self.state.phase_name, self.state.phase_total, self.state.phase_done = name, total, 0
        if self._live is None and name not in self._phases_told:
            self._phases_told.add(name)
            self._tell(f"{name} …")

    def advance(self, done: int, beside: str | None = None) -> None:
        if beside is None:
            self.state.phase_done = done
        elif beside in self.state.beside:
            total = self.state.beside.pop(beside)[1]
            if done < total:
                self.state.beside[beside] = (done, total)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.state.finish_step(step, metrics)
        if self._live is None and (self._line_time is None or self._clock() - self._line_time >= PLAIN_INTERVAL):
            self._tell_step()

    def note(self, message: str) -> None:
        if self._live is None:
            self._tell(message)
        else:
            self._live.console.print(Text(message))

    def _tell_step(self) -> None:
        self._line_time, self._step_told = self._clock(), self.state.step
        self._tell(" · ".join([self.state.headline(), *self.state.figures(), *self.state.times()[1:]]))

    def _tell(self, message: str) -> None:
        self._console.print(Text(f"[{duration(self.state.elapsed())}] {message}"), soft_wrap=True)

    def _panel(self) -> RenderableType:
        state = self.state
        phase = Table.grid(padding=(0, 1))
        phase.add_row(*_bar(state.phase_name, state.phase_done, state.phase_total))
        for name, (done, total) in state.beside.items():
            phase.add_row(*_bar(name, done, total))
        headline, line = state.headline(), sparkline(state.rewards)
        lines: list[RenderableType] = [phase]
        if headline:
            lines.append(Text(f"{headline}  {line}  {' · '.join(state.figures())}"))
        lines.append(Text(" · ".join(state.times()), style="dim"))
        return Group(*lines)


def _bar(name: str, done: int, total: int | None) -> tuple[RenderableType, RenderableType, str]:
    if not total:
        return Text(name, style="bold"), "", ""
    done = min(done, total)  # where rollouts overlap with steps, more may be there than the next step takes
    return Text(name, style="bold"), ProgressBar(total=total, completed=done, width=30), f"{done:,}/{total:,}"


def hide_library_progress() -> None:
    """Ours shows the progress; transformers' own bars would tear it. Downloads from the hub keep theirs."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
