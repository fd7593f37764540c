"""Runs side by side: settings, results, curves, data quality, and the prompts they tried. Metric
names are those of `algorithm.rl.metrics` and of the loop."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, cast

import msgspec
import numpy as np

from agentlightning.dashboard.progress import failed
from agentlightning.data.continuity import SUGGESTIONS
from agentlightning.data.excluded import excluded_often
from agentlightning.display import resume_command
from agentlightning.errors import NotFoundError
from agentlightning.prompts.lineage import (
    CANDIDATE,
    MEASURE,
    ROUND,
    Candidate,
    Measure,
    Round,
    Score,
)
from agentlightning.store.base import LightningStore
from agentlightning.tracing.dialects import mapping
from agentlightning.types import Condition, Metrics, Order, Run, RunStatus

T = TypeVar("T")
_SPARKLINE: Final = 40
_MEASURED_KEPT: Final = 1000  # ended runs
# seconds without a step or a new rollout after which a running run may have died
_QUIET: Final = 900.0
_RECENT: Final = 20  # steps whose pace is taken for that of the next ones
# settings that do not change results
_UNSHARED: Final = ("time_limit", "threads", "n_runners", "device")


class RunRow(msgspec.Struct, frozen=True, kw_only=True):
    """A run in a list; `name` is its folder's, if known. Runs of one `family` differ only in their
    seed. `last` has the newest value of each metric, `models` the names of its policies at the
    gateway, `failed` the number of failed rollouts, `settings` its settings by dotted keys. `lost`
    is why a run that has not ended may not be running any more, and how to resume it. `reason` is
    why the run ended, `conclusion` what to say of a training without success, `excluded` has a
    sentence for each reason that left out many calls of the newest step. `time_left` is in seconds,
    None if it is not known; `stopping` says that the run was asked to end."""

    run_id: str
    name: str | None
    tags: list[str]
    agent: str | None
    reason: str | None
    conclusion: str | None
    excluded: list[str]
    time_left: float | None
    stopping: bool
    failed: int
    settings: dict[str, str]
    kind: str
    status: RunStatus | Literal["stopped"]
    lost: str | None
    start_time: float
    end_time: float | None
    policy_version: int
    seed: int | None
    family: str
    steps: int
    total_steps: int | None
    models: list[str]
    last: dict[str, float]
    best_val: float | None
    sparkline: list[float]


class RunSeries(msgspec.Struct, frozen=True, kw_only=True):
    """The curves of a run: `values` of each requested metric, and the possible x axes. `names` are
    all metrics."""

    run_id: str
    family: str
    seed: int | None
    names: list[str]
    step: list[float]
    seconds: list[float]
    rollouts: list[float]
    tokens_read: list[float]
    tokens_written: list[float]
    values: dict[str, list[float | None]]


class MetricsCache:
    """The metrics of runs and how many of their rollouts failed; those of ended runs are cached."""

    def __init__(self) -> None:
        self._ended: dict[tuple[str, float], tuple[list[Metrics], int]] = {}

    async def of(self, store: LightningStore, run: Run) -> tuple[list[Metrics], int]:
        key = (run.run_id, run.end_time or 0.0)
        found = self._ended.get(key)
        if found is None:
            page = await store.page_rollouts(failed(run.run_id), limit=0, with_total=True)
            found = await store.query_metrics(run.run_id), page.total or 0
            if run.end_time is not None:
                self._ended[key] = found
                if len(self._ended) > _MEASURED_KEPT:
                    del self._ended[next(iter(self._ended))]
        return found


async def find_run(store: LightningStore, run_id: str) -> Run:
    """NotFoundError if there is no run with this id."""
    run = next((run for run in await store.query_runs() if run.run_id == run_id), None)
    if run is None:
        raise NotFoundError(f"there is no run {run_id!r} here")
    return run


async def last_activity(store: LightningStore, run: Run, measured: Sequence[Metrics]) -> float:
    """When the run last showed activity: its start, its newest step or its newest rollout."""
    newest = Order(field="number", descending=True)
    page = await store.page_rollouts(Condition("run_id", "eq", run.run_id), [newest], limit=1)
    times = [item.end_time or item.start_time for item in page.items]
    return max([run.start_time, *times, *(metrics.time for metrics in measured[-1:])])


def _lost_reason(run: Run, active_at: float) -> str | None:
    quiet = time.time() - active_at
    if run.status != "stopped" and (run.status != "running" or quiet < _QUIET):
        return None
    directory = run.manifest.get("directory")
    resume = resume_command(Path(directory) if directory else None, run.manifest)
    if run.status == "stopped":
        return f"It stopped unexpectedly: no process has its store open. Resume it with: {resume}"
    return (
        f"No step and no rollout for {quiet / 60:.0f} min. If its process has died, resume it "
        f"with: {resume}"
    )


def row_of(run: Run, measured: Sequence[Metrics], failed: int, active_at: float) -> RunRow:
    config = mapping(run.manifest.get("config"))
    seed = run.manifest.get("seed")
    total_steps = mapping(config.get("algorithm")).get("steps")
    rewards = [metrics.values["reward"] for metrics in measured if "reward" in metrics.values]
    val = [metrics.values["val_reward"] for metrics in measured if "val_reward" in metrics.values]
    trained = next(
        (metrics.values for metrics in reversed(measured) if "calls" in metrics.values), {}
    )
    tags = run.manifest.get("tags")
    steps = total_steps if isinstance(total_steps, int) else None
    return RunRow(
        run_id=run.run_id,
        name=_text(run, "name"),
        tags=[str(tag) for tag in cast("list[Any]", tags)] if isinstance(tags, list) else [],
        agent=_text(run, "agent"),
        reason=_text(run, "reason"),
        conclusion=_text(run, "conclusion"),
        excluded=list(excluded_often(trained).values()),
        time_left=time_left(measured, steps, time.time()) if run.status == "running" else None,
        stopping=run.status == "running" and run.manifest.get("stop") is True,
        failed=failed,
        settings={
            name: value if isinstance(value, str) else msgspec.json.encode(value).decode()
            for name, value in dotted(config)
        },
        kind=run.kind,
        status=run.status,
        lost=_lost_reason(run, active_at),
        start_time=run.start_time,
        end_time=active_at if run.status == "stopped" else run.end_time,
        policy_version=run.policy_version,
        seed=seed if isinstance(seed, int) else None,
        family=_family(run),
        steps=measured[-1].step if measured else 0,
        total_steps=steps,
        models=list(mapping(config.get("models"))),
        last={name: value for metrics in measured for name, value in metrics.values.items()},
        best_val=max(val, default=None),
        sparkline=[float(part.mean()) for part in _parts(np.array(rewards), _SPARKLINE)],
    )


def _text(run: Run, key: str) -> str | None:
    """None where another program keeps something else under this key."""
    return value if isinstance(value := run.manifest.get(key), str) and value else None


def time_left(measured: Sequence[Metrics], total: int | None, now: float) -> float | None:
    """Seconds until the last of `total` steps at the pace of the newest ones; None before there is
    a pace. Of 10 steps that took 3 s each, step 4 ended 1 s ago: 6 · 3 − 1 = 17 s."""
    recent = [metrics for metrics in measured if metrics.step > 0][-_RECENT:]
    if total is None or len(recent) < 2:
        return None
    first = recent[0]
    newest = recent[-1]
    pace = (newest.time - first.time) / (newest.step - first.step)
    return max(0.0, (total - newest.step) * pace - (now - newest.time))


def dotted(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """`{"algorithm": {"steps": 4}}` → `("algorithm.steps", 4)`, without None."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from dotted(cast("Mapping[str, Any]", value), f"{before}{name}.")
        elif value is not None:
            yield f"{before}{name}", value


def _family(run: Run) -> str:
    config = {
        name: value
        for name, value in mapping(run.manifest.get("config")).items()
        if name not in _UNSHARED
    }
    # Not the tasks: a seed may generate them.
    data = mapping(run.manifest.get("data"))
    key = (
        (run.kind, config, {name: mapping(of).get("tasks") for name, of in data.items()})
        if config
        else run.run_id
    )
    return hashlib.sha256(msgspec.json.encode(key, order="sorted")).hexdigest()[:12]


def _parts(values: np.ndarray[Any, Any], count: int) -> list[np.ndarray[Any, Any]]:
    """At most `count` parts of similar size; none if there are no values."""
    return np.array_split(values, min(count, len(values))) if len(values) else []


def series(run: Run, measured: Sequence[Metrics], names: Sequence[str], points: int) -> RunSeries:
    parts = _parts(np.arange(len(measured)), points)
    buckets = [[measured[int(at)] for at in part] for part in parts]

    def summed(value: Callable[[Mapping[str, float]], float]) -> list[float]:
        total = np.cumsum([value(metrics.values) for metrics in measured])
        return [float(total[int(part[-1])]) for part in parts]

    def mean(name: str, bucket: Sequence[Metrics]) -> float | None:
        values = [metrics.values[name] for metrics in bucket if name in metrics.values]
        return sum(values) / len(values) if values else None

    return RunSeries(
        run_id=run.run_id,
        family=_family(run),
        seed=seed if isinstance(seed := run.manifest.get("seed"), int) else None,
        names=sorted({name for metrics in measured for name in metrics.values}),
        step=[float(bucket[-1].step) for bucket in buckets],
        seconds=[bucket[-1].time - run.start_time for bucket in buckets],
        rollouts=summed(lambda values: values.get("rollouts", 0.0)),
        tokens_read=summed(
            lambda values: values.get("prompt_tokens_mean", 0.0) * values.get("calls", 0.0)
        ),
        tokens_written=summed(lambda values: values.get("sampled_tokens", 0.0)),
        values={name: [mean(name, bucket) for bucket in buckets] for name in names},
    )


# --- the quality of data --------------------------------------------------------------------------

_COUNTED: Final[Mapping[str, tuple[str, ...]]] = {
    "outcomes": ("rollouts/",),
    "excluded": ("excluded/",),
    "kept": ("kept/",),
    "breaks": ("unmerged/",),
    "rewards_lost": ("rewards_lost/",),
    "dropped": ("groups_dropped/", "rollouts_dropped/"),
}


class Quality(msgspec.Struct, frozen=True, kw_only=True):
    """Losses and drift of a run's data, by reason, over all its steps. `shares` are per step;
    `suggestions` are what you can do about each kind of break."""

    run_id: str
    rollouts: int
    calls: int
    step: list[int]
    counts: dict[str, dict[str, int]]
    shares: dict[str, list[float | None]]
    suggestions: dict[str, str]


def quality(run: Run, measured: Sequence[Metrics]) -> Quality:
    """Computed from each step's counts, without steps that counted no rollouts (evaluations)."""
    steps = [metrics for metrics in measured if "rollouts" in metrics.values]
    suggestions: dict[str, str] = {**SUGGESTIONS}
    total: dict[str, float] = {}
    for step in steps:
        for name, value in step.values.items():
            total[name] = total.get(name, 0.0) + value

    def counts(prefixes: Sequence[str]) -> dict[str, int]:
        named = {
            name.removeprefix(prefix): round(value)
            for prefix in prefixes
            for name, value in total.items()
            if name.startswith(prefix)
        }
        # Breaks are also counted by agent, and as a share.
        return {
            name: count
            for name, count in named.items()
            if prefixes != ("unmerged/",) or name in suggestions
        }

    def share(part: str, *whole: str) -> list[float | None]:
        sums = [
            (step.values.get(part, 0.0), sum(step.values.get(name, 0.0) for name in whole))
            for step in steps
        ]
        return [value / of if of else None for value, of in sums]

    return Quality(
        run_id=run.run_id,
        rollouts=round(total.get("rollouts", 0.0)),
        calls=round(total.get("calls", 0.0) + total.get("calls_excluded", 0.0)),
        step=[step.step for step in steps],
        counts={name: counts(prefixes) for name, prefixes in _COUNTED.items()},
        shares={
            "excluded": share("calls_excluded", "calls", "calls_excluded"),
            "unrewarded": share("unrewarded", "rollouts"),
            "unmerged": [step.values.get("unmerged/rollouts") for step in steps],
        },
        suggestions=suggestions,
    )


# --- prompts --------------------------------------------------------------------------------------


class TriedPrompt(Candidate, frozen=True, kw_only=True):
    """A candidate of a prompt search, with the difference from its parent and its newest score."""

    diff: str
    resources_id: str
    time: float
    score: Score | None


class MeasuredPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """The rollout of a candidate on a held-out task."""

    candidate: str
    task: int
    rollout_id: str
    reward: float | None


class Prompts(msgspec.Struct, frozen=True, kw_only=True):
    candidates: list[TriedPrompt]
    rounds: list[Round]
    measured: list[MeasuredPrompt]


async def prompts(store: LightningStore, run: Run) -> Prompts:
    """The candidates that the run stored as versions of its resources, and their rollouts on the
    held-out tasks that chose among them."""
    updates = [
        resource for resource in await store.query_resources() if resource.run_id == run.run_id
    ]
    rounds = [found for update in updates if (found := _read(update.metadata.get(ROUND), Round))]
    scores = {name: score for past in rounds for name, score in past.scores.items()}
    tried: dict[str, TriedPrompt] = {}
    for entry in reversed(updates):
        made = mapping(entry.metadata.get(CANDIDATE))
        about = {
            "diff": entry.metadata.get("diff", ""),
            "resources_id": entry.resources_id,
            "time": entry.create_time,
        }
        if found := _read(
            {**made, **about, "score": scores.get(str(made.get("name")))}, TriedPrompt
        ):
            tried[found.name] = found
    ended = await store.query_rollouts(
        run_id=run.run_id, mode_in=["val"], status_in=["succeeded", "failed"]
    )
    measures = [(rollout, _read(rollout.metadata.get(MEASURE), Measure)) for rollout in ended]
    measured = [
        MeasuredPrompt(
            candidate=measure[0],
            task=measure[2],
            rollout_id=rollout.rollout_id,
            reward=rollout.reward if rollout.status == "succeeded" else None,
        )
        for rollout, measure in measures
        if measure is not None and measure[0] in tried
    ]
    return Prompts(candidates=list(reversed(tried.values())), rounds=rounds, measured=measured)


def _read(value: Any, kind: type[T]) -> T | None:
    """None if it is not of this kind: a user's algorithm may use the name for something else."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return None
