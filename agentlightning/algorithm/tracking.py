"""Sends a run's metrics to the store, to `metrics.jsonl`, and to every tracker.

A tracker runs in its own thread: nothing waits for it, and its first error is shown once and does
not stop training. Its package is imported when a run starts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final, Protocol, cast, runtime_checkable

import msgspec

from agentlightning.data.references import is_reference, load_reference
from agentlightning.errors import ConfigError, imported, nearest
from agentlightning.store.base import LightningStore
from agentlightning.types import Metrics, Run

METRICS_FILE: Final = "metrics.jsonl"  # in the run's directory: an object per step, in order
CLOSING_SECONDS: Final = 60.0  # how long the end of a run waits for a tracker to send what it holds


@dataclass(frozen=True)
class TrackedRun:
    """The run as a tracker gets it at its start. `directory` is the run's; `history` has a resumed
    run's earlier metrics, oldest first."""

    run_id: str
    kind: str
    manifest: Mapping[str, Any]
    directory: Path
    history: Sequence[Metrics] = ()

    @property
    def config(self) -> Mapping[str, Any]:
        """The settings, nested."""
        return self.manifest.get("config", {})


@runtime_checkable
class Tracker(Protocol):
    """Shows or keeps the metrics of a run. One thread calls it; all methods may block and raise."""

    name: str

    def start(self, run: TrackedRun) -> str | None:
        """Called once, first. Returns where to look, if that is worth a line."""
        ...

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """The metrics at `step` (0: before training). A step may come several times with other
        names, and late, for evaluations beside training."""
        ...

    def close(self) -> None:
        """Called once, at the end, if `start` succeeded."""
        ...


class Tracking:
    """The metrics of one run. `history` has them by step. `stop` is set if the store says that the
    run should end."""

    def __init__(
        self,
        store: LightningStore,
        run: Run,
        directory: Path,
        trackers: Sequence[Tracker],
        note: Callable[[str], None],
        stop: asyncio.Event,
    ) -> None:
        self._stop = stop
        self.history: dict[int, dict[str, float]] = {}
        self._store = store
        self._run = run
        self._directory = directory
        self._trackers = trackers
        self._note = note
        self._outboxes: list[_Outbox] | None = None
        self._measured: list[Metrics] = []

    async def resume_after(self, step: int) -> None:
        """Continue after `step` of a resumed run; later metrics will come again."""
        self._measured = [
            metric
            for metric in await self._store.query_metrics(self._run.run_id)
            if metric.step <= step
        ]
        self.history = {metrics.step: dict(metrics.values) for metrics in self._measured}
        self._write(sorted(self.history))

    async def record(self, step: int, values: Mapping[str, float]) -> None:
        """Add metrics at `step`."""
        if self._outboxes is None:
            run = TrackedRun(
                self._run.run_id,
                self._run.kind,
                self._run.manifest,
                self._directory,
                self._measured,
            )
            self._outboxes = [_Outbox(tracker, run, self._note) for tracker in self._trackers]
        for outbox in self._outboxes:
            outbox.log(step, dict(values))
        is_newest = step > max(self.history, default=-1)
        known = self.history[step] = self.history.get(step, {}) | dict(values)
        self._write([step] if is_newest else sorted(self.history), append=is_newest)
        run = await self._store.add_metrics(
            Metrics(run_id=self._run.run_id, step=step, time=time.time(), values=known)
        )
        if run.manifest.get("stop"):
            self._stop.set()

    def _write(self, steps: Sequence[int], append: bool = False) -> None:
        path = self._directory / METRICS_FILE
        target = path if append else path.with_suffix(".partial")
        with target.open("ab" if append else "wb") as file:
            file.writelines(
                msgspec.json.encode({"step": step, **self.history[step]}) + b"\n" for step in steps
            )
        target.replace(path)

    async def close(self) -> None:
        """Wait until every tracker has closed, for at most a minute."""
        await asyncio.gather(*(outbox.close() for outbox in self._outboxes or ()))


class _Outbox:
    """Metrics for a tracker, and the thread that delivers them."""

    def __init__(self, tracker: Tracker, run: TrackedRun, note: Callable[[str], None]) -> None:
        self._tracker = tracker
        self._note = note
        self._loop = asyncio.get_running_loop()
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._failed = False
        self._thread = threading.Thread(
            target=self._work, args=(run,), name=f"tracker {tracker.name}", daemon=True
        )
        self._thread.start()

    def log(self, step: int, values: dict[str, float]) -> None:
        self._calls.put(lambda: self._tracker.log(step, values))

    async def close(self) -> None:
        self._calls.put(self._tracker.close)
        self._calls.put(None)
        await asyncio.to_thread(self._thread.join, CLOSING_SECONDS)
        if self._thread.is_alive():
            self._note(
                f"{self._tracker.name}: not done after {CLOSING_SECONDS:.0f} s; what it has not "
                "sent is lost"
            )

    def _work(self, run: TrackedRun) -> None:
        where = self._try(lambda: self._tracker.start(run))
        if self._failed:
            return
        if where:
            self._log(str(where))
        for call in iter(self._calls.get, None):
            self._try(call)

    def _try(self, call: Callable[[], object]) -> object:
        try:
            return call()
        except Exception as error:  # noqa: BLE001 (whatever it is, training goes on)
            if not self._failed:
                self._failed = True
                self._log(f"{type(error).__name__}: {error} (shown once; training continues)")

    def _log(self, message: str) -> None:
        with contextlib.suppress(RuntimeError):  # the run has ended without it
            self._loop.call_soon_threadsafe(self._note, f"{self._tracker.name}: {message}")


@dataclass(kw_only=True)
class TensorBoard:
    """Event files for TensorBoard in `directory`; default: `tensorboard/` of the run's
    directory."""

    directory: str | None = None
    name = "tensorboard"

    def start(self, run: TrackedRun) -> str:
        from tensorboardX import SummaryWriter

        directory = Path(self.directory or run.directory / "tensorboard").expanduser()
        # Hides later steps of an interrupted process: they are repeated.
        again = run.history[-1].step + 1 if run.history else None
        self._writer = SummaryWriter(str(directory), purge_step=again, write_to_disk=True)
        return f"tensorboard --logdir {directory}"

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


@dataclass(kw_only=True)
class WandB:
    """A run of Weights & Biases with the same id, in `project` and `group` of `entity`, a user or
    team. Its environment variables apply, such as `WANDB_MODE=offline`; local files are in the
    run's directory."""

    project: str = "agentlightning"
    entity: str | None = None
    group: str | None = None
    name = "wandb"

    def start(self, run: TrackedRun) -> str | None:
        import wandb  # pyright: ignore[reportMissingImports]

        # without a key it must not stop and ask for one
        wandb.setup(settings=wandb.Settings(silent=True))
        self._run = wandb.init(
            project=self.project,
            entity=self.entity,
            group=self.group,
            name=run.directory.name,
            id=run.run_id,
            resume="allow",
            config=dict(run.config),
            dir=os.environ.get("WANDB_DIR") or str(run.directory),
            settings=wandb.Settings(console="off"),
        )
        # Our steps instead of its own counter, which refuses late evaluations.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        return f"wandb sync {Path(self._run.dir).parent}" if self._run.offline else self._run.url

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self) -> None:
        self._run.finish()


@dataclass(kw_only=True)
class MLflow:
    """A run of MLflow in `experiment` at `uri`; default: `MLFLOW_TRACKING_URI`, or MLflow's.
    Resumed runs continue."""

    experiment: str = "agentlightning"
    uri: str | None = None
    name = "mlflow"

    def start(self, run: TrackedRun) -> str:
        from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]

        self._client = MlflowClient(tracking_uri=self.uri)
        found = self._client.get_experiment_by_name(self.experiment)
        experiment = (
            found.experiment_id if found else self._client.create_experiment(self.experiment)
        )
        tag = "agentlightning.run_id"
        known = self._client.search_runs(
            [experiment], f"tags.`{tag}` = '{run.run_id}'", max_results=1
        )
        if known:
            self._id = known[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            made = self._client.create_run(
                experiment, tags={tag: run.run_id}, run_name=run.directory.name
            )
            self._id = made.info.run_id
            for name, value in _flat(run.config):
                # accepted by every version
                self._client.log_param(self._id, _allowed(name), value[:500])
        return f"run {self._id} of experiment {self.experiment!r} at {self._client.tracking_uri}"

    def log(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]

        now = int(time.time() * 1000)
        self._client.log_batch(
            self._id, [Metric(_allowed(name), value, now, step) for name, value in values.items()]
        )

    def close(self) -> None:
        self._client.set_terminated(self._id)


TRACKERS: Final[dict[str, type[Tracker]]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
}
_PACKAGES: Final = {"tensorboard": "tensorboardX", "wandb": "wandb", "mlflow": "mlflow"}


def make_tracker(spec: str | Mapping[str, Any] | Tracker) -> Tracker:
    """A tracker from a name, `{"name": …, option: value}`, or a tracker itself. A name is one of
    `TRACKERS`, or a reference such as `file.py:Class`.

    ConfigError for an unknown name or option, or a package that is not installed."""
    made: object = spec
    if isinstance(spec, str | Mapping):
        options: dict[str, Any] = {"name": spec} if isinstance(spec, str) else dict(spec)
        name = str(options.pop("name", None))
        if name not in TRACKERS and not is_reference(name):
            raise ConfigError(
                f"trackers: no tracker {name!r}; {nearest(name, TRACKERS)} or file.py:Class"
            )
        if name in TRACKERS:
            imported(_PACKAGES[name], f"the tracker {name!r}", _PACKAGES[name])
        maker: Any = TRACKERS.get(name) or load_reference(name)
        try:
            made = maker(**options)
        except TypeError as error:
            raise ConfigError(f"trackers: {name}: {error}") from None
    if not isinstance(made, Tracker):
        raise ConfigError(
            f"{made!r} is not a tracker: it needs a name, and the methods start, log and close"
        )
    return made


def _allowed(name: str) -> str:
    """The name without characters that MLflow refuses."""
    return re.sub(r"[^\w\-./: ]", "_", name)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """`{"a": {"b": 1}}` → `("a.b", "1")`."""
    for name, value in values.items():
        nested = isinstance(value, Mapping)
        yield from (
            _flat(cast("Any", value), f"{prefix}{name}.")
            if nested
            else [(f"{prefix}{name}", str(value))]
        )
