"""Finds runs and rollouts in the stores below a folder, in one store or at a server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from agentlightning.cli.options import note
from agentlightning.cli.store_location import RUNS, STORE_FILE, StoreLocation, stores_below
from agentlightning.errors import (
    ConfigError,
    NotFoundError,
    nearest,
)
from agentlightning.store.redaction import text_without_secrets
from agentlightning.types import Metrics, Rollout, Run


@dataclass(frozen=True)
class StoredRun:
    """A run, its metrics by step, and its store."""

    place: StoreLocation
    run: Run
    history: tuple[Metrics, ...]

    @property
    def newest(self) -> dict[str, float]:
        """The last value of each metric."""
        return {name: value for metrics in self.history for name, value in metrics.values.items()}

    def curve(self, name: str) -> list[tuple[float, float]]:
        """A metric by training step."""
        return [
            (metrics.step, value)
            for metrics in self.history
            if (value := metrics.values.get(name)) is not None
        ]


async def stored_runs(path: Path, place: StoreLocation) -> list[StoredRun]:
    """The runs of the named store or server, or else of the stores below `path`, oldest first."""
    found: list[StoredRun] = []
    places = [place] if place.named else list(map(StoreLocation, stores_below(path)))
    for source in places:
        try:
            async with source.open(reading=True) as store:
                for run in await store.query_runs():
                    found.append(
                        StoredRun(source, run, tuple(await store.query_metrics(run.run_id)))
                    )
        except ConfigError as error:
            if len(places) == 1:
                raise
            note(f"left out: {error}")
    return sorted(found, key=lambda stored: stored.run.start_time)


async def find_rollout(named: StoreLocation, rollout_id: str) -> tuple[StoreLocation, Rollout]:
    """The rollout and its store: the named one, or whichever below runs/ has it."""
    places = [named] if named.named else [StoreLocation(store) for store in stores_below()]
    for place in places:
        async with place.open(reading=True) as store:
            rollout = await store.get_rollout_by_id(rollout_id)
        if rollout is not None:
            if len(places) > 1:
                note(f"in {place}")
            return place, rollout
    where = (
        f"any of {len(places)} stores here"
        if len(places) > 1
        else text_without_secrets(str(places[0]))
    )
    raise NotFoundError(f"there is no rollout {rollout_id!r} in {where}; see `agl rollouts ls`")


async def choose_run(name: str | None, place: StoreLocation) -> StoredRun:
    """The run with this id, beginning of an id, name or directory; without a name, the newest.

    NotFoundError if no run has the name, or several have; ConfigError for the directory of a run
    that is stored elsewhere, unless `place` says where."""
    from agentlightning.algorithm.directory import MARK, read_mark

    run_id = name or ""
    if name and (directory := Path(name)).is_dir():
        own = directory / STORE_FILE
        if not own.is_file() and not place.named:
            raise ConfigError(f"the run in {name} is stored elsewhere; give --store or --server")
        run_id = (
            read_mark(directory).run_id if (directory / MARK).is_file() or not own.is_file() else ""
        )
        place = (
            StoreLocation(str(own)) if own.is_file() else place
        )  # which may hold others beside it
    found = await stored_runs(RUNS, place)
    if not found:
        called = f" {name!r}: {place} has no run at all" if run_id else f" in {name or place}"
        raise NotFoundError(f"there is no run{called}; name another place with --store or --server")
    alike = [
        stored
        for stored in found
        if run_id and run_id in (stored.run.run_id, stored.run.manifest.get("name"))
    ]
    alike = alike or (
        [stored for stored in found if stored.run.run_id.startswith(run_id)]
        if run_id
        else found[-1:]
    )
    if len(alike) != 1:
        ids = [stored.run.run_id for stored in alike or found]
        reason = "more than one run" if alike else "no run"
        raise NotFoundError(
            f"there is {reason} called {run_id!r}; {nearest(run_id, ids)}. A run's directory is a "
            "name too"
        )
    return alike[0]
